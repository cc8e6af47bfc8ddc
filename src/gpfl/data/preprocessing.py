"""Federated preprocessing: statistics of each client's training samples, their merge, and the encoding they define.

Each client computes `client_statistics`, the server merges them with `merge_statistics`, and every client encodes its rows
with the `Preprocessor` that is fitted to the merged statistics. No row leaves a client.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from gpfl.core.options import option
from gpfl.data.columns import UNKNOWN, ColumnSchema, Floats, RawColumns, Schema
from gpfl.errors import GpflError, pluralize

LEVELS = 256  # levels of a histogram: evenly spaced values from the low to the high end of the declared range
FILLED = ("mean", "median", "most_frequent")  # values of `missing` that fill missing values
UNSEEN = ("error", "ignore")  # what to do with categories in new rows that no client trained on
NUMBER_BYTES = 8
DESCRIPTIONS = {
    "count": "count",
    "mean": "mean",
    "squared_deviation": "sum of squared deviations",
    "histogram": f"histogram of {LEVELS} counts over the declared range",
    "has_missing": "whether values are missing",
}
COUNTED = {"categories": "category name", "counts": "count"}  # described with their number
BLOCK = 1 << 20  # values that are summed at once: a copy of a large table would not fit


@dataclass(frozen=True, kw_only=True)
class PreprocessingOptions:
    """How columns are encoded."""

    scale: str = option(
        "federated",
        "numeric columns: scaled to mean 0 and std 1 by the training samples of all clients, by those of the client alone "
        "(federated where it has none, or a constant), or not scaled",
        choices=("federated", "local", "none"),
    )
    missing: str = option(
        "error",
        "missing inputs: an error, or filled with the mean, the median or the most frequent value of the training samples of "
        "all clients; categories are always filled with the most frequent",
        choices=("error", *FILLED),
    )
    missing_indicator: bool = option(
        False, "add an input, 0 or 1, for each column with missing values in training samples", omit_default=True
    )
    unseen: str = option(
        "error",
        "what saved models do with a category in new rows that no client trained on: an error, or ignored (encoded as zeros, "
        "or read as missing if the columns are declared)",
        choices=UNSEEN,
        omit_default=True,
    )

    @property
    def fills(self) -> bool:
        """Whether missing values are filled."""
        return self.missing in FILLED


# Statistics.


class _Statistics:
    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it, without what is not needed."""
        content = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {key: value for key, value in content.items() if value is not None and (value != [] or key == "categories")}

    @property
    def n_bytes(self) -> int:
        """Bytes to send them."""
        return _count_bytes(list(self.to_dict().values()))

    def describe(self) -> str:
        """Return a description of the content."""
        parts = [DESCRIPTIONS.get(key) or pluralize(len(getattr(self, key)), COUNTED[key]) for key in self.to_dict()]
        return ", ".join(parts) or "nothing"


def _count_bytes(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_count_bytes, value))
    return len(value.encode()) if isinstance(value, str) else 1 if isinstance(value, bool) else NUMBER_BYTES


@dataclass(frozen=True)
class NumericStatistics(_Statistics):
    """Statistics of the values of a numeric or date column that are not missing; None and () where they are not needed."""

    count: int
    mean: float = 0.0
    squared_deviation: float | None = None  # sum of squared deviations from the mean
    histogram: tuple[int, ...] = ()  # values nearest to each level of the declared range
    has_missing: bool | None = None


@dataclass(frozen=True)
class CategoricalStatistics(_Statistics):
    """Categories of a column and their counts; None and () where they are not needed."""

    categories: tuple[str, ...] | None = None  # None: declared beforehand
    counts: tuple[int, ...] = ()
    has_missing: bool | None = None


ColumnStatistics = NumericStatistics | CategoricalStatistics


@dataclass(frozen=True)
class ClientStatistics:
    """What leaves a client before round 0: statistics of its training samples by column."""

    columns: Mapping[str, ColumnStatistics]

    @property
    def n_bytes(self) -> int:
        """Bytes to send them: 8 per number, 1 per yes or no, and the text of category names. Names of columns are known."""
        return sum(column.n_bytes for column in self.columns.values())

    def describe(self) -> list[str]:
        """Return a line for each column that says what leaves the client."""
        return [f"{name}: {column.describe()} ({column.n_bytes} B)" for name, column in self.columns.items()]

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        return {name: column.to_dict() for name, column in self.columns.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> "ClientStatistics":
        """Return the statistics that `to_dict` wrote. Raise GpflError if they are invalid."""
        return cls({name: _statistics_from_dict(name, column) for name, column in content.items()})


def client_statistics(raw: RawColumns, indices: npt.NDArray[np.int64], options: PreprocessingOptions) -> ClientStatistics:
    """Return the statistics of the rows at `indices`, a client's training samples, that the options need."""
    schema, values = raw.schema, raw.values[indices]
    width = max(1, BLOCK // max(1, len(values)))
    blocks = [_moments(values[:, start : start + width]) for start in range(0, len(schema), width)]
    counts, means, deviations = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    columns: dict[str, ColumnStatistics] = {}
    for i, column in enumerate(schema.columns):
        has_missing = bool(counts[i] < len(values)) if options.missing_indicator else None
        found = values[~np.isnan(values[:, i]), i]
        if column.is_categorical:
            occurrences = np.bincount(found.astype(np.int64), minlength=len(column.categories))
            names = None
            if not schema.declared:
                order = sorted(np.flatnonzero(occurrences).tolist(), key=lambda index: column.categories[index])
                names, occurrences = tuple(column.categories[index] for index in order), occurrences[order]
            columns[column.name] = CategoricalStatistics(
                names, tuple(occurrences.tolist()) if options.fills else (), has_missing
            )
        elif options.scale != "none" or options.fills or options.missing_indicator:
            columns[column.name] = NumericStatistics(
                int(counts[i]),
                float(means[i]),
                float(deviations[i]) if options.scale != "none" else None,
                _histogram(column, found) if options.missing in ("median", "most_frequent") else (),
                has_missing,
            )
    return ClientStatistics(columns)


def _moments(values: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Return count, mean and sum of squared deviations of the values of each column that are not missing."""
    present = ~np.isnan(values)
    counts = present.sum(0)
    size = np.maximum(counts, 1)
    means = np.where(present, values, 0.0).sum(0) / size
    means += np.where(present, values - means, 0.0).sum(0) / size  # corrects the rounding of a long sum
    return counts, means, (np.where(present, values - means, 0.0) ** 2).sum(0)


def _histogram(column: ColumnSchema, values: Floats) -> tuple[int, ...]:
    if column.range is None:
        raise GpflError(
            f"column '{column.name}' has no declared range, which --missing median and most_frequent need: write a schema with "
            "gpfl data show … --write-schema schema.toml, check its low and high, and give it with --schema schema.toml"
        )
    low, high = column.range
    levels = np.rint((np.clip(values, low, high) - low) / (high - low) * (LEVELS - 1)).astype(np.int64)
    return tuple(np.bincount(levels, minlength=LEVELS).tolist())


def merge_statistics(statistics: Sequence[ClientStatistics]) -> ClientStatistics:
    """Return the statistics of all clients' samples together.

    Means and squared deviations are merged by the formulas of Chan, Golub and LeVeque for any number of groups. All sums are
    exactly rounded, so that the result does not depend on the order of the clients.
    """
    if not statistics:
        raise ValueError("there are no statistics to merge")
    names = list(statistics[0].columns)
    for other in statistics[1:]:
        if different := sorted(set(names) ^ other.columns.keys()):
            raise GpflError(f"column '{different[0]}' is missing at some clients: give all clients the same columns")
    return ClientStatistics({name: _merge_columns(name, [s.columns[name] for s in statistics]) for name in names})


def _merge_columns(name: str, parts: Sequence[ColumnStatistics]) -> ColumnStatistics:
    missing = None if any(part.has_missing is None for part in parts) else any(part.has_missing for part in parts)
    numeric = [part for part in parts if isinstance(part, NumericStatistics)]
    categorical = [part for part in parts if isinstance(part, CategoricalStatistics)]
    if numeric and categorical:
        raise GpflError(f"column '{name}' is numeric at one client and categorical at another: declare its kind with --schema")
    return _merge_numeric(name, numeric, missing) if numeric else _merge_categorical(name, categorical, missing)


def _merge_numeric(name: str, parts: Sequence[NumericStatistics], missing: bool | None) -> NumericStatistics:
    nonempty = [part for part in parts if part.count]
    count = sum(part.count for part in nonempty)
    shift = min((part.mean for part in nonempty), default=0.0)  # keeps digits where all means are large
    mean = shift + math.fsum(part.count * (part.mean - shift) for part in nonempty) / max(count, 1)
    within = [part.squared_deviation for part in parts if part.squared_deviation is not None]
    deviation = None
    if len(within) == len(parts):
        deviation = math.fsum([*within, *(part.count * (part.mean - mean) ** 2 for part in nonempty)])
    return NumericStatistics(count, mean, deviation, _add_counts(name, [part.histogram for part in parts]), missing)


def _merge_categorical(name: str, parts: Sequence[CategoricalStatistics], missing: bool | None) -> CategoricalStatistics:
    if any(part.categories is None for part in parts):
        return CategoricalStatistics(None, _add_counts(name, [part.counts for part in parts]), missing)
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(dict(zip(part.categories or (), part.counts, strict=bool(part.counts))))
    names = tuple(sorted({category for part in parts for category in part.categories or ()}))
    return CategoricalStatistics(names, tuple(totals[name] for name in names) if totals else (), missing)


def _add_counts(name: str, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if len(set(map(len, parts))) > 1:
        raise GpflError(f"column '{name}' has different numbers of counts at two clients: give all clients the same schema")
    return tuple(sum(counts) for counts in zip(*parts, strict=True))


# Encoding.


@dataclass(frozen=True)
class Preprocessor:
    """A fitted encoding of raw columns as inputs of a net.

    A numeric or date column becomes one input, a categorical one an input for each category: 1 for its own, 0 for all
    others, and 0 for all if the category does not occur in training samples. Indicators of missing values come last.
    """

    schema: Schema  # columns by name, with the categories of the encoding
    scaling: Mapping[str, tuple[float, float]]  # mean and standard deviation of each numeric column
    fill: Mapping[str, float | str] = field(default_factory=dict)  # in place of missing values, an error for other columns
    indicators: tuple[str, ...] = ()  # columns with an input that says whether the value was missing
    unseen: str = "error"  # what to do with a category in new rows that has no input; `transform` itself ignores it

    @classmethod
    def fit(cls, schema: Schema, statistics: ClientStatistics, options: PreprocessingOptions) -> "Preprocessor":
        """Return the encoding that merged statistics of training samples define."""
        columns: list[ColumnSchema] = []
        scaling: dict[str, tuple[float, float]] = {}
        fill: dict[str, float | str] = {}
        indicators = []
        for column in schema.columns:
            found = statistics.columns.get(column.name)
            if isinstance(found, CategoricalStatistics) and found.categories is not None:
                column = replace(column, categories=found.categories)
            if not column.is_categorical:
                scaling[column.name] = _scaling(found)
            if options.fills and found is not None:
                fill[column.name] = _fill_value(column, found, options)
            if found is not None and found.has_missing:
                indicators.append(column.name)
            columns.append(column)
        return cls(replace(schema, columns=tuple(columns)), scaling, fill, tuple(indicators), options.unseen)

    def localize(self, statistics: ClientStatistics, options: PreprocessingOptions) -> "Preprocessor":
        """Return the encoding with a client's own scaling and fill of numeric columns.

        A column without values or without spread at the client stays as it is.
        """
        scaling, fill = dict(self.scaling), dict(self.fill)
        for column in self.schema.columns:
            found = statistics.columns[column.name]
            if isinstance(found, NumericStatistics) and _has_spread(found):
                scaling[column.name] = _scaling(found)
                if options.fills:
                    fill[column.name] = _fill_value(column, found, options)
        return replace(self, scaling=scaling, fill=fill)

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs."""
        names = []
        for column in self.schema.columns:
            names += [f"{column.name}={category}" for category in column.categories] if column.is_categorical else [column.name]
        return [*names, *(f"{name} missing" for name in self.indicators)]

    def transform(self, raw: RawColumns) -> npt.NDArray[np.float32]:
        """Return rows as inputs, (rows, width). Columns are found by name; further ones are left out."""
        if self.schema.declared:
            raw, _ = raw.conform(self.schema)
        inputs = np.zeros((len(raw), len(self.input_names)), dtype=np.float32)
        start, missing = 0, {}
        for column in self.schema.columns:
            name, categories = column.name, column.categories
            values = raw.codes(name, categories) if column.is_categorical else raw.numbers(name)
            missing[name] = absent = np.isnan(values)
            if absent.any():
                if name not in self.fill:
                    raise GpflError(
                        f"column '{name}' has {pluralize(int(absent.sum()), 'missing value')}, and missing values are not "
                        "filled: fill in the data, or train with --missing mean"
                    )
                fill = self.fill[name]
                values = np.where(absent, categories.index(str(fill)) if column.is_categorical else fill, values)
            if column.is_categorical:
                inputs[:, start : start + len(categories)] = values[:, None] == np.arange(len(categories))
                start += len(categories)
            else:
                mean, std = self.scaling[name]
                with np.errstate(over="ignore"):  # values beyond float32 become infinite, which the caller reports
                    inputs[:, start] = (values - mean) / std
                start += 1
        for i, name in enumerate(self.indicators, start):
            inputs[:, i] = missing[name]
        return inputs

    def count_unseen(self, raw: RawColumns) -> dict[str, int]:
        """Return how many values of each column are categories without an input, which are encoded as zeros."""
        columns = [column for column in self.schema.columns if column.is_categorical and not self.schema.declared]
        counts = {column.name: int((raw.codes(column.name, column.categories) == UNKNOWN).sum()) for column in columns}
        return {name: count for name, count in counts.items() if count}

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        return {
            "schema": self.schema.to_dict(),
            "scaling": {name: list(values) for name, values in self.scaling.items()},
            "fill": dict(self.fill),
            "indicators": list(self.indicators),
            "unseen": self.unseen,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> "Preprocessor":
        """Return the encoding that `to_dict` wrote. Raise GpflError if it is invalid."""
        try:
            schema, scaling, fill, indicators = (content[key] for key in ("schema", "scaling", "fill", "indicators"))
            if not (isinstance(schema, Mapping) and isinstance(scaling, Mapping) and isinstance(fill, Mapping)):
                raise TypeError("schema, scaling and fill are objects")
            if not isinstance(indicators, list):
                raise TypeError("indicators is a list")
            unseen = content.get("unseen", "error")  # models of earlier versions have none
            if unseen not in UNSEEN:
                raise ValueError(f"unseen is {unseen!r}")
            pairs = {str(name): (float(mean), float(std)) for name, (mean, std) in scaling.items()}
            return cls(Schema.from_dict(schema), pairs, dict(fill), tuple(map(str, indicators)), str(unseen))
        except (KeyError, TypeError, ValueError) as problem:
            raise GpflError(f"this is not a preprocessing of gpfl (missing or wrong: {problem})") from None


def _scaling(statistics: ColumnStatistics | None) -> tuple[float, float]:
    """Return the mean and the standard deviation to scale by: (0, 1) if the column is not scaled."""
    if not isinstance(statistics, NumericStatistics) or statistics.squared_deviation is None:
        return 0.0, 1.0
    spread = _has_spread(statistics)
    return statistics.mean, math.sqrt(statistics.squared_deviation / statistics.count) if spread else 1.0


def _has_spread(statistics: NumericStatistics) -> bool:
    """Return whether the values differ by more than the rounding of their mean."""
    rounding = 8 * float(np.finfo(np.float64).eps) * statistics.mean
    return (statistics.squared_deviation or 0.0) > statistics.count * rounding**2


def _fill_value(column: ColumnSchema, statistics: ColumnStatistics, options: PreprocessingOptions) -> float | str:
    counts = statistics.counts if isinstance(statistics, CategoricalStatistics) else (statistics.count,)
    if not sum(counts):
        raise GpflError(
            f"column '{column.name}' has no value in any training sample, so there is nothing to fill in: "
            f"leave it out with --ignore {column.name}"
        )
    if isinstance(statistics, CategoricalStatistics):
        return column.categories[int(np.argmax(counts))]
    if options.missing == "mean":
        return statistics.mean
    low, high = cast(tuple[float, float], column.range)
    levels = np.linspace(low, high, LEVELS)
    if options.missing == "most_frequent":
        return float(levels[int(np.argmax(statistics.histogram))])
    ends = np.cumsum(statistics.histogram)
    middle = np.searchsorted(ends, [(statistics.count - 1) // 2, statistics.count // 2], side="right")
    return float(levels[middle].mean())


def _statistics_from_dict(name: str, content: object) -> ColumnStatistics:
    try:
        if not isinstance(content, Mapping):
            raise TypeError("no object")
        missing = content.get("has_missing")
        if missing is not None and not isinstance(missing, bool):
            raise TypeError("has_missing")
        histogram, counts = (_parse_counts(content.get(key, [])) for key in ("histogram", "counts"))
        if "count" in content:
            (count,), mean, deviation = _parse_counts([content["count"]]), content["mean"], content.get("squared_deviation")
            squared = None if deviation is None else _parse_number(deviation, low=0.0)
            return NumericStatistics(count, _parse_number(mean), squared, histogram, missing)
        categories = content.get("categories")
        if categories is not None and not (isinstance(categories, list) and all(isinstance(name, str) for name in categories)):
            raise TypeError("categories")
        if counts and categories is not None and len(counts) != len(categories):
            raise TypeError("counts")
        return CategoricalStatistics(None if categories is None else tuple(categories), counts, missing)
    except (KeyError, TypeError) as problem:
        raise GpflError(f"the statistics of column '{name}' are not those of gpfl (missing or wrong: {problem})") from None


def _parse_counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
        raise TypeError("counts")
    return tuple(value)


def _parse_number(value: object, low: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= low):
        raise TypeError(f"{value!r}")
    return float(value)
