"""Options: documented and validated fields of frozen dataclasses, of which methods, nets and config sections are made."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from gpfl.errors import GpflError, did_you_mean

Value = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
T = TypeVar("T")

BY_NET = math.nan
"""The default of an option whose value depends on the net or is the learning rate; `Method.bind` replaces it."""


@dataclass(frozen=True)
class SearchRange:
    """A range of numbers to search, on a logarithmic or a linear scale."""

    low: float
    high: float
    log: bool = True

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', log' if self.log else ''}"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Option:
    """The metadata of a field: help text, limits, and the range that `gpfl tune` searches."""

    help: str
    symbol: str = ""
    typical: str = ""
    min: float | None = None
    above: float | None = None  # an exclusive minimum
    max: float | None = None
    choices: tuple[str, ...] = ()
    search: SearchRange | tuple[int, ...] | None = None  # a range, or the values to try; None: not searched
    by_net: Mapping[str, float] | None = None  # defaults by net, "*" for all others; the field's default is BY_NET
    disabled_by: tuple[float, str] | None = None  # a value that disables the method, and the consequence
    omit_default: bool = False  # configs leave it out at its default, so that configs older than the option stay the same

    @property
    def limits(self) -> str:
        """A description of the allowed values."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        limits = (("above", self.above), ("at least", self.min), ("at most", self.max))
        return " and ".join(f"{name} {_format_number(limit)}" for name, limit in limits if limit is not None)

    def allows(self, value: Value) -> bool:
        """Return whether the value, or every entry of a tuple, is within the limits."""
        if isinstance(value, tuple):
            return all(self.allows(entry) for entry in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
        )


def option(
    default: T,
    help: str,
    *,
    symbol: str = "",
    typical: str = "",
    min: float | None = None,
    above: float | None = None,
    max: float | None = None,
    choices: tuple[str, ...] = (),
    search: SearchRange | tuple[int, ...] | None = None,
    by_net: Mapping[str, float] | None = None,
    disabled_by: tuple[float, str] | None = None,
    omit_default: bool = False,
) -> T:
    """Declare a dataclass field that users can set, see `Option`. `typical` defaults to the search range."""
    if search and not typical:
        low, high = (search.low, search.high) if isinstance(search, SearchRange) else (search[0], search[-1])
        typical = f"{low:g} to {high:g}"
    spec = Option(help, symbol, typical, min, above, max, choices, search, by_net, disabled_by, omit_default)
    return dataclasses.field(default=default, metadata={"option": spec})


def is_unset(value: object) -> bool:
    """Return whether the value of an option is `BY_NET`."""
    return isinstance(value, float) and math.isnan(value)


def options_of(record: type) -> dict[str, Option]:
    """Return the options of a dataclass by name, in the order of their declaration."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(record) if "option" in f.metadata}


def option_values(record: object) -> dict[str, Value]:
    """Return the values of an instance's options by name."""
    return {name: getattr(record, name) for name in options_of(type(record))}


def config_values(record: object) -> dict[str, Value]:
    """Return the option values that a config file holds."""
    defaults = {field.name: field.default for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    omit = {name for name, spec in options_of(type(record)).items() if spec.omit_default}
    return {name: value for name, value in option_values(record).items() if name not in omit or value != defaults[name]}


def build(record: type[T], values: Mapping[str, object], section: str) -> T:
    """Return an instance with these option values; raise on unknown keys, wrong types and values outside the limits."""
    return record(**_validate(record, values, section))


def replace(instance: T, values: Mapping[str, object], section: str) -> T:
    """Return the instance with other option values, which are validated like those of a new one."""
    validated = _validate(type(instance), values, section)
    return dataclasses.replace(instance, **validated) if validated else instance  # type: ignore[type-var]


def check_not_disabled(record: object, section: str) -> None:
    """Raise if an option has the value that disables the method."""
    for name, spec in options_of(type(record)).items():
        if spec.disabled_by and getattr(record, name) == spec.disabled_by[0]:
            value, reason = spec.disabled_by
            raise GpflError(
                f"{section}.{name} is {value:g}: {reason}; choose another value, or pass --allow-noop (allow_noop=True)"
            )


def describe_type(hint: object) -> str:
    """Return the description of a field's type in error messages."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(choice) for choice in typing.get_args(hint))
    if origin is tuple:
        entries = typing.get_args(hint)
        count = "" if entries[-1] is Ellipsis else f" of {len(entries)}"
        return f"a list{count}, each entry {describe_type(entries[0])}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    return names[cast(type, hint)]


def _validate(record: type, values: Mapping[str, object], section: str) -> dict[str, Value]:
    known, hints = options_of(record), typing.get_type_hints(record)
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known) if known else f"'{section}' has no options"
            raise GpflError(f"unknown key '{section}.{key}'; {hint}")
    return {key: _validate_value(raw, hints[key], known[key], f"{section}.{key}") for key, raw in values.items()}


def _validate_value(raw: object, hint: object, spec: Option, key: str) -> Value:
    value = _convert(raw, hint)
    if value is None:
        raise GpflError(f"{key} is {_to_python(raw)!r}; it must be {describe_type(hint)}")
    if not spec.allows(value):
        wrong = next(entry for entry in (value if isinstance(value, tuple) else (value,)) if not spec.allows(entry))
        suggestion = did_you_mean(wrong, spec.choices) if spec.choices and isinstance(wrong, str) else ""
        tail = f"; {suggestion}" if suggestion and not suggestion.startswith("known:") else ""  # the limits list all choices
        raise GpflError(f"{key} is {_to_python(raw)!r}; it must be {spec.limits or 'a finite number'}{tail}")
    return value


def _convert(raw: object, hint: object) -> Value | None:
    """Return `raw` converted to the type, or None if it has another type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return next((value for choice in typing.get_args(hint) if (value := _convert(raw, choice)) is not None), None)
    if origin is tuple:
        types_ = typing.get_args(hint)
        any_length = types_[-1] is Ellipsis
        if not isinstance(raw, (list, tuple)):
            if not any_length:
                return None
            raw = (raw,)
        if not any_length and len(raw) != len(types_):
            return None
        entries = [_convert(entry, types_[0]) for entry in raw]
        return None if any(entry is None for entry in entries) else cast(Value, tuple(entries))
    if hint is bool:
        return raw if isinstance(raw, bool) else None
    if hint is int:
        return int(raw) if isinstance(raw, numbers.Integral) and not isinstance(raw, bool) else None
    if hint is float:
        return float(raw) if isinstance(raw, numbers.Real) and not isinstance(raw, bool) else None
    return raw if isinstance(raw, str) else None


def _to_python(raw: object) -> object:
    """Return numbers of other types, such as numpy's, as Python numbers; anything else unchanged."""
    if isinstance(raw, bool) or not isinstance(raw, numbers.Real):
        return raw
    return int(raw) if isinstance(raw, numbers.Integral) else float(raw)


def _format_number(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"
