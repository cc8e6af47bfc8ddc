"""Tables of data profiles."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from gpfl.data import Table
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.profile import profile_data
from gpfl.report.profile_tables import profile_tables


def render(clients: int, classes: int = 2) -> list[str]:
    """Return the tables of a federation on 80 characters; the last client is older than all others."""
    rng, rows = np.random.default_rng(0), 60 * clients
    ids = np.arange(rows) % clients
    long = ColumnSchema("a rather long name of a column", "categorical", ("f", "m"))
    columns = (ColumnSchema("age"), long, ColumnSchema("day", "date"), ColumnSchema("income"))
    age = rng.normal(50, 10, rows) + 30 * (ids == clients - 1)
    age[ids == 0] = np.where(np.arange(60) < 15, np.nan, age[ids == 0])
    values = np.stack([age, rng.integers(0, 2, rows), 19367 + rng.integers(0, 90, rows), 1e4 * age], axis=1).astype(float)
    names = [f"hospital number {k}" for k in range(clients)]
    metadata = {"classes": [f"class {k}" for k in range(classes)], "label": "outcome"}
    table = Table(RawColumns(Schema(columns), values), np.arange(rows) % classes, classes=classes, metadata=metadata)
    profile = profile_data(table, {name: np.flatnonzero(ids == k) for k, name in enumerate(names)})
    out = io.StringIO()
    console = Console(file=out, width=80)
    for result in profile_tables(profile):
        console.print(result)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("classes", [2, 9])
@pytest.mark.parametrize("clients", [1, 2, 4, 5, 50])
def test_profiles_fit_on_80_characters(clients: int, classes: int) -> None:
    lines = render(clients, classes)
    assert max(map(len, lines)) <= 80
    assert not any("Hidden" in line for line in lines)
    assert len(lines) < 60


def find(lines: list[str], start: str, place: int = 0) -> str:
    return " ".join([line for line in lines if line.startswith(start)][place].split())


def test_columns_have_their_range_missing_share_and_largest_drift() -> None:
    lines = render(4)
    assert find(lines, "age").startswith("age numbers 18")
    assert " 6 % hospi…mber 3 +" in find(lines, "age")
    assert find(lines, "age").endswith(" *")
    assert find(lines, "a rath… column").startswith("a rath… column text ")
    assert "2023-01-10 to 2023-04-09" in find(lines, "day")
    assert find(lines, "outcome").startswith("outcome label class 0 50 %, … 0 %")


def test_few_clients_have_a_column_each() -> None:
    lines = render(4)
    assert find(lines, "rows") == "rows 60 60 60 60"
    assert find(lines, "  missing") == "missing 25 % 0 % 0 % 0 %"
    assert find(lines, "  range").count("[") == find(lines, "  range", 1).count("[") == 4


def test_many_clients_are_summarised() -> None:
    lines = render(50)
    assert "50 clients with 60 to 60 rows (median 60); the 12 that differ most:" in lines
    assert find(lines, "hospit…mber 49").endswith(" *")
    assert "(hos…r 49)" in find(lines, "age", 1)
    assert sum(line.startswith("hospit…") for line in lines) == 12
