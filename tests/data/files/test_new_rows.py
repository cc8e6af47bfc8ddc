"""New rows in the columns of a known schema."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from user_files import lines, message_of, write, write_image

from gpfl.data.columns import UNKNOWN, ColumnSchema, Schema
from gpfl.data.files import NewData, read_new_rows

SCHEMA = Schema(
    (ColumnSchema("age"), ColumnSchema("sex", "categorical", ("f", "m")), ColumnSchema("admitted", "date")),
)
ROWS = [("sex", "note", "admitted", "age"), ("m", "x", "2023-01-10", 61.5), ("", "y", "", ""), ("f", "z", "1970-01-02", 40)]
VALUES = [[61.5, 1, 19367], [np.nan, np.nan, np.nan], [40, 0, 1]]


def same(data: NewData, values: object = VALUES) -> bool:
    return np.array_equal(read_new_rows(data, SCHEMA).columns.values, np.array(values), equal_nan=True)


class Frame:
    """A data frame that is no mapping, as that of pandas."""

    def __init__(self, columns: dict[str, object]) -> None:
        self._columns, self.columns = columns, np.array(list(columns))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._columns[name])


def test_columns_are_found_by_name_in_any_order_and_others_ignored(tmp_path: Path) -> None:
    assert same(write(tmp_path / "a.csv", lines(*ROWS)))
    assert same(str(write(tmp_path / "a.tsv", lines(*ROWS, mark="\t"))))
    columns = {name: [row[k] for row in ROWS[1:]] for k, name in enumerate(ROWS[0])}
    assert same(columns)  # type: ignore[arg-type]
    ages, days = [61.5, None, 40.0], [datetime.date(2023, 1, 10), None, datetime.date(1970, 1, 2)]
    frame = pl.DataFrame({"age": ages, "sex": ["m", None, "f"], "admitted": days})
    assert same(frame)
    frame.write_parquet(tmp_path / "a.parquet")
    assert same(tmp_path / "a.parquet")
    times = np.array(["2023-01-10", "NaT", "1970-01-02"], "M8[ns]")
    assert same(Frame({"age": [61.5, np.nan, 40], "sex": np.array(["m", np.nan, "f"], object), "admitted": times}))
    assert read_new_rows(frame, SCHEMA).columns.schema is SCHEMA


def test_a_row_may_be_alone_and_numbers_may_have_marks(tmp_path: Path) -> None:
    assert same({"age": ["1 234,5"], "sex": ["f"], "admitted": ["10.1.2023"]}, [[1234.5, 0, 19367]])
    assert same({"age": ["50%"], "sex": ["f"], "admitted": [3]}, [[0.5, 0, 3]])


def test_categories_that_are_numbers_keep_their_text(tmp_path: Path) -> None:
    schema = Schema((ColumnSchema("code", "categorical", ("01", "1", "x")),))
    path = write(tmp_path / "a.csv", lines(("code", "label"), ("1", "007"), ("01", "7")))
    new = read_new_rows(path, schema, text=["label"])
    assert new.columns.values[:, 0].tolist() == [1, 0]
    assert new.table.columns["label"].tolist() == ["007", "7"]
    assert read_new_rows({"code": [1, 1]}, schema).columns.values[:, 0].tolist() == [1, 1]


def test_categories_that_are_not_in_the_schema_are_counted(tmp_path: Path) -> None:
    new = read_new_rows({"age": [1, 2, 3, 4], "sex": ["d", "f", "x", "d"], "admitted": [0, 0, 0, 0]}, SCHEMA)
    assert new.columns.values[:, 1].tolist() == [UNKNOWN, 0, UNKNOWN, UNKNOWN]
    assert new.unseen == {"sex": {"d": 2, "x": 1}}


def test_one_column_is_enough(tmp_path: Path) -> None:
    one = write(tmp_path / "one.csv", "age\n41\n42\n")
    assert read_new_rows(one, Schema((ColumnSchema("age"),))).columns.values[:, 0].tolist() == [41, 42]
    other = write(tmp_path / "other.csv", "age^sex\n41^f\n")
    assert "age (did you mean 'age^sex'?)" in message_of(lambda: read_new_rows(other, SCHEMA))


def test_cells_of_another_type_are_errors_or_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(*ROWS[:2], ("f", "", "soon", "old"), ("f", "", "2023-01-11", "9")))
    assert message_of(lambda: read_new_rows(path, SCHEMA)) == (
        "column 'age' has cells that are not numbers in 1 of 3 rows (33 %), first 'old' in a.csv, line 3: "
        "correct the file, read such cells as missing values with --unreadable missing"
    )
    every = {"age": ["old", "new"], "sex": ["f", "f"], "admitted": [0, 0]}
    assert "in 2 of 2 rows (100 %), first 'old'" in message_of(lambda: read_new_rows(every, SCHEMA))
    new = read_new_rows(path, SCHEMA, unreadable="missing")
    assert np.array_equal(new.columns.values, [[61.5, 1, 19367], [np.nan, 0, np.nan], [9, 0, 19368]], equal_nan=True)
    assert new.unreadable == {"age": 1, "admitted": 1}


def test_absent_columns_and_bad_sources_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("Age", "sex", "admitted"), (1, "f", "2023-01-10")))
    assert message_of(lambda: read_new_rows(path, SCHEMA)) == (
        f"{path} lacks 1 column that the model needs: age (did you mean 'Age'?)"
    )
    assert message_of(lambda: read_new_rows({"q": [1]}, SCHEMA)) == (
        "dict lacks 3 columns that the model needs: age, sex, admitted; its columns are q"
    )
    assert message_of(lambda: read_new_rows({"age": 3}, SCHEMA)) == "column 'age' has shape (); give one value per row"
    assert message_of(lambda: read_new_rows({"age": []}, SCHEMA)) == "dict has no rows"
    ragged = {"age": [1, 2], "sex": ["f"], "admitted": [0, 0]}
    assert message_of(lambda: read_new_rows(ragged, SCHEMA)) == "dict has sex of shape (1,); give one value per row"  # type: ignore[arg-type]
    write_image(tmp_path / "images" / "cat" / "1.png", 0)
    assert message_of(lambda: read_new_rows(tmp_path / "images", SCHEMA)) == (
        f"{tmp_path}/images holds images; give rows: a .csv, .tsv, .csv.gz, .tsv.gz, .parquet, .npz file, or a folder with one "
        "per client"
    )
    assert message_of(lambda: read_new_rows(tmp_path / "b.csv", SCHEMA)) == f"there is no file {tmp_path / 'b.csv'}"
    other = write(tmp_path / "a.xlsx", "x")
    assert message_of(lambda: read_new_rows(other, SCHEMA)).startswith(f"cannot read {other}: give a .csv, ")


@pytest.mark.parametrize("name", ["x.npz", "x.csv.gz"])
def test_arrays_and_compressed_text_are_read(name: str, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / name
    if name.endswith("npz"):
        np.savez(path, age=[61.5], sex=np.array(["m"]), admitted=[19367])
    else:
        path.write_bytes(gzip.compress(lines(*ROWS[:2]).encode()))
    assert same(path, [VALUES[0]])
