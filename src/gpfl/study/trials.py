"""Trials: one config run with several seeds on one split."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from gpfl import api, files
from gpfl import config as configs
from gpfl.config import Given
from gpfl.errors import GpflError
from gpfl.federation import MANIFEST
from gpfl.runs import RunFolder, read_json, refuse_used
from gpfl.simulate import Watch

Watcher = Callable[[str], Watch]
"""Gives the watch of a run from its label."""


@dataclass(frozen=True)
class Trials:
    """Runs of one config with several seeds."""

    method: str
    folders: list[Path]
    summaries: list[dict[str, object]]

    def values(self, key: str) -> list[float]:
        """Gives a number of each trial's summary."""
        return [cast(float, summary[key]) for summary in self.summaries]

    def mean(self, key: str) -> float:
        """Gives the mean over trials."""
        return float(np.mean(self.values(key)))

    def std(self, key: str) -> float:
        """Gives the population standard deviation over trials, as the paper reports it."""
        return float(np.std(self.values(key)))


def run_trials(given: Given, seeds: Sequence[int], out: Path, watcher: Watcher, *, label: str = "") -> Trials:
    """Gives the trials of a config in `out`, each in a folder seed-N; those that are there are not run again.

    With a `label`, as comparisons give it, `out` may hold trials of the same config; otherwise it must be new.
    """
    config = configs.resolve(with_seed(given, seeds[0]))
    federation = config.federation()
    config, _ = api.prepare(config, federation, None, None)
    held: list[int] = []
    if label and (out / "config.toml").exists():
        refuse_other_config(out, config.to_toml())
        held = read_seeds(out)
    else:
        refuse_used(out)
        federation.save(out / MANIFEST)
        files.write_text(out / "config.toml", config.to_toml())
    plan = {"method": label or config.method.name, "seeds": [*held, *(seed for seed in seeds if seed not in held)]}
    files.write_text(out / "trials.json", json.dumps(plan) + "\n")
    return resume_trials(out, watcher, only=seeds)


def refuse_other_config(out: Path, config: str) -> None:
    """Refuses a folder whose trials were run with other settings, and names the first that differs."""
    old, new = (tomllib.loads(text) for text in ((out / "config.toml").read_text(encoding="utf-8"), config))
    for section in new:
        for key, value in new[section].items():
            before = old.get(section, {}).get(key)
            if before != value and (section, key) != ("run", "seed"):
                raise GpflError(
                    f"{out} holds trials with {section}.{key} = {before!r}, now it is {value!r}: choose another --out"
                )


def read_seeds(out: Path) -> list[int]:
    """Gives the seeds of the trials in `out`."""
    seeds = read_json(out / "trials.json").get("seeds")
    if not isinstance(seeds, list) or not all(isinstance(seed, int) for seed in seeds):
        raise GpflError(f"{out / 'trials.json'} does not list seeds")
    return seeds


def resume_trials(out: Path, watcher: Watcher, *, only: Sequence[int] | None = None) -> Trials:
    """Gives the trials of `out`: finished ones are read, others are gone on with or begun."""
    seeds = read_seeds(out)
    name = str(read_json(out / "trials.json").get("method", ""))
    given = configs.read(out / "config.toml")
    folders, summaries = [], []
    for seed in only or seeds:
        folder = RunFolder(out / f"seed-{seed}")
        label = f"{name} seed {seed}"
        if folder.finished:
            summary = folder.summary()
        elif (folder.path / "config.toml").exists():
            summary = api.resume(folder.path, watch=watcher(label)).summary
        else:
            config = configs.resolve(with_seed(given, seed))
            summary = api.begin(config, config.federation(), out=folder.path, watch=watcher(label)).summary
        folders.append(folder.path)
        summaries.append(summary)
    trials = Trials(name, folders, summaries)
    numbers = {
        key: {"mean": trials.mean(key), "std": trials.std(key)}
        for key in ("best_accuracy", "last_accuracy", "std", "cov", "seconds")
    }
    files.write_text(out / "trials.json", json.dumps({"method": name, "seeds": seeds, **numbers}, indent=2) + "\n")
    return trials


def with_seed(given: Given, seed: int) -> Given:
    """Gives the same config with another seed."""
    return {**given, "run": {**given.get("run", {}), "seed": seed}}
