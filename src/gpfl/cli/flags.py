"""Command-line flags for the options of a run: data, partition, net, training, method and defence."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import typing
from collections.abc import Container, Iterable, Mapping

import click
from typer.core import TyperOption

from gpfl.core.options import Option, describe_type, options_of
from gpfl.core.randomness import MAX_SEED
from gpfl.data import DATASETS, FILES, FileDataset
from gpfl.defences.config import DefenceConfig
from gpfl.errors import GpflError
from gpfl.federation.partition import PARTITIONS
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import ConfigDict, RunOptions, TrainOptions

RECORDS: Mapping[str, Mapping[str, type]] = {
    "method": METHODS,
    "data": {FILES: FileDataset, **{name: type(source) for name, source in DATASETS.items() if options_of(type(source))}},
    "partition": PARTITIONS,
    "net": NETS,
    "train": {"": TrainOptions},
    "defence": {"": DefenceConfig},
    "run": {"": RunOptions},
}
"""The records behind each section of a config, by name where there are several."""

PLAIN = ("run", "data", "partition", "train", "net", "method", "defence")
"""Who has the plain flag where two sections have an option of one name: --seed is the run's, --beta the partition's."""

PREFIXED = {("partition", "rng")}
"""Options whose flag carries the name of their section though no other section has them."""

PANELS = {
    "method": "Method",
    "data": "Data",
    "partition": "Federation",
    "net": "Net",
    "train": "Training",
    "defence": "Defence",
    "run": "Run",
}


def flag_name(section: str, key: str) -> str:
    """Gives an option's flag; of two sections that have the name, the later of PLAIN carries its own before it."""
    first = next(s for s in PLAIN if key in keys_of(s))
    prefix = "" if section == first and (section, key) not in PREFIXED else f"{section}-"
    return prefix + key.replace("_", "-")


def name_flags(text: str, sections: Iterable[str], only: Container[str] | None = None) -> str:
    """Gives a message with the flag of every option of these sections that it speaks of: "train.lr (--lr) is -1".

    A command that has not all of them names those that it has, such as train.rounds.
    """
    names = {f"{section}.{key}": flag_name(section, key) for section in sections for key in keys_of(section)}
    known = {name: flag for name, flag in names.items() if only is None or name in only}

    def named(found: re.Match[str]) -> str:
        return f"{found[0]} (--{known[found[0]]})" if found[0] in known else found[0]

    return re.sub(r"(?<!--set )(?<![\w./'-])[a-z]+\.[a-z_]+(?= (?:is|belongs|cannot|=) )", named, text)


def keys_of(section: str) -> list[str]:
    """Gives all options of a section's records, each once."""
    keys: dict[str, None] = {}
    for record in RECORDS[section].values():
        keys.update(dict.fromkeys(options_of(record)))
    return list(keys)


def config_flags(sections: Iterable[str] = tuple(RECORDS), omit: tuple[str, ...] = ()) -> list[click.Option]:
    """Gives a flag for every option of the sections, in panels; `omit` leaves out some of [run]."""
    return [make_flag(section, key) for section in sections for key in keys_of(section) if section != "run" or key not in omit]


def name_flag(section: str, known: Iterable[str], panel: str) -> TyperOption:
    """Gives the flag that names a method, data set, partition or net."""
    words = f"Name of the {section}: {', '.join(known)}."
    return TyperOption(param_decls=[f"--{section}", f"{section}__name"], metavar="NAME", help=words, rich_help_panel=panel)


def make_flag(section: str, key: str) -> click.Option:
    """Gives the flag of one option."""
    owners = {name: record for name, record in RECORDS[section].items() if key in options_of(record)}
    record = next(iter(owners.values()))
    hint = typing.get_type_hints(record)[key]
    name = flag_name(section, key)
    boolean = hint is bool
    return TyperOption(
        param_decls=[f"--{name}/--no-{name}" if boolean else f"--{name}", f"{section}__{key}"],
        type=bool if boolean else str,
        is_flag=boolean,
        multiple=any(is_list(record, key) for record in owners.values()),
        default=None,
        metavar=None if boolean else metavar(options_of(record)[key], hint),
        help=words(owners, key, len(RECORDS[section])),
        rich_help_panel=PANELS[section],
    )


def is_list(record: type, key: str) -> bool:
    """Tells whether an option takes a list of any length; its flag may then be given several times."""
    hint = typing.get_type_hints(record)[key]
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def metavar(described: Option, hint: object) -> str:
    """Gives the word that stands for the value."""
    if described.choices:
        return (",…|" if "a list" in describe_type(hint) else "|").join(described.choices)
    return {"an integer": "N", "a number": "X", "text": "TEXT", "a list, each entry text": "NAME,…"}.get(
        describe_type(hint), "X,X"
    )


def words(owners: Mapping[str, type], key: str, records: int) -> str:
    """Gives the help of a flag: what it is for each record that has it, its symbol, default and usual range."""
    texts: dict[str, list[str]] = {}
    for name, record in owners.items():
        texts.setdefault(describe(record, key), []).append(name)
    if len(texts) == 1 and (len(owners) == records or "" in owners):
        return next(iter(texts))
    return " ".join(f"{', '.join(names)}: {text}." for text, names in texts.items())


def describe(record: type, key: str) -> str:
    """Gives what an option is, in one line."""
    described = options_of(record)[key]
    default = next(f.default for f in dataclasses.fields(record) if f.name == key)
    shown = default_words(record, key, default)
    facts = [part for part in (f"usual: {described.typical}" if described.typical else "", f"default: {shown}") if part]
    symbol = f"{described.symbol}, " if described.symbol else ""
    return f"{symbol}{described.help} ({'; '.join(facts)})"


def default_words(record: type, key: str, default: object) -> str:
    """Gives a default in words."""
    if isinstance(default, float) and math.isnan(default):
        by_net = options_of(record)[key].by_net
        if by_net:
            return "by net: " + ", ".join(f"{net} {value:g}" for net, value in by_net.items()).replace("* ", "others ")
        if key != "lr":
            return "the learning rate"
        return "by net: " + ", ".join(f"{name} {kind.lr:g}" for name, kind in NETS.items())
    if isinstance(default, tuple):
        return ",".join(str(entry) for entry in default) or "none"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"


def given_by_flags(values: Mapping[str, object]) -> ConfigDict:
    """Gives the sections of a config from the flags that were set."""
    given: ConfigDict = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        if value is None or value == () or not key:
            continue
        given.setdefault(section, {})[key] = parse(section, key, value)
    return given


def parse(section: str, key: str, value: object) -> object:
    """Gives a flag's text as a value; commas make a list where an option of that name takes one, and several texts one list."""
    if isinstance(value, tuple):
        lists = [parse(section, key, text) for text in value]
        return (
            lists[0] if len(lists) == 1 else [entry for part in lists for entry in (part if isinstance(part, list) else [part])]
        )
    if not isinstance(value, str):
        return value
    records = [record for record in RECORDS.get(section, {}).values() if key in options_of(record)]
    kinds = [describe_type(typing.get_type_hints(record)[key]) for record in records]
    if kinds == ["text"] * len(kinds):
        return value
    if all(kind == "a list, each entry text" for kind in kinds) and kinds:
        return texts(value)
    if "," in value and any("a list" in kind for kind in kinds):
        return [number(entry.strip()) for entry in value.strip("[] ").split(",")]
    return number(value)


def texts(value: str) -> list[str]:
    """Gives the texts of a list with commas between, such as a line of a CSV file; brackets around it may be there."""
    value = value.strip()
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    return [text.strip() for line in csv.reader([value], skipinitialspace=True) for text in line]


def number(text: str) -> object:
    """Gives a value as TOML reads it, or a number that TOML does not know, such as .5."""
    value = toml.parse_value(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return text
    return value


def parse_seeds(seeds: str) -> list[int]:
    """Gives the seeds of a list such as 0,1,2."""
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise GpflError(f"--seeds is '{seeds}'; it must be whole numbers with commas between, such as 0,1,2") from None
    if len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise GpflError(f"--seeds is '{seeds}'; the seeds must differ and not be negative")
    if max(numbers) > MAX_SEED:
        raise GpflError(f"--seeds is '{seeds}'; a seed must be at most {MAX_SEED}")
    return numbers


def given_by_set(assignments: tuple[str, ...]) -> ConfigDict:
    """Gives the sections of a config from `--set section.key=value`."""
    given: ConfigDict = {}
    for text in assignments:
        path, equals, value = text.partition("=")
        section, dot, key = path.strip().partition(".")
        if not equals or not dot or not key:
            raise GpflError(f"--set {text} is not of the form section.key=value, such as method.lam=0.1")
        given.setdefault(section, {})[key] = toml.parse_value(value.strip())
    return given


def merge(*layers: ConfigDict) -> ConfigDict:
    """Gives several configs laid over each other, the last on top; a new name drops the options of the old one."""
    merged: ConfigDict = {}
    for layer in layers:
        for section, values in layer.items():
            below = merged.get(section, {})
            if "name" in values and "name" in below and values["name"] != below["name"]:
                below = {}
            merged[section] = {**below, **values}
    return merged
