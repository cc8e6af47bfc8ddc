"""Patients of three hospitals: raw rows with missing values and categories, and runs on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from user_files import lines, write

import gpfl

COLUMNS = ("patient", "chol", "hospital", "pain", "age", "outcome")
HOSPITALS = ("north", "south", "St. Mary")
LABEL = "outcome"


def make_rows(n: int = 180, seed: int = 0) -> list[tuple[str, ...]]:
    """Return patients as text: every ninth without cholesterol, every seventeenth without kind of pain."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        age, chol = rng.normal(55 + 4 * (k % 3), 9), rng.normal(240, 40)
        pain = ("typical", "atypical", "absent")[rng.integers(3)]
        score = (age - 59) / 9 + (pain == "typical") - (chol - 240) / 80 + rng.normal() / 2
        cells = ("" if k % 9 == 0 else f"{chol:.0f}", HOSPITALS[k % 3], "" if k % 17 == 5 else pain, f"{age:.1f}")
        rows.append((f"{k:04d}", *cells, "ill" if score > 0 else "well"))
    return rows


def write_rows(path: Path, rows: Iterable[tuple[str, ...]], columns: tuple[str, ...] = COLUMNS) -> Path:
    """Write rows as CSV with some of the columns, in the given order."""
    index = [COLUMNS.index(name) for name in columns]
    return write(path, lines(columns, *([row[i] for i in index] for row in rows)))


def fit(folder: Path, *, scale: str = "federated", method: str = "fedper", **settings: Any) -> gpfl.Result:
    """Return a run in `folder/run` on `folder/visits.csv`."""
    path = write_rows(folder / "visits.csv", make_rows())
    reading = {"client": "hospital", "label": LABEL, "ignore": ("patient",), "missing": "mean", "missing_indicator": True}
    partition = {key: settings.pop(key) for key in ("validation_fraction",) if key in settings}
    federation = gpfl.federate(path, scale=scale, **reading, **partition)
    return gpfl.fit(method, federation, **{"net": "mlp", "rounds": 3, "lr": 0.1, "out": folder / "run", **settings})
