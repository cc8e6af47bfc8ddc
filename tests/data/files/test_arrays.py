"""Arrays of npz files: inputs of any shape, pixels, labels, clients and parts; what is refused."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from user_files import (
    AGES,
    DRAW,
    TEST,
    TRAIN,
    VALIDATION,
    X,
    Y,
    clients_of,
    close,
    load,
    parts_of,
    read_as,
    refusal,
    scaled,
    write,
)

import gpfl


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
    assert table.metadata == {"classes": ["7", "9"], **read_as("y")}


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
    assert table.client_names == ("2", "10")
    assert clients_of(table) == ["10", "2", "2", "10"]


def test_arrays_of_one_value_a_row_are_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", age=np.array(AGES), sex=np.array(["f", "m"] * 3), y=np.array([0, 1] * 3))
    table = load(tmp_path / "a.npz")
    assert close(table.x, [[age, *sex] for age, sex in zip(scaled(AGES), [(1, 0), (0, 1)] * 3, strict=True)])


def test_ignored_array_is_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", left=X, right=X + 1, notes=np.array([None] * 4), y=Y)
    assert np.array_equal(load(tmp_path / "a.npz", ignore=["left", "notes"]).x.numpy(), X + 1)
    assert refusal(tmp_path / "a.npz", ignore=["notes", "lft"]) == "data.ignore names column 'lft'; did you mean 'left'?"


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
    assert (table.x.dtype, table.input_spec.kind) == (torch.uint8, "pixels")
    assert np.array_equal(table.x.numpy(), wanted)
    assert np.allclose(table.inputs(torch.arange(4)).numpy(), wanted / 127.5 - 1, rtol=0, atol=1e-6)
    assert "bytes taken as pixels" in table.description


# What is refused.


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


NEITHER = "in {path} is not an array of numbers or text, nor a dict of such"
TEXTS = ": if these are PFLlib's texts, use --data agnews, or give them as CSV"
BAD_NPZS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no zip": (
        lambda path: path.write_bytes(b"x" * 99),
        "{path} is damaged or of another format (File is not a zip file): get it again",
    ),
    "nothing in it": (savez(), "{path} holds no array"),
    "objects": (savez(x=X, y=np.array([0, "a", None, 1], dtype=object)), f"y.npy {NEITHER} (an array of objects){TEXTS}"),
    "ragged rows": (
        savez(data={"x": np.array([np.zeros(1), np.zeros(2)], dtype=object), "y": Y}),
        f"data.npy {NEITHER} (an array of objects){TEXTS}",
    ),
    "a list in a dict": (
        savez(data={"x": X, "y": [0, 1]}),
        f"data.npy {NEITHER} (a list under 'y' where an array should be){TEXTS}",
    ),
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
        "1 of 4 rows hold NaN or infinity, first bad.npz, row 4: fill them, or leave them out with --missing drop",
    ),
    "infinity": (
        savez(x=np.where(X < 3, -np.inf, X), y=Y),
        "2 of 4 rows hold NaN or infinity, first bad.npz, row 1: fill them, or leave them out with --missing drop",
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
