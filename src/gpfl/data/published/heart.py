"""UCI Heart Disease: patients of four hospitals."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpfl.core.net import InputSpec
from gpfl.core.options import option
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.preprocessing import FILLED, PreprocessingOptions
from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
FILES = (
    ("cleveland", "processed.cleveland.data", 18_461, "2d91a8ff69cfd9616aa47b59d6f843db"),
    ("hungary", "processed.hungarian.data", 10_263, "22e96bee155b5973568101c93b3705f6"),
    ("switzerland", "processed.switzerland.data", 4_109, "9a87f7577310b3917730d06ba9349e20"),
    ("long-beach", "processed.va.data", 6_737, "4249d03ca7711e84f4444768c9426170"),
)
"""Hospital, name, size and MD5 of each file."""

COLUMNS: Mapping[str, tuple[float, float] | dict[float, str]] = {
    "age": (0.0, 120.0),
    "sex": {0: "female", 1: "male"},
    "cp": {1: "typical angina", 2: "atypical angina", 3: "non-anginal pain", 4: "asymptomatic"},
    "trestbps": (0.0, 300.0),
    "chol": (0.0, 700.0),
    "fbs": {0: "up to 120 mg/dl", 1: "above 120 mg/dl"},
    "restecg": {0: "normal", 1: "ST-T wave abnormality", 2: "left ventricular hypertrophy"},
    "thalach": (0.0, 250.0),
    "exang": {0: "no", 1: "yes"},
    "oldpeak": (-5.0, 10.0),
    "slope": {1: "upsloping", 2: "flat", 3: "downsloping"},
    "ca": (0.0, 3.0),
    "thal": {3: "normal", 6: "fixed defect", 7: "reversible defect"},
}
"""The publisher's columns: the range of a number, or the category of each code."""

INCOMPLETE = ("slope", "ca", "thal")  # columns without a value for most patients outside Cleveland

CLASSES = ("absent", "present")
DEGREES = ("0", "1", "2", "3", "4")  # labels: degrees of heart disease
SCHEMA = Schema(
    tuple(
        ColumnSchema(name, "categorical", tuple(values.values()))
        if isinstance(values, dict)
        else ColumnSchema(name, low=values[0], high=values[1])
        for name, values in COLUMNS.items()
    ),
    "num",
    CLASSES,
    declared=True,
)


def parse(paths: Mapping[str, Path]) -> Table:
    """Return all patients, hospital by hospital; class 1 is any degree of heart disease."""
    rows = [_read_rows(paths[name]) for _, name, _, _ in FILES]
    values = np.concatenate(rows)
    return Table(
        RawColumns(SCHEMA, values[:, :-1]),
        values[:, -1] > 0,
        classes=len(CLASSES),
        name="heart",
        client_ids=np.repeat(np.arange(len(rows)), [len(each) for each in rows]),
        client_names=[hospital for hospital, *_ in FILES],
    )


def _read_rows(path: Path) -> npt.NDArray[np.float64]:
    """Return numbers, indices of categories or NaN, and the label from 0 to 4, of each line."""
    read_columns = [partial(_read_cell, allowed) for allowed in COLUMNS.values()]
    converters: dict[int | str, Callable[[str], float]] = dict(enumerate([*read_columns, DEGREES.index]))
    with archive.report_damage(path):
        lines = path.read_text(encoding="ascii").splitlines()
        if not lines:
            raise ValueError("it is empty")
        rows = np.loadtxt(lines, delimiter=",", converters=converters, ndmin=2, encoding="ascii")
        if rows.shape[1] != len(converters):
            raise ValueError(f"it has {rows.shape[1]} columns; it must have {len(converters)}")
        return rows


def _read_cell(allowed: tuple[float, float] | dict[float, str], cell: str) -> float:
    if cell.strip() == "?":
        return math.nan
    value = float(cell)
    if isinstance(allowed, dict):
        return list(allowed).index(value)
    if not allowed[0] <= value <= allowed[1]:
        raise ValueError("outside the range of the column")
    return value


@dataclass(frozen=True, kw_only=True)
class Heart(PreprocessingOptions, PublishedDataset):
    """UCI Heart Disease, with missing values as published or complete cases only."""

    missing: str = option(
        "mean",
        "missing inputs: filled with the mean, the median or the most frequent value of the training samples of all clients "
        "(categories always with the most frequent), or an error",
        choices=(*FILLED, "error"),
    )
    cases: str = option(
        "all",
        "all 920 patients with 13 inputs, or as in FLamby the 740 with a value in each of 10 inputs (without slope, ca, thal)",
        choices=("all", "complete"),
    )

    @property
    def expected_samples(self) -> int:
        """Number of chosen samples."""
        return 740 if self.cases == "complete" else self.n_samples

    def read(self) -> Table:
        """Return the table of the chosen cases."""
        table = super().read()
        table.metadata |= {"classes": list(CLASSES), "label": SCHEMA.label}
        table.preprocessing = self
        if self.cases == "complete":
            assert table.raw is not None
            kept = [i for i, column in enumerate(SCHEMA.columns) if column.name not in INCOMPLETE]
            raw = RawColumns(replace(SCHEMA, columns=tuple(SCHEMA.columns[i] for i in kept)), table.raw.values[:, kept])
            rows = np.flatnonzero(~np.isnan(raw.values).any(axis=1))
            table = table.select(rows)
            table.raw = raw.select(rows)
            table.x, table.input_spec = torch.from_numpy(table.raw.values), InputSpec((len(kept),))
        return table


HEART = Heart(
    name="heart",
    description="UCI Heart Disease: 920 patients of four hospitals, 13 inputs with missing values, disease or none",
    files=tuple(PublishedFile(name, f"{URL}{name}", size, md5=md5) for _, name, size, md5 in FILES),
    licence="CC BY 4.0; Janosi, Steinbrunn, Pfisterer, Detrano",
    n_samples=920,
    folder_names=("heart_disease", "heart-disease", "fed_heart_disease"),
    parse=parse,
    partition={"name": "natural"},
    net={"name": "mlp", "hidden": [32]},
    train={"rounds": 100, "lr": 0.05, "batch_size": 10},
)
