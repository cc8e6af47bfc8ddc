"""Profiles of columns at each client: ranges, missing values, balance of labels, and drift between clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpfl.core.local_round import Indices
from gpfl.data.columns import ColumnSchema, Floats
from gpfl.data.table import Table

LARGE_DIFFERENCE = 0.25  # from this standardised mean difference a drift is called large, if chance does not explain it
LARGE_DISTANCE = 0.1  # the same for a total variation distance
DEVIATIONS = 3.5  # chance explains a drift of this many standard deviations: many columns of many clients are compared


@dataclass(frozen=True)
class ValueSummary:
    """The values of a column at a client, or at all of them.

    `drift` is the difference from the rows of all other clients: the standardised mean difference, positive if the client's
    mean is larger, or for categories the total variation distance. It is None if one side has no values.
    """

    rows: int
    missing: int  # rows without a value
    low: float | None = None  # of numbers or dates, as the next three
    high: float | None = None
    mean: float | None = None
    std: float | None = None  # population standard deviation
    counts: tuple[int, ...] = ()  # rows of each category
    drift: float | None = None
    large: bool = False  # whether the drift is large, and larger than chance explains

    @property
    def missing_share(self) -> float:
        """Share of rows without a value."""
        return self.missing / self.rows if self.rows else 0.0

    def to_dict(self, schema: ColumnSchema) -> dict[str, object]:
        """Return the content as JSON holds it, for a column of this schema."""
        keys = ("rows", "missing_share", *(() if schema.is_categorical else ("low", "high", "mean", "std")), "drift", "large")
        counts = {"counts": dict(zip(schema.categories, self.counts, strict=True))} if schema.is_categorical else {}
        return {key: getattr(self, key) for key in keys} | counts


@dataclass(frozen=True)
class ColumnProfile:
    """The values of a column at all clients together and at each."""

    schema: ColumnSchema
    total: ValueSummary
    clients: tuple[ValueSummary, ...]

    @property
    def most_drifting(self) -> int | None:
        """Index of the client with the largest drift."""
        drifts = [abs(client.drift or 0.0) for client in self.clients]
        return int(np.argmax(drifts)) if any(drifts) else None


@dataclass(frozen=True)
class DataProfile:
    """The columns and the label at each client."""

    clients: tuple[str, ...]
    columns: tuple[ColumnProfile, ...]
    label: ColumnProfile

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        return {
            "clients": list(self.clients),
            "columns": [self._describe_column(column) for column in self.columns],
            "label": self._describe_column(self.label),
        }

    def _describe_column(self, column: ColumnProfile) -> dict[str, object]:
        most = column.most_drifting
        by_client = {name: each.to_dict(column.schema) for name, each in zip(self.clients, column.clients, strict=True)}
        largest = None if most is None else self.clients[most]
        total = column.total.to_dict(column.schema)
        return {**column.schema.to_dict(), "all": total, "by_client": by_client, "largest_drift": largest}


def profile_data(table: Table, clients: Mapping[str, Indices]) -> DataProfile:
    """Return the profile of a table's columns, if it has any, and of its labels, by the samples of each client."""
    parts = list(clients.values())
    raw, names = table.raw, table.metadata.get("classes")
    classes = tuple(map(str, names)) if isinstance(names, list) else tuple(map(str, range(table.classes)))
    columns = () if raw is None else zip(raw.schema.columns, raw.values.T, strict=True)
    label = ColumnSchema(str(table.metadata.get("label", "label")), "categorical", classes)
    return DataProfile(
        tuple(clients),
        tuple(_profile(schema, values, parts) for schema, values in columns),
        _profile(label, table.y.cpu().numpy().astype(np.float64), parts),
    )


def _profile(schema: ColumnSchema, values: Floats, parts: Sequence[Indices]) -> ColumnProfile:
    total = _summarise(schema, values[np.concatenate(parts)])
    compare = _compare_categories if schema.is_categorical else _compare_means
    return ColumnProfile(schema, total, tuple(compare(_summarise(schema, values[part]), total) for part in parts))


def _summarise(schema: ColumnSchema, values: Floats) -> ValueSummary:
    present = values[~np.isnan(values)]
    summary = ValueSummary(len(values), len(values) - len(present))
    if schema.is_categorical:
        counts = np.bincount(present.astype(np.int64), minlength=len(schema.categories))
        return replace(summary, counts=tuple(counts.tolist()))
    if not len(present):
        return summary
    low, high, mean, std = map(float, (present.min(), present.max(), present.mean(), present.std()))
    return replace(summary, low=low, high=high, mean=mean, std=std)


def _compare_means(client: ValueSummary, total: ValueSummary) -> ValueSummary:
    """Return a client's summary with its standardised mean difference from all others."""
    n, m = client.rows - client.missing, (total.rows - total.missing) - (client.rows - client.missing)
    if not m or client.mean is None or client.std is None or total.mean is None or total.std is None:
        return client
    difference = (client.mean - total.mean) * (n + m) / m  # from the mean of the others
    squares = (n + m) * total.std**2 - n * client.std**2 - difference**2 * n * m / (n + m)
    std = math.sqrt((client.std**2 + max(squares, 0.0) / m) / 2)
    drift = difference / (std or total.std) if total.std else 0.0
    chance = DEVIATIONS * math.sqrt(1 / n + 1 / m)
    return replace(client, drift=drift, large=abs(drift) >= max(LARGE_DIFFERENCE, chance))


def _compare_categories(client: ValueSummary, total: ValueSummary) -> ValueSummary:
    """Return a client's summary with the total variation distance of its categories from those of all others."""
    counts, others = np.array(client.counts), np.array(total.counts) - np.array(client.counts)
    n, m = int(counts.sum()), int(others.sum())
    if not n or not m:
        return client
    distance = float(np.abs(counts / n - others / m).sum() / 2)
    shares, spread = (counts + others) / (n + m), math.sqrt(1 / n + 1 / m)
    # The mean between samples of one distribution, and standard deviations of at most half the spread.
    expected = float(np.sqrt(shares * (1 - shares)).sum()) * spread / math.sqrt(2 * math.pi)
    chance = expected + (DEVIATIONS - 1) * spread / 2
    return replace(client, drift=distance, large=distance >= max(LARGE_DISTANCE, chance))
