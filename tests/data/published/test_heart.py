"""UCI Heart Disease from files in the published layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Command
from user_files import message_of, write

import gpfl
from gpfl.data import PUBLISHED, Table, find_dataset
from gpfl.data.published import cache
from gpfl.data.published.dataset import provenance_warning
from gpfl.data.published.heart import FILES, SCHEMA
from gpfl.io import toml

COMPLETE = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
GAPS = "32,0,4,95,?,?,0,127,0,-.7,?,?,?,3"
PARTLY = "40,0,2,95,0,0,1,127,1,1,?,?,?,1"
ROWS = [COMPLETE, PARTLY, COMPLETE.replace("63.0,1.0", "50.0,0.0"), GAPS, PARTLY.replace("40", "41"), GAPS.replace("32", "33")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the four files, a hospital of six to nine patients each."""
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    for i, (_, name, _, _) in enumerate(FILES):
        write(tmp_path / "heart" / name, "\n".join([*ROWS, *ROWS[:i]]) + "\n")
    return tmp_path / "heart"


def load(folder: Path, **options: object) -> Table:
    PUBLISHED["heart"].prepare(folder, unverified=True)
    return find_dataset("heart", options).load()


def test_patients_of_four_hospitals_have_13_columns_with_missing_values_as_published(folder: Path) -> None:
    table = load(folder)
    assert table.client_names == ("cleveland", "hungary", "switzerland", "long-beach")
    assert table.client_ids is not None
    assert np.bincount(table.client_ids).tolist() == [6, 7, 8, 9]
    assert table.raw is not None
    assert table.raw.schema == SCHEMA
    nan = np.nan
    np.testing.assert_array_equal(
        table.raw.values[[0, 3]],
        [[63, 1, 0, 145, 233, 1, 2, 150, 0, 2.3, 2, 0, 1], [32, 0, 3, 95, nan, nan, 0, 127, 0, -0.7, nan, nan, nan]],
    )
    assert table.y[:6].tolist() == [0, 1, 0, 1, 1, 1], "any degree of disease is class 1"
    assert table.metadata["classes"] == ["absent", "present"]


def test_the_parsed_table_is_that_of_the_files(folder: Path) -> None:
    digest = PUBLISHED["heart"].prepare(folder, unverified=True).digest
    opened = cache.load("heart")
    assert opened is not None
    assert opened.raw is not None
    assert opened.raw.schema == SCHEMA
    assert opened.digest == digest == load(folder).digest


def test_the_complete_cases_leave_out_three_columns_and_then_incomplete_rows(folder: Path) -> None:
    table = load(folder, cases="complete")
    assert table.raw is not None
    assert [column.name for column in table.raw.schema.columns] == [
        *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
    ]
    assert len(table) == 4 * 4 + 0 + 1 + 2 + 3
    assert not np.isnan(table.raw.values).any()
    assert table.digest != load(folder).digest
    assert "of the 740 published rows" in provenance_warning(table)


BAD = {
    "a short line": (lambda text: text.replace(",0\n", "\n", 1), "column 13, which is invalid for the number of fields 13"),
    "a code": (lambda text: text.replace("1.0,145", "9,145", 1), "could not convert string '9' to float64 at row 0, column 3"),
    "a number": (
        lambda text: text.replace("145.0", "1450", 1),
        "could not convert string '1450' to float64 at row 0, column 4",
    ),
    "a text": (lambda text: text.replace("145.0", "high", 1), "could not convert string 'high' to float64 at row 0, column 4"),
    "a label": (lambda text: text.replace(",0\n", ",5\n", 1), "could not convert string '5' to float64 at row 0, column 14"),
    "no line": (lambda text: "", "it is empty"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_file_is_an_error_and_leaves_no_table(kind: str, folder: Path) -> None:
    damage, reason = BAD[kind]
    path = folder / FILES[2][1]
    path.write_text(damage(path.read_text()))
    message = message_of(lambda: load(folder))
    assert message.startswith(f"{path} is damaged or has another format (")
    assert reason in message
    assert cache.load("heart") is None


def test_hospitals_are_clients_and_missing_values_are_filled_by_default(folder: Path, command: Command) -> None:
    assert command("data", "get", "heart", "--from", folder, "--unverified").code == 0
    result = command("run", "--data", "heart", "--method", "fedavg", "--rounds", 1, "--out", "run")
    assert result.code == 0, result.err
    assert "Preprocessing: before round 0 each client sends statistics of 13 of 13 columns, at most 296 bytes" in result.out
    assert toml.read(Path("run/config.toml"))["data"] == {
        "name": "heart", "scale": "federated", "missing": "mean", "cases": "all"
    }  # fmt: skip
    assert {path.name for path in Path("run/models").iterdir()} == {
        f"client-{name}.safetensors" for name in ("cleveland", "hungary", "switzerland", "long-beach")
    }
    loaded = gpfl.load("run")
    assert loaded.federation.table.raw is not None
    assert loaded.clients[0].predict(loaded.federation.table.raw).shape == (30,)


def test_a_manifest_records_the_cases(folder: Path, tmp_path: Path) -> None:
    load(folder)
    federation = gpfl.federate("heart", cases="complete", scale="local", test_fraction=0.5)
    federation.save(tmp_path / "federation.toml")
    loaded = gpfl.Federation.load(tmp_path / "federation.toml")
    assert np.array_equal(loaded.table.x, federation.table.x)
    assert loaded.preprocessing == federation.preprocessing


@pytest.mark.parametrize("missing", ["median", "most_frequent"])
def test_declared_ranges_allow_medians(folder: Path, missing: str) -> None:
    load(folder)
    assert gpfl.federate("heart", missing=missing).table.x.isfinite().all()


def test_missing_values_are_an_error_if_chosen(folder: Path) -> None:
    load(folder)
    assert message_of(lambda: gpfl.federate("heart", missing="error")) == (
        "column 'chol' has 8 missing values, and missing values are not filled: fill in the data, or train with --missing mean"
    )
