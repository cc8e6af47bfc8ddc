"""Trials: one config run with several seeds on one partition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpfl.engine.distributed import process_group
from gpfl.errors import DivergenceError, GpflError
from gpfl.experiments.damage import config_fault, summary_fault
from gpfl.experiments.stored_runs import FolderRun, Trials
from gpfl.federation import MANIFEST, Federation
from gpfl.io import files, toml
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict
from gpfl.training.execute import PreparedRun, execute_trials, open_run
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir, make_empty_folder, remove_partial_start

NEGLIGIBLE = (*(("run", key) for key in ("seed", "engine", "device", "compile", "checkpoint_every")), ("partition", "file"))
"""Settings in which trials of one study may differ: they change no number, or are what trials differ in."""

ANOTHER = "it is another run's: move {0} away, or remove {0} and have this one run"

Sections = Mapping[str, Mapping[str, object]]
"""A complete config, as its TOML has it."""

CallbackFactory = Callable[[str], Callback]
"""Makes the callback of a run from its label."""


def run_trials(
    given: ConfigDict, seeds: Sequence[int], out: Path, make_callback: CallbackFactory, *, label: str = ""
) -> Trials:
    """Gives the trials of a config in `out`, each in a folder seed-N; those that are there are not run again.

    With a `label`, as comparisons give it, `out` may hold trials of the same config; otherwise it must be new.
    """
    config, federation = check_trials(given, seeds, out if label else None)
    process_group().run_on_main(lambda: write_plan(out, config, federation, seeds, label))
    return resume_trials(out, make_callback, only=seeds)


def write_plan(out: Path, config: Config, federation: Federation, seeds: Sequence[int], label: str) -> None:
    """Writes what trials are gone on with from; without a `label` into a new folder alone."""
    held: list[int] = []
    if label and (out / "config.toml").exists():
        _, held = read_trials_plan(out)
    else:
        remove_partial_start(out)
        make_empty_folder(out)
        federation.save(out / MANIFEST)
    plan = {"method": label or config.method.name, "seeds": [*held, *(seed for seed in seeds if seed not in held)]}
    files.write_text(out / "trials.json", json.dumps(plan) + "\n")
    if not (out / "config.toml").exists():
        files.write_text(out / "config.toml", config.to_toml())  # last: its presence says that all is there to go on


def check_trials(given: ConfigDict, seeds: Sequence[int], out: Path | None) -> tuple[Config, Federation]:
    """Gives the config of trials, complete, and their federation; refuses what could not be run, or not in that folder."""
    if not seeds:
        raise GpflError("there is no seed; give at least one")
    config = configs.resolve_config(with_seed(given, seeds[0]))
    federation = config.federation()
    config, _ = prepare(config, federation, None, None)
    if out is not None and (out / "config.toml").exists():
        refuse_other_config(out, config.sections())
        refuse_other_federation(out, federation)
    return config, federation


def refuse_other_config(out: Path, new: Sections) -> None:
    """Refuses a folder whose trials were run with other settings, and names the first that differs."""
    old = configs.read_config(out / "config.toml")
    if "defence" in old and "defence" not in new:
        raise GpflError(f"{out} holds trials under a defence, now there is none: choose another --out")
    if found := first_difference(old, new):
        key, before, value = found
        raise GpflError(f"{out} holds trials with {key} = {before}, now it is {value}: choose another --out")


def config_of(folder: Path) -> Sections:
    """Gives the complete config of trials or of one, of which it is known that it is whole."""
    return configs.read_sections(folder / "config.toml")


def first_difference(old: Sections, new: Sections) -> tuple[str, str, str] | None:
    """Gives the first setting in which two configs differ, but for those in which trials may, and its two values."""
    for section in {**new, **old}:
        others, values = old.get(section, {}), new.get(section, {})
        for key in {**values, **others}:
            before, value = (repr(held[key]) if key in held else "its default" for held in (others, values))
            if before != value and (section, key) not in NEGLIGIBLE:
                return f"{section}.{key}", before, value
    return None


def is_finished(run: Path) -> bool:
    """Tells whether a trial has ended and is whole."""
    return RunDir(run).finished and not trial_fault(run)


def trial_fault(run: Path) -> str:
    """Gives what is wrong with a trial that has ended, and the way out; "" where nothing is, or it has not.

    Its summary cannot be read, or its config is not its folder's with its seed.
    """
    if not RunDir(run).finished:
        return ""
    path = run / "config.toml"
    if (fault := summary_fault(run)) or config_fault(run) or not path.exists():
        return fault  # tables can do without a trial's own config
    held = config_of(run)
    seed = held["run"]["seed"]
    if run.name != f"seed-{seed}":
        return f"{path} has run.seed = {seed}: {ANOTHER.format(run)}"
    return "" if config_fault(run.parent) else other_fault(path, held, config_of(run.parent))


def folder_fault(folder: Path, wanted: Sections) -> str:
    """Gives what is wrong with a folder of trials, and the way out: its config is damaged, or not the one wanted."""
    fault = config_fault(folder)
    path = folder / "config.toml"
    return fault if fault or not path.exists() else other_fault(path, config_of(folder), wanted)


def other_fault(path: Path, held: Sections, wanted: Sections) -> str:
    """Gives in what a config is not the one wanted, and the way out; "" where it is."""
    if not (found := first_difference(held, wanted)):
        return ""
    key, before, value = found
    return f"{path} has {key} = {before}, not {value}: {ANOTHER.format(path.parent)}"


def refuse_other_federation(out: Path, federation: Federation) -> None:
    """Refuses a folder whose trials were run on another division."""
    held = Federation.load(out / MANIFEST, federation.table).manifest()
    if toml.dump(held) != toml.dump(federation.manifest()):
        raise GpflError(f"{out} holds trials on another federation, {out / MANIFEST}: choose another --out")


def is_trials_dir(out: Path) -> bool:
    """Tells whether a folder is one of trials."""
    return (out / "trials.json").exists() or any(out.glob("seed-*/config.toml"))


def read_trials_plan(out: Path) -> tuple[str, list[int]]:
    """Gives the name and the seeds of the trials in `out`."""
    path = out / "trials.json"
    way = 'it must hold the method and the seeds, such as {"method": "gpfl", "seeds": [0, 1, 2]}'
    content = files.read_json(path, way)
    name, seeds = content.get("method"), content.get("seeds")
    if not isinstance(name, str):
        raise GpflError(f"{path} does not name the method: {way}")
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise GpflError(f"{path} does not list seeds: {way}")
    return name, seeds


def resume_trials(out: Path, make_callback: CallbackFactory, *, only: Sequence[int] | None = None) -> Trials:
    """Gives the trials of `out`: finished ones are read, others are gone on with or begun."""
    name, seeds, given, unfinished = process_group().run_on_main(lambda: stand(out, only))
    if unfinished:
        federation = configs.resolve_config(with_seed(given, seeds[0])).federation()
        with process_group().abort_all_on_error():
            runs = [
                prepare_trial(out / f"seed-{seed}", with_seed(given, seed), federation, make_callback(f"{name} seed {seed}"))
                for seed in unfinished
            ]
            ends = zip(unfinished, execute_trials(runs), strict=True)
        refuse_diverged({seed: end for seed, end in ends if isinstance(end, DivergenceError)})
    return process_group().run_on_main(lambda: summarize_trials(out, name, seeds, only or seeds))


def stand(out: Path, only: Sequence[int] | None) -> tuple[str, list[int], ConfigDict, list[int]]:
    """Gives the name, the seeds and the config of the trials in `out`, and the seeds that have not ended, all or of some."""
    RunDir.open(out)
    name, seeds = read_trials_plan(out)
    given = configs.read_config(out / "config.toml")
    return name, seeds, given, [seed for seed in only or seeds if not RunDir(out / f"seed-{seed}").finished]


def summarize_trials(out: Path, name: str, seeds: Sequence[int], wanted: Sequence[int]) -> Trials:
    """Gives the trials of `out` that were wanted or have ended, having written their means."""
    trials = read_trials(out, [seed for seed in seeds if seed in wanted or is_finished(out / f"seed-{seed}")])
    numbers = {
        key: {"mean": trials.mean(key), "std": trials.std(key)}
        for key in ("best_accuracy", "last_accuracy", "std", "cov", "seconds", "idle_clients")
    }
    files.write_text(out / "trials.json", json.dumps({"method": name, "seeds": seeds, **numbers}, indent=2) + "\n")
    return trials


def refuse_diverged(diverged: Mapping[int, DivergenceError]) -> None:
    """Refuses trials of which some diverged, once the others have ended."""
    if diverged:
        (seed, end), *others = diverged.items()
        also = f", and seed{'s' * (len(others) > 1)} {', '.join(str(other) for other, _ in others)} diverged as well"
        raise DivergenceError(f"seed {seed}: {end.reason}{also if others else ''}", end.remedy)


def prepare_trial(path: Path, given: ConfigDict, federation: Federation | None, callback: Callback) -> PreparedRun:
    """Gives the run of a trial: gone on with, or new."""
    if process_group().broadcast((path / "config.toml").exists()):
        return open_run(path, federation=federation, callbacks=[callback])
    config, setting = prepare(
        configs.resolve_config(given), federation or configs.resolve_config(given).federation(), None, None
    )
    return PreparedRun(config, setting, RunDir.create(path, config.to_toml(), setting.federation), [callback])


def read_trials(out: Path, only: Sequence[int] | None = None) -> Trials:
    """Gives the trials of `out` that have finished, all or those of some seeds."""
    name, seeds = read_trials_plan(out)
    folders = [RunDir(out / f"seed-{seed}") for seed in (seeds if only is None else only)]
    finished = [folder for folder in folders if folder.finished]
    return Trials(name, [FolderRun(folder.path) for folder in finished])


def with_seed(given: ConfigDict, seed: int) -> ConfigDict:
    """Gives the same config with another seed."""
    return {**given, "run": {**given.get("run", {}), "seed": seed}}


def delete_weights(run: Path) -> None:
    """Removes what is large of a run: checkpoints and models. Config, metrics and summary stay."""
    shutil.rmtree(run / "models", ignore_errors=True)
    for name in ("checkpoint", "selected"):
        (run / f"{name}.safetensors").unlink(missing_ok=True)
