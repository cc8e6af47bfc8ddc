"""Profiles of columns at each client."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gpfl.data import Table
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.profile import DataProfile, profile_data

RNG = np.random.default_rng(0)


def profile_of(columns: dict[str, tuple[object, object]], clients: list[int], y: list[int]) -> DataProfile:
    """Return the profile of columns (values, categories or None)."""
    schema = Schema(
        tuple(
            ColumnSchema(name) if categories is None else ColumnSchema(name, "categorical", tuple(categories))  # type: ignore[arg-type]
            for name, (_, categories) in columns.items()
        )
    )
    values = np.stack([np.asarray(values, dtype=float) for values, _ in columns.values()], axis=1)
    table = Table(RawColumns(schema, values), y, classes=2, metadata={"classes": ["ill", "well"], "label": "outcome"})
    parts = {f"c{client}": np.flatnonzero(np.array(clients) == client) for client in sorted(set(clients))}
    return profile_data(table, parts)


def test_a_profile_has_ranges_shares_and_counts_of_each_client() -> None:
    nan = np.nan
    profile = profile_of(
        {"age": ([1, 2, nan, 4, 9], None), "sex": ([0, nan, 1, 1, 1], ("f", "m"))}, [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]
    )
    age, sex = profile.columns
    assert (age.total.rows, age.total.missing, age.total.low, age.total.high, age.total.mean) == (5, 1, 1, 9, 4)
    assert [(c.rows, c.missing, c.low, c.high, c.mean, c.std) for c in age.clients] == [
        (3, 1, 1, 2, 1.5, 0.5),
        (2, 0, 4, 9, 6.5, 2.5),
    ]
    assert age.clients[0].missing_share == pytest.approx(1 / 3)
    assert [c.counts for c in sex.clients] == [(1, 1), (0, 2)]
    assert (profile.label.schema.name, profile.label.schema.categories) == ("outcome", ("ill", "well"))
    assert [c.counts for c in profile.label.clients] == [(1, 2), (0, 2)]


def test_drift_is_the_standardised_mean_difference_from_all_other_clients() -> None:
    values, clients = RNG.normal(size=300), [k % 3 for k in range(300)]
    values[np.array(clients) == 1] += 2
    (column,) = profile_of({"a": (values, None)}, clients, [k % 2 for k in range(300)]).columns
    for client, summary in enumerate(column.clients):
        own, others = values[np.array(clients) == client], values[np.array(clients) != client]
        expected = (own.mean() - others.mean()) / np.sqrt((own.var() + others.var()) / 2)
        assert summary.drift == pytest.approx(expected)
    assert column.most_drifting == 1


def test_drift_of_categories_is_the_total_variation_distance() -> None:
    clients, values = [0] * 10 + [1] * 10 + [2] * 5, [0] * 10 + [0] * 5 + [1] * 5 + [2] * 5
    (column,) = profile_of({"a": (values, ("u", "v", "w"))}, clients, [k % 2 for k in range(25)]).columns
    assert column.clients[2].drift == 1, "no category in common"
    for client, summary in enumerate(column.clients):
        mask = np.array(clients) == client
        p, q = (np.bincount(np.array(values)[rows], minlength=3) / rows.sum() for rows in (mask, ~mask))
        assert summary.drift == pytest.approx(np.abs(p - q).sum() / 2)


def test_large_drifts_are_those_that_chance_does_not_explain() -> None:
    clients = [k % 50 for k in range(2000)]
    numbers, sexes = RNG.normal(size=2000), RNG.integers(0, 2, 2000).astype(float)
    y = RNG.integers(0, 2, 2000)
    profile = profile_of({"a": (numbers, None), "b": (sexes, ("f", "m"))}, clients, y.tolist())
    assert not any(c.large for column in (*profile.columns, profile.label) for c in column.clients), "50 equal clients"
    numbers[np.array(clients) == 7] += 1.5
    sexes[np.array(clients) == 9] = 1
    profile = profile_of({"a": (numbers, None), "b": (sexes, ("f", "m"))}, clients, y.tolist())
    assert [[k for k, c in enumerate(column.clients) if c.large] for column in profile.columns] == [[7], [9]]


def test_drift_needs_values_on_both_sides() -> None:
    nan = np.nan
    profile = profile_of({"a": ([1, 2, nan, nan], None), "b": ([0, 0, nan, nan], ("u",))}, [0, 0, 1, 1], [0, 1, 0, 1])
    assert [[c.drift for c in column.clients] for column in profile.columns] == [[None, None], [None, None]]
    assert [column.most_drifting for column in profile.columns] == [None, None]
    constant = profile_of({"a": ([3, 3, 3, 3], None), "b": ([1, 1, 2, 2], None)}, [0, 0, 1, 1], [0, 1, 0, 1])
    assert [c.drift for c in constant.columns[0].clients] == [0, 0]
    assert [c.drift for c in constant.columns[1].clients] == pytest.approx([-2, 2]), "in standard deviations of all rows"


def test_a_profile_is_json() -> None:
    profile = profile_of({"a": ([1, 2, np.nan, 4], None), "b": ([0, 1, 0, 0], ("u", "v"))}, [0, 0, 1, 1], [0, 1, 0, 0])
    content = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert content["clients"] == ["c0", "c1"]
    assert [column["name"] for column in content["columns"]] == ["a", "b"]
    assert content["columns"][0]["by_client"]["c1"]["missing_share"] == 0.5
    assert content["columns"][1]["all"]["counts"] == {"u": 3, "v": 1}
    assert content["label"]["by_client"]["c0"]["counts"] == {"ill": 1, "well": 1}
    assert content["label"]["largest_drift"] == "c0"
