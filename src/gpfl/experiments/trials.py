"""Trials: runs of one config with several seeds on one partition, in one folder."""

import gc
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from gpfl.engine.distributed import process_group
from gpfl.errors import DivergenceError, GpflError
from gpfl.experiments.stored_runs import Sections, StoredRun, Trials, check_same_config
from gpfl.federation import MANIFEST, Federation
from gpfl.io import files, toml
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict
from gpfl.training.execute import PreparedRun, execute_trials, open_run
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir, make_empty_folder, remove_partial_start

TRIALS_FILE = "trials.json"  # file in a folder of trials with the method's label, the seeds and the means

SUMMARY_KEYS = ("selected_accuracy", "best_accuracy", "last_accuracy", "std", "cov", "seconds", "idle_clients")
"""Numbers of each trial's summary whose mean and standard deviation are written."""

CallbackFactory = Callable[[str], Callback]  # returns the callback of a run, given its label


def run_trials(
    settings: ConfigDict, seeds: Sequence[int], out: Path, make_callback: CallbackFactory, *, label: str = ""
) -> Trials:
    """Train one run per seed, each in a folder seed-N of `out`. Finished runs are not repeated.

    With a `label`, `out` may hold trials of the same config; without, it must be new.
    """
    config, federation = check_trials(settings, seeds, out if label else None)
    process_group().run_on_main(lambda: _write_plan(out, config, federation, seeds, label))
    return resume_trials(out, make_callback, only=seeds)


def check_trials(settings: ConfigDict, seeds: Sequence[int], out: Path | None) -> tuple[Config, Federation]:
    """Return the complete config of trials and their federation. Raise if they cannot run, or not in `out`."""
    if not seeds:
        raise GpflError("there are no seeds: give at least one")
    config = configs.resolve_config(with_seed(settings, seeds[0]))
    federation = config.federation()
    config, _ = prepare(config, federation, None, None)
    if out is not None and (out / "config.toml").exists():
        _check_same_config(out, config.sections())
        check_same_federation(out, federation)
    return config, federation


def resume_trials(out: Path, make_callback: CallbackFactory, *, only: Sequence[int] | None = None) -> Trials:
    """Start or resume the unfinished trials in `out`, all or those of some seeds, and return the finished ones."""
    label, seeds, settings, unfinished = process_group().run_on_main(lambda: _read_progress(out, only))
    if unfinished:
        federation = configs.resolve_config(with_seed(settings, seeds[0])).federation()
        with process_group().abort_all_on_error():
            callbacks = {seed: make_callback(f"{label} seed {seed}") for seed in unfinished}
            ends = train_trials(
                [
                    partial(prepare_trial, out / f"seed-{seed}", with_seed(settings, seed), federation, callback)
                    for seed, callback in callbacks.items()
                ]
            )
        raise_divergence({seed: end for seed, end in zip(unfinished, ends, strict=True) if end})
    return process_group().run_on_main(lambda: _summarize_trials(out, label, seeds, only or seeds))


def train_trials(prepare: Sequence[Callable[[], PreparedRun]]) -> list[DivergenceError | None]:
    """Train trials at the same time, or one by one if memory is short, and return how each diverged, if it did."""
    try:
        ends = execute_trials([prepare_one() for prepare_one in prepare])
        return [end if isinstance(end, DivergenceError) else None for end in ends]
    except torch.OutOfMemoryError:
        if len(prepare) == 1 or process_group().world_size > 1:
            raise
    gc.collect()  # frees the failed attempt, which the error holds inside the handler
    return [end for prepare_one in prepare for end in train_trials([prepare_one])]


def prepare_trial(path: Path, settings: ConfigDict, federation: Federation | None, callback: Callback) -> PreparedRun:
    """Return the run of a trial, new or resumed."""
    if process_group().broadcast((path / "config.toml").exists()):
        return open_run(path, federation=federation, callbacks=[callback])
    config = configs.resolve_config(settings)
    config, spec = prepare(config, federation or config.federation(), None, None)
    return PreparedRun(config, spec, RunDir.create(path, config.to_toml(), spec.federation), [callback])


def read_trials(out: Path, only: Sequence[int] | None = None) -> Trials:
    """Return the finished trials in `out`, all or those of some seeds."""
    label, seeds = read_trials_plan(out)
    run_dirs = [RunDir(out / f"seed-{seed}") for seed in (seeds if only is None else only)]
    return Trials(label, [StoredRun(run_dir.path) for run_dir in run_dirs if run_dir.finished])


def read_trials_plan(out: Path) -> tuple[str, list[int]]:
    """Return the label and the seeds of the trials in `out`."""
    path = out / TRIALS_FILE
    fix = 'it must hold the method and the seeds, such as {"method": "gpfl", "seeds": [0, 1, 2]}'
    content = files.read_json(path, fix)
    label, seeds = content.get("method"), content.get("seeds")
    if not isinstance(label, str) or not isinstance(seeds, list) or not seeds:
        raise GpflError(f"{path} cannot be read: {fix}")
    return label, seeds


def is_trials_dir(out: Path) -> bool:
    """Return whether a folder holds trials."""
    return (out / TRIALS_FILE).exists() or any(out.glob("seed-*/config.toml"))


def with_seed(settings: ConfigDict, seed: int) -> ConfigDict:
    """Return the same config with another seed."""
    return {**settings, "run": {**settings.get("run", {}), "seed": seed}}


def check_same_federation(out: Path, federation: Federation) -> None:
    """Raise if the trials in a folder were run on another federation."""
    stored = Federation.load(out / MANIFEST, federation.table).manifest()
    if toml.dump(stored) != toml.dump(federation.manifest()):
        raise GpflError(f"{out} holds trials on another federation, {out / MANIFEST}: choose another --out")


def raise_divergence(diverged: Mapping[int, DivergenceError]) -> None:
    """Raise one error for all trials that diverged, by seed."""
    if diverged:
        (seed, error), *others = diverged.items()
        also = f", and seed{'s' * (len(others) > 1)} {', '.join(str(other) for other, _ in others)} diverged as well"
        raise DivergenceError(f"seed {seed}: {error.reason}{also if others else ''}", error.remedy)


def delete_weights(run: Path) -> None:
    """Remove checkpoints and models of a run. Config, metrics and summary remain."""
    shutil.rmtree(run / "models", ignore_errors=True)
    for name in ("checkpoint", "selected"):
        (run / f"{name}.safetensors").unlink(missing_ok=True)


def _check_same_config(out: Path, new: Sections) -> None:
    old = configs.read_config(out / "config.toml")
    if "defence" in old and "defence" not in new:
        raise GpflError(f"{out} holds trials under a defence, now there is none: choose another --out")
    check_same_config(out, old, new, "trials")


def _write_plan(out: Path, config: Config, federation: Federation, seeds: Sequence[int], label: str) -> None:
    earlier: list[int] = []
    started = (out / "config.toml").exists()
    if label and started:
        _, earlier = read_trials_plan(out)
    else:
        remove_partial_start(out)
        make_empty_folder(out)
        federation.save(out / MANIFEST)
    plan = {"method": label or config.method.name, "seeds": [*earlier, *(seed for seed in seeds if seed not in earlier)]}
    files.write_text(out / TRIALS_FILE, json.dumps(plan) + "\n")
    if not started:
        files.write_text(out / "config.toml", config.to_toml())  # last: where it exists, the trials can resume


def _read_progress(out: Path, only: Sequence[int] | None) -> tuple[str, list[int], ConfigDict, list[int]]:
    RunDir.open(out)
    label, seeds = read_trials_plan(out)
    settings = configs.read_config(out / "config.toml")
    return label, seeds, settings, [seed for seed in only or seeds if not RunDir(out / f"seed-{seed}").finished]


def _summarize_trials(out: Path, label: str, seeds: Sequence[int], required: Sequence[int]) -> Trials:
    """Return the trials of the required seeds and all others that have finished, after writing their means."""
    trials = read_trials(out, [seed for seed in seeds if seed in required or RunDir(out / f"seed-{seed}").finished])
    means = {key: {"mean": trials.mean(key), "std": trials.std(key)} for key in SUMMARY_KEYS}
    files.write_text(out / TRIALS_FILE, json.dumps({"method": label, "seeds": seeds, **means}, indent=2) + "\n")
    return trials
