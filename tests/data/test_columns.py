"""Schemas of columns and their raw values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.errors import GpflError

NAN = np.nan
SCHEMA = Schema(
    (
        ColumnSchema("age", low=0.0, high=120.0),
        ColumnSchema("sex", "categorical", ("f", "m")),
        ColumnSchema("admitted", "date", low=10_957.0, high=20_000.0),
        ColumnSchema("weight"),
    ),
    label="outcome",
    classes=("home", "ward"),
    declared=True,
)


def test_a_schema_survives_its_toml_file_and_json(tmp_path: Path) -> None:
    SCHEMA.write(tmp_path / "schema.toml")
    assert Schema.read(tmp_path / "schema.toml") == SCHEMA
    assert Schema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA


def test_a_range_of_dates_is_written_as_dates(tmp_path: Path) -> None:
    SCHEMA.write(tmp_path / "schema.toml")
    text = (tmp_path / "schema.toml").read_text()
    assert 'low = "2000-01-01"' in text
    (tmp_path / "schema.toml").write_text(text.replace('"2000-01-01"', "2000-01-01"))
    assert Schema.read(tmp_path / "schema.toml") == SCHEMA, "also as a TOML date"


BAD = {
    "kind": ("[[column]]\nname = 'a'\nkind = 'number'", "column 'a' has kind 'number'; did you mean 'numeric'?"),
    "category twice": (
        "[[column]]\nname = 'a'\nkind = 'categorical'\ncategories = ['x', 'x']",
        "column 'a' lists a category twice: x, x",
    ),
    "categories of numbers": (
        "[[column]]\nname = 'a'\ncategories = ['x']",
        "column 'a' is numeric and lists categories: remove them, or set its kind to categorical",
    ),
    "range of categories": (
        "[[column]]\nname = 'a'\nkind = 'categorical'\nlow = 0",
        "column 'a' is categorical and has a range: remove low and high, or set its kind to numeric",
    ),
    "range": ("[[column]]\nname = 'a'\nlow = 3\nhigh = 3", "column 'a' has the range 3 to 3; low must be below high"),
    "bound": ("[[column]]\nname = 'a'\nlow = 'x'", "column 'a' has low = 'x', which is neither a number nor a date"),
    "infinity": ("[[column]]\nname = 'a'\nlow = inf", "column 'a' has low = inf, which is not a finite number"),
    "name twice": ("[[column]]\nname = 'a'\n[[column]]\nname = 'a'", "two columns are named 'a'; give each its own name"),
    "no name": ("[[column]]\nkind = 'numeric'", "a column without a name"),
    "categories": (
        "[[column]]\nname = 'a'\nkind = 'categorical'\ncategories = [1]",
        "column 'a' needs a kind and a list of texts as categories",
    ),
    "no columns": ("label = 'y'", "it has no [[column]]"),
    "label": ("label = 3\n[[column]]\nname = 'a'", "label must be text and classes a list of texts"),
    "key": ("columns = 3", "unknown key 'columns'"),
    "key of a column": ("[[column]]\nname = 'a'\nunit = 'kg'", "unknown key 'unit' of a column"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_schema_is_an_error(kind: str, tmp_path: Path) -> None:
    text, reason = BAD[kind]
    path = tmp_path / "schema.toml"
    path.write_text(text)
    with pytest.raises(GpflError) as problem:
        Schema.read(path)
    fix = "write one with gpfl data show --write-schema, and edit it"
    assert str(problem.value) == f"{path} is not a schema ({reason}): {fix}"


def make_raw() -> RawColumns:
    found = Schema(
        (
            ColumnSchema("weight"),
            ColumnSchema("note", "categorical", ("x",)),
            ColumnSchema("sex", "categorical", ("m", "other", "f")),
            ColumnSchema("age"),
            ColumnSchema("admitted", "date"),
        )
    )
    return RawColumns(found, np.array([[70, 0, 0, 50, 19_000], [NAN, 0, 1, 121, 1.0], [80, NAN, 2, NAN, NAN]]))


def test_values_outside_a_declared_schema_become_missing_and_are_counted() -> None:
    conforming, outside = make_raw().conform(SCHEMA)
    expected = [[50, 1, 19_000, 70], [NAN, NAN, NAN, NAN], [NAN, 0, NAN, 80]]
    np.testing.assert_array_equal(conforming.values, expected)
    assert conforming.schema is SCHEMA
    assert outside == {"age": 1, "sex": 1, "admitted": 1}


def test_numbers_may_be_declared_as_categories_but_not_the_reverse() -> None:
    raw = RawColumns(Schema((ColumnSchema("code"),)), np.array([[1.0], [2.5], [NAN], [7.0]]))
    np.testing.assert_array_equal(raw.codes("code", ("2.5", "1")), [1, 0, NAN, -1])
    with pytest.raises(GpflError, match=r"^column 'sex' holds categories, such as 'm'; it must be numeric$"):
        make_raw().conform(Schema((ColumnSchema("sex"),)))
    with pytest.raises(GpflError, match=r"^column 'admitted' holds dates; it must be categorical$"):
        make_raw().conform(Schema((ColumnSchema("admitted", "categorical"),)))


def test_an_absent_column_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(GpflError, match=r"^the data have no column 'Weigth'; did you mean 'weight'\?$"):
        make_raw().conform(Schema((ColumnSchema("Weigth"),)))
