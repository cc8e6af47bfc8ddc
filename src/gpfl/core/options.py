"""Options: documented, validated fields of frozen dataclasses, such as methods, nets, partitions and config sections."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from gpfl.errors import GpflError, did_you_mean

Value = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
T = TypeVar("T")

BY_NET = math.nan
"""The default of an option whose value depends on the net; `Method.bind` puts the net's own value in its place."""


@dataclass(frozen=True)
class Span:
    """A range of numbers to search: by ratio, as suits weights and rates, or evenly."""

    low: float
    high: float
    log: bool = True

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', log' if self.log else ''}"

    def holds(self, value: float) -> bool:
        """Tells whether a value lies in the range."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Option:
    """What is known of a field besides its type: its words for `--help`, its limits, and what `gpfl tune` tries."""

    doc: str
    symbol: str = ""
    typical: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    search: Span | tuple[int, ...] | None = None  # a range, or the values to try; None: not searched
    later: bool = (
        False  # added after results were recorded: at its default it is not written, so that their configs stay the same
    )
    by_net: Mapping[str, float] | None = None  # the default for each net, "*" for all others; the field's default is BY_NET
    disabled_by: tuple[float, str] | None = None  # a value that disables the method, and what it then is

    def limits(self) -> str:
        """Gives the limits in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        parts = []
        if self.above is not None:
            parts.append(f"above {number_text(self.above)}")
        if self.least is not None:
            parts.append(f"at least {number_text(self.least)}")
        if self.most is not None:
            parts.append(f"at most {number_text(self.most)}")
        return " and ".join(parts)

    def admits(self, value: Value) -> bool:
        """Tells whether the value, or every entry of a tuple, is within the limits."""
        if isinstance(value, tuple):
            return all(self.admits(entry) for entry in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
        )


def option(
    default: T,
    doc: str,
    *,
    symbol: str = "",
    typical: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    search: Span | tuple[int, ...] | None = None,
    later: bool = False,
    by_net: Mapping[str, float] | None = None,
    disabled_by: tuple[float, str] | None = None,
) -> T:
    """Declares a dataclass field that users may set."""
    described = Option(doc, symbol, typical, least, above, most, choices, search, later, by_net, disabled_by)
    return dataclasses.field(default=default, metadata={"option": described})


def options_of(record: type) -> dict[str, Option]:
    """Gives the options of a dataclass by name, in the order of their declaration."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(record) if "option" in f.metadata}


def values_of(record: object) -> dict[str, Value]:
    """Gives the values of an instance's options by name."""
    return {name: getattr(record, name) for name in options_of(type(record))}


def written_of(record: object) -> dict[str, Value]:
    """Gives the values that a config holds: all but those of options that were added later and are at their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    known = options_of(type(record))
    return {name: value for name, value in values_of(record).items() if not known[name].later or value != defaults[name]}


def build(record: type[T], given: Mapping[str, object], where: str) -> T:
    """Gives the dataclass made of `given`, or says which key or value of section `where` is wrong."""
    return record(**checked_values(record, given, where))


def changed(instance: T, given: Mapping[str, object], where: str) -> T:
    """Gives an instance with the options of `given` in place of its own, checked as those of a new one are."""
    values = checked_values(type(instance), given, where)
    return dataclasses.replace(instance, **values) if values else instance  # type: ignore[type-var]


def checked_values(record: type, given: Mapping[str, object], where: str) -> dict[str, Value]:
    """Gives the values of `given` in the types of the record's options, all known and within their limits."""
    known = options_of(record)
    hints = typing.get_type_hints(record)
    values = {}
    for key, raw in given.items():
        if key not in known:
            raise GpflError(f"unknown key '{where}.{key}'; {unknown_key_hint(key, known, where)}")
        values[key] = checked(raw, hints[key], known[key], f"{where}.{key}")
    return values


def check_not_disabled(record: object, section: str) -> None:
    """Raise if an option has the value that disables the method."""
    for name, described in options_of(type(record)).items():
        if described.disabled_by and getattr(record, name) == described.disabled_by[0]:
            value, reason = described.disabled_by
            raise GpflError(
                f"{section}.{name} is {value:g}: {reason}; choose another value, or pass --allow-noop (allow_noop=True)"
            )


def unknown_key_hint(key: str, known: Iterable[str], where: str) -> str:
    """Gives the tail of the message about an unknown key."""
    names = list(known)
    return did_you_mean(key, names) if names else f"'{where}' has no options"


def checked(raw: object, hint: object, described: Option, label: str) -> Value:
    """Gives `raw` as a value of the field's type and within its limits, or says what is wrong with it."""
    value = convert(raw, hint)
    if value is None:
        raise GpflError(f"{label} is {plain(raw)!r}; it must be {describe_type(hint)}")
    if not described.admits(value):
        limits = described.limits() or "a finite number"
        tail = ""
        if described.choices and isinstance(value, str):
            suggestion = did_you_mean(value, described.choices)
            tail = "" if suggestion.startswith("known:") else f"; {suggestion}"  # the limits name them all
        raise GpflError(f"{label} is {plain(raw)!r}; it must be {limits}{tail}")
    return value


def plain(raw: object) -> object:
    """Gives a number of any kind, such as numpy's, as Python's own; all else as it is."""
    if isinstance(raw, bool) or not isinstance(raw, numbers.Real):
        return raw
    return int(raw) if isinstance(raw, numbers.Integral) else float(raw)


def number_text(number: float) -> str:
    """Gives a number in words, a whole one with all its digits."""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def convert(raw: object, hint: object) -> Value | None:
    """Gives `raw` as the type `hint` stands for, or None where it is not of that type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            value = convert(raw, choice)
            if value is not None:
                return value
        return None
    if origin is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(raw, (list, tuple)):
            if kinds[-1] is not Ellipsis:
                return None
            raw = (raw,)
        if kinds[-1] is not Ellipsis and len(raw) != len(kinds):
            return None
        entries = [convert(entry, kinds[0]) for entry in raw]
        return None if any(entry is None for entry in entries) else cast(Value, tuple(entries))
    if hint is bool:
        return raw if isinstance(raw, bool) else None
    if hint is int:
        return int(raw) if isinstance(raw, numbers.Integral) and not isinstance(raw, bool) else None
    if hint is float:
        return float(raw) if isinstance(raw, numbers.Real) and not isinstance(raw, bool) else None
    return raw if isinstance(raw, str) else None


def describe_type(hint: object) -> str:
    """Gives the type in a user's words."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(choice) for choice in typing.get_args(hint))
    if origin is tuple:
        kinds = typing.get_args(hint)
        count = "" if kinds[-1] is Ellipsis else f" of {len(kinds)}"
        return f"a list{count}, each entry {describe_type(kinds[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names[cast(type, hint)]
