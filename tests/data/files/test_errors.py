"""Files, folders and options that are errors, each in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import IterableDataset
from user_files import EXPECTED, GOOD_ROWS, X, Y, error_of, lines, message_of, missing, missing_role, write

import gpfl
from gpfl.data import find_dataset


def endless(number: str) -> str:
    return (
        f"column 'a' holds {number} in bad.csv, line 3, which is too large for a float32: correct the file, "
        "or leave the column out with --ignore a"
    )


REGRESSION = (
    "labels are whole numbers or names of classes, and regression is not offered yet: make classes of the numbers, such as "
    "'label above 10' with yes and no, or choose another column with --label"
)
BAD_CSVS: dict[str, tuple[str | bytes, dict[str, object], str]] = {
    "empty": ("", {}, "{path} is empty"),
    "a blank first line": ("\na,label\n1,0\n", {}, "{path} is empty"),
    "a first line alone": ("a,label\n", {}, "{path} has no rows below its first line"),
    "no first line": ("1,2,0\n3,4,1\n", {}, "{path} begins with numbers (1, 2, 0 …); its first line must name the columns"),
    "a column twice": ("a,a,label\n1,2,0\n", {}, "{path} has two columns named 'a'"),
    "a column without a name": (
        "a,,label\n1,2,0\n",
        {},
        "{path}: column 2 of 3 has no name: name it in the first line",
    ),
    "a short line": ("a,b,label\n1,2,0\n\n3,1\n", {}, "{path}, line 4, has 2 cells when split at commas; the first line has 3"),
    "a long line": ("a,b,label\n1,2,0,5\n", {}, "{path}, line 2, has 4 cells when split at commas; the first line has 3"),
    "an open quote": ('a,label\n1,"0\n2,1\n', {}, "{path} cannot be read as CSV (unexpected end of data)"),
    "a missing number": ("a,label\n1,0\n,1\n2,1\nNA,0\n", {}, missing("a", 2, "bad.csv, line 3")),
    "a NaN": ("a,label\n1,0\n2,0\nnan,1\n", {}, missing("a", 1, "bad.csv, line 4")),
    "an infinity": ("a,label\n1,0\n-inf,1\n", {}, endless("-inf")),
    "a number that no float holds": ("a,label\n1,0\n1e300,1\n", {}, endless("1e+300")),
    "a missing text": ("a,label\nu,0\n ? ,1\nv,1\n", {}, missing("a", 1, "bad.csv, line 3")),
    "a missing label": ("a,label\n1,x\n2,\n3,y\n", {}, missing_role("label", 1, "bad.csv, line 3")),
    "a missing label among numbers": (
        "a,label\n1,0\n2,n/a\n3,1\n",
        {},
        missing_role("label", 1, "bad.csv, line 3"),
    ),
    "a missing client": (
        "a,client,label\n1,n,0\n2,,1\n",
        {},
        missing_role("client", 1, "bad.csv, line 3"),
    ),
    "one class": ("a,label\n1,x\n2,x\n", {}, "every row has the class 'x'; there must be at least two classes"),
    "a label with a fraction": (
        "a,label\n1,0\n2,36.6\n",
        {},
        f"'label' holds 36.6; {REGRESSION}",
    ),
    "a label of real numbers with a question mark": (
        lines(("a", "label"), *((k, k % 5 / 2 if k else "?") for k in range(30))),
        {},
        f"'label' holds 0.5; {REGRESSION}",
    ),
    "a label without end": (
        "a,label\n1,0\n2,inf\n",
        {},
        f"'label' holds inf; {REGRESSION}",
    ),
    "a label for nearly every row": (
        lines(("a", "label"), *((k, k) for k in range(30))),
        {},
        "'label' holds 30 different values in 30 rows, too many for classes; "
        "regression is not offered yet: group the values into classes, or choose another column with --label",
    ),
    "a thousand classes and one": (
        lines(("a", "label"), *((k, k % 1001) for k in range(3003))),
        {},
        "'label' holds 1,001 different values in 3,003 rows, too many for classes; "
        "regression is not offered yet: group the values into classes, or choose another column with --label",
    ),
    "too many categories": (
        lines(("a", "label"), *((f"text {k:02}", k % 2) for k in range(51))),
        {},
        "column 'a' holds 51 different texts, such as 'text 00' (at most 50 can be categories): "
        "leave the column out with --ignore a",
    ),
    "no label": (
        lines(("a", "b"), *((k / 7, k / 3) for k in range(4))),
        {},
        "no label column found: use --label NAME; the columns are a, b",
    ),
    "no label, and a column that rather names clients": (
        lines(("a", "kind", "site"), *((k / 7, "fm"[k % 2], "uvw"[k % 3]) for k in range(6))),
        {},
        "no label column found: which column holds it? candidates: kind (2 values), site (3 values); "
        "choose one with --label kind",
    ),
    "no label, but candidates": (
        lines(("a", "sex", "outcome"), *((k / 7, "fm"[k % 2], "uvw"[k % 3]) for k in range(6))),
        {},
        "no label column found: which column holds it? candidates: outcome (3 values), sex (2 values); "
        "choose one with --label outcome",
    ),
    "another label": (
        lines(("a", "outcome"), *GOOD_ROWS),
        {"label": "outcom"},
        "data.label is 'outcom', which is not a column; did you mean 'outcome'?",
    ),
    "another client": (
        lines(("a", "hospital", "label"), (1, "n", 0), (2, "s", 1)),
        {"client": "hospitl"},
        "data.client is 'hospitl', which is not a column; did you mean 'hospital'?",
    ),
    "another part": (
        lines(("a", "label"), *GOOD_ROWS),
        {"split_column": "zzz"},
        "data.split_column is 'zzz', which is not a column; known: a, label",
    ),
    "another column to ignore": (
        lines(("a", "row_id", "label"), (1, 1, 0), (2, 2, 1)),
        {"ignore": ["row"]},
        "data.ignore names column 'row'; did you mean 'row_id'?",
    ),
    "one column for label and client": (
        lines(("a", "site"), *GOOD_ROWS),
        {"label": "site", "client": "site"},
        "column 'site' is named by both --label and --client: remove it from one",
    ),
    "one column for client and part": (
        lines(("a", "site", "label"), (1, "n", 0), (2, "s", 1)),
        {"split_column": "site", "client": "site"},
        "column 'site' is named by both --client and --split-column: remove it from one",
    ),
    "a label to ignore": (
        lines(("a", "label"), *GOOD_ROWS),
        {"label": "label", "ignore": ["a", "label"]},
        "column 'label' is named by both --label and --ignore: remove it from one",
    ),
    "every column ignored": (
        lines(("a", "label"), *GOOD_ROWS),
        {"ignore": ["a", "label"]},
        "no label column found: use --label NAME; the columns are none",
    ),
    "no inputs": (lines(("client", "label"), *GOOD_ROWS), {}, "{path} has no column of inputs besides client, label"),
    "all ignored": (lines(("a", "label"), *GOOD_ROWS), {"ignore": ["a"]}, "{path} has no column of inputs besides a, label"),
    "test rows alone": (
        "a,label,part\n1,0,test\n2,1,val\n",
        {},
        "there are test and validation rows, but none for training",
    ),
    "another scale": (
        lines(("a", "label"), *GOOD_ROWS),
        {"scale": "none!"},
        "data.scale is 'none!'; it must be one of federated, local, none; did you mean 'none'?",
    ),
    "an image size below 0": (
        lines(("a", "label"), *GOOD_ROWS),
        {"image_size": -1},
        "data.image_size is -1; it must be at least 0 and at most 1024",
    ),
    "an unknown option": (
        lines(("a", "label"), *GOOD_ROWS),
        {"labl": "a"},
        "unknown key 'data.labl'; did you mean 'label'?",
    ),
    "HAR's option": (
        lines(("a", "label"), *GOOD_ROWS),
        {"layout": "channels"},
        "data.layout belongs to data 'har', not to 'bad.csv': leave it out",
    ),
}


@pytest.mark.parametrize("kind", BAD_CSVS)
def test_bad_csv_files_are_errors(kind: str, tmp_path: Path) -> None:
    text, settings, expected = BAD_CSVS[kind]
    path = write(tmp_path / "bad.csv", text)
    assert error_of(path, **settings) == expected.replace("{path}", str(path))


def test_files_with_different_columns_are_errors(tmp_path: Path) -> None:
    d = tmp_path / "d"
    write(d / "a.csv", lines(("a", "b", "label"), (1, 2, 0), (3, 4, 1)))
    write(d / "b.csv", lines(("a", "label"), (1, 0), (3, 1)))
    same = "all files must have the same columns"
    assert error_of(d) == f"column 'b' is in {d}/a.csv, but not in {d}/b.csv; {same}"
    write(d / "b.csv", lines(("a", "b", "c", "label"), (1, 2, 3, 0)))
    assert error_of(d) == f"column 'c' is in {d}/b.csv, but not in {d}/a.csv; {same}"
    write(d / "b.csv", lines(("a", "b", "label"), (1, 2, 0), ("", 2, 0)))
    assert error_of(d) == missing("a", 1, "b.csv, line 3"), "lines are counted in their own file"
    e = tmp_path / "e"
    e.mkdir()
    np.savez(e / "1.npz", x=X, y=Y)
    np.savez(e / "2.npz", x=X[:, :1], y=Y)
    assert error_of(e) == f"{e}/2.npz has rows of shape (1,) (float64), 1.npz of (2,) (float64); they must agree"
    np.savez(e / "2.npz", x=X.astype(np.float32), y=Y)
    assert error_of(e) == f"{e}/2.npz has rows of shape (2,) (float32), 1.npz of (2,) (float64); they must agree"
    np.savez(e / "2.npz", x=X, z=Y)
    assert error_of(e) == f"{e}/2.npz has no array 'y', which 1.npz has; it has x, z"


def test_folders_without_a_known_layout_are_errors(tmp_path: Path) -> None:
    d = tmp_path / "d"
    d.mkdir()
    nothing = f"{d} holds no file that can be read: {EXPECTED}"
    assert error_of(d) == nothing
    write(d / "notes.txt", "x")
    write(d / "photo.png", "x")
    assert error_of(d) == nothing
    write(d / "a.csv", lines(("a", "label"), *GOOD_ROWS))
    (d / "north").mkdir()
    assert error_of(d) == f"{d} holds both files (a.csv) and folders (north): {EXPECTED}"
    (d / "a.csv").unlink()
    assert error_of(d) == f"{d}/north holds no file that can be read: {EXPECTED}"
    (d / "north/east").mkdir()
    assert error_of(d) == f"{d}/north, of client north, holds folders without images, such as east: {EXPECTED}"


def test_inconsistent_splits_are_errors(tmp_path: Path) -> None:
    text = lines(("a", "label"), *GOOD_ROWS)
    d = tmp_path / "d"
    for name in ("a/train.csv", "a/test.csv", "b/all.csv"):
        write(d / name, text)
    assert error_of(d) == f"{d}/a/test.csv is a test split, but {d}/b/all.csv is not divided: divide all clients or none"
    for name in ("train/train.csv", "train/test.csv", "test/test.csv"):
        write(tmp_path / "e" / name, text)
    assert error_of(tmp_path / "e") == f"{tmp_path}/e/test is a test split, but contains splits (test.csv): {EXPECTED}"
    for name in ("train/a.csv", "test/a.csv", "north/a.csv"):
        write(tmp_path / "f" / name, text)
    assert error_of(tmp_path / "f") == f"{tmp_path}/f holds north next to test and train: {EXPECTED}"
    for name in ("test/a.csv", "val/a.csv"):
        write(tmp_path / "g" / name, text)
    assert error_of(tmp_path / "g") == "there are test and validation rows, but none for training"


def test_missing_data_are_errors(tmp_path: Path) -> None:
    path = "or give the path of a file or folder"
    names = "agnews, amazon, cifar100, digits, fmnist, har, heart, tiny"
    assert message_of(lambda: find_dataset("qqq", {})) == f"unknown data 'qqq'; known: {names} ({path})"
    assert message_of(lambda: find_dataset("digit", {})) == f"unknown data 'digit'; did you mean 'digits'? ({path})"
    assert error_of(tmp_path / "a.csv") == f"there is no file or folder {tmp_path}/a.csv"
    assert message_of(lambda: find_dataset("./nope", {})) == "there is no file or folder ./nope"
    file = write(tmp_path / "a.xlsx", "x")
    assert error_of(file) == f"cannot read {file}: give a .csv, .tsv, .csv.gz, .tsv.gz, .parquet, .npz file or a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a")
    path.chmod(0)
    assert "Permission denied" in error_of(path)


def test_options_for_other_kinds_of_files_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "label"), *GOOD_ROWS))
    assert error_of(path, image_size=64) == "data.image_size is 64, but a.csv holds rows, not images: leave it out"
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    assert error_of(tmp_path / "a.npz", scale="none") == (
        "data.scale is 'none', but the array 'x' of a.npz is never scaled: leave it out"
    )


def test_an_array_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    monkeypatch.setattr("gpfl.data.files.reader.MAX_BYTES", 160)
    assert error_of(tmp_path / "a.npz") == (
        f"x.npy in {tmp_path}/a.npz would take 192 bytes; an array may take 160: divide it among several files"
    )


def test_an_error_lists_choices_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "label"), *GOOD_ROWS))
    assert error_of(path, missing="qqq") == "data.missing is 'qqq'; it must be one of error, mean, median, most_frequent, drop"


def test_options_for_files_are_errors_with_named_datasets() -> None:
    message = message_of(lambda: find_dataset("digits", {"label": "y"}))
    assert message == "data.label belongs to your own files, not to 'digits': leave it out"


def test_a_client_without_test_rows_is_an_error_and_min_samples_leaves_it_out(tmp_path: Path) -> None:
    rows = [(k, "big", k % 2) for k in range(12)] + [(5, "small", 1)]
    path = write(tmp_path / "a.csv", lines(("a", "client", "label"), *rows))
    assert message_of(lambda: gpfl.federate(path)) == (
        "client small has no training samples (0 training, 1 test): --min-samples 2 leaves out 1 of 2 clients; "
        "is 'client' the column of clients?"
    )
    federation = gpfl.federate(path, min_samples=2)
    assert [shard.name for shard in federation.shards] == ["big"]
    assert sorted([*federation.shards[0].train, *federation.shards[0].test]) == list(range(12))
    assert message_of(lambda: gpfl.federate(path, min_samples=13)) == (
        "partition.min_samples is 13; the largest client of data 'a.csv' has 12 samples: lower --min-samples"
    )
    assert federation.data_warnings() == ["1 client with fewer than 2 samples, left out: small."]
    assert gpfl.federate(path, min_samples=2, clients=1).data_warnings() == federation.data_warnings()
    for client, parts in (("a", ("train", "test")), ("b", ("train",))):
        for part in parts:
            write(tmp_path / "d" / client / f"{part}.csv", lines(("a", "label"), *GOOD_ROWS))
    assert message_of(lambda: gpfl.federate(tmp_path / "d")).startswith("client b has no test samples (4 training, 0 test): ")


def test_one_error_counts_all_clients_without_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "client", "label"), *((k % 5, k, k % 2) for k in range(9))))
    assert message_of(lambda: gpfl.federate(path)) == (
        "client 0 has no training samples (0 training, 1 test), and 8 other clients of 9 lack some as well: "
        "give clients more samples; is 'client' the column of clients?"
    )
    assert message_of(lambda: gpfl.federate([(X[:1], Y[:1]), (X, Y)])) == (
        "client 0 has no training samples (0 training, 1 test): give every client both, or leave such clients out"
    ), "no flag: these clients were brought in Python"


def test_a_misspelt_option_is_suggested_in_python(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "label"), *GOOD_ROWS))
    assert message_of(lambda: gpfl.federate(path, lable="a")) == "unknown setting 'lable'; did you mean 'label'?"
    assert message_of(lambda: gpfl.federate(path, cliens=3)).endswith("did you mean 'clients'?")


def test_a_torch_dataset_without_a_length_is_an_error() -> None:
    class Stream(IterableDataset[tuple[np.ndarray, int]]):
        def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
            yield from zip(X, Y, strict=True)

    assert message_of(lambda: gpfl.federate([Stream()])) == (
        "the dataset of client 0 has no length: give one with len() and items by index, or arrays (x, y)"
    )
