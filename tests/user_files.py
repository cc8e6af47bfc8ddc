"""Files for the tests of user files, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpfl.data import Table, find_dataset
from gpfl.errors import GpflError
from gpfl.federation.preprocessing import FederatedPreprocessing

RNG = np.random.default_rng(0)
TRAIN, VALIDATION, TEST = 0, 1, 2
EXPECTED = (
    "give a file or sub-folder per client, or class folders of images; "
    "files may be .csv, .tsv, .csv.gz, .tsv.gz, .parquet, .npz, images .png, .jpg, .jpeg, .bmp, .webp, .ppm, .pgm, .tif, .tiff"
)


def load(path: Path, **options: object) -> Table:
    return find_dataset(str(path), options).load()


def error_of(path: Path, **options: object) -> str:
    """Return the message for bad files, which is one line."""
    with pytest.raises(GpflError) as problem:
        load(path, **options)
    assert "\n" not in str(problem.value)
    return str(problem.value)


def message_of(act: Callable[[], object]) -> str:
    with pytest.raises(GpflError) as problem:
        act()
    return str(problem.value)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def lines(*rows: Sequence[object], mark: str = ",") -> str:
    return "".join(mark.join(str(cell) for cell in row) + "\n" for row in rows)


def client_names_of(table: Table) -> list[str]:
    """Return the name of each row's client."""
    assert table.client_ids is not None
    return [table.client_names[client] for client in table.client_ids]


def splits_of(table: Table) -> list[int]:
    assert table.splits is not None
    return table.splits.tolist()


def scaled(column: Sequence[float], over: Sequence[float] | None = None) -> list[float]:
    """Return a standardised column, computed with sums."""
    values = list(column if over is None else over)
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return [(value - mean) / std for value in column]


def inputs(table: Table) -> torch.Tensor:
    """Return the inputs of a table: raw columns as they are encoded if a single client has all training rows."""
    if table.raw is None:
        return table.x
    rows = np.arange(len(table))
    train = rows if table.splits is None else np.flatnonzero(table.splits == TRAIN)
    return FederatedPreprocessing.fit(table.raw, {"all": train}, table.preprocessing).encode(table, {"all": rows}).x


def column_names(table: Table) -> list[str]:
    assert table.raw is not None
    return [column.name for column in table.raw.schema.columns]


def close(found: torch.Tensor, expected: Sequence[Sequence[float]]) -> bool:
    return found.dtype == torch.float32 and np.allclose(found.numpy(), np.array(expected), rtol=1e-6, atol=1e-6)


def missing(column: str, count: int, first: str) -> str:
    values = "1 missing value, in" if count == 1 else f"{count} missing values, first in"
    return (
        f"column '{column}' has {values} {first}: fill missing values with --missing mean, leave such rows out with "
        f"--missing drop, or leave the column out with --ignore {column}"
    )


def missing_role(column: str, count: int, first: str) -> str:
    """Return the message for a missing label or client."""
    values = "1 missing value, in" if count == 1 else f"{count} missing values, first in"
    return f"column '{column}' has {values} {first}: fill in the file, or leave such rows out with --missing-labels drop"


def file_metadata(label: str, **changes: object) -> dict[str, object]:
    """Return how a manifest records the reading of columns or arrays."""
    return {"label": label, "client": "", "split_column": "", "ignore": [], "missing": "error"} | changes


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
GOOD_ROWS = [(k, k % 2) for k in range(4)]
X, Y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])


def make_csv(rows: int = 48, clients: int = 3) -> str:
    """Return a CSV for a few rounds of training."""
    x = np.random.default_rng(1).normal(size=(rows, 2)).round(3)
    return lines(
        ("a", "b", "site", "kind"),
        *((x[k, 0], x[k, 1], f"s{k % clients}", "high" if x[k].sum() > 0 else "low") for k in range(rows)),
    )


def write_image(path: Path, seed: int, size: tuple[int, int] = (5, 4), mode: str = "RGB") -> np.ndarray:
    """Write an image and return its pixels (channels, height, width)."""
    width, height = size
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values[:, :, 0] if mode == "L" else values, mode).save(path)
    return np.moveaxis(values, 2, 0)
