"""The config of a command: a file, flags over it, --set over both."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpfl.cli.options import flag_name, keys_of, parse_options
from gpfl.cli.terminal import print_line
from gpfl.data import DATASETS
from gpfl.data.files.layout import SUFFIXES, file_suffix
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict

if TYPE_CHECKING:
    from gpfl.experiments.compare import MethodVariant

MethodOverrides = Mapping[str, Mapping[str, object]]  # options of single methods, by method name


def parse_set(assignments: Iterable[str]) -> ConfigDict:
    """Return the config sections of `--set section.key=value`."""
    config: ConfigDict = {}
    for text in assignments:
        path, equals, value = text.partition("=")
        section, dot, key = path.strip().partition(".")
        if not equals or not dot or not key:
            raise GpflError(f"--set {text} is not of the form section.key=value, such as method.lam=0.1")
        config.setdefault(section, {})[key] = toml.parse_value(value.strip())
    return config


def parse_method_set(
    assignments: Iterable[str], methods: Sequence[object], *, names_from: str = "--methods"
) -> tuple[ConfigDict, MethodOverrides]:
    """Return the config sections of --set, and apart from them the options of single methods (`fedprox.mu=0.01`).

    Raise for one that a command which runs these methods would ignore.
    """
    config = parse_set(assignments)
    overrides = {name: config.pop(name) for name in list(config) if name in METHODS}
    for key in config.get("method", {}):
        raise GpflError(f"--set method.{key} does not name the method: use --set {methods[0]}.{key}=…")
    if "seed" in config.get("run", {}):
        raise GpflError("--set run.seed is not available here: use --seeds, or --seed where the command has it")
    for name in overrides:
        if name not in methods:
            raise GpflError(f"--set {name}.… is for a method that is not run: add {name} to {names_from}, or leave it out")
    return config, overrides


def load_shared_config(
    flags: Mapping[str, Any], command: str, methods: "Sequence[MethodVariant]", *, names_from: str = "--methods"
) -> "tuple[ConfigDict, list[MethodVariant]]":
    """Return the config that methods share, from the flags of a command, and the methods with the options of their own."""
    names = [str(variant.method["name"]) for variant in methods]
    settings, overrides = parse_method_set(flags["assignments"], names, names_from=names_from)
    config = load_config(flags, merge(parse_options(flags), settings), command)
    if config.pop("method", None):
        print_line(f"Section [method] of {flags['config']} is ignored: use {names_from} and --set.")
    own = [{**overrides.get(name, {}), **variant.method} for name, variant in zip(names, methods, strict=True)]
    return config, [replace(variant, method=method) for variant, method in zip(methods, own, strict=True)]


def merge(*layers: ConfigDict) -> ConfigDict:
    """Merge configs: later ones override earlier ones, and a new name drops the options of the old one.

    The options of your own files stay when others of your own files are named.
    """
    merged: ConfigDict = {}
    for layer in layers:
        for section, values in layer.items():
            below = merged.get(section, {})
            if "name" in values and "name" in below and values["name"] != below["name"]:
                own_files = section == "data" and not {values["name"], below["name"]} & set(DATASETS)
                below = below if own_files else {}
            merged[section] = {**below, **values}
    return merged


def load_config(flags: Mapping[str, Any], overrides: ConfigDict, command: str) -> ConfigDict:
    """Return the config of a file with overrides; the manifest of a federation takes the place of a partition.

    `command` is the one to suggest when the file is a dataset or a method instead of a config.
    """
    file, federation = flags.get("config"), flags["federation"]
    if file is not None:
        _check_config_path(file, command)
    config = merge(configs.read_config(Path(file)) if file is not None else {}, overrides)
    if federation is not None:
        flags = {"name": "--partition"} | {key: flag_name("partition", key) for key in keys_of("partition")}
        for key in overrides.get("partition", {}):  # the manifest already assigns the samples
            flag = flags.get(key, f"partition.{key}")
            raise GpflError(f"--federation {federation} already assigns the samples to clients: leave out {flag}")
        config["partition"] = {"name": "manifest", "file": federation}
    return config


def new_folder(folder: Path | None, default: Path) -> Path:
    """Return the folder of --out, or the default with the first free number; the same one in all processes."""
    if folder is not None:
        return folder
    number, folder = 1, default
    while folder.exists():
        number += 1
        folder = default.with_name(f"{default.name}-{number}")
    return process_group().broadcast(folder)


def _check_config_path(config: str, command: str) -> None:
    """Raise if data, a method or a run's folder is given as the config of `command`, and name the flag for it."""
    path, quoted = Path(config), shlex.quote(config)
    if path.suffix.lower() == ".toml" and not path.is_dir():
        return
    if (path / "config.toml").is_file():
        raise GpflError(f"{config} is the folder of a run, not a config: did you mean `gpfl resume {quoted}`?")
    flag = ""
    if config in METHODS and not path.exists():
        flag = "--method"
    elif config in DATASETS or file_suffix(path) in SUFFIXES or path.is_dir():
        flag = "--data"
    if flag:
        raise GpflError(f"{config} is not a config (.toml): did you mean `gpfl {command} {flag} {quoted}`?")
