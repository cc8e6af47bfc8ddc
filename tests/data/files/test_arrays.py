"""Arrays of npz files: inputs of any shape, pixels, labels, clients and splits, and errors."""

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
    RNG,
    TEST,
    TRAIN,
    VALIDATION,
    X,
    Y,
    client_names_of,
    close,
    error_of,
    file_metadata,
    inputs,
    load,
    scaled,
    splits_of,
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
def test_array_labels_are_encoded_from_zero(labels: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=labels)
    table = load(tmp_path / "a.npz")
    assert table.y.tolist() == [0, 1, 0]
    assert table.metadata == {"classes": ["7", "9"], **file_metadata("y")}


def test_npz_may_hold_its_splits(tmp_path: Path) -> None:
    x = {part: RNG.normal(size=(rows, 3)) for part, rows in (("train", 4), ("val", 1), ("test", 2))}
    y = {"train": [0, 1, 2, 0], "val": [1], "test": [2, 0]}
    np.savez(tmp_path / "a.npz", **{f"x_{part}": x[part] for part in x}, **{f"y_{part}": y[part] for part in y})
    table = load(tmp_path / "a.npz")
    for index, part in ((TRAIN, "train"), (VALIDATION, "val"), (TEST, "test")):
        rows = np.array(splits_of(table)) == index
        assert np.array_equal(table.x.numpy()[rows], x[part].astype(np.float32))
        assert table.y.numpy()[rows].tolist() == y[part]


def test_npz_of_each_client_may_hold_its_splits(tmp_path: Path) -> None:
    for client in ("a", "b"):
        x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1] * 3)
        np.savez(write(tmp_path / "d" / f"{client}.npz", b""), x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:])
    federation = gpfl.federate(tmp_path / "d")
    assert [shard.name for shard in federation.shards] == ["a", "b"]
    for shard in federation.shards:
        assert sorted(federation.table.x[shard.train, 0].tolist()) == [0, 2, 4, 6]
        assert sorted(federation.table.x[shard.test, 0].tolist()) == [8, 10]


def test_npz_may_name_the_client_and_label_of_each_row(tmp_path: Path) -> None:
    x = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", signals=x, kind=np.array([3, 1, 3, 1]), who=np.array([10.0, 2.0, 2.0, 10.0]), note=np.zeros(4))
    table = load(tmp_path / "a.npz", label="kind", client="who")
    assert np.array_equal(table.x.numpy(), x)
    assert table.y.tolist() == [1, 0, 1, 0]
    assert table.client_names == ("2", "10")
    assert client_names_of(table) == ["10", "2", "2", "10"]


def test_one_dimensional_arrays_are_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", age=np.array(AGES), sex=np.array(["f", "m"] * 3), y=np.array([0, 1] * 3))
    table = load(tmp_path / "a.npz")
    assert close(inputs(table), [[age, *sex] for age, sex in zip(scaled(AGES), [(1, 0), (0, 1)] * 3, strict=True)])


def test_an_ignored_array_is_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", left=X, right=X + 1, notes=np.array([None] * 4), y=Y)
    assert np.array_equal(load(tmp_path / "a.npz", ignore=["left", "notes"]).x.numpy(), X + 1)
    assert error_of(tmp_path / "a.npz", ignore=["notes", "lft"]) == "data.ignore names column 'lft'; did you mean 'left'?"


BYTES = RNG.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
PIXELS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "channels last": (BYTES, np.moveaxis(BYTES, 3, 1)),
    "one channel last": (BYTES[..., :1], BYTES[:, None, :, :, 0]),
    "channels first": (np.moveaxis(BYTES, 3, 1), np.moveaxis(BYTES, 3, 1)),
    "no channel": (BYTES[..., 0], BYTES[:, None, :, :, 0]),
    "flat": (BYTES.reshape(4, -1), BYTES.reshape(4, -1)),
}


@pytest.mark.parametrize("kind", PIXELS)
def test_arrays_of_bytes_are_pixels_with_channels_first(kind: str, tmp_path: Path) -> None:
    images, expected = PIXELS[kind]
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([0, 1, 0, 1]))
    table = load(tmp_path / "a.npz")
    assert (table.x.dtype, table.input_spec.kind) == (torch.uint8, "pixels")
    assert np.array_equal(table.x.numpy(), expected)
    assert np.allclose(table.inputs(torch.arange(4)).numpy(), expected / 127.5 - 1, rtol=0, atol=1e-6)
    assert "bytes read as pixels" in table.description


# Errors.


def npz_of(**arrays: object) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)  # type: ignore[arg-type]


def member(name: str, content: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, content)

    return put


def npy(header: str, body: bytes = bytes(16)) -> bytes:
    """Return an npy file with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body


NEITHER = "in {path} is not an array of numbers or text, nor a dict of arrays"
TEXTS = ": if these are PFLlib's texts, use --data agnews or give them as CSV"
BAD_NPZS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no zip": (
        lambda path: path.write_bytes(b"x" * 99),
        "{path} is damaged or has another format (File is not a zip file): get it again",
    ),
    "nothing in it": (npz_of(), "{path} holds no array"),
    "objects": (npz_of(x=X, y=np.array([0, "a", None, 1], dtype=object)), f"y.npy {NEITHER} (an array of objects){TEXTS}"),
    "ragged rows": (
        npz_of(data={"x": np.array([np.zeros(1), np.zeros(2)], dtype=object), "y": Y}),
        f"data.npy {NEITHER} (an array of objects){TEXTS}",
    ),
    "a list in a dict": (
        npz_of(data={"x": X, "y": [0, 1]}),
        f"data.npy {NEITHER} (a list under 'y' instead of an array){TEXTS}",
    ),
    "a call": (npz_of(data={"x": os.getcwd}), f"data.npy {NEITHER} (posix.getcwd)"),
    "complex numbers": (npz_of(x=X * 1j, y=Y), f"x.npy {NEITHER} (the type complex128)"),
    "times": (npz_of(x=X, y=Y.astype("M8[s]")), f"y.npy {NEITHER} (the type datetime64[s])"),
    "bytes that are no text": (
        npz_of(x=X, y=np.array([b"a", b"\xff", b"a", b"a"])),
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
        npz_of(x=np.where(X > 5, np.nan, X), y=Y),
        "1 of 4 rows hold NaN or infinity, first bad.npz, row 4: fill them, or leave them out with --missing drop",
    ),
    "infinity": (
        npz_of(x=np.where(X < 3, -np.inf, X), y=Y),
        "2 of 4 rows hold NaN or infinity, first bad.npz, row 1: fill them, or leave them out with --missing drop",
    ),
    "a label less": (npz_of(x=X, y=Y[:3]), "{path} has x of shape (4, 2) and y of shape (3,); give one label per row"),
    "labels one-hot": (
        npz_of(x=X, y=np.eye(4)),
        "{path} has x of shape (4, 2) and y of shape (4, 4); give one label per row",
    ),
    "texts for inputs": (npz_of(x=X.astype("U3"), y=Y), "{path} has x of type <U3; inputs must be numbers"),
    "no labels": (npz_of(x=X, z=Y / 2), "no label column found: use --label NAME; the columns are x, z"),
    "no labels, but candidates": (
        npz_of(x=X, z=Y),
        "no label column found: which column holds it? candidates: z (2 values); choose one with --label z",
    ),
    "two inputs": (npz_of(left=X, right=X, y=Y), "{path} holds left, right, y: name the inputs x and the labels y"),
    "columns of two lengths": (npz_of(a=Y, y=Y[:3]), "{path} has arrays of different length: {'a': 4, 'y': 3}"),
    "test without labels": (
        npz_of(x_train=X, y_train=Y, x_test=X),
        "no label column found: use --label NAME; the columns are x",
    ),
}


@pytest.mark.parametrize("kind", BAD_NPZS)
def test_bad_npz_files_are_errors(kind: str, tmp_path: Path) -> None:
    make, expected = BAD_NPZS[kind]
    path = tmp_path / "bad.npz"
    make(path)
    message, expected = error_of(path), expected.replace("{path}", str(path))
    assert message == expected or (expected.count("(") > expected.count(")") and message.startswith(expected))
