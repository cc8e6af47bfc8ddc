"""Read rows of columns and encode them as in training; preprocessing.json describes the steps."""

import csv
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def read(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the cells of CSV files by column."""
    rows = []
    for path in paths:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows += list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


def encode(cells: Mapping[str, Sequence[str]], spec: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return rows as inputs of the net. Raise if a value cannot be encoded as in training."""
    n_rows = len(cells[spec["columns"][0]["name"]])
    x = np.zeros((n_rows, len(spec["names"])), dtype=np.float32)
    for column in spec["columns"]:
        name, start = column["name"], column["input"]
        texts = [str(cell).strip() for cell in cells[name]]
        missing = np.array([text.lower() in spec["missing"] for text in texts])
        if column["kind"] == "categorical":
            index = {category: i for i, category in enumerate(column["categories"])}
            codes = np.array([index.get(text, -1) for text in texts])
            unseen = ~missing & (codes < 0)
            if unseen.any() and spec["unseen"] == "error":
                raise ValueError(f"column '{name}' holds '{texts[unseen.argmax()]}', which the model does not know")
            missing |= unseen & (spec["unseen"] == "missing")
            codes[missing] = _fill(column, missing, index.get(column["fill"]))
            x[:, start : start + len(index)] = codes[:, None] == np.arange(len(index))
        else:
            values = np.array([np.nan if gone else _number(text) for text, gone in zip(texts, missing, strict=True)])
            for end, sign in ((column["low"], -1), (column["high"], 1)):
                missing |= False if end is None else sign * values > sign * end
            values[missing] = _fill(column, missing, column["fill"])
            with np.errstate(over="ignore"):  # reported below
                x[:, start] = (values - column["mean"]) / column["std"]
        if column["indicator"] is not None:
            x[:, column["indicator"]] = missing
    if not np.isfinite(x).all():
        raise ValueError("a number is too large or not finite")
    return x


def _fill(column: Mapping[str, Any], missing: npt.NDArray[np.bool_], value: float | None) -> float:
    if missing.any() and value is None:
        raise ValueError(f"column '{column['name']}' has missing values, which the model does not fill")
    return 0 if value is None else value


def _number(text: str) -> float:
    """Return a number, or a date (2024-01-31) as days since 1970-01-01."""
    try:
        return float(text)
    except ValueError:
        return float((np.datetime64(text) - np.datetime64(0, "D")) / np.timedelta64(1, "D"))


def graph_inputs(
    cells: Mapping[str, Sequence[str]], spec: Mapping[str, Any], columns: Sequence[Any]
) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of the ONNX model: texts, and numbers with NaN where they are missing."""
    inputs: dict[str, npt.NDArray[Any]] = {}
    for column in columns:
        texts = [cell.strip() for cell in cells[column.name]]
        if column.type == "tensor(string)":
            inputs[column.name] = np.array(texts, dtype=object)
        else:
            inputs[column.name] = np.array([np.nan if text.lower() in spec["missing"] else _number(text) for text in texts])
    return inputs
