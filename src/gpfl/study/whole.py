"""What is whole of a folder of runs: a summary that can be read, a config that holds all that was written."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gpfl.config import SECTIONS, Given, RunOptions, TrainOptions
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.nets import NETS
from gpfl.options import options_of
from gpfl.partition import SPLITS
from gpfl.runs import RunFolder


def begun(folder: Path) -> bool:
    """Tells whether a folder should hold a config: it does, good or bad, or it holds trials."""
    return (folder / "config.toml").exists() or any(folder.glob("seed-*"))


def ended(run: Path) -> bool:
    """Tells whether a trial has ended and its summary is whole."""
    try:
        RunFolder(run).summary()
    except GpflError:
        return False
    return True


def whole_config(run: Path) -> Given:
    """Gives the config of a run or of trials, which was written complete; refuses one that is damaged.

    The way out is the caller's to say.
    """
    path = run / "config.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        wrong = shortfall(content)
    except OSError as problem:
        wrong = str(problem.strerror)
    except ValueError as problem:  # no TOML, or no text
        wrong = str(problem)
    if wrong:
        raise GpflError(f"{path} is damaged ({wrong})")
    return content


def shortfall(content: Mapping[str, object]) -> str:
    """Gives the first thing that keeps a content from being a complete config; "" where it is one."""
    for name, values in content.items():
        if not isinstance(values, dict):
            return f"'{name}' stands outside a section"
    sections = cast(Given, content)
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
        return [key for key, option in options_of(always[section]).items() if not option.later]
    named: Mapping[str, Mapping[str, type]] = {"split": SPLITS, "net": NETS, "method": METHODS}
    record = named.get(section, {}).get(str(name))
    return ["name", *(key for key, option in options_of(record).items() if not option.later)] if record else ["name"]
