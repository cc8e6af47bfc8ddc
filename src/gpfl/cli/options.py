"""Options that commands share: a flag for every option of a config, and --set, --seeds, --out and --federation."""

import csv
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from gpfl.cli.command import Argument
from gpfl.core.options import BY_NET, describe_type, options_of
from gpfl.core.randomness import MAX_SEED
from gpfl.data import DATASETS, FILES, FileDataset
from gpfl.defences.config import DefenceConfig
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import PARTITIONS
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import ConfigDict, RunOptions, TrainOptions, known_defaults

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

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
"""Options whose flag starts with the section although no other section has an option of that name."""

HEADINGS = {section: section.capitalize() for section in (*RECORDS, "attack")} | {"train": "Training", "net": "Network"}
"""The heading of each section in the help."""

DEFAULT_NAMES = {"method": "gpfl", "data": "digits", "partition": "pathological", "net": "mlp"}
"""Defaults of --method, --data, --partition and --net, by section."""


def keys_of(section: str) -> list[str]:
    """Return the options of all dataclasses of a section, each once."""
    return list(dict.fromkeys(key for record in RECORDS[section].values() for key in options_of(record)))


def flag_name(section: str, key: str) -> str:
    """Return the flag of an option, such as --batch-size or --partition-seed."""
    first = next(other for other in RECORDS if key in keys_of(other))
    plain = section == first and (section, key) not in PREFIXED
    return "--" + (key if plain else f"{section}_{key}").replace("_", "-")


def help_record(flag: str, record: type, key: str, default: object) -> tuple[str, str]:
    """Return the flag of an option with its placeholder, and its symbol, description, typical range and default."""
    option, hint = options_of(record)[key], typing.get_type_hints(record)[key]
    placeholders = {int: "N", str: "TEXT", tuple[str, ...]: "NAME,…", tuple[int, ...]: "N,…", tuple[int, int]: "N,N"}
    placeholder = ("," if _is_list(hint) else "|").join(option.choices) or placeholders.get(hint, "X")
    text = option.help[:1].upper() + option.help[1:] if option.help[:1].isascii() and not option.symbol else option.help
    if len(placeholder) > 60:  # too long for the first column
        text, placeholder = f"{text}: {', '.join(option.choices)}", "NAME"
    symbol = f"{option.symbol}: " if option.symbol else ""
    typical = f"typical: {option.typical}; " if option.typical else ""
    flag = f"--[no-]{flag[2:]}" if hint is bool else f"{flag} {placeholder}"
    return flag, f"{symbol}{text}  [{typical}default: {_value_text(default)}]"


def default_of(record: type, key: str, net: str = "") -> object:
    """Return the default of an option for a net, or a description of it for all nets."""
    default = next(field.default for field in dataclasses.fields(record) if field.name == key)
    by_net = options_of(record)[key].by_net
    if default is not BY_NET:
        return default
    if by_net is None:
        return getattr(NETS[net], "lr", default) if record is TrainOptions else "the learning rate"
    if net:
        return by_net.get(net, by_net["*"])
    return f"{by_net['*']:g}, but {', '.join(f'{name} {value:g}' for name, value in by_net.items() if name != '*')}"


def _is_list(hint: object) -> bool:
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


class SectionChoice(NamedTuple):
    """The dataclass that a command line selects for a section of a config, and the dataset's defaults for it."""

    name: str
    record: type
    values: Mapping[str, object]


def chosen_records(ctx: click.Context) -> dict[str, SectionChoice]:
    """Return what the command line of a context chooses for each section; a dataset without options has none."""
    flags: Mapping[str, Any] = ctx.command.make_parser(ctx).parse_args(list(ctx.meta["gpfl.arguments"]))[0]
    data = flags.get("data__name") or DEFAULT_NAMES["data"]
    defaults = DATASETS[data].defaults if data in DATASETS else {}
    chosen = {}
    for section, records in RECORDS.items():
        values = defaults.get(section, {})
        name = flags.get(f"{section}__name") or str(values.get("name", DEFAULT_NAMES.get(section, "")))
        if section == "data" and name not in DATASETS:
            chosen[section] = SectionChoice(name, FileDataset, {})
        elif name in records:
            named = section in DEFAULT_NAMES
            values = known_defaults(defaults, section, name, records[name]) if named else values
            chosen[section] = SectionChoice(name, records[name], values)
        elif section != "data":
            raise GpflError(f"unknown {section} '{name}'; {did_you_mean(name, records)}")
    return chosen


class ConfigOption(click.Option):
    """The flag of an option of a config or an attack. It takes any text, which is checked once the whole config is known.

    The help of a config's option depends on the chosen method, dataset, partition and net, for which the key is "name"; attacks
    pass their `defaults`.
    """

    def __init__(self, *names: Any, section: str, key: str, defaults: object = None) -> None:
        self.section, self.key, self.defaults, self.group = section, key, defaults, HEADINGS[section]
        hints = _hints(section, key)
        kind: dict[str, Any] = {"type": bool, "is_flag": True} if bool in hints else {"multiple": any(map(_is_list, hints))}
        super().__init__(*names, default=None, **kind)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the flag and its help, or None if the chosen dataclass does not have the option."""
        if self.defaults is not None:
            return help_record(self.opts[0], type(self.defaults), self.key, getattr(self.defaults, self.key))
        chosen = chosen_records(ctx)
        if self.key == "name":
            names = (*DATASETS, "or a file or folder") if self.section == "data" else RECORDS[self.section]
            default = chosen[self.section].name if self.section in chosen else DEFAULT_NAMES["data"]
            return f"{self.opts[0]} NAME", f"{', '.join(names)}  [default: {default}]"
        if self.section not in chosen or self.key not in options_of(chosen[self.section].record):
            return None
        _, record, values = chosen[self.section]
        value = values.get(self.key, default_of(record, self.key, chosen["net"].name))
        return help_record(self.opts[0], record, self.key, value)


def compose(*decorators: Decorator) -> Decorator:
    """Return a decorator that applies several, as if they were written in this order."""
    return lambda function: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


def config_options(*sections: str, omit: Collection[str] = ()) -> Decorator:
    """Add a flag for every option of the config sections, and for their names; `omit` lists options such as run.seed."""
    decorators: list[Decorator] = [federation_option] if "partition" in sections else []
    for section in sections:
        if section in DEFAULT_NAMES:
            decorators.append(_add_flag(f"--{section}", section, "name"))
        decorators.append(config_option(section, *(key for key in keys_of(section) if f"{section}.{key}" not in omit)))
    return compose(*decorators)


def config_option(section: str, *keys: str) -> Decorator:
    """Add the flags of some options of a config section."""
    return compose(*(_add_flag(flag_name(section, key), section, key) for key in keys))


def attack_options(defaults: object, *, omit: Collection[str] = (), seed_flag: str = "--attack-seed") -> Decorator:
    """Add a flag for each option of an `AttackPlan`; `parse_options` returns their values as the section "attack"."""
    flags = {key: seed_flag if key == "seed" else f"--{key}" for key in options_of(type(defaults)) if key not in omit}
    return compose(*(_add_flag(flag, "attack", key, defaults) for key, flag in flags.items()))


def _add_flag(flag: str, section: str, key: str, defaults: object = None) -> Decorator:
    names = f"{flag}/--no-{flag[2:]}" if bool in _hints(section, key) else flag
    return click.option(names, f"{section}__{key}", cls=ConfigOption, section=section, key=key, defaults=defaults)


def _hints(section: str, key: str) -> list[object]:
    if section == "attack":  # not part of a config; other commands need not wait for the import
        from gpfl.privacy.attack_runner import AttackPlan

        return [typing.get_type_hints(AttackPlan)[key]]
    return [typing.get_type_hints(record)[key] for record in RECORDS[section].values() if key in options_of(record)]


class CommaList(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """A comma-separated list of names or numbers."""

    def __init__(
        self, kind: type, choices: Iterable[str] = (), *, max: float = math.inf, unique: bool = False, none: bool = False
    ) -> None:
        self.kind, self.choices, self.max, self.unique, self.none = kind, list(choices), max, unique, none
        self.name = {str: "NAME,…", int: "N,…"}.get(kind, "X,…")

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder of the value."""
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the entries, each once; raise for one of another type, unknown, or outside the limits."""
        if not isinstance(value, str):
            return value
        if self.none and value.strip() == "none":
            return ()
        text = f"{param.opts[0] if param else 'the list'} is '{value}'"
        try:
            entries = [self.kind(entry.strip()) for entry in value.split(",")]
        except ValueError:
            kind = "integers" if self.kind is int else "numbers"
            raise GpflError(f"{text}; it must be {kind} separated by commas, such as 1,4") from None
        for entry in entries:
            if self.choices and entry not in self.choices:
                raise GpflError(f"{text}; {did_you_mean(entry, self.choices)}")
            if self.kind is not str and not (math.isfinite(entry) and 0 <= entry <= self.max):
                limit = f" and at most {self.max}" if math.isfinite(self.max) else ""
                raise GpflError(f"{text}; each number must be at least 0{limit}")
        if self.unique and len(set(entries)) < len(entries):
            raise GpflError(f"{text}; give each only once")
        return tuple(dict.fromkeys(entries))


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


option = functools.partial(click.option, show_default=True)  # an option whose help shows its default
PATH = click.Path(path_type=Path)

config_argument = click.argument(
    "config", required=False, cls=Argument, metavar="[CONFIG.toml]", help="Config file. Flags override it."
)
run_argument = click.argument("run", cls=Argument, metavar="RUN", type=PATH, help="Folder of a finished run.")
federation_option = click.option(
    "--federation", metavar="FILE", help="Use the partition in a manifest, such as federation.toml of a run."
)


def set_option(description: str, metavar: str = "NAME.KEY=VALUE") -> Decorator:
    """Add --set."""
    return click.option("--set", "assignments", multiple=True, metavar=metavar, help=description)


def methods_option(description: str, default: str = "all") -> Decorator:
    """Add --methods, a list of methods as a text."""
    return option("--methods", default=default, metavar="NAME,…", help=description)


def patience_option(default: int) -> Decorator:
    """Add --patience."""
    return option(
        "--patience", default=default, metavar="N", help="End a run after this many rounds without a better accuracy; 0: never."
    )


def seeds_option(default: str | None, description: str) -> Decorator:
    """Add --seeds, a list of seeds."""
    return option("--seeds", default=default, type=CommaList(int, max=MAX_SEED, unique=True), help=description)


def out_option(description: str, default: str | None = None) -> Decorator:
    """Add --out."""
    return option("--out", default=default, type=Folder(), metavar="DIR", help=description)


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
