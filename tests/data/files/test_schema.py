"""Files with a declared schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Command
from user_files import error_of, inputs, lines, load, write

import gpfl
from gpfl.data.columns import ColumnSchema, Schema
from gpfl.io import toml

ROWS = [(20, 1, "f", "n", "well"), (30, 2, "m", "n", "ill"), (40, 1, "f", "s", "well"), (50, 2, "m", "s", "ill")] * 5
COLUMNS = (
    ColumnSchema("ward", "categorical", ("3", "1", "2")),
    ColumnSchema("age", low=0.0, high=255.0),
    ColumnSchema("sex", "categorical", ("f", "m", "x")),
)
SCHEMA = Schema(COLUMNS, "outcome", ("well", "ill", "dead"))


def visits(tmp_path: Path, *more: tuple[object, ...]) -> Path:
    return write(tmp_path / "a.csv", lines(("age", "ward", "sex", "client", "outcome"), *ROWS, *more))


def declare(tmp_path: Path, schema: Schema = SCHEMA) -> str:
    schema.write(tmp_path / "schema.toml")
    return str(tmp_path / "schema.toml")


def test_a_schema_sets_columns_categories_label_and_classes(tmp_path: Path) -> None:
    table = load(visits(tmp_path), schema=declare(tmp_path), scale="none")
    assert (table.classes, table.metadata["classes"], table.y[:2].tolist()) == (3, ["well", "ill", "dead"], [0, 1])
    assert inputs(table)[:2].tolist() == [[0, 1, 0, 20, 1, 0, 0], [0, 0, 1, 30, 0, 1, 0]], "numbers may be categories"
    assert table.raw is not None
    assert table.raw.schema.declared


def test_columns_that_are_not_declared_are_left_out(tmp_path: Path) -> None:
    table = load(visits(tmp_path), schema=declare(tmp_path, Schema(COLUMNS[1:2], "outcome")))
    assert inputs(table).shape == (20, 1)


def test_a_median_is_filled_in_with_a_declared_range(tmp_path: Path) -> None:
    path = visits(tmp_path, ("", 1, "f", "n", "well"), (60, 1, "f", "n", "well"))
    table = load(path, schema=declare(tmp_path), scale="none", missing="median")
    assert inputs(table)[20, 3] == 40
    assert "column 'age' has no declared range" in error_from_inputs(path)


def error_from_inputs(path: Path) -> str:
    with pytest.raises(gpfl.GpflError) as problem:
        inputs(load(path, missing="median", label="outcome"))
    return str(problem.value)


OUTSIDE = {
    "range": (
        (256, 1, "f", "n", "well"),
        "column 'age' has 1 value outside 0 to 255, which {schema} declares, first in a.csv, line 22",
    ),
    "category": (
        (20, 1, "d", "n", "well"),
        "column 'sex' has 1 value outside f, m, x, which {schema} declares, first in a.csv, line 22",
    ),
    "several": (
        (-1, 4, "f", "n", "well"),
        "column 'ward' has 1 value outside 3, 1, 2, which {schema} declares, first in a.csv, line 22, "
        "and 1 other column have some as well",
    ),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_values_outside_the_schema_are_an_error_unless_missing_values_are_filled(kind: str, tmp_path: Path) -> None:
    row, expected = OUTSIDE[kind]
    path, schema = visits(tmp_path, row), declare(tmp_path)
    fix = "correct the file or the schema, or count such values as missing with --missing mean"
    assert error_of(path, schema=schema) == f"{expected.format(schema=schema)}: {fix}"
    assert "Values outside the schema count as missing: " in load(path, schema=schema, missing="mean").description


def test_labels_and_columns_must_be_those_of_the_schema(tmp_path: Path) -> None:
    path = visits(tmp_path, (20, 1, "f", "n", "gone"))
    schema = declare(tmp_path)
    assert error_of(path, schema=schema) == (
        "column 'outcome' holds 'gone' in a.csv, line 22, which is not among the classes of the schema (well, ill, dead): "
        "correct the file or the schema"
    )
    other = declare(tmp_path, Schema((ColumnSchema("agee"),), "outcome"))
    assert error_of(path, schema=other) == (
        "the schema declares column 'agee', which the data do not have; did you mean 'age'?"
    )
    assert error_of(path, schema=str(tmp_path / "none.toml")) == (
        f"cannot read {tmp_path / 'none.toml'}: No such file or directory"
    )


def test_show_writes_a_schema_with_which_a_run_resumes_elsewhere(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    visits(Path())
    shown = command("data", "show", "--data", "a.csv", "--label", "outcome", "--write-schema", "schema.toml")
    assert shown.code == 0, shown.err
    assert "Schema: schema.toml. Its ranges are the smallest and largest values of the data: check them, then use" in shown.out
    assert Schema.read(Path("schema.toml")) == Schema(
        (
            ColumnSchema("age", low=20.0, high=50.0),
            ColumnSchema("ward", low=1.0, high=2.0),
            ColumnSchema("sex", "categorical", ("f", "m")),
        ),
        "outcome",
        ("ill", "well"),
        declared=True,
    )
    flags = ("--data", "a.csv", "--schema", "schema.toml", "--missing", "median", "--method", "fedavg", "--rounds", 2)
    run = command("run", *flags, "--out", "run")
    assert run.code == 0, run.err
    assert "Preprocessing: before round 0 each client sends statistics of 3 of 3 columns, at most " in run.out
    folder = Path("run").resolve()
    assert toml.read(folder / "config.toml")["data"]["schema"] == str(Path("schema.toml").resolve())  # type: ignore[index]
    (folder / "summary.json").unlink()
    monkeypatch.chdir("/")
    assert command("resume", folder).code == 0
    Path(folder.parent / "schema.toml").write_text(Path(folder.parent / "schema.toml").read_text().replace("50.0", "51.0"))
    (folder / "summary.json").unlink()
    assert "divides a table with sha256" in command("resume", folder).err


def test_show_writes_a_schema_of_data_with_missing_values(command: Command) -> None:
    write(Path("a.csv"), lines(("age", "outcome"), *((k if k % 5 else "", "ill" if k % 2 else "well") for k in range(20))))
    shown = command("data", "show", "a.csv", "--label", "outcome", "--write-schema", "schema.toml")
    assert (shown.code, shown.err) == (0, "")
    assert "The samples of each client are not shown: column 'age' has 4 missing values" in shown.out
    assert Schema.read(Path("schema.toml")).columns == (ColumnSchema("age", low=1.0, high=19.0),)


def test_a_config_may_name_a_schema_relative_to_its_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    visits(tmp_path / "configs")
    declare(tmp_path / "configs")
    write(tmp_path / "configs" / "c.toml", '[data]\nname = "a.csv"\nschema = "schema.toml"\n[train]\nrounds = 1\n')
    result = command("run", tmp_path / "configs" / "c.toml", "--out", tmp_path / "run")
    assert result.code == 0, result.err


def test_only_columns_have_a_schema(command: Command) -> None:
    result = command("data", "show", "--data", "digits", "--write-schema", "schema.toml")
    assert result.err == (
        "gpfl: --write-schema schema.toml: data 'digits' has no columns, so there is no schema: leave it out\n"
    )
