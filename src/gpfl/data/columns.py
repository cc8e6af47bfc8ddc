"""Columns of mixed types before they are encoded: their schema, and their values as numbers."""

import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError, did_you_mean
from gpfl.io import files, toml

Floats = npt.NDArray[np.float64]

KINDS = ("numeric", "categorical", "date")  # kinds of column. A date is the number of days since 1970-01-01

EPOCH = datetime.date(1970, 1, 1).toordinal()
UNKNOWN = -1.0  # code of a category that is not in a list of categories


@dataclass(frozen=True)
class ColumnSchema:
    """What a column holds."""

    name: str
    kind: str = "numeric"  # one of `KINDS`
    categories: tuple[str, ...] = ()  # categories of a categorical column
    low: float | None = None  # smallest plausible value of a numeric or date column, if declared
    high: float | None = None  # largest plausible value, if declared

    def __post_init__(self) -> None:
        column = f"column '{self.name}'"
        if self.kind not in KINDS:
            raise GpflError(f"{column} has kind '{self.kind}'; {did_you_mean(self.kind, KINDS)}")
        if len(set(self.categories)) < len(self.categories):
            raise GpflError(f"{column} lists a category twice: {', '.join(self.categories)}")
        if self.categories and self.kind != "categorical":
            raise GpflError(f"{column} is {self.kind} and lists categories: remove them, or set its kind to categorical")
        if self.kind == "categorical" and (self.low is not None or self.high is not None):
            raise GpflError(f"{column} is categorical and has a range: remove low and high, or set its kind to numeric")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise GpflError(f"{column} has the range {self.low:g} to {self.high:g}; low must be below high")

    @property
    def is_categorical(self) -> bool:
        """Whether the values are indices of categories."""
        return self.kind == "categorical"

    @property
    def limits(self) -> str:
        """Description of the declared values, such as "0 to 120" or "f, m"."""
        if self.is_categorical:
            return ", ".join(self.categories[:5]) + (", …" if len(self.categories) > 5 else "")
        low, high = (
            "" if value is None else _format_date(value) if self.kind == "date" else f"{value:g}"
            for value in (self.low, self.high)
        )
        return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"

    @property
    def range(self) -> tuple[float, float] | None:
        """The declared range, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON and TOML hold it: dates of a range as text, no entry for what is not declared."""
        content: dict[str, object] = {"name": self.name, "kind": self.kind}
        if self.is_categorical:
            content["categories"] = list(self.categories)
        for key, value in (("low", self.low), ("high", self.high)):
            if value is not None:
                content[key] = _format_date(value) if self.kind == "date" else value
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> "ColumnSchema":
        """Return the column that `to_dict` wrote. Raise ValueError if it is invalid."""
        unknown = content.keys() - {"name", "kind", "categories", "low", "high"}
        if unknown:
            raise ValueError(f"unknown key '{min(unknown)}' of a column")
        name, kind, categories = content.get("name"), content.get("kind", "numeric"), content.get("categories", [])
        if not isinstance(name, str) or not name:
            raise ValueError("a column without a name")
        if not isinstance(kind, str) or not isinstance(categories, list) or not all(isinstance(c, str) for c in categories):
            raise ValueError(f"column '{name}' needs a kind and a list of texts as categories")
        low, high = (_parse_bound(content.get(key), name, key) for key in ("low", "high"))
        return cls(name, kind, tuple(categories), low, high)


@dataclass(frozen=True)
class Schema:
    """The columns of inputs, the label and its classes.

    Attributes:
        columns: Columns in the order of their values.
        label: Name of the label column, "" if unknown.
        classes: Classes of the label in order, () if unknown.
        declared: Whether the schema was declared beforehand. Its categories are then those of the encoding, and values
            outside its ranges and categories count as missing; otherwise it only names what was found in the data.

    """

    columns: tuple[ColumnSchema, ...]
    label: str = ""
    classes: tuple[str, ...] = ()
    declared: bool = False

    def __post_init__(self) -> None:
        for name, count in Counter(column.name for column in self.columns).items():
            if count > 1:
                raise GpflError(f"two columns are named '{name}'; give each its own name")

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Index of each column by name."""
        return {column.name: i for i, column in enumerate(self.columns)}

    def find_columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the schema, which must all be among `names`."""
        for name in self.index:
            if name not in names:
                raise GpflError(f"the schema declares column '{name}', which the data do not have; {did_you_mean(name, names)}")
        return list(self.index)

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        header = {"label": self.label, "classes": list(self.classes)} if self.label else {}
        return {**header, "declared": self.declared, "column": [column.to_dict() for column in self.columns]}

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> "Schema":
        """Return the schema that `to_dict` wrote. Raise ValueError if it is invalid."""
        unknown = content.keys() - {"label", "classes", "declared", "column"}
        if unknown:
            raise ValueError(f"unknown key '{min(unknown)}'")
        label, classes, entries = content.get("label", ""), content.get("classes", []), content.get("column")
        if not isinstance(label, str) or not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
            raise ValueError("label must be text and classes a list of texts")
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
            raise ValueError("it has no [[column]]")
        columns = tuple(ColumnSchema.from_dict(cast(Mapping[str, object], entry)) for entry in entries)
        return cls(columns, label, tuple(classes), content.get("declared") is True)

    def write(self, path: Path) -> None:
        """Write the schema as a TOML file for `--schema`."""
        files.write_text(path, toml.dump({key: value for key, value in self.to_dict().items() if key != "declared"}))

    @classmethod
    def read(cls, path: Path) -> "Schema":
        """Return the schema that a TOML file declares."""
        content = toml.read(path)
        try:
            return replace(cls.from_dict(content), declared=True)
        except (ValueError, GpflError) as problem:
            raise GpflError(
                f"{path} is not a schema ({problem}): write one with gpfl data show --write-schema, and edit it"
            ) from None


@dataclass(frozen=True, eq=False)
class RawColumns:
    """Rows of columns that are not encoded yet."""

    schema: Schema  # what the columns hold
    values: Floats  # (rows, columns): numbers, or indices of `categories`; NaN where a value is missing

    def __len__(self) -> int:
        return len(self.values)

    def select(self, indices: npt.NDArray[np.int64]) -> "RawColumns":
        """Return the rows at `indices`."""
        return replace(self, values=self.values[indices])

    def column(self, name: str) -> tuple[ColumnSchema, Floats]:
        """Return the schema and the values of a column. Raise if there is none of that name."""
        if name not in self.schema.index:
            raise GpflError(f"the data have no column '{name}'; {did_you_mean(name, self.schema.index)}")
        index = self.schema.index[name]
        return self.schema.columns[index], self.values[:, index]

    def draft_schema(self, label: str, classes: Sequence[str]) -> Schema:
        """Return a schema to edit: the columns as they are, and the smallest and largest value of each as its range."""
        columns = []
        for column, values in zip(self.schema.columns, self.values.T, strict=True):
            known = values[~np.isnan(values)]
            if not column.is_categorical and column.range is None and len(known) and known.min() < known.max():
                column = replace(column, low=float(known.min()), high=float(known.max()))
            columns.append(column)
        return Schema(tuple(columns), label, tuple(classes))

    def codes(self, name: str, categories: Sequence[str]) -> Floats:
        """Return a column as indices of `categories`: NaN for a missing value, `UNKNOWN` for one that is not among them.

        Values that are already `UNKNOWN` stay so. Numbers are matched as text, whole ones without a decimal point.
        """
        column, values = self.column(name)
        if column.kind == "date":
            raise GpflError(f"column '{name}' holds dates; it must be categorical")
        present = ~np.isnan(values)
        unique, inverse = np.unique(values[present], return_inverse=True)
        index = {category: float(i) for i, category in enumerate(categories)}
        if column.is_categorical:
            found = [UNKNOWN if k == UNKNOWN else index.get(column.categories[int(k)], UNKNOWN) for k in unique.tolist()]
        else:
            found = [index.get(_format_number(k), UNKNOWN) for k in unique.tolist()]
        codes = np.full(len(values), np.nan)
        codes[present] = np.array(found)[inverse]
        return codes

    def numbers(self, name: str) -> Floats:
        """Return the values of a numeric or date column. Raise if it holds categories."""
        column, values = self.column(name)
        if column.is_categorical and (column.categories or not np.isnan(values).all()):
            example = f", such as '{column.categories[0][:40]}'" if column.categories else ""
            raise GpflError(f"column '{name}' holds categories{example}; it must be numeric")
        return values

    def conform(self, schema: Schema) -> tuple["RawColumns", dict[str, int]]:
        """Return the columns of a declared schema in its order, and how many values of each are outside it.

        Values outside a declared range and categories that are not declared become missing. Columns that are not declared are
        dropped; an absent column is an error.
        """
        values = np.empty((len(self), len(schema)))
        outside: dict[str, int] = {}
        for i, column in enumerate(schema.columns):
            if column.is_categorical:
                entries = self.codes(column.name, column.categories)
                bad = entries == UNKNOWN
            else:
                entries = self.numbers(column.name)
                low = -math.inf if column.low is None else column.low
                high = math.inf if column.high is None else column.high
                bad = (entries < low) | (entries > high)
            values[:, i] = np.where(bad, np.nan, entries)
            if bad.any():
                outside[column.name] = int(bad.sum())
        return RawColumns(schema, values), outside


def _format_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _format_date(days: float) -> str:
    return datetime.date.fromordinal(EPOCH + round(days)).isoformat()


def _parse_bound(value: object, name: str, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"column '{name}' has {key} = '{value}', which is neither a number nor a date") from None
    if isinstance(value, datetime.date):
        return float(value.toordinal() - EPOCH)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"column '{name}' has {key} = {value!r}, which is not a finite number")
    return float(value)
