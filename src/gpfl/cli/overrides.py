"""What a command was given: a config, flags and --set laid over each other, settings of single methods, and the folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpfl.cli import flags
from gpfl.cli.data import refuse_splits
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict

Own = Mapping[str, Mapping[str, object]]
"""Settings of single methods by name."""


def layered(config: str | None, by_hand: ConfigDict, federation: str | None, command: str) -> ConfigDict:
    """Gives the config of a file with what was given by flags and --set over it; a manifest takes the place of a partition.

    `command` is the one that data or a method in the place of the config may be meant for.
    """
    if config is not None:
        configs.refuse_data(config, command)
    file = configs.read_config(Path(config)) if config is not None else {}
    if federation is None:
        return flags.merge(file, by_hand)
    refuse_splits(by_hand, federation)
    return {**flags.merge(file, by_hand), "partition": {"name": "manifest", "file": federation}}


def split_settings(assignments: tuple[str, ...]) -> tuple[ConfigDict, Own]:
    """Gives what --set says to all methods, by section, and what it says to single ones, by name."""
    settings = flags.given_by_set(assignments)
    own = {name: settings.pop(name) for name in list(settings) if name in METHODS}
    return settings, own


def refuse_unheard(
    settings: ConfigDict, own: Own, names: Iterable[object], *, done: str, kind: str, place: str = "--methods"
) -> None:
    """Refuses settings that a command for methods of these names would not listen to.

    It is in the words of the command: what is `done` with methods, the `kind` of thing it makes, the `place` of their names.
    """
    running = list(names)
    for key in settings.get("method", {}):
        raise GpflError(f"--set method.{key} does not say whose {key}: name the method, such as --set {running[0]}.{key}=…")
    if "seed" in settings.get("run", {}):
        raise GpflError(f"--set run.seed is not for {kind}: give --seeds, or --seed where there is one")
    for name in own:
        if name not in running:
            raise GpflError(f"--set {name}.… is for a method that is not {done}: add {name} to {place}, or leave it out")


def results_folder(name: str) -> Path:
    """Gives the folder of --out for results; refuses a file."""
    folder = named_folder(name)
    if folder.exists() and not folder.is_dir():
        raise GpflError(f"--out {folder} is a file; name a folder")
    return folder


def named_folder(name: str, flag: str = "--out") -> Path:
    """Gives the folder of a flag."""
    if not name.strip():
        raise GpflError(f"{flag} is empty; name a folder")
    return Path(name)
