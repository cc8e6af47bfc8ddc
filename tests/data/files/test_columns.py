"""One file of rows: clients, labels and columns."""

from __future__ import annotations

import codecs
import gzip
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from user_files import (
    AGES,
    TEST,
    TRAIN,
    VALIDATION,
    VISITS,
    client_names_of,
    close,
    column_names,
    error_of,
    file_metadata,
    inputs,
    lines,
    load,
    message_of,
    missing,
    missing_role,
    scaled,
    splits_of,
    write,
    write_image,
)

import gpfl
from gpfl.data import FileDataset
from gpfl.data.columns import ColumnSchema, Schema
from gpfl.data.files.layout import InputFile
from gpfl.data.files.reader import read_table

# One file.


def test_a_csv_has_its_clients_in_a_column(tmp_path: Path) -> None:
    table = load(write(tmp_path / "visits.csv", lines(*VISITS)), client="hospital", label="outcome")
    assert close(inputs(table), [[age, *sex] for age, sex in zip(scaled(AGES), [(1, 0), (0, 1)] * 3, strict=True)])
    assert table.y.tolist() == [0, 2, 1, 0, 0, 2]
    assert (table.classes, table.name, table.input_spec.kind, table.shape) == (3, "visits.csv", "floats", (2,))
    assert client_names_of(table) == ["north", "south"] * 3
    assert table.client_names == ("north", "south")
    assert table.splits is None
    assert table.metadata == {
        "classes": ["home", "icu", "ward"],
        **file_metadata("outcome", client="hospital", scale="federated"),
    }
    assert table.raw is not None
    assert table.raw.schema == Schema((ColumnSchema("age"), ColumnSchema("sex", "categorical", ("f", "m"))))
    assert table.raw.values.tolist() == [[age, k % 2] for k, age in enumerate(AGES)], "not encoded yet"
    assert table.description == (
        "visits.csv: 6 rows; 2 clients by 'hospital' with 3 rows; random train and test split.\n"
        "3 classes of 'outcome': home, icu, ward. Inputs: 1 numeric column (age), scaled to mean 0 and std 1; "
        "1 categorical column, one-hot: sex (f, m)."
    )
    assert isinstance(table.source, FileDataset)


@pytest.mark.parametrize("label", ["label", "Label", "y", "target", "class"])
def test_usual_names_of_label_and_client_columns_are_found(label: str, tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", lines(("client", "x1", label), ("b", 1, "u"), ("a", 2, "v"), ("b", 3, "u"))))
    assert client_names_of(table) == ["b", "a", "b"]
    assert table.y.tolist() == [0, 1, 0]
    assert close(inputs(table), [[v] for v in scaled([1, 2, 3])])


def test_a_csv_without_clients_is_divided_by_a_partition(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "label"), *((k, k % 2) for k in range(40))))
    table = load(path)
    assert table.client_ids is None
    assert "40 rows; no client column; random" in table.description
    federation = gpfl.federate(path, partition="dirichlet", clients=4, beta=100.0)
    assert len(federation) == 4
    assert sorted(np.concatenate([[*s.train, *s.test] for s in federation.shards])) == list(range(40))
    question = "data '{}.csv' does not name the client of each sample: "
    at_random = "or divide the rows at random with --partition dirichlet"
    message = message_of(lambda: gpfl.federate(path))
    assert message == f"{question.format('a')}name the column with --client, {at_random}"
    assert message_of(lambda: gpfl.federate(path, partition="natural")) == message
    rows = [(k / 7, "fm"[k % 2], f"site {k % 4}", k % 3, k % 2) for k in range(40)]
    path = write(tmp_path / "b.csv", lines(("a", "sex", "hospital", "ward", "label"), *rows))
    assert message_of(lambda: gpfl.federate(path)) == (
        f"{question.format('b')}which column does? candidates: hospital (4 values), sex (2 values), ward (3 values); "
        f"choose one with --client hospital, {at_random}"
    )
    assert message_of(lambda: gpfl.federate(path, group="hospital")).endswith("choose one with --client sex")


@pytest.mark.parametrize("mark", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_csv_may_have_any_delimiter_and_line_ending(mark: str, start: bytes, end: str, tmp_path: Path) -> None:
    text = lines(*VISITS, mark=mark).replace("\n", end)
    table = load(write(tmp_path / "visits.csv", start + text.encode()), client="hospital", label="outcome")
    assert close(inputs(table)[:, :1], [[age] for age in scaled(AGES)])
    assert table.client_names == ("north", "south")


ACCENTS = lines(("kind", "label"), ("Müller", "ä"), ("Lee", "ö"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_csv_may_be_utf_8_or_utf_16(encoding: str, tmp_path: Path) -> None:
    mark = codecs.BOM_UTF16_LE if encoding == "utf-16-le" else codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    table = load(write(tmp_path / "a.csv", mark + ACCENTS.encode(encoding)))
    assert table.metadata["classes"] == ["ä", "ö"]
    assert table.description.count("\n") == 1, "no note"


def test_csv_in_latin_1_is_read_and_reported(tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", ACCENTS.encode("latin-1")))
    assert table.metadata["classes"] == ["ä", "ö"]
    assert "a.csv is not UTF-8 (byte 12) and was read as Latin-1." in table.description.splitlines()


@pytest.mark.parametrize("suffix", ["csv.gz", "CSV.GZ", "tsv.gz"])
def test_compressed_text_is_read_like_the_text(suffix: str, tmp_path: Path) -> None:
    mark = "\t" if suffix.startswith("tsv") else ","
    path = write(
        tmp_path / f"sites/north.{suffix}", gzip.compress(lines(("a", "label"), (1, "x"), ("", "y"), mark=mark).encode())
    )
    write(tmp_path / f"sites/south.{suffix}", gzip.compress(lines(("a", "label"), (3, "y"), mark=mark).encode()))
    assert load(tmp_path / "sites", missing="drop").client_names == ("north", "south")
    assert error_of(path) == missing("a", 1, f"{path.name}, line 3")
    path.write_bytes(path.read_bytes()[:-5])
    assert error_of(path).startswith(f"{path} cannot be decompressed (")


def test_lines_without_any_value_are_not_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,label\n\n1,x\n,\n""," "\n,y\n')
    assert error_of(path) == missing("a", 1, "a.csv, line 6")


def test_line_ends_of_old_macintosh_files_are_read(tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", "a,label\r1,x\r2,y\r"))
    assert table.raw is not None
    assert table.raw.values.tolist() == [[1], [2]]


def test_long_categories_are_shortened_in_the_description(tmp_path: Path) -> None:
    text = "x" * 300_000
    description = load(write(tmp_path / "a.csv", lines(("a", "label"), (text, 0), ("y", 1)))).description
    assert f"one-hot: a ({'x' * 39}…, y)." in description


def test_quotes_inside_a_cell_are_text(tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", 'a,pipe,label\n1,5" pipe,x\n2,6" pipe,y\n3,"a ""b""",x\n'))
    assert table.raw is not None
    assert table.raw.schema.columns[1].categories == ('5" pipe', '6" pipe', 'a "b"')


def test_tsv_is_split_at_tabs_only(tmp_path: Path) -> None:
    rows = [("a, b, c", "label"), (1, "x, y"), (2, "z")]
    table = load(write(tmp_path / "a.TSV", lines(*rows, mark="\t")))
    assert table.metadata["classes"] == ["x, y", "z"]
    assert column_names(table) == ["a, b, c"]


def test_quoted_cells_may_hold_delimiters_quotes_and_line_breaks(tmp_path: Path) -> None:
    text = '"a",kind,label\n1,"x, y","he said ""no"""\n\n2," x, y ","two\nlines"\n3,z,"two\nlines"\n'
    table = load(write(tmp_path / "a.csv", text))
    assert table.metadata["classes"] == ['he said "no"', "two\nlines"]
    assert table.y.tolist() == [0, 1, 1]
    assert close(inputs(table), [[a, *kind] for a, kind in zip(scaled([1, 2, 3]), [(1, 0), (1, 0), (0, 1)], strict=True)])


# Labels.


LABELS: dict[str, tuple[Sequence[object], list[int], list[str]]] = {
    "names by the alphabet": (["b", "c", "a", "b"], [1, 2, 0, 1], ["a", "b", "c"]),
    "whole numbers by size": ([10, 2, 2, 33], [1, 0, 0, 2], ["2", "10", "33"]),
    "from 1 on": ([1, 2, 3, 1], [0, 1, 2, 0], ["1", "2", "3"]),
    "below 0": ([-1, 1, -1, 1], [0, 1, 0, 1], ["-1", "1"]),
    "whole floats": (["1.0", "0.0", "2.0", "1"], [1, 0, 2, 1], ["0", "1", "2"]),
    "with blanks": ([" a", "a ", "b", "b"], [0, 0, 1, 1], ["a", "b"]),
    "truth values": (["True", "False", "True"], [1, 0, 1], ["False", "True"]),
    "percentages": (["10%", "5%", "10%"], [0, 1, 0], ["10%", "5%"]),
    "dates": (["2023-01-10", "2022-01-10", "2023-01-10"], [1, 0, 1], ["2022-01-10", "2023-01-10"]),
    "numbers and names": ([1, "x", 10, 1], [0, 2, 1, 0], ["1", "10", "x"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_classes_are_in_numeric_or_alphabetic_order(kind: str, tmp_path: Path) -> None:
    labels, numbers, names = LABELS[kind]
    table = load(write(tmp_path / "a.csv", lines(("a", "label"), *enumerate(labels))))
    assert table.y.tolist() == numbers
    assert table.metadata["classes"] == names
    assert table.classes == len(names)


# Columns.


def test_a_split_column_divides_rows_and_only_training_rows_set_the_scale(tmp_path: Path) -> None:
    ages = [1.0, 2.0, 6.0, 100.0, -50.0, 3.0]
    splits = ["train", "Training", "train", "test", "val", "train"]
    rows = [(age, splits[k], k % 2, "n") for k, age in enumerate(ages)]
    table = load(write(tmp_path / "a.csv", lines(("age", "fold", "label", "client"), *rows)), split_column="fold")
    assert splits_of(table) == [TRAIN, TRAIN, TRAIN, TEST, VALIDATION, TRAIN]
    assert close(inputs(table), [[v] for v in scaled(ages, over=[1.0, 2.0, 6.0, 3.0])])
    assert "train and test from the files" in table.description
    (shard,) = gpfl.federate(table, partition="natural").shards
    assert (shard.train.tolist(), shard.validation.tolist(), shard.test.tolist()) == ([0, 1, 2, 5], [4], [3])


VISITS_OF_PATIENTS = [(k, f"p{k // 3}", k % 2, "n" if k < 30 else "s") for k in range(60)]
PATIENTS = ("age", "patient", "label", "client")


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_groups_are_never_divided_and_their_column_is_not_an_input(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        write(path, lines(PATIENTS, *VISITS_OF_PATIENTS))
    else:
        age, patient, label, client = (np.array(column) for column in zip(*VISITS_OF_PATIENTS, strict=True))
        np.savez(path, x=np.stack([age, age], axis=1).astype(np.float32), patient=patient, label=label, client=client)
    table = load(path, group="patient")
    assert table.group_ids is not None
    assert len({(k // 3, number) for k, number in enumerate(table.group_ids.tolist())}) == 20
    assert table.shape == ((1,) if suffix == "csv" else (2,))
    assert table.metadata["group"] == "patient"
    assert "random train and test split, grouped by 'patient'." in table.description
    for shard in gpfl.federate(table, partition="natural").shards:
        assert not set(shard.train // 3) & set(shard.test // 3)
        assert len(shard.test) in (6, 9)


def test_the_group_column_must_exist_and_have_no_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(PATIENTS, *VISITS_OF_PATIENTS))
    assert error_of(path, group="patients") == "data.group is 'patients', which is not a column; did you mean 'patient'?"
    assert "named by both --client and --group" in error_of(path, group="client", client="client")
    holes = [
        (age, "" if k == 4 else patient, label, client) for k, (age, patient, label, client) in enumerate(VISITS_OF_PATIENTS)
    ]
    gaps = write(tmp_path / "b.csv", lines(PATIENTS, *holes))
    assert "column 'patient' has 1 missing value, in" in error_of(gaps, group="patient")
    assert len(load(gaps, group="patient", missing_labels="drop")) == 59
    alone = write(tmp_path / "d.csv", lines(PATIENTS[:3], *(row[:3] for row in VISITS_OF_PATIENTS)))
    with pytest.raises(
        gpfl.GpflError, match=r"partition 'dirichlet' assigns single samples: name the column of clients with --client"
    ):
        gpfl.federate(alone, group="patient", partition="dirichlet", clients=2)
    rows = [(*row, "train" if k % 4 else "test") for k, row in enumerate(VISITS_OF_PATIENTS)]
    parted = write(tmp_path / "c.csv", lines((*PATIENTS, "part"), *rows))
    with pytest.raises(gpfl.GpflError, match=r"client n has samples of one group in train and in test, such as samples"):
        gpfl.federate(parted, group="patient", partition="natural")


def test_groups_at_several_clients_and_similar_names_are_reported(tmp_path: Path) -> None:
    rows = [(k, ["p", "P", "q", "r"][k % 4], k % 3 % 2, "n" if k < 30 else "s") for k in range(60)]
    description = load(write(tmp_path / "a.csv", lines(PATIENTS, *rows)), group="patient").description
    assert "4 values of 'patient' at several clients: the rows of each client are a group." in description
    assert "The values of 'patient' 'P' and 'p' differ only in case: are they the same?" in description


@pytest.mark.parametrize("bad", [np.array(["a"] * 7), np.array("a"), np.zeros((60, 2))])
@pytest.mark.parametrize("flag", ["client", "group"])
def test_an_array_without_a_value_per_row_is_an_error(flag: str, bad: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 2), dtype=np.float32), y=np.arange(60) % 2, who=bad)
    assert "has no array 'who' with one value for each of its 60 rows" in error_of(tmp_path / "a.npz", **{flag: "who"})


def test_a_column_that_is_constant_in_training_is_not_scaled(tmp_path: Path) -> None:
    rows = [(0.1, 0.7, k % 2, "train") for k in range(7)] + [(0.2, 0.7, 1, "test")]
    table = load(write(tmp_path / "a.csv", lines(("a", "b", "label", "part"), *rows)))
    assert close(inputs(table), [[0.0, 0.0]] * 7 + [[0.1, 0.0]])


def test_scale_none_does_not_scale_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "visits.csv", lines(*VISITS))
    table = load(path, label="outcome", client="hospital", ignore=["sex"], scale="none")
    assert close(inputs(table), [[age] for age in AGES])
    assert "1 numeric column (age), not scaled." in table.description


def test_ignored_columns_are_not_inputs(tmp_path: Path) -> None:
    rows = [(k, "nan" if k else "", f"text {k}", k * k, k % 2) for k in range(60)]
    path = write(tmp_path / "a.csv", lines(("row", "empty", "comment", "2024", "label"), *rows))
    table = load(path, ignore=["row", "empty", "comment"])
    assert close(inputs(table), [[v] for v in scaled([float(k * k) for k in range(60)])])
    assert load(path, ignore=["empty", "comment", "2024"]).shape == (1,)


def test_an_ignored_column_takes_no_memory(tmp_path: Path) -> None:
    rows = [(k, "x" * (100_000 if k == 7 else 1), k % 2) for k in range(40)]
    path = write(tmp_path / "a.csv", lines(("a", "comment", "label"), *rows))
    assert len(read_table(InputFile(path)).columns["comment"]) == 40
    assert len(read_table(InputFile(path), ["comment"]).columns["comment"]) == 0
    assert close(inputs(load(path, ignore=["comment"])), [[v] for v in scaled(range(40))])


def test_an_ignored_column_has_no_role(tmp_path: Path) -> None:
    rows = [(k, "ns"[k % 2], "train" if k else "test", k % 2, k % 3) for k in range(6)]
    path = write(tmp_path / "a.csv", lines(("a", "client", "part", "label", "y"), *rows))
    table = load(path, ignore=["client", "part", "label"])
    assert (table.client_ids, table.splits, table.shape) == (None, None, (1,))
    assert table.y.tolist() == [0, 1, 2] * 2


def test_a_chosen_column_is_not_found_for_another_role(tmp_path: Path) -> None:
    rows = [(k, "ns"[k % 2], "train" if k else "test", k % 3) for k in range(6)]
    path = write(tmp_path / "a.csv", lines(("a", "client", "split", "label"), *rows))
    assert load(path, label="client").client_ids is None
    assert load(path, label="split").splits is None
    assert error_of(path, client="label") == (
        "no label column found: which column holds it? candidates: split (2 values), client (2 values); "
        "choose one with --label split"
    )


def test_a_column_that_some_files_lack_may_be_ignored(tmp_path: Path) -> None:
    write(tmp_path / "d/n.csv", lines(("a", "note", "label"), (1, "x", 0), (2, "y", 1)))
    write(tmp_path / "d/s.csv", lines(("a", "label"), (3, 0)))
    assert close(inputs(load(tmp_path / "d", ignore=["note"])), [[v] for v in scaled([1, 2, 3])])


@pytest.mark.parametrize(
    ("clients", "first", "second"),
    [(["10", "2", "2", "10"], "2", "10"), (["b", "a", "a", "b"], "a", "b"), (["s2", "s10", "s10", "s2"], "s10", "s2")],
)
def test_clients_are_in_numeric_or_alphabetic_order(clients: list[str], first: str, second: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "client", "label"), *((k, who, k % 2) for k, who in enumerate(clients))))
    table = load(path)
    assert table.client_names == (first, second)
    assert client_names_of(table) == clients
    federation = gpfl.federate(path, test_fraction=0.5)
    assert [shard.name for shard in federation.shards] == [first, second]


def test_a_split_column_with_other_values_is_an_input_unless_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("part", "label"), ("leg", 0), ("arm", 1), ("leg", 1)))
    table = load(path)
    assert table.splits is None
    assert close(inputs(table), [[0, 1], [1, 0], [0, 1]])
    assert (
        error_of(path, split_column="part")
        == "column 'part' holds 'leg' in a.csv, line 2; it must hold train, validation or test"
    )


def test_a_split_column_of_training_rows_only_divides_nothing_and_is_not_an_input(tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", lines(("a", "split", "label"), (1, "train", 0), (2, "train", 1))))
    assert table.splits is None
    assert table.shape == (1,)


def test_a_split_column_is_an_input_if_folders_name_the_splits(tmp_path: Path) -> None:
    for part, rows in (("train", [(1, "leg", 0), (2, "arm", 1)]), ("test", [(3, "arm", 1)])):
        write(tmp_path / "d" / f"{part}.csv", lines(("a", "part", "label"), *rows))
    assert column_names(load(tmp_path / "d")) == ["a", "part"]


# Parquet.


def test_parquet_is_read_like_a_csv_with_the_same_columns(tmp_path: Path) -> None:
    columns = {name: [row[k] for row in VISITS[1:]] for k, name in enumerate(VISITS[0])}
    frame = pl.DataFrame({"stay": pl.Series([1, 2, 3, 4, 5, 9], dtype=pl.Int16), "kept": [True, False] * 3, **columns})
    frame.with_columns(pl.col("hospital").cast(pl.Categorical)).write_parquet(tmp_path / "visits.parquet")
    table = load(tmp_path / "visits.parquet", client="hospital", label="outcome")
    one_hot = [(0, 1), (1, 0)] * 3, [(1, 0), (0, 1)] * 3  # False before True, f before m
    rows = zip(scaled([1, 2, 3, 4, 5, 9]), one_hot[0], scaled(AGES), one_hot[1], strict=True)
    assert close(inputs(table), [[stay, *kept, age, *sex] for stay, kept, age, sex in rows])
    assert client_names_of(table) == ["north", "south"] * 3
    assert table.y.tolist() == [0, 2, 1, 0, 0, 2]


def test_the_index_of_pandas_is_not_an_input(tmp_path: Path) -> None:
    columns = {"a": [5, 6, 9], "label": ["x", "y", "x"], "__index_level_0__": [0, 1, 2], "__index_level_12__": ["u", "v", "w"]}
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    table = load(tmp_path / "a.parquet")
    assert close(inputs(table), [[v] for v in scaled([5, 6, 9])])
    assert column_names(table) == ["a"]


def test_an_ignored_parquet_column_may_have_any_type(tmp_path: Path) -> None:
    columns = {"a": [5, 6, 9], "tags": [[1], [], [2, 3]], "raw": [b"1", b"2", b"3"], "label": ["x", "y", "x"]}
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    assert close(inputs(load(tmp_path / "a.parquet", ignore=["tags", "raw"])), [[v] for v in scaled([5, 6, 9])])


def test_bad_parquet_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.DataFrame({"a": [1, None, 3], "label": ["x", "y", "x"]}).write_parquet(path)
    assert error_of(path) == missing("a", 1, "a.parquet, row 2")
    pl.DataFrame({"a": ["u", None, "v"], "label": ["x", "y", "x"]}).write_parquet(path)
    assert error_of(path) == missing("a", 1, "a.parquet, row 2")
    pl.DataFrame({"a": [1, 2], "label": ["x", None]}).write_parquet(path)
    assert error_of(path) == missing_role("label", 1, "a.parquet, row 2")
    pl.DataFrame({"a": [[1], [2, 3]], "b": [b"1", b"2"], "label": ["x", "y"]}).write_parquet(path)
    assert error_of(path) == (
        f"{path} has column 'a' of type List(Int64), column 'b' of type Binary; columns must be numbers or text: "
        "leave out with --ignore a,b"
    )
    pl.DataFrame({"a": pl.Series([], dtype=pl.Int64), "label": pl.Series([], dtype=pl.String)}).write_parquet(path)
    assert error_of(path) == f"{path} has no rows"
    path.write_bytes(path.read_bytes()[:-9])
    assert error_of(path).startswith(f"{path} cannot be read as Parquet (")


# Without polars.


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.parquet"])
def test_tables_without_polars_name_the_package_to_install(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    path = write(tmp_path / name, b"PAR1")
    assert error_of(path) == f"{path} needs polars to be read: pip install polars"


def test_arrays_and_images_need_no_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)), y=np.array([0, 1]))
    assert len(load(tmp_path / "a.npz")) == 2
    for kind in ("cat", "dog"):
        write_image(tmp_path / "d/north" / kind / "1.png", 0)
    assert len(load(tmp_path / "d")) == 2


def test_importing_gpfl_does_not_import_polars() -> None:
    code = "import sys, gpfl, gpfl.cli.main; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
