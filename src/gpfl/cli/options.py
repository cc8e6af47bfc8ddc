"""Options that commands share: one flag for every option of a config, and --set, --seeds, --out and --federation."""

from __future__ import annotations

import csv
import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from gpfl.cli.command import Argument
from gpfl.core.options import BY_NET, Option, describe_type, options_of
from gpfl.core.randomness import MAX_SEED
from gpfl.data import DATASETS, FILES, FileDataset
from gpfl.defences.config import DefenceConfig
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation.partition import PARTITIONS
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import ConfigDict, RunOptions, TrainOptions

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

RECORDS: Mapping[str, Mapping[str, type]] = {
    "method": METHODS,
    "data": {FILES: FileDataset, **{name: type(source) for name, source in DATASETS.items() if options_of(type(source))}},
    "partition": PARTITIONS,
    "net": NETS,
    "train": {"": TrainOptions},
    "defence": {"": DefenceConfig},
    "run": {"": RunOptions},
}
"""The dataclasses behind each section of a config, by name where the section has a name."""

NAMED = ("method", "data", "partition", "net")
"""The sections that --method, --data, … choose a dataclass for."""

PLAIN_FLAG = ("run", "data", "partition", "train", "net", "method", "defence")
"""Of two sections with an option of one name, the earlier has the plain flag: --seed is run.seed, not partition.seed."""

GROUPS = {
    "method": "Method",
    "data": "Data",
    "partition": "Partition",
    "net": "Network",
    "train": "Training",
    "defence": "Defence",
    "run": "Run",
}


def keys_of(section: str) -> list[str]:
    """Return the options of all dataclasses of a section, each once."""
    return list(dict.fromkeys(key for record in RECORDS[section].values() for key in options_of(record)))


def flag_name(section: str, key: str) -> str:
    """Return the flag of an option, such as --batch-size; the later section in PLAIN_FLAG puts its name before it."""
    first = next(other for other in PLAIN_FLAG if key in keys_of(other))
    return "--" + (key if section == first else f"{section}_{key}").replace("_", "-")


class ConfigOption(click.Option):
    """The flag of one config option. Its help is that of the chosen method, dataset, partition or net."""

    def __init__(self, *names: Any, section: str, key: str, **settings: Any) -> None:
        self.section, self.key, self.group = section, key, GROUPS[section]
        self.records = [record for record in RECORDS[section].values() if key in options_of(record)]
        hints = [_hint(record, key) for record in self.records]
        settings |= {"type": bool, "is_flag": True} if bool in hints else {"multiple": any(map(_is_list, hints))}
        super().__init__(*names, default=None, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the flag and its help, or None if the chosen dataclass does not have the option."""
        chosen = Chosen.by(ctx)
        record = chosen.records[self.section]
        if record is None or self.key not in options_of(record):
            return None
        return help_record(self.section, self.key, record, chosen.default(self.section, self.key))


class NameOption(click.Option):
    """The flag that chooses the method, dataset, partition or net of a config."""

    def __init__(self, *names: Any, section: str, **settings: Any) -> None:
        self.section, self.group = section, GROUPS[section]
        super().__init__(*names, metavar="NAME", **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the flag and the known names."""
        names = (*DATASETS, "or a file or folder") if self.section == "data" else RECORDS[self.section]
        return f"{self.opts[0]} NAME", f"{', '.join(names)}  [default: {Chosen.by(ctx).names[self.section]}]"


@dataclass(frozen=True)
class Chosen:
    """What a command line chooses in the named sections, and the defaults of the dataset."""

    names: Mapping[str, str]
    records: Mapping[str, type | None]
    defaults: Mapping[str, Mapping[str, object]]

    @classmethod
    def by(cls, ctx: click.Context) -> Chosen:
        """Return what the command line of a context chooses."""
        values: Mapping[str, Any] = ctx.command.make_parser(ctx).parse_args(list(ctx.meta["gpfl.arguments"]))[0]
        data = values.get("data__name") or "digits"
        defaults = DATASETS[data].defaults if data in DATASETS else {}
        names = {"method": "gpfl", "data": data, "partition": "pathological", "net": "mlp"}
        for section in names:
            names[section] = values.get(f"{section}__name") or str(defaults.get(section, {}).get("name", names[section]))
        for section, name in names.items():
            if section != "data" and name not in RECORDS[section]:
                raise GpflError(f"unknown {section} '{name}'; {did_you_mean(name, RECORDS[section])}")
        records = {section: RECORDS[section].get(names.get(section, "")) for section in RECORDS}
        return cls(names, records if data in DATASETS else {**records, "data": FileDataset}, defaults)

    def default(self, section: str, key: str) -> object:
        """Return the default of an option."""
        record, net = self.records[section], self.records["net"]
        values = self.defaults.get(section, {})
        if key in values and values.get("name") == self.names.get(section):
            return values[key]
        default = next(field.default for field in dataclasses.fields(record) if field.name == key)  # type: ignore[arg-type]
        if default is not BY_NET:
            return default
        by_net = options_of(record)[key].by_net  # type: ignore[arg-type]
        if by_net:
            return by_net.get(self.names["net"], by_net["*"])
        return getattr(net, "lr", BY_NET) if key == "lr" else "the learning rate"


def help_record(section: str, key: str, record: type, default: object) -> tuple[str, str]:
    """Return the flag of an option with its placeholder, and its symbol, description, typical range and default."""
    option, hint = options_of(record)[key], _hint(record, key)
    flag = flag_name(section, key)
    flag = f"--[no-]{flag[2:]}" if hint is bool else f"{flag} {_metavar(option, hint)}"
    text = f"{option.symbol}: {option.help}" if option.symbol else _capitalize(option.help)
    typical = f"typical: {option.typical}; " if option.typical else ""
    return flag, f"{text}  [{typical}default: {value_text(default)}]"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:1].isascii() else text  # symbols such as μ stay


def value_text(value: object) -> str:
    """Return a value as the help shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _hint(record: type, key: str) -> object:
    return typing.get_type_hints(record)[key]


def _is_list(hint: object) -> bool:
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def _metavar(option: Option, hint: object) -> str:
    if option.choices:
        return ("," if _is_list(hint) else "|").join(option.choices)
    names = {bool: "", int: "N", str: "TEXT", tuple[str, ...]: "NAME,…", tuple[int, ...]: "N,…", tuple[int, int]: "N,N"}
    return names.get(hint, "X")  # type: ignore[call-overload,no-any-return]


# Decorators of commands.


def config_options(*sections: str, omit: Collection[str] = ()) -> Decorator:
    """Add a flag for every option of the config sections, and for their names; `omit` lists options such as run.seed."""
    decorators: list[Decorator] = []
    for section in sections:
        if section in NAMED:
            decorators.append(click.option(f"--{section}", f"{section}__name", cls=NameOption, section=section))
        if section == "partition":
            decorators.append(federation_option)
        decorators += [_flag(section, key) for key in keys_of(section) if f"{section}.{key}" not in omit]
    return compose(*decorators)


def config_option(section: str, *keys: str) -> Decorator:
    """Add the flags of some options of a config section."""
    return compose(*(_flag(section, key) for key in keys))


def _flag(section: str, key: str) -> Decorator:
    flag = flag_name(section, key)
    boolean = any(_hint(record, key) is bool for record in RECORDS[section].values() if key in options_of(record))
    names = f"{flag}/--no-{flag[2:]}" if boolean else flag
    return click.option(names, f"{section}__{key}", cls=ConfigOption, section=section, key=key)


def compose(*decorators: Decorator) -> Decorator:
    """Return a decorator that applies several, as if they were written in this order."""
    return lambda function: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


class GroupedOption(click.Option):
    """An option with the group it is listed in."""

    def __init__(self, *names: Any, group: str, **settings: Any) -> None:
        self.group = group
        super().__init__(*names, **settings)


def federation_option(function: Function) -> Function:
    """Add --federation."""
    return click.option(
        "--federation",
        metavar="FILE",
        cls=GroupedOption,
        group=GROUPS["partition"],
        help="Manifest of a saved federation, instead of a partition.",
    )(function)


def config_argument(function: Function) -> Function:
    """Add the optional argument for a config file."""
    return click.argument(
        "config", required=False, cls=Argument, metavar="[CONFIG.toml]", help="Config file. Flags override it."
    )(function)


option = functools.partial(click.option, show_default=True)
"""An option whose help shows its default."""


def set_option(description: str, metavar: str = "NAME.KEY=VALUE") -> Decorator:
    """Add --set."""
    return click.option("--set", "assignments", multiple=True, metavar=metavar, help=description)


def seeds_option(default: str | None, description: str) -> Decorator:
    """Add --seeds, whose value `parse_seeds` reads."""
    return click.option("--seeds", default=default, show_default=default is not None, metavar="N,…", help=description)


def out_option(description: str, default: str | None = None) -> Decorator:
    """Add --out."""
    return click.option("--out", default=default, show_default=default is not None, metavar="DIR", help=description)


def set_instead(error: click.NoSuchOption) -> str:
    """Return the message that names the --set for a flag which a command lacks; "" if there is none."""
    if error.ctx is None or all(param.name != "assignments" for param in error.ctx.command.params):
        return ""
    keys = {flag_name(section, key): f"{section}.{key}" for section in PLAIN_FLAG for key in keys_of(section)}
    option = keys.get(error.option_name, "").replace("method.", "NAME.")
    return f"No such option '{error.option_name}': use --set {option}=…" if option else ""


# Values of flags.


def parse_options(values: Mapping[str, object]) -> ConfigDict:
    """Return the config sections of the flags that were set."""
    config: ConfigDict = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        if value is not None and value != () and key:
            config.setdefault(section, {})[key] = parse_value(section, key, value)
    return config


def parse_value(section: str, key: str, value: object) -> object:
    """Return the value of a flag's text; a repeated flag, or commas where the option takes a list, give a list."""
    if isinstance(value, tuple):
        values = [parse_value(section, key, text) for text in value]
        return values[0] if len(values) == 1 else [e for each in values for e in (each if isinstance(each, list) else [each])]
    if not isinstance(value, str):
        return value
    hints = {_hint(record, key) for record in RECORDS[section].values() if key in options_of(record)}
    if hints <= {str}:
        return value
    if hints == {tuple[str, ...]}:
        return [text.strip() for line in csv.reader([_without_brackets(value)], skipinitialspace=True) for text in line]
    if "," in value and any("a list" in describe_type(hint) for hint in hints):
        return [_number(text.strip()) for text in _without_brackets(value).split(",")]
    return _number(value)


def _without_brackets(text: str) -> str:
    text = text.strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _number(text: str) -> object:
    value = toml.parse_value(text)
    with suppress(ValueError):  # TOML has no .5
        return float(value) if isinstance(value, str) else value
    return value


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list such as 0,1,2."""
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        raise GpflError(f"--seeds is '{text}'; it must be whole numbers separated by commas, such as 0,1,2") from None
    if len(set(seeds)) != len(seeds) or not 0 <= min(seeds) <= max(seeds) <= MAX_SEED:
        raise GpflError(f"--seeds is '{text}'; seeds must differ and be at least 0 and at most {MAX_SEED}")
    return seeds


def parse_list(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names of a comma-separated list, each once; raise for one that is not known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise GpflError(f"{flag} is '{text}'; {did_you_mean(name, known)}")
    return list(dict.fromkeys(names))


def parse_numbers(flag: str, text: str, least: int = 1) -> list[int]:
    """Return the whole numbers of a comma-separated list, each once; raise for one below `least`."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise GpflError(f"{flag} is '{text}'; it must be whole numbers separated by commas, such as 1,4") from None
    if min(numbers) < least:
        raise GpflError(f"{flag} is '{text}'; each number must be at least {least}")
    return list(dict.fromkeys(numbers))
