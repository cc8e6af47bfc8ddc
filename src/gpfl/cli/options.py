"""Options that commands share: a flag for every option of a config, and --set, --seeds, --out and --federation."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gpfl.cli.command import Argument
from gpfl.core.options import BY_NET, Option, describe_type, options_of
from gpfl.core.randomness import MAX_SEED
from gpfl.data import DATASETS, FILES, FileDataset
from gpfl.defences.config import DefenceConfig
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import PARTITIONS
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import ConfigDict, RunOptions, TrainOptions

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

RECORDS: Mapping[str, Mapping[str, type]] = {
    "run": {"": RunOptions},
    "data": {FILES: FileDataset, **{name: type(source) for name, source in DATASETS.items() if options_of(type(source))}},
    "partition": PARTITIONS,
    "train": {"": TrainOptions},
    "net": NETS,
    "method": METHODS,
    "defence": {"": DefenceConfig},
}
"""The dataclasses behind each section of a config. Of two options with one name, the earlier section has the plain flag."""

PREFIXED = {("partition", "rng")}
"""Options whose flag has its section before it although no other section has the name."""

HEADINGS = {section: section.capitalize() for section in RECORDS} | {"train": "Training", "net": "Network"}
"""The heading of each section in the help."""

DEFAULT_NAMES = {"method": "gpfl", "data": "digits", "partition": "pathological", "net": "mlp"}
"""The sections that --method, --data, … choose a dataclass for, with the defaults."""


def keys_of(section: str) -> list[str]:
    """Return the options of all dataclasses of a section, each once."""
    return list(dict.fromkeys(key for record in RECORDS[section].values() for key in options_of(record)))


def flag_name(section: str, key: str) -> str:
    """Return the flag of an option, such as --batch-size or --partition-seed."""
    first = next(other for other in RECORDS if key in keys_of(other))
    plain = section == first and (section, key) not in PREFIXED
    return "--" + (key if plain else f"{section}_{key}").replace("_", "-")


def help_record(section: str, key: str, record: type, default: object) -> tuple[str, str]:
    """Return the flag of an option with its placeholder, and its symbol, description, typical range and default."""
    option, hint, flag = options_of(record)[key], _hint(record, key), flag_name(section, key)
    flag = f"--[no-]{flag[2:]}" if hint is bool else f"{flag} {_placeholder(option, hint)}"
    capital = option.help[:1].isascii() and not option.symbol  # not μ
    text = option.help[:1].upper() + option.help[1:] if capital else option.help
    if _has_many_choices(option):
        text += f": {', '.join(option.choices)}"
    symbol = f"{option.symbol}: " if option.symbol else ""
    typical = f"typical: {option.typical}; " if option.typical else ""
    return flag, f"{symbol}{text}  [{typical}default: {_value_text(default)}]"


def _hint(record: type, key: str) -> object:
    return typing.get_type_hints(record)[key]


def _hints(section: str, key: str) -> list[object]:
    return [_hint(record, key) for record in RECORDS[section].values() if key in options_of(record)]


def _is_list(hint: object) -> bool:
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def _has_many_choices(option: Option) -> bool:
    """Return whether the choices are too long for a placeholder in the first column of the help."""
    return len("|".join(option.choices)) > 60


def _placeholder(option: Option, hint: object) -> str:
    if _has_many_choices(option):
        return "NAME"
    if option.choices:
        return ("," if _is_list(hint) else "|").join(option.choices)
    names = {int: "N", str: "TEXT", tuple[str, ...]: "NAME,…", tuple[int, ...]: "N,…", tuple[int, int]: "N,N"}
    return names.get(hint, "X")  # type: ignore[call-overload,no-any-return]


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


# What the help of a command depends on.


@dataclass(frozen=True)
class Choices:
    """The names that a command line chooses in the sections of DEFAULT_NAMES, and the defaults of its dataset."""

    names: Mapping[str, str]
    records: Mapping[str, type | None]
    defaults: Mapping[str, Mapping[str, object]]

    @classmethod
    def from_context(cls, ctx: click.Context) -> Choices:
        """Return the choices of the command line that a context was made for."""
        values: Mapping[str, Any] = ctx.command.make_parser(ctx).parse_args(list(ctx.meta["gpfl.arguments"]))[0]
        data = values.get("data__name") or DEFAULT_NAMES["data"]
        defaults = DATASETS[data].defaults if data in DATASETS else {}
        names = {
            section: values.get(f"{section}__name") or str(defaults.get(section, {}).get("name", default))
            for section, default in DEFAULT_NAMES.items()
        }
        for section in names.keys() - {"data"}:
            if names[section] not in RECORDS[section]:
                raise GpflError(f"unknown {section} '{names[section]}'; {did_you_mean(names[section], RECORDS[section])}")
        records = {section: RECORDS[section].get(names.get(section, "")) for section in RECORDS}
        return cls(names, records if data in DATASETS else {**records, "data": FileDataset}, defaults)

    def default(self, section: str, key: str) -> object:
        """Return the default of an option."""
        record, values = self.records[section], self.defaults.get(section, {})
        if key in values and values.get("name") == self.names.get(section):
            return values[key]
        default = next(field.default for field in dataclasses.fields(record) if field.name == key)  # type: ignore[arg-type]
        if default is not BY_NET:
            return default
        if by_net := options_of(record)[key].by_net:  # type: ignore[arg-type]
            return by_net.get(self.names["net"], by_net["*"])
        return getattr(self.records["net"], "lr", BY_NET) if key == "lr" else "the learning rate"


class ConfigOption(click.Option):
    """The flag of one config option; the help depends on the chosen method, dataset, partition or net."""

    def __init__(self, *names: Any, section: str, key: str, **settings: Any) -> None:
        self.section, self.key, self.group = section, key, HEADINGS[section]
        hints = _hints(section, key)
        settings |= {"type": bool, "is_flag": True} if bool in hints else {"multiple": any(map(_is_list, hints))}
        super().__init__(*names, default=None, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the flag and its help, or None if the chosen dataclass does not have the option."""
        choices = Choices.from_context(ctx)
        record = choices.records[self.section]
        if record is None or self.key not in options_of(record):
            return None
        return help_record(self.section, self.key, record, choices.default(self.section, self.key))


class NameOption(click.Option):
    """The flag that chooses the method, dataset, partition or net of a config."""

    def __init__(self, *names: Any, section: str, **settings: Any) -> None:
        self.section, self.group = section, HEADINGS[section]
        super().__init__(*names, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the flag and the known names."""
        names = (*DATASETS, "or a file or folder") if self.section == "data" else RECORDS[self.section]
        return f"{self.opts[0]} NAME", f"{', '.join(names)}  [default: {Choices.from_context(ctx).names[self.section]}]"


# Decorators of commands.


def compose(*decorators: Decorator) -> Decorator:
    """Return a decorator that applies several, as if they were written in this order."""
    return lambda function: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


def config_options(*sections: str, omit: Collection[str] = ()) -> Decorator:
    """Add a flag for every option of the config sections, and for their names; `omit` lists options such as run.seed."""
    decorators: list[Decorator] = []
    for section in sections:
        if section in DEFAULT_NAMES:
            decorators.append(click.option(f"--{section}", f"{section}__name", cls=NameOption, section=section))
        decorators.append(config_option(section, *(key for key in keys_of(section) if f"{section}.{key}" not in omit)))
    return compose(*([federation_option] if "partition" in sections else []), *decorators)


def config_option(section: str, *keys: str) -> Decorator:
    """Add the flags of some options of a config section."""
    decorators = []
    for key in keys:
        flag = flag_name(section, key)
        names = f"{flag}/--no-{flag[2:]}" if bool in _hints(section, key) else flag
        decorators.append(click.option(names, f"{section}__{key}", cls=ConfigOption, section=section, key=key))
    return compose(*decorators)


class CommaList(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A comma-separated list of names or numbers."""

    def __init__(
        self, kind: type, choices: Iterable[str] = (), *, min: float = 0, max: float = math.inf, unique: bool = False
    ) -> None:
        self.kind, self.choices, self.min, self.max, self.unique = kind, list(choices), min, max, unique
        self.name = {str: "NAME,…", int: "N,…"}.get(kind, "X,…")

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder of the value."""
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the entries, each once; raise for one of another type, unknown, or outside the limits."""
        if not isinstance(value, str):
            return value
        text = f"{param.opts[0] if param else 'the list'} is '{value}'"
        try:
            entries = [self.kind(entry.strip()) for entry in value.split(",")]
        except ValueError:
            kind = "integers" if self.kind is int else "numbers"
            raise GpflError(f"{text}; it must be {kind} separated by commas, such as 1,4") from None
        for entry in entries:
            if self.choices and entry not in self.choices:
                raise GpflError(f"{text}; {did_you_mean(entry, self.choices)}")
            if self.kind is not str and not (math.isfinite(entry) and self.min <= entry <= self.max):
                limit = f" and at most {self.max}" if math.isfinite(self.max) else ""
                raise GpflError(f"{text}; each number must be at least {self.min:g}{limit}")
        if self.unique and len(set(entries)) < len(entries):
            raise GpflError(f"{text}; give each only once")
        return list(dict.fromkeys(entries))


class Folder(click.ParamType):  # type: ignore[type-arg]
    """A folder, which need not exist."""

    name = "DIR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raise if it is empty or a file."""
        flag, folder = param.opts[0] if param else "the folder", Path(value)
        if not str(value).strip():
            raise GpflError(f"{flag} is empty; name a folder")
        if folder.exists() and not folder.is_dir():
            raise GpflError(f"{flag} {folder} is a file; choose a folder")
        return folder


option = functools.partial(click.option, show_default=True)
"""An option whose help shows its default."""

config_argument = click.argument(
    "config", required=False, cls=Argument, metavar="[CONFIG.toml]", help="Config file. Flags override it."
)
federation_option = click.option(
    "--federation", metavar="FILE", help="Use the partition in a manifest, such as federation.toml of a run."
)


def set_option(description: str, metavar: str = "NAME.KEY=VALUE") -> Decorator:
    """Add --set."""
    return click.option("--set", "assignments", multiple=True, metavar=metavar, help=description)


def seeds_option(default: str | None, description: str) -> Decorator:
    """Add --seeds, a list of seeds."""
    return option("--seeds", default=default, type=CommaList(int, max=MAX_SEED, unique=True), help=description)


def out_option(description: str, default: str | None = None) -> Decorator:
    """Add --out."""
    return option("--out", default=default, type=Folder(), metavar="DIR", help=description)


# Values of config flags.


def parse_options(values: Mapping[str, object]) -> ConfigDict:
    """Return the config sections of the flags that were set."""
    config: ConfigDict = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        if value is not None and value != () and key:
            config.setdefault(section, {})[key] = _parse_value(section, key, value)
    return config


def _parse_value(section: str, key: str, value: object) -> object:
    """Return the value of a flag's text; a repeated flag, or commas where the option takes a list, give a list."""
    if isinstance(value, tuple):
        values = [_parse_value(section, key, text) for text in value]
        return values[0] if len(values) == 1 else [e for each in values for e in (each if isinstance(each, list) else [each])]
    if not isinstance(value, str):
        return value
    hints = set(_hints(section, key))
    if hints <= {str}:
        return value
    text = value.strip()
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if hints == {tuple[str, ...]}:
        return [entry.strip() for line in csv.reader([inner], skipinitialspace=True) for entry in line]
    if "," in inner and any("a list" in describe_type(hint) for hint in hints):
        return [_number(entry.strip()) for entry in inner.split(",")]
    return _number(value)


def _number(text: str) -> object:
    value = toml.parse_value(text)
    with suppress(ValueError):  # TOML has no .5
        return float(value) if isinstance(value, str) else value
    return value


def suggest_set(error: click.NoSuchOption) -> str:
    """Return the message that names the --set for a flag which a command lacks; "" if there is none."""
    if error.ctx is None or all(param.name != "assignments" for param in error.ctx.command.params):
        return ""
    keys = {flag_name(section, key): f"{section}.{key}" for section in RECORDS for key in keys_of(section)}
    option = keys.get(error.option_name, "").replace("method.", "NAME.")
    return f"No such option '{error.option_name}': use --set {option}=…" if option else ""
