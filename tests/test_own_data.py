"""A person's own files: every layout that the page names, what becomes of columns and images, and what is refused."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command, Said, content, without_time
from PIL import Image

import gpfl
from gpfl import config, flags, toml
from gpfl.data import Own, Table, find_source
from gpfl.data.own import source as own_source
from gpfl.errors import GpflError
from gpfl.federation import Shard

DRAW = np.random.default_rng(0)
TRAIN, VALIDATION, TEST = 0, 1, 2
EXPECTED = (
    "give a file or sub-folder for each client, or class folders of images; files may be .csv, .tsv, .parquet, .npz, "
    "images .png, .jpg, .jpeg, .bmp, .webp, .ppm, .pgm, .tif, .tiff"
)


def load(path: Path, **settings: object) -> Table:
    return find_source(str(path), settings).load()


def refusal(path: Path, **settings: object) -> str:
    """What is said of bad data: one line."""
    with pytest.raises(GpflError) as problem:
        load(path, **settings)
    assert "\n" not in str(problem.value)
    return str(problem.value)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def lines(*rows: Sequence[object], mark: str = ",") -> str:
    return "".join(mark.join(str(cell) for cell in row) + "\n" for row in rows)


def clients_of(table: Table) -> list[str]:
    """The name of each row's client."""
    assert table.groups is not None
    return [table.group_names[group] for group in table.groups]


def parts_of(table: Table) -> list[int]:
    assert table.parts is not None
    return table.parts.tolist()


def scaled(column: Sequence[float], over: Sequence[float] | None = None) -> list[float]:
    """A column less its mean, by its standard deviation, worked out with sums."""
    seen = list(column if over is None else over)
    mean = sum(seen) / len(seen)
    std = (sum((value - mean) ** 2 for value in seen) / len(seen)) ** 0.5
    return [(value - mean) / std for value in column]


def close(found: torch.Tensor, wanted: Sequence[Sequence[float]]) -> bool:
    return found.dtype == torch.float32 and np.allclose(found.numpy(), np.array(wanted), rtol=1e-6, atol=1e-6)


AGES = [61.5, 48.0, 70.0, 55.5, 39.0, 66.0]
VISITS = [
    ("age", "sex", "hospital", "outcome"),
    (61.5, "f", "north", "home"),
    (48.0, "m", "south", "ward"),
    (70.0, "f", "north", "icu"),
    (55.5, "m", "south", "home"),
    (39.0, "f", "north", "home"),
    (66.0, "m", "south", "ward"),
]


def many(rows: int = 48, clients: int = 3) -> str:
    """A CSV that a few rounds can be trained on."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(rows, 2)).round(3)
    return lines(
        ("a", "b", "site", "kind"),
        *((x[k, 0], x[k, 1], f"s{k % clients}", "high" if x[k].sum() > 0 else "low") for k in range(rows)),
    )


# One file.


def test_one_csv_has_its_clients_from_a_column(tmp_path: Path) -> None:
    table = load(write(tmp_path / "visits.csv", lines(*VISITS)), client="hospital", label="outcome")
    assert close(table.x, [[age, *sex] for age, sex in zip(scaled(AGES), [(1, 0), (0, 1)] * 3, strict=True)])
    assert table.y.tolist() == [0, 2, 1, 0, 0, 2]
    assert (table.classes, table.name, table.form.kind, table.shape) == (3, "visits.csv", "floats", (3,))
    assert clients_of(table) == ["north", "south"] * 3
    assert table.group_names == ("north", "south")
    assert table.parts is None
    mean = sum(AGES) / 6
    assert table.origin == {
        "classes": ["home", "icu", "ward"],
        "columns": [
            {
                "name": "age",
                "mean": pytest.approx(mean),
                "std": pytest.approx((sum((age - mean) ** 2 for age in AGES) / 6) ** 0.5),
            },
            {"name": "sex", "values": ["f", "m"]},
        ],
    }
    assert table.words == (
        "visits.csv: 6 rows; 2 clients by 'hospital' with 3 rows; train and test drawn at random.\n"
        "3 classes of 'outcome': home, icu, ward. Inputs: columns: 1 of numbers (age), scaled to mean 0 and std 1; "
        "1 of categories, one-hot: sex (f, m)."
    )
    assert isinstance(table.source, Own)


@pytest.mark.parametrize("label", ["label", "Label", "y", "target", "class"])
def test_usual_names_of_label_and_client_are_found(label: str, tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", lines(("client", "x1", label), ("b", 1, "u"), ("a", 2, "v"), ("b", 3, "u"))))
    assert clients_of(table) == ["b", "a", "b"]
    assert table.y.tolist() == [0, 1, 0]
    assert close(table.x, [[v] for v in scaled([1, 2, 3])])


def test_csv_without_clients_is_divided_by_a_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "label"), *((k, k % 2) for k in range(40))))
    table = load(path)
    assert table.groups is None
    assert "no clients are told, so rows are divided among clients by a split" in table.words
    federation = gpfl.federate(path, clients=4, beta=100.0)
    assert len(federation) == 4
    assert sorted(np.concatenate([[*s.train, *s.test] for s in federation.shards])) == list(range(40))
    said = refusal_of(lambda: gpfl.federate(path, split="natural"))
    assert said == "data 'a.csv' does not tell the group of a row: use --split dirichlet or pathological"


def refusal_of(act: Callable[[], object]) -> str:
    with pytest.raises(GpflError) as problem:
        act()
    return str(problem.value)


@pytest.mark.parametrize("mark", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_csv_of_any_mark_and_end_of_line_is_the_same(mark: str, start: bytes, end: str, tmp_path: Path) -> None:
    text = lines(*VISITS, mark=mark).replace("\n", end)
    table = load(write(tmp_path / "visits.csv", start + text.encode()), client="hospital", label="outcome")
    assert close(table.x[:, :1], [[age] for age in scaled(AGES)])
    assert table.group_names == ("north", "south")


def test_tsv_is_cut_at_tabs_alone(tmp_path: Path) -> None:
    rows = [("a, b, c", "label"), (1, "x, y"), (2, "z")]
    table = load(write(tmp_path / "a.TSV", lines(*rows, mark="\t")))
    assert table.origin["classes"] == ["x, y", "z"]
    assert [step["name"] for step in table.origin["columns"]] == ["a, b, c"]  # type: ignore[attr-defined]


def test_quoted_cells_hold_marks_quotes_and_lines(tmp_path: Path) -> None:
    text = '"a",kind,label\n1,"x, y","he said ""no"""\n\n2," x, y ","two\nlines"\n3,z,"two\nlines"\n'
    table = load(write(tmp_path / "a.csv", text))
    assert table.origin["classes"] == ['he said "no"', "two\nlines"]
    assert table.y.tolist() == [0, 1, 1]
    assert close(table.x, [[a, *kind] for a, kind in zip(scaled([1, 2, 3]), [(1, 0), (1, 0), (0, 1)], strict=True)])


# Labels.


LABELS: dict[str, tuple[Sequence[object], list[int], list[str]]] = {
    "names by the alphabet": (["b", "c", "a", "b"], [1, 2, 0, 1], ["a", "b", "c"]),
    "whole numbers by size": ([10, 2, 2, 33], [1, 0, 0, 2], ["2", "10", "33"]),
    "from 1 on": ([1, 2, 3, 1], [0, 1, 2, 0], ["1", "2", "3"]),
    "below 0": ([-1, 1, -1, 1], [0, 1, 0, 1], ["-1", "1"]),
    "whole floats": (["1.0", "0.0", "2.0", "1"], [1, 0, 2, 1], ["0", "1", "2"]),
    "with blanks": ([" a", "a ", "b", "b"], [0, 0, 1, 1], ["a", "b"]),
    "numbers and names": ([1, "x", 10, 1], [0, 2, 1, 0], ["1", "10", "x"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_classes_are_numbered_in_the_order_of_numbers_or_of_the_alphabet(kind: str, tmp_path: Path) -> None:
    labels, numbers, names = LABELS[kind]
    table = load(write(tmp_path / "a.csv", lines(("a", "label"), *enumerate(labels))))
    assert table.y.tolist() == numbers
    assert table.origin["classes"] == names
    assert table.classes == len(names)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([7, 9, 7]),
        np.array([7.0, 9.0, 7.0], dtype=np.float32),
        np.array(["7", "9", "7"]),
        np.array([b"7", b"9", b"7"]),
        np.array([7, 9, 7], dtype=np.uint8),
        np.array([7, 9, 7], dtype=">i4"),
    ],
    ids=lambda labels: labels.dtype.str,
)
def test_labels_of_an_array_are_numbered_too(labels: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=labels)
    table = load(tmp_path / "a.npz")
    assert table.y.tolist() == [0, 1, 0]
    assert table.origin == {"classes": ["7", "9"]}


# Columns.


def test_part_column_divides_rows_and_only_training_rows_are_measured(tmp_path: Path) -> None:
    ages = [1.0, 2.0, 6.0, 100.0, -50.0, 3.0]
    said = ["train", "Training", "train", "test", "val", "train"]
    rows = [(age, said[k], k % 2, "n") for k, age in enumerate(ages)]
    table = load(write(tmp_path / "a.csv", lines(("age", "fold", "label", "client"), *rows)), part="fold")
    assert parts_of(table) == [TRAIN, TRAIN, TRAIN, TEST, VALIDATION, TRAIN]
    assert close(table.x, [[v] for v in scaled(ages, over=[1.0, 2.0, 6.0, 3.0])])
    (step,) = table.origin["columns"]  # type: ignore[misc]
    assert step == {"name": "age", "mean": 3.0, "std": pytest.approx(((4 + 1 + 9 + 0) / 4) ** 0.5)}
    assert "train and test as given" in table.words
    (shard,) = gpfl.federate(table, split="natural").shards
    assert (shard.train.tolist(), shard.validation.tolist(), shard.test.tolist()) == ([0, 1, 2, 5], [4], [3])


def test_column_that_is_the_same_in_all_training_rows_is_not_blown_up(tmp_path: Path) -> None:
    rows = [(0.1, 0.7, k % 2, "train") for k in range(7)] + [(0.2, 0.7, 1, "test")]
    table = load(write(tmp_path / "a.csv", lines(("a", "b", "label", "part"), *rows)))
    assert close(table.x, [[0.0, 0.0]] * 7 + [[0.1, 0.0]])


def test_scale_none_leaves_numbers_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "visits.csv", lines(*VISITS))
    table = load(path, label="outcome", client="hospital", ignore=["sex"], scale="none")
    assert close(table.x, [[age] for age in AGES])
    assert table.origin["columns"] == [{"name": "age", "mean": 0.0, "std": 1.0}]
    assert "1 of numbers (age), as they are." in table.words


def test_ignored_columns_are_no_inputs(tmp_path: Path) -> None:
    rows = [(k, "nan" if k else "", f"text {k}", k * k, k % 2) for k in range(60)]
    path = write(tmp_path / "a.csv", lines(("row", "empty", "comment", "2024", "label"), *rows))
    table = load(path, ignore=["row", "empty", "comment"])
    assert close(table.x, [[v] for v in scaled([float(k * k) for k in range(60)])])
    assert load(path, ignore=["empty", "comment", "2024"]).shape == (1,)


def test_recipe_gives_the_inputs_of_new_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "visits.csv", lines(*VISITS))
    table = load(path, label="outcome", client="hospital")
    rows = []
    for age, sex, _, _ in VISITS[1:]:
        row: list[float] = []
        for step, cell in zip(table.origin["columns"], (age, sex), strict=True):  # type: ignore[call-overload]
            row += [(cell - step["mean"]) / step["std"]] if "mean" in step else [float(cell == v) for v in step["values"]]
        rows.append(row)
    assert close(table.x, rows)


@pytest.mark.parametrize(
    ("said", "first", "second"),
    [(["10", "2", "2", "10"], "2", "10"), (["b", "a", "a", "b"], "a", "b"), (["s2", "s10", "s10", "s2"], "s10", "s2")],
)
def test_clients_come_in_the_order_of_numbers_or_of_the_alphabet(
    said: list[str], first: str, second: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "client", "label"), *((k, who, k % 2) for k, who in enumerate(said))))
    table = load(path)
    assert table.group_names == (first, second)
    assert clients_of(table) == said
    federation = gpfl.federate(path, test=0.5)
    assert [shard.name for shard in federation.shards] == [first, second]


def test_part_column_about_something_else_is_an_input_unless_it_was_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("part", "label"), ("leg", 0), ("arm", 1), ("leg", 1)))
    table = load(path)
    assert table.parts is None
    assert close(table.x, [[0, 1], [1, 0], [0, 1]])
    assert refusal(path, part="part") == "column 'part' holds 'leg' in a.csv, row 1; it must hold train, validation or test"


def test_part_column_that_says_train_of_all_rows_divides_nothing_and_is_no_input(tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", lines(("a", "split", "label"), (1, "train", 0), (2, "train", 1))))
    assert table.parts is None
    assert table.shape == (1,)


def test_part_column_is_an_input_where_folders_tell_the_parts(tmp_path: Path) -> None:
    for part, rows in (("train", [(1, "leg", 0), (2, "arm", 1)]), ("test", [(3, "arm", 1)])):
        write(tmp_path / "d" / f"{part}.csv", lines(("a", "part", "label"), *rows))
    assert load(tmp_path / "d").shape == (3,)


# Files and folders of clients.


def per_client(mark: str = ",") -> dict[str, str]:
    return {
        "10": lines(("a", "label"), (1, "x"), (2, "y"), mark=mark),
        "2": lines(("label", "a"), ("y", 4), mark=mark),
    }


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".npz"])
def test_a_file_for_each_client(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    for name, text in per_client("\t" if ending == ".tsv" else ",").items():
        if ending == ".npz":
            folder.mkdir(exist_ok=True)
            a, label = ([1.0, 2.0], ["x", "y"]) if name == "10" else ([4.0], ["y"])
            np.savez(folder / f"{name}.npz", x=np.array(a)[:, None], label=np.array(label))
        else:
            write(folder / f"{name}{ending}", text)
    write(folder / ".hidden.csv", "x")
    write(folder / "README.txt", "x")
    table = load(folder)
    wanted = [[4.0], [1.0], [2.0]] if ending == ".npz" else [[v] for v in scaled([4, 1, 2])]
    assert close(table.x, wanted), "arrays are not scaled"
    assert clients_of(table) == ["2", "10", "10"]
    assert table.group_names == ("2", "10")
    assert table.y.tolist() == [1, 0, 1]
    assert (table.name, table.parts) == ("sites", None)


def divided_files() -> dict[tuple[str, str], str]:
    """Text by client and part."""
    return {
        ("north", "train"): lines(("a", "label"), (1, "x"), (2, "y")),
        ("north", "test"): lines(("a", "label"), (9, "x")),
        ("south", "train"): lines(("a", "label"), (4, "y"), (5, "x")),
        ("south", "test"): lines(("a", "label"), (8, "y")),
    }


@pytest.mark.parametrize("outer", ["clients", "parts"])
def test_train_and_test_lie_in_clients_or_clients_in_train_and_test(outer: str, tmp_path: Path) -> None:
    for (client, part), text in divided_files().items():
        write(tmp_path / "d" / (f"{client}/{part}.csv" if outer == "clients" else f"{part}/{client}.csv"), text)
    federation = gpfl.federate(tmp_path / "d")
    table = federation.table
    values = (table.x[:, 0].numpy() * 1.5811388 + 3).round(4)  # 1, 2, 4, 5: mean 3, variance 2.5
    by_client = {
        s.name: [sorted(values[s.part(part)].tolist()) for part in ("train", "validation", "test")] for s in federation.shards
    }
    assert by_client == {"north": [[1.0, 2.0], [], [9.0]], "south": [[4.0, 5.0], [], [8.0]]}
    assert federation.table.words.startswith("d: 6 rows; 2 clients with 3 rows; train and test as given.\n")


def test_validation_files_are_validation_rows(tmp_path: Path) -> None:
    for client in ("north", "south"):
        for part, rows in (("train", 4), ("val", 2), ("test", 1)):
            write(tmp_path / "d" / client / f"{part}.csv", lines(("a", "label"), *((k, k % 2) for k in range(rows))))
    federation = gpfl.federate(tmp_path / "d", validation=0.5)
    assert federation.rows("train").tolist() == [4, 4]
    assert federation.rows("validation").tolist() == [2, 2], "those given, not a share"
    assert federation.rows("test").tolist() == [1, 1]


def test_share_of_the_given_training_rows_may_be_kept_for_validation(tmp_path: Path) -> None:
    for client in ("north", "south"):
        for part, rows in (("train", 8), ("test", 2)):
            write(tmp_path / "d" / client / f"{part}.csv", lines(("a", "label"), *((k, k % 2) for k in range(rows))))
    federation = gpfl.federate(tmp_path / "d", validation=0.25)
    for shard in federation.shards:
        assert federation.table.parts is not None
        assert (len(shard.train), len(shard.validation), len(shard.test)) == (6, 2, 2)
        assert set(federation.table.parts[[*shard.train, *shard.validation]]) == {TRAIN}
        assert set(federation.table.parts[shard.test]) == {TEST}


@pytest.mark.parametrize("split", ["dirichlet", "pathological"])
def test_parts_hold_under_any_split(split: str, tmp_path: Path) -> None:
    for part, rows in (("train", 90), ("test", 30)):
        write(tmp_path / "d" / f"{part}.csv", lines(("a", "label"), *((k, k % 3) for k in range(rows))))
    options = {"beta": 100.0} if split == "dirichlet" else {"classes_per_client": 3, "balanced": True}
    federation = gpfl.federate(tmp_path / "d", split=split, clients=2, **options)
    given = federation.table.parts
    assert given is not None
    assert sorted(np.concatenate([shard.train for shard in federation.shards])) == np.flatnonzero(given == TRAIN).tolist()
    assert sorted(np.concatenate([shard.test for shard in federation.shards])) == np.flatnonzero(given == TEST).tolist()


@pytest.mark.parametrize("leftovers", [(), ("rawdata/MNIST/raw/t10k", "config.json")], ids=["bare", "with downloads"])
def test_folders_of_pfllib_are_read_as_they_are(leftovers: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "MNIST"
    held = {}
    for part, rows in (("train", 3), ("test", 2)):
        (root / part).mkdir(parents=True)
        for client in range(11):
            x = DRAW.normal(size=(rows, 1, 4, 5)).astype(np.float32)
            y = np.array([client % 3, (client + 1) % 3, 0])[:rows]
            held[str(client), part] = x, y
            with (root / part / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": x, "y": y})  # type: ignore[arg-type]
    for name in leftovers:
        write(root / name, "x")
    federation = gpfl.federate(root)
    assert [shard.name for shard in federation.shards] == [str(client) for client in range(11)]
    assert federation.table.shape == (1, 4, 5)
    for shard in federation.shards:
        for part, rows_ in (("train", shard.train), ("test", shard.test)):
            x, y = held[shard.name, part]
            assert np.array_equal(federation.table.x[rows_].numpy(), x)
            assert np.array_equal(federation.table.y[rows_].numpy(), y)
    assert find_source(str(root), {}).defaults == {"split": {"name": "natural"}, "net": {"name": "cnn4"}}


def test_npz_may_hold_its_parts(tmp_path: Path) -> None:
    x = {part: DRAW.normal(size=(rows, 3)) for part, rows in (("train", 4), ("val", 1), ("test", 2))}
    y = {"train": [0, 1, 2, 0], "val": [1], "test": [2, 0]}
    np.savez(tmp_path / "a.npz", **{f"x_{part}": x[part] for part in x}, **{f"y_{part}": y[part] for part in y})
    table = load(tmp_path / "a.npz")
    for place, part in ((TRAIN, "train"), (VALIDATION, "val"), (TEST, "test")):
        rows = np.array(parts_of(table)) == place
        assert np.array_equal(table.x.numpy()[rows], x[part].astype(np.float32))
        assert table.y.numpy()[rows].tolist() == y[part]


def test_npz_of_each_client_may_hold_its_parts(tmp_path: Path) -> None:
    for client in ("a", "b"):
        x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1] * 3)
        np.savez(write(tmp_path / "d" / f"{client}.npz", b""), x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:])
    federation = gpfl.federate(tmp_path / "d")
    assert [shard.name for shard in federation.shards] == ["a", "b"]
    for shard in federation.shards:
        assert sorted(federation.table.x[shard.train, 0].tolist()) == [0, 2, 4, 6]
        assert sorted(federation.table.x[shard.test, 0].tolist()) == [8, 10]


def test_npz_may_name_clients_and_labels_of_its_rows(tmp_path: Path) -> None:
    x = DRAW.normal(size=(4, 2, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", signals=x, kind=np.array([3, 1, 3, 1]), who=np.array([10.0, 2.0, 2.0, 10.0]), note=np.zeros(4))
    table = load(tmp_path / "a.npz", label="kind", client="who")
    assert np.array_equal(table.x.numpy(), x)
    assert table.y.tolist() == [1, 0, 1, 0]
    assert table.group_names == ("2", "10")
    assert clients_of(table) == ["10", "2", "2", "10"]


BYTES = DRAW.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
PIXELS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "channels last": (BYTES, np.moveaxis(BYTES, 3, 1)),
    "one channel last": (BYTES[..., :1], BYTES[:, None, :, :, 0]),
    "channels first": (np.moveaxis(BYTES, 3, 1), np.moveaxis(BYTES, 3, 1)),
    "no channel": (BYTES[..., 0], BYTES[:, None, :, :, 0]),
    "flat": (BYTES.reshape(4, -1), BYTES.reshape(4, -1)),
}


@pytest.mark.parametrize("kind", PIXELS)
def test_bytes_of_an_array_are_pixels_with_channels_first(kind: str, tmp_path: Path) -> None:
    given, wanted = PIXELS[kind]
    np.savez(tmp_path / "a.npz", images=given, labels=np.array([0, 1, 0, 1]))
    table = load(tmp_path / "a.npz")
    assert (table.x.dtype, table.form.kind) == (torch.uint8, "pixels")
    assert np.array_equal(table.x.numpy(), wanted)
    assert np.allclose(table.inputs(torch.arange(4)).numpy(), wanted / 127.5 - 1, rtol=0, atol=1e-6)
    assert "bytes taken as pixels" in table.words


# Parquet.


def test_parquet_is_read_as_a_csv_of_the_same_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[k] for row in VISITS[1:]] for k, name in enumerate(VISITS[0])}
    whole = {"stay": pa.array([1, 2, 3, 4, 5, 9], pa.int16()), "kept": [True, False] * 3, **columns}
    whole["hospital"] = pa.array(columns["hospital"]).dictionary_encode()
    parquet.write_table(pa.table(whole), tmp_path / "visits.parquet")
    table = load(tmp_path / "visits.parquet", client="hospital", label="outcome")
    one_hot = [(0, 1), (1, 0)] * 3, [(1, 0), (0, 1)] * 3  # False before True, f before m
    rows = zip(scaled([1, 2, 3, 4, 5, 9]), one_hot[0], scaled(AGES), one_hot[1], strict=True)
    assert close(table.x, [[stay, *kept, age, *sex] for stay, kept, age, sex in rows])
    assert clients_of(table) == ["north", "south"] * 3
    assert table.y.tolist() == [0, 2, 1, 0, 0, 2]


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"a": pa.array([1, None, 3]), "label": ["x", "y", "x"]}), path)
    assert refusal(path) == missing("a", 1, "a.parquet, row 2")
    parquet.write_table(pa.table({"a": pa.array(["u", None, "v"]), "label": ["x", "y", "x"]}), path)
    assert refusal(path) == missing("a", 1, "a.parquet, row 2")
    parquet.write_table(pa.table({"a": [1, 2], "label": pa.array(["x", None])}), path)
    assert refusal(path) == "'label' is missing in 1 of 2 rows: every row needs a label"
    parquet.write_table(pa.table({"a": [[1], [2, 3]], "label": ["x", "y"]}), path)
    assert refusal(path).startswith(f"{path} has column 'a' of type list<")
    assert refusal(path).endswith("; columns must be numbers or text")
    parquet.write_table(pa.table({"a": pa.array([b"1", b"2"]), "label": ["x", "y"]}), path)
    assert refusal(path) == f"{path} has column 'a' of type binary; columns must be numbers or text"
    parquet.write_table(pa.table({"a": pa.array([], pa.int64()), "label": pa.array([], pa.string())}), path)
    assert refusal(path) == f"{path} has no rows"
    path.write_bytes(path.read_bytes()[:-9])
    assert refusal(path).startswith(f"{path} cannot be read as Parquet (")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet", "pyarrow.types"):
        monkeypatch.setitem(sys.modules, name, None)
    path = write(tmp_path / "a.parquet", b"PAR1")
    assert refusal(path) == f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow"


# Images.


def picture(path: Path, seed: int, size: tuple[int, int] = (5, 4), mode: str = "RGB") -> np.ndarray:
    """Writes an image and gives its bytes (channels, height, width)."""
    width, height = size
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values[:, :, 0] if mode == "L" else values, mode).save(path)
    return np.moveaxis(values, 2, 0)


def test_class_folders_without_clients(tmp_path: Path) -> None:
    places = ["cat/2.png", "cat/10.PNG", "dog/a.bmp", "dog/b.png"]
    wanted = [picture(tmp_path / "p" / place, k) for k, place in enumerate(places)]
    write(tmp_path / "p/cat/notes.txt", "x")
    write(tmp_path / "p/.cache/x.png", "x")
    (tmp_path / "p/empty").mkdir()
    table = load(tmp_path / "p")
    assert np.array_equal(table.x.numpy(), np.stack(wanted))
    assert (table.x.dtype, table.form.kind, table.form.white) == (torch.uint8, "pixels", 255)
    assert table.y.tolist() == [0, 0, 1, 1]
    assert table.origin == {"classes": ["cat", "dog"]}
    assert (table.groups, table.parts) == (None, None)
    assert table.words.endswith("2 classes of 'class': cat, dog. Inputs: colour images of 5×4.")


@pytest.mark.parametrize("form", ["{client}/{part}/{kind}", "{part}/{client}/{kind}", "{client}/{kind}", "{part}/{kind}"])
def test_class_folders_with_clients_and_parts(form: str, tmp_path: Path) -> None:
    wanted = {}
    for number, client in enumerate(("north", "south")):
        for k, part in enumerate(("train", "test")):
            for m, kind in enumerate(("dog", "cat")):
                seed = 100 * number + 10 * k + m
                place = tmp_path / "p" / form.format(client=client, part=part, kind=kind) / f"{seed}.png"
                wanted[picture(place, seed).tobytes()] = (client, k * TEST, kind)
    table = load(tmp_path / "p")
    assert len(table) == 8
    for row in range(8):
        client, part, kind = wanted[table.x[row].numpy().tobytes()]
        assert ["cat", "dog"][table.y[row]] == kind
        if "client" in form:
            assert clients_of(table)[row] == client
        else:
            assert table.groups is None
        if "part" in form:
            assert parts_of(table)[row] == part
        else:
            assert table.parts is None


def test_grey_images_have_one_channel_and_three_beside_a_coloured_one(tmp_path: Path) -> None:
    grey = [picture(tmp_path / f"p/{kind}/1.png", k, mode="L") for k, kind in enumerate("ab")]
    table = load(tmp_path / "p")
    assert np.array_equal(table.x.numpy(), np.stack(grey))
    assert "grey images of 5×4" in table.words
    colour = picture(tmp_path / "p/b/2.png", 7, mode="RGBA")
    table = load(tmp_path / "p")
    assert np.array_equal(table.x.numpy(), np.stack([grey[0].repeat(3, 0), grey[1].repeat(3, 0), colour[:3]]))


def test_images_of_other_sizes_are_resized_where_a_size_was_named(tmp_path: Path) -> None:
    first = picture(tmp_path / "p/a/1.png", 0, size=(3, 3))
    picture(tmp_path / "p/b/1.png", 1, size=(8, 5))
    Image.new("RGB", (7, 9), (10, 20, 30)).save(tmp_path / "p/b/2.png")
    assert refusal(tmp_path / "p") == (
        f"{tmp_path}/p/b/1.png is 8×5, 1.png is 3×3: give all images one size, or say --image-size 64 to resize them"
    )
    table = load(tmp_path / "p", image_size=3)
    assert table.x.shape == (3, 3, 3, 3)
    assert np.array_equal(table.x[0].numpy(), first), "one that has the size stays as it is"
    assert (table.x[2].flatten(1).numpy() == np.array([[10], [20], [30]])).all(), "one colour stays one colour"
    assert table.words.endswith("colour images of 3×3, resized.")


def test_bad_images_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "p/a/1.png", 0, size=(40, 40))
    bad = tmp_path / "p/b/1.png"
    picture(bad, 1, size=(40, 40))
    whole = bad.read_bytes()
    bad.write_bytes(whole[:400])
    assert refusal(tmp_path / "p").startswith(f"{bad} is damaged (")
    assert refusal(tmp_path / "p").endswith("): remove or replace it")
    bad.write_bytes(b"GIF89a")
    assert refusal(tmp_path / "p") == f"{bad} is not an image (cannot identify image file {str(bad)!r}): remove or replace it"
    Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40)).save(bad)
    assert refusal(tmp_path / "p") == f"{bad} has pixels of mode I;16, deeper than 8 bits: save it with 8 bits a channel"
    bad.write_bytes(whole)
    assert len(load(tmp_path / "p")) == 2


def test_images_that_are_divided_in_part_are_refused(tmp_path: Path) -> None:
    for place in ("a/train/x", "a/test/y", "b/x", "b/y"):
        picture(tmp_path / "p" / place / "1.png", 0)
    assert refusal(tmp_path / "p") == (
        f"{tmp_path}/p/b is not divided into train and test, but others are: divide all clients or none"
    )
    for place in ("q/test/x", "q/test/y"):
        picture(tmp_path / place / "1.png", 0)
    assert refusal(tmp_path / "q") == "there are test rows, but none for training"


def test_images_without_a_test_part_are_not_tested_on_training_rows(tmp_path: Path) -> None:
    for place in ("n/train/x", "n/train/y", "n/val/x"):
        picture(tmp_path / "p" / place / "1.png", 0)
    said = refusal_of(lambda: gpfl.federate(tmp_path / "p"))
    assert said.startswith("client n has no test rows (2 training, 0 test): ")


# What is refused.


def missing(column: str, count: int, first: str) -> str:
    return (
        f"column '{column}' has {count} missing or infinite values, first in {first}: "
        f"fill them, remove those rows, or leave the column out with --ignore {column}"
    )


GOOD_ROWS = [(k, k % 2) for k in range(4)]
BAD_CSVS: dict[str, tuple[str | bytes, dict[str, object], str]] = {
    "empty": ("", {}, "{path} is empty"),
    "a blank first line": ("\na,label\n1,0\n", {}, "{path} is empty"),
    "a first line alone": ("a,label\n", {}, "{path} has no rows below its first line"),
    "no first line": ("1,2,0\n3,4,1\n", {}, "{path} begins with numbers (1, 2, 0 …); its first line must name the columns"),
    "a column twice": ("a,a,label\n1,2,0\n", {}, "{path} has two columns named 'a'"),
    "a column without a name": (
        "a,,label\n1,2,0\n",
        {},
        "{path} has a column without a name, the 2. of 3: name it in the first line",
    ),
    "a short line": ("a,b,label\n1,2,0\n\n3,1\n", {}, "{path}, line 4, has 2 cells; the first line names 3"),
    "a long line": ("a,b,label\n1,2,0,5\n", {}, "{path}, line 2, has 4 cells; the first line names 3"),
    "an open quote": ('a,label\n1,"0\n2,1\n', {}, "{path} cannot be read as CSV (unexpected end of data)"),
    "no UTF-8": (b"a,label\nM\xfcller,0\n", {}, "{path} is not UTF-8 text (byte 9): save it as UTF-8"),
    "no UTF-8, far down": (
        b"a,label\n" + b"1,0\n" * 5000 + b"\xff,1\n",
        {},
        "{path} is not UTF-8 text (byte 20008): save it as UTF-8",
    ),
    "UTF-16": ("a,label\n1,0\n".encode("utf-16"), {}, "{path} is not UTF-8 text (byte 0): save it as UTF-8"),
    "a missing number": ("a,label\n1,0\n,1\n2,1\nNA,0\n", {}, missing("a", 2, "bad.csv, row 2")),
    "a NaN": ("a,label\n1,0\n2,0\nnan,1\n", {}, missing("a", 1, "bad.csv, row 3")),
    "an infinity": ("a,label\n1,0\n-inf,1\n", {}, missing("a", 1, "bad.csv, row 2")),
    "a number that no float holds": ("a,label\n1,0\n1e300,1\n", {}, missing("a", 1, "bad.csv, row 2")),
    "a missing text": ("a,label\nu,0\n ? ,1\nv,1\n", {}, missing("a", 1, "bad.csv, row 2")),
    "a missing label": ("a,label\n1,x\n2,\n3,y\n", {}, "'label' is missing in 1 of 3 rows: every row needs a label"),
    "a missing label among numbers": (
        "a,label\n1,0\n2,n/a\n3,1\n",
        {},
        "'label' is missing in 1 of 3 rows: every row needs a label",
    ),
    "a missing client": (
        "a,client,label\n1,n,0\n2,,1\n",
        {},
        "column 'client' has 1 missing or infinite values, first in bad.csv, row 2: fill them or remove those rows",
    ),
    "one class": ("a,label\n1,x\n2,x\n", {}, "all 2 rows are of one class, 'x'; there must be at least two"),
    "a label with a fraction": (
        "a,label\n1,0\n2,36.6\n",
        {},
        "'label' holds 36.6; labels are whole numbers or names of classes: name another column with --label",
    ),
    "a label without end": (
        "a,label\n1,0\n2,inf\n",
        {},
        "'label' holds inf; labels are whole numbers or names of classes: name another column with --label",
    ),
    "a label for nearly every row": (
        lines(("a", "label"), *((k, k) for k in range(30))),
        {},
        "'label' holds 30 different values in 30 rows, too many for classes: name another column with --label",
    ),
    "a thousand classes and one": (
        lines(("a", "label"), *((k, k % 1001) for k in range(3003))),
        {},
        "'label' holds 1,001 different values in 3,003 rows, too many for classes: name another column with --label",
    ),
    "too many categories": (
        lines(("a", "label"), *((f"text {k:02}", k % 2) for k in range(51))),
        {},
        "column 'a' holds 51 different texts, such as 'text 00'; categories may be at most 50: leave it out with --ignore a",
    ),
    "no label": (lines(("a", "b"), *GOOD_ROWS), {}, "which column holds the label? Say --label NAME; there are a, b"),
    "another label": (
        lines(("a", "outcome"), *GOOD_ROWS),
        {"label": "outcom"},
        "data.label is 'outcom', which is no column; did you mean 'outcome'?",
    ),
    "another client": (
        lines(("a", "hospital", "label"), (1, "n", 0), (2, "s", 1)),
        {"client": "hospitl"},
        "data.client is 'hospitl', which is no column; did you mean 'hospital'?",
    ),
    "another part": (
        lines(("a", "label"), *GOOD_ROWS),
        {"part": "zzz"},
        "data.part is 'zzz', which is no column; known: a, label",
    ),
    "another column to ignore": (
        lines(("a", "row_id", "label"), (1, 1, 0), (2, 2, 1)),
        {"ignore": ["row"]},
        "data.ignore names column 'row'; did you mean 'row_id'?",
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
        "data.scale is 'none!'; it must be one of standard, none; did you mean 'none'?",
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
def test_bad_csv_is_refused(kind: str, tmp_path: Path) -> None:
    text, settings, words = BAD_CSVS[kind]
    path = write(tmp_path / "bad.csv", text)
    assert refusal(path, **settings) == words.replace("{path}", str(path))


def savez(**arrays: object) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)  # type: ignore[arg-type]


def member(name: str, content: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, content)

    return put


def npy(header: str, body: bytes = bytes(16)) -> bytes:
    """An npy file with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body


X, Y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
NEITHER = "in {path} is not an array of numbers or text, nor a dict of such"
BAD_NPZS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no zip": (
        lambda path: path.write_bytes(b"x" * 99),
        "{path} is damaged or of another format (File is not a zip file): get it again",
    ),
    "nothing in it": (savez(), "{path} holds no array"),
    "objects": (savez(x=X, y=np.array([0, "a", None, 1], dtype=object)), f"y.npy {NEITHER} (an array of objects)"),
    "ragged rows": (
        savez(data={"x": np.array([np.zeros(1), np.zeros(2)], dtype=object), "y": Y}),
        f"data.npy {NEITHER} (an array of objects)",
    ),
    "a list in a dict": (savez(data={"x": X, "y": [0, 1]}), f"data.npy {NEITHER} (a list under 'y' where an array should be)"),
    "a call": (savez(data={"x": os.getcwd}), f"data.npy {NEITHER} (posix.getcwd)"),
    "complex numbers": (savez(x=X * 1j, y=Y), f"x.npy {NEITHER} (the type complex128)"),
    "times": (savez(x=X, y=Y.astype("M8[s]")), f"y.npy {NEITHER} (the type datetime64[s])"),
    "bytes that are no text": (
        savez(x=X, y=np.array([b"a", b"\xff", b"a", b"a"])),
        f"y.npy {NEITHER} ('ascii' codec can't decode byte 0xff in position 0: ordinal not in range(128))",
    ),
    "another member": (member("x.txt", b"12345678"), f"x.txt {NEITHER} (the magic string is not correct; expected"),
    "a cut header": (member("x.npy", npy("{'descr': (")), f"x.npy {NEITHER} ("),
    "a header of other keys": (member("x.npy", npy("{1: 2, 'a': 3}")), f"x.npy {NEITHER} ("),
    "a shape beyond memory": (
        member("x.npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}")),
        f"x.npy {NEITHER} (Unable to allocate",
    ),
    "a shape beyond numbers": (
        member("x.npy", npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**30},)}}")),
        f"x.npy {NEITHER} (",
    ),
    "a header without end": (member("x.npy", npy(" " * 20000)), f"x.npy {NEITHER} (Header info length (20000) is large"),
    "NaN": (
        savez(x=np.where(X > 5, np.nan, X), y=Y),
        "1 of 4 rows hold NaN or infinity, first bad.npz, row 4: fill or remove them",
    ),
    "infinity": (
        savez(x=np.where(X < 3, -np.inf, X), y=Y),
        "2 of 4 rows hold NaN or infinity, first bad.npz, row 1: fill or remove them",
    ),
    "a label less": (savez(x=X, y=Y[:3]), "{path} has x of shape (4, 2) and y of shape (3,); give a label for each row"),
    "labels one-hot": (
        savez(x=X, y=np.eye(4)),
        "{path} has x of shape (4, 2) and y of shape (4, 4); give a label for each row",
    ),
    "texts for inputs": (savez(x=X.astype("U3"), y=Y), "{path} has x of type <U3; inputs must be numbers"),
    "no labels": (savez(x=X, z=Y), "which column holds the label? Say --label NAME; there are x, z"),
    "two inputs": (savez(left=X, right=X, y=Y), "{path} holds left, right, y: name the inputs x and the labels y"),
    "columns of two lengths": (savez(a=Y, y=Y[:3]), "{path} has arrays of different length: {'a': 4, 'y': 3}"),
    "test without labels": (
        savez(x_train=X, y_train=Y, x_test=X),
        "which column holds the label? Say --label NAME; there are x",
    ),
}


@pytest.mark.parametrize("kind", BAD_NPZS)
def test_bad_npz_is_refused(kind: str, tmp_path: Path) -> None:
    make, words = BAD_NPZS[kind]
    path = tmp_path / "bad.npz"
    make(path)
    said, wanted = refusal(path), words.replace("{path}", str(path))
    assert said == wanted or (wanted.count("(") > wanted.count(")") and said.startswith(wanted))


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    d = tmp_path / "d"
    write(d / "a.csv", lines(("a", "b", "label"), (1, 2, 0), (3, 4, 1)))
    write(d / "b.csv", lines(("a", "label"), (1, 0), (3, 1)))
    same = "all files must have the same columns"
    assert refusal(d) == f"column 'b' is in {d}/a.csv, but not in {d}/b.csv; {same}"
    write(d / "b.csv", lines(("a", "b", "c", "label"), (1, 2, 3, 0)))
    assert refusal(d) == f"column 'c' is in {d}/b.csv, but not in {d}/a.csv; {same}"
    write(d / "b.csv", lines(("a", "b", "label"), (1, 2, 0), ("", 2, 0)))
    assert refusal(d) == missing("a", 1, "b.csv, row 2"), "rows are counted in their own file"
    e = tmp_path / "e"
    e.mkdir()
    np.savez(e / "1.npz", x=X, y=Y)
    np.savez(e / "2.npz", x=X[:, :1], y=Y)
    assert refusal(e) == f"{e}/2.npz has rows of shape (1,) (float64), 1.npz of (2,) (float64); they must agree"
    np.savez(e / "2.npz", x=X.astype(np.float32), y=Y)
    assert refusal(e) == f"{e}/2.npz has rows of shape (2,) (float32), 1.npz of (2,) (float64); they must agree"
    np.savez(e / "2.npz", x=X, z=Y)
    assert refusal(e) == f"{e}/2.npz has no array 'y', which 1.npz has; it has x, z"


def test_folders_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    d = tmp_path / "d"
    d.mkdir()
    nothing = f"{d} holds nothing that can be read: {EXPECTED}"
    assert refusal(d) == nothing
    write(d / "notes.txt", "x")
    write(d / "photo.png", "x")
    assert refusal(d) == nothing
    write(d / "a.csv", lines(("a", "label"), *GOOD_ROWS))
    (d / "north").mkdir()
    assert refusal(d) == f"{d} holds both files (a.csv) and folders (north): {EXPECTED}"
    (d / "a.csv").unlink()
    assert refusal(d) == f"{d}/north holds nothing that can be read: {EXPECTED}"
    (d / "north/east").mkdir()
    assert refusal(d) == f"{d}/north, of client north, holds folders without images, such as east: {EXPECTED}"


def test_parts_in_disorder_are_refused(tmp_path: Path) -> None:
    text = lines(("a", "label"), *GOOD_ROWS)
    d = tmp_path / "d"
    for place in ("a/train.csv", "a/test.csv", "b/all.csv"):
        write(d / place, text)
    assert refusal(d) == f"{d}/a/test.csv is a test part, but {d}/b/all.csv is not divided: divide all clients or none"
    for place in ("train/train.csv", "train/test.csv", "test/test.csv"):
        write(tmp_path / "e" / place, text)
    assert refusal(tmp_path / "e") == f"{tmp_path}/e/test is a test part, and holds parts again (test.csv): {EXPECTED}"
    for place in ("train/a.csv", "test/a.csv", "north/a.csv"):
        write(tmp_path / "f" / place, text)
    assert refusal(tmp_path / "f") == f"{tmp_path}/f holds north beside test and train: {EXPECTED}"
    for place in ("test/a.csv", "val/a.csv"):
        write(tmp_path / "g" / place, text)
    assert refusal(tmp_path / "g") == "there are test and validation rows, but none for training"


def test_images_beside_other_things_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "d/a/cat/1.png", 0)
    write(tmp_path / "d/b/all.csv", lines(("a", "label"), *GOOD_ROWS))
    assert refusal(tmp_path / "d") == (
        f"{tmp_path}/d/b/all.csv holds no class folders of images, but others do: give all clients one form"
    )
    picture(tmp_path / "e/cat/1.png", 0)
    picture(tmp_path / "e/north/dog/1.png", 0)
    assert refusal(tmp_path / "e") == f"{tmp_path}/e holds folders of images, and north, which holds folders: {EXPECTED}"


def test_data_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = "or the path of a file or folder of your own"
    names = "agnews, amazon, cifar100, digits, fmnist, har, tiny"
    assert refusal_of(lambda: find_source("qqq", {})) == f"unknown data 'qqq'; known: {names} ({path})"
    assert refusal_of(lambda: find_source("digit", {})) == f"unknown data 'digit'; did you mean 'digits'? ({path})"
    assert refusal(tmp_path / "a.csv") == f"there is no file or folder {tmp_path}/a.csv"
    file = write(tmp_path / "a.xlsx", "x")
    assert refusal(file) == f"{file} is no file that can be read: it must be .csv, .tsv, .parquet, .npz, or a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a")
    path.chmod(0)
    assert "Permission denied" in refusal(path)


def test_options_of_own_files_do_not_go_with_named_data() -> None:
    said = refusal_of(lambda: find_source("digits", {"label": "y"}))
    assert said == "data.label belongs to your own files, not to 'digits': leave it out"


def test_client_without_test_rows_is_refused_and_min_rows_leaves_it_out(tmp_path: Path) -> None:
    rows = [(k, "big", k % 2) for k in range(12)] + [(5, "small", 1)]
    path = write(tmp_path / "a.csv", lines(("a", "client", "label"), *rows))
    assert refusal_of(lambda: gpfl.federate(path)) == (
        "client small has no training rows (0 training, 1 test): give it more rows, leave it out "
        "(--split natural: --min-rows), or change --clients, --test or --validation"
    )
    federation = gpfl.federate(path, min_rows=2)
    assert [shard.name for shard in federation.shards] == ["big"]
    assert sorted([*federation.shards[0].train, *federation.shards[0].test]) == list(range(12))
    assert refusal_of(lambda: gpfl.federate(path, min_rows=13)) == (
        "split.min_rows is 13; the largest group of data 'a.csv' has 12 rows"
    )
    for client, parts in (("a", ("train", "test")), ("b", ("train",))):
        for part in parts:
            write(tmp_path / "d" / client / f"{part}.csv", lines(("a", "label"), *GOOD_ROWS))
    assert refusal_of(lambda: gpfl.federate(tmp_path / "d")).startswith("client b has no test rows (4 training, 0 test): ")


# What a person should know.


def shards(**rows: tuple[list[int], list[int]]) -> list[Shard]:
    none = np.array([], dtype=np.int64)
    return [Shard(name, np.array(train), none, np.array(test)) for name, (train, test) in rows.items()]


def test_oddities_count_labels_that_cannot_be_learnt() -> None:
    y = [0, 1, 2, 0, 1, 2, 0, 3]
    table = Table(np.zeros((8, 1)), y, origin={"classes": ["home", "icu", "ward", "gone"]})
    assert gpfl.Federation(table, shards(a=([0, 1, 2], [3, 4, 5]))).oddities() == []
    federation = gpfl.Federation(table, shards(a=([0, 1], [3, 2, 5]), b=([6], [4, 7])))
    assert federation.oddities() == [
        "No client has training rows of 2 classes that have test rows: ward, gone.",
        "4 test rows of 2 clients have a label that their client never trains on (most: client a, 2).",
        "1 clients train on one class only, such as client b.",
    ]
    plain = gpfl.Federation(Table(np.zeros((8, 1)), y), shards(a=([0, 1], [2]), b=([3, 4], [6])))
    assert plain.oddities() == [
        "No client has training rows of 1 classes that have test rows: 2.",
        "1 test rows of 1 clients have a label that their client never trains on (most: client a, 1).",
    ]


# Runs.


OWN = ("--data", "visits.csv", "--client", "site", "--label", "kind")


def assert_refused(said: Said, *words: str) -> None:
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("gpfl: ")
    for word in words:
        assert word in said.err


def test_run_says_what_was_found_and_writes_the_recipe_down(command: Command) -> None:
    write(Path("visits.csv"), lines(*VISITS[:1], *VISITS[1:] * 4))
    said = command("run", "--data", "visits.csv", "--client", "hospital", "--label", "outcome", "--rounds", 1)
    assert said.code == 0, said.err
    assert said.out.splitlines()[:2] == [
        "visits.csv: 24 rows; 2 clients by 'hospital' with 12 rows; train and test drawn at random.",
        "3 classes of 'outcome': home, icu, ward. Inputs: columns: 1 of numbers (age), scaled to mean 0 and std 1; "
        "1 of categories, one-hot: sex (f, m).",
    ]
    folder = Path("runs/visits-gpfl")
    assert {"models/client-north.safetensors", "models/client-south.safetensors"} <= content(folder).keys()
    mean = sum(AGES) / 6
    std = (sum((age - mean) ** 2 for age in AGES) / 6) ** 0.5
    assert toml.read(folder / "federation.toml")["source"] == {
        "classes": ["home", "icu", "ward"],
        "columns": [
            {"name": "age", "mean": pytest.approx(mean), "std": pytest.approx(std)},
            {"name": "sex", "values": ["f", "m"]},
        ],
    }
    assert toml.read(folder / "config.toml")["data"] == {
        "name": str(Path("visits.csv").resolve()),
        "label": "outcome",
        "client": "hospital",
        "part": "",
        "ignore": [],
        "scale": "standard",
        "image_size": 0,
    }


def test_run_says_what_is_odd(command: Command) -> None:
    rows = [(k, who, kind, part) for k, (who, kind, part) in enumerate([("a", "x", "train")] * 4 + [("a", "y", "test")] * 2)]
    rows += [(k, "b", "xy"[k % 2], "test" if k > 4 else "train") for k in range(7)]
    write(Path("v.csv"), lines(("a", "client", "label", "part"), *rows))
    said = command("run", "--data", "v.csv", "--method", "local", "--rounds", 1, "--out", "run")
    assert said.code == 0, said.err
    assert said.out.splitlines()[2:4] == [
        "2 test rows of 1 clients have a label that their client never trains on (most: client a, 2).",
        "1 clients train on one class only, such as client a.",
    ]
    shown = command("data", "show", "--data", "v.csv")
    assert shown.code == 0, shown.err
    assert "2 test rows of 1 clients have a label" in shown.out


def unfinish(folder: Path) -> None:
    """Takes a run back to its first line, as a kill in the first round leaves it."""
    (folder / "summary.json").unlink()
    (folder / "checkpoint.safetensors").unlink()
    metrics = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(metrics[0])


def test_run_is_resumed_from_another_folder(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("visits.csv"), many())
    said = command("run", *OWN, "--ignore", "b", "--scale", "none", "--method", "fedavg", "--rounds", 2, "--out", "run")
    assert said.code == 0, said.err
    whole = without_time(Path("run"))
    unfinish(Path("run"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    said = command("resume", "../run")
    assert said.code == 0, said.err
    assert without_time(Path("../run")) == whole
    again = command("run", "../run/config.toml", "--out", "two")
    assert again.code == 0, again.err
    assert without_time(Path("two")) == whole
    assert Path("two/config.toml").read_bytes() == Path("../run/config.toml").read_bytes()
    loaded = gpfl.load("../run")
    assert [client.name for client in loaded.clients] == ["s0", "s1", "s2"]


def test_resume_of_changed_or_vanished_files_is_refused(command: Command) -> None:
    write(Path("visits.csv"), many())
    assert command("run", *OWN, "--method", "local", "--rounds", 1, "--out", "run").code == 0
    write(Path("visits.csv"), many(rows=51))
    assert_refused(
        command("resume", "run"), "run/federation.toml divides a table with sha256 ", "but the data 'visits.csv' has "
    )
    Path("visits.csv").unlink()
    assert_refused(command("resume", "run"), f"there is no file or folder {Path('visits.csv').resolve()}")


def test_manifest_divides_the_same_file_and_refuses_a_changed_one(command: Command) -> None:
    write(Path("visits.csv"), many())
    rounds = ("--method", "local", "--rounds", 1)
    assert command("run", *OWN, *rounds, "--split-seed", 7, "--out", "one").code == 0
    said = command("run", *OWN, *rounds, "--federation", "one/federation.toml", "--out", "two")
    assert said.code == 0, said.err
    assert without_time(Path("two")) == without_time(Path("one"))
    assert Path("two/federation.toml").read_bytes() == Path("one/federation.toml").read_bytes()
    write(Path("visits.csv"), many().replace("high", "low", 1))
    said = command("run", *OWN, *rounds, "--federation", "one/federation.toml", "--out", "three")
    assert_refused(said, "one/federation.toml divides a table with sha256", "give the table it was made from")
    assert not Path("three").exists()


def test_manifest_names_its_own_data(command: Command) -> None:
    rounds = ("--method", "local", "--rounds", 1)
    assert command("run", "--data", "toy", *rounds, "--out", "one").code == 0
    said = command("run", "--federation", "one/federation.toml", *rounds, "--net", "mlp", "--lr", 0.1, "--out", "two")
    assert said.code == 0, said.err
    assert without_time(Path("two")) == without_time(Path("one"))
    assert toml.read(Path("two/config.toml"))["data"] == {"name": "toy"}


def test_manifest_of_own_files_wants_them_named(command: Command, tmp_path: Path) -> None:
    write(Path("visits.csv"), many())
    assert command("run", *OWN, "--method", "local", "--rounds", 1, "--out", "one").code == 0
    Path("visits.csv").rename("moved.csv")
    assert_refused(
        command("run", "--federation", "one/federation.toml", "--out", "two"), "there is no file or folder visits.csv"
    )
    with pytest.raises(
        GpflError, match=r"which were given in Python, or lie in files of your own: .* name the files with --data"
    ):
        gpfl.Federation.load("one/federation.toml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--data", "visits.csv", "--layout", "channels"), "data.layout (--layout) belongs to data 'har', not to 'visits.csv'"),
        (("--data", "digits", "--label", "y"), "data.label (--label) belongs to your own files, not to 'digits'"),
        (("--data", "visits.csv", "--label", "knd"), "data.label (--label) is 'knd', which is no column; did you mean 'kind'?"),
        (("--data", "visits.csv", "--label", "kind", "--ignore", "c"), "data.ignore names column 'c'; known: a, b, kind, site"),
        (("--data", "visits.csv"), "which column holds the label? Say --label NAME; there are a, b, site, kind"),
        (("--data", "visits.csv", "--label", "kind", "--split", "natural"), "does not tell the group of a row"),
        ((*OWN, "--min-rows", 40), "split.min_rows (--min-rows) is 40; the largest group of data 'visits.csv' has 16 rows"),
        ((*OWN, "--beta", 1), "split.beta (--beta) belongs to split 'dirichlet', not to 'natural'"),
        (("--data", "qqq"), "unknown data 'qqq'; known: agnews, amazon, "),
        (("--data", "other/visits.csv"), "there is no file or folder other/visits.csv"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(command: Command, given: tuple[object, ...], words: str) -> None:
    write(Path("visits.csv"), many())
    assert_refused(command("run", *given, "--out", "run"), words)
    assert not Path("run").exists()


def test_columns_named_by_numbers_may_be_ignored(command: Command) -> None:
    rows = [(k, k * k, k % 5, k % 2, "ab"[k % 2]) for k in range(24)]
    write(Path("v.csv"), lines(("2023", "2024", "true", "site", "label"), *rows))
    said = command("data", "show", "--data", "v.csv", "--client", "site", "--ignore", "2023, true")
    assert said.code == 0, said.err
    assert "columns: 1 of numbers (2024)" in said.out
    assert flags.given_by_flags({"data__ignore": "2023"}) == {"data": {"ignore": ["2023"]}}
    assert flags.given_by_flags({"data__ignore": '["a b", c]'}) == {"data": {"ignore": ["a b", "c"]}}


def test_config_names_data_that_lie_beside_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("study/visits.csv"), many())
    data = '[data]\nname = "visits.csv"\nclient = "site"\nlabel = "kind"\nignore = ["b"]\n'
    text = data + '[train]\nrounds = 1\n[method]\nname = "local"\n'
    write(Path("study/my.toml"), text)
    here = Path("study").resolve()
    said = command("run", "study/my.toml", "--out", "one")
    assert said.code == 0, said.err
    written = config.read(Path("one/config.toml"))["data"]
    assert written["name"] == str(here / "visits.csv")
    assert written["ignore"] == ["b"]
    resolved = config.resolve(config.read(Path("one/config.toml")))
    assert resolved.to_toml() == Path("one/config.toml").read_text()
    assert resolved.source == Own(
        name="visits.csv", doc="your own files", path=here / "visits.csv", client="site", label="kind", ignore=("b",)
    )
    monkeypatch.chdir("study")
    assert command("run", "my.toml", "--out", "../two").code == 0
    assert without_time(Path("../two")) == without_time(Path("../one"))


def test_other_data_by_flag_drop_the_options_of_the_files_data(command: Command) -> None:
    write(Path("visits.csv"), many())
    write(Path("my.toml"), '[data]\nname = "visits.csv"\nclient = "site"\nlabel = "kind"\n[method]\nname = "local"\n')
    said = command("run", "my.toml", "--data", "toy", "--rounds", 1, "--out", "run")
    assert said.code == 0, said.err
    assert toml.read(Path("run/config.toml"))["data"] == {"name": "toy"}


# Read once.


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Own]:
    """The sources whose files were read."""
    seen: list[Own] = []
    original = Own.gather

    def gather(self: Own) -> Table:
        seen.append(self)
        return original(self)

    monkeypatch.setattr(Own, "gather", gather)
    own_source.read_once.cache_clear()
    return seen


def test_trials_and_comparisons_read_the_files_once(command: Command, gathered: list[Own]) -> None:
    write(Path("visits.csv"), many())
    said = command("compare", *OWN, "--methods", "local,fedavg", "--seeds", "0,1", "--rounds", 1, "--out", "all")
    assert said.code == 0, said.err
    assert [source.path for source in gathered] == [Path("visits.csv").resolve()]


def test_files_that_change_are_read_again(tmp_path: Path, gathered: list[Own]) -> None:
    d = tmp_path / "d"
    for name in ("a", "b"):
        write(d / f"{name}.csv", lines(("a", "label"), *GOOD_ROWS))
    first = load(d)
    assert load(d) is first
    assert len(gathered) == 1
    write(d / "b.csv", lines(("a", "label"), *GOOD_ROWS, (9, 1)))
    assert len(load(d)) == 9
    write(d / "c.csv", lines(("a", "label"), *GOOD_ROWS))
    assert load(d).group_names == ("a", "b", "c")
    os.utime(d / "a.csv", ns=(1, 1))
    load(d)
    assert len(gathered) == 4
    load(d, scale="none")
    assert len(gathered) == 5, "read otherwise is read anew"
    (d / "c.csv").unlink()
    assert load(d).group_names == ("a", "b")


def test_same_content_has_the_same_digest_and_another_division_another(tmp_path: Path) -> None:
    base = load(write(tmp_path / "a.csv", many()), client="site", label="kind").digest
    assert load(write(tmp_path / "b.csv", many().replace(",", ";")), client="site", label="kind").digest == base
    others: Mapping[str, Table] = {
        "values": load(write(tmp_path / "c.csv", many(rows=45)), client="site", label="kind"),
        "clients": load(write(tmp_path / "d.csv", many().replace("s1", "s2", 1)), client="site", label="kind"),
        "scale": load(tmp_path / "a.csv", client="site", label="kind", scale="none"),
    }
    assert len({base, *(table.digest for table in others.values())}) == 4


def test_clients_of_odd_names_have_files_of_their_own(tmp_path: Path) -> None:
    names = ["../up", "a/b", "a b", "é"]
    rows = [(k, name, (k + place) % 2) for place, name in enumerate(names) for k in range(8)]
    path = write(tmp_path / "v.csv", lines(("a", "client", "label"), *rows))
    federation = gpfl.federate(path)
    result = gpfl.fit("local", federation, rounds=1, out=tmp_path / "run")
    assert sorted(client.name for client in result.clients) == sorted(names)
    models = [name for name in content(tmp_path / "run") if name.startswith("models/client-")]
    assert len(models) == 4
    assert {file.name for file in tmp_path.iterdir()} == {"v.csv", "run"}
    assert [shard.name for shard in gpfl.Federation.load(tmp_path / "run/federation.toml", federation.table).shards] == sorted(
        names
    )
