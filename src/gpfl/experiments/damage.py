"""What is damaged of a folder of runs: a config that lacks what was written, a summary that cannot be read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gpfl.core.options import options_of
from gpfl.errors import GpflError
from gpfl.federation import PARTITIONS
from gpfl.io.legacy import read_version, upgrade_config
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import SECTIONS, ConfigDict, RunOptions, TrainOptions
from gpfl.training.run_dir import RunDir

WAY = "restore the file, or remove {} and have it run again"
"""The way out of a file that is damaged: a run whose weights are not kept can only begin anew."""


def summary_fault(run: Path) -> str:
    """Gives what is wrong with the summary of a trial, and the way out; "" where there is none, or a whole one."""
    folder = RunDir(run)
    try:
        if folder.finished:
            folder.read_summary(WAY.format(run))
    except GpflError as problem:
        return str(problem)
    return ""


def config_fault(folder: Path) -> str:
    """Gives what is wrong with the config of trials, and the way out; "" where it is whole, or nothing is begun.

    Configs are written complete, so that one which lacks something is damaged.
    """
    path = folder / "config.toml"
    try:
        if not path.exists() and not any(folder.glob("seed-*")):
            return ""
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        read_version(content, path)
        wrong = shortfall(upgrade_config({key: value for key, value in content.items() if key != "format_version"}))
    except OSError as problem:
        return f"cannot read {path} ({problem.strerror}): {WAY.format(folder)}"
    except GpflError as problem:
        return str(problem)
    except ValueError as problem:  # no TOML, or no text
        wrong = str(problem)
    return f"{path} is damaged ({wrong}): {WAY.format(folder)}" if wrong else ""


def shortfall(content: Mapping[str, object]) -> str:
    """Gives the first thing that keeps a content from being a complete config; "" where it is one."""
    for name, values in content.items():
        if not isinstance(values, dict):
            return f"'{name}' stands outside a section"
    sections = cast(ConfigDict, content)
    for section in (section for section in SECTIONS if section != "defence"):
        if section not in sections:
            return f"it lacks [{section}]"
        for key in written_keys(section, sections[section].get("name")):
            if key not in sections[section]:
                return f"it lacks {section}.{key}"
    return ""


def written_keys(section: str, name: object) -> list[str]:
    """Gives the keys that a section of a complete config holds; of one with a name that nobody knows, the name alone."""
    always: Mapping[str, type] = {"run": RunOptions, "train": TrainOptions}
    if section in always:
        return [key for key, option in options_of(always[section]).items() if not option.omit_default]
    named: Mapping[str, Mapping[str, type]] = {"partition": PARTITIONS, "net": NETS, "method": METHODS}
    record = named.get(section, {}).get(str(name))
    return ["name", *(key for key, option in options_of(record).items() if not option.omit_default)] if record else ["name"]
