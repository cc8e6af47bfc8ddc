"""Compare configs, and check that stored trials are readable and belong to their folder."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from gpfl.errors import GpflError
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict
from gpfl.training.run_dir import RunDir

Sections = Mapping[str, Mapping[str, object]]  # a complete config by section and key

UNCOMPARED = (*(("run", key) for key in ("seed", "engine", "device", "compile", "checkpoint_every")), ("partition", "file"))
"""Settings that do not change results, or in which the trials of one config differ."""

RESTORE = "restore the file, or remove {} to run it again"
"""How to fix a damaged file. A run without weights cannot resume, only start again."""


def first_difference(old: Sections, new: Sections) -> tuple[str, str, str] | None:
    """Return the first setting in which two configs differ, with both values, or None. Settings in `UNCOMPARED` may differ."""
    for section in {**new, **old}:
        old_values, new_values = old.get(section, {}), new.get(section, {})
        for key in {**new_values, **old_values}:
            before, after = (repr(values[key]) if key in values else "its default" for values in (old_values, new_values))
            if before != after and (section, key) not in UNCOMPARED:
                return f"{section}.{key}", before, after
    return None


def merge_configs(*layers: Sections) -> ConfigDict:
    """Return the sections of several configs in one. Later configs override earlier ones."""
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in chain(*layers)}


def is_finished(run: Path) -> bool:
    """Return whether a trial has finished and is undamaged."""
    return RunDir(run).finished and not find_trial_damage(run)


def find_trial_damage(run: Path) -> str:
    """Return what is wrong with a finished trial, and the fix; "" if nothing.

    Its summary must be readable, and its config must be that of its folder with its seed.
    """
    if not RunDir(run).finished:
        return ""
    try:
        RunDir(run).read_summary(RESTORE.format(run))
    except GpflError as error:
        return str(error)
    try:
        config, expected = (configs.read_sections(folder / "config.toml") for folder in (run, run.parent))
    except GpflError:  # tables need only the summary and the metrics
        return ""
    seed = config.get("run", {}).get("seed")
    if seed is not None and run.name != f"seed-{seed}":
        return f"{run / 'config.toml'} has run.seed = {seed}, so it belongs to another run: move {run} away or remove it"
    return _find_mismatch(run / "config.toml", merge_configs(expected, config), expected)


def find_folder_damage(folder: Path, expected: Sections | None = None) -> str:
    """Return what is wrong with the config of a folder of trials, and the fix; "" if nothing, or if the folder is new.

    With `expected` it must equal that complete config.
    """
    path = folder / "config.toml"
    if not path.exists() and not any(folder.glob("seed-*")):
        return ""
    try:
        config = configs.read_sections(path)
    except GpflError as error:
        return f"{error}: {RESTORE.format(folder)}"
    return _find_mismatch(path, config, expected) if expected else ""


def _find_mismatch(path: Path, config: Sections, expected: Sections) -> str:
    if not (difference := first_difference(config, expected)):
        return ""
    key, value, wanted = difference
    return f"{path} has {key} = {value}, not {wanted}, so it belongs to another run: move {path.parent} away or remove it"
