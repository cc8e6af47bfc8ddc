"""Trials: one config run with several seeds on one split."""

from __future__ import annotations

import json
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


def run_trials(given: Given, seeds: Sequence[int], out: Path, watcher: Watcher) -> Trials:
    """Gives the trials of a new study in `out`, each in a folder seed-N."""
    config = configs.resolve(with_seed(given, seeds[0]))
    federation = config.federation()
    config, _ = api.prepare(config, federation, None, None)
    refuse_used(out)
    federation.save(out / MANIFEST)
    files.write_text(out / "trials.json", json.dumps({"seeds": list(seeds)}) + "\n")
    files.write_text(out / "config.toml", config.to_toml())
    return resume_trials(out, watcher)


def resume_trials(out: Path, watcher: Watcher) -> Trials:
    """Gives the trials of `out`: finished ones are read, others are gone on with or begun."""
    seeds = read_json(out / "trials.json").get("seeds")
    if not isinstance(seeds, list) or not all(isinstance(seed, int) for seed in seeds):
        raise GpflError(f"{out / 'trials.json'} does not list seeds")
    given = configs.read(out / "config.toml")
    folders, summaries = [], []
    for seed in seeds:
        folder = RunFolder(out / f"seed-{seed}")
        label = f"{configs.name_in(given, 'method', 'gpfl')} seed {seed}"
        if folder.finished:
            summary = folder.summary()
        elif (folder.path / "config.toml").exists():
            summary = api.resume(folder.path, watch=watcher(label)).summary
        else:
            config = configs.resolve(with_seed(given, seed))
            summary = api.begin(config, config.federation(), out=folder.path, watch=watcher(label)).summary
        folders.append(folder.path)
        summaries.append(summary)
    trials = Trials(str(summaries[0]["method"]), folders, summaries)
    numbers = {
        key: {"mean": trials.mean(key), "std": trials.std(key)}
        for key in ("best_accuracy", "last_accuracy", "std", "cov", "seconds")
    }
    files.write_text(out / "trials.json", json.dumps({"seeds": seeds, "method": trials.method, **numbers}, indent=2) + "\n")
    return trials


def with_seed(given: Given, seed: int) -> Given:
    """Gives the same config with another seed."""
    return {**given, "run": {**given.get("run", {}), "seed": seed}}
