"""npz files with an array of inputs of any shape and an array of labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpfl.data.files.layout import SPLIT_NAMES, InputFile
from gpfl.data.files.raw_table import Array, RawTable, RowLocator, find_missing, number_rows
from gpfl.data.files.roles import find_roles, read_rows
from gpfl.data.files.samples import ColumnOptions, FileSamples
from gpfl.errors import GpflError

INPUT_NAMES = ("x", "data", "images", "features")


def divide_by_split(inputs: Sequence[InputFile], tables: Sequence[RawTable]) -> tuple[list[InputFile], list[RawTable]]:
    """Return inputs with arrays x_train, y_train, x_test and y_test as one input per split."""
    out_inputs, out_tables = [], []
    for entry, table in zip(inputs, tables, strict=True):
        columns = table.columns
        suffixes = {name.rpartition("_")[2] for name in columns if name.startswith(("x_", "y_"))}
        if "train" in suffixes and suffixes <= SPLIT_NAMES.keys() and not entry.split:
            for suffix in sorted(suffixes):
                out_inputs.append(InputFile(entry.path, entry.client, SPLIT_NAMES[suffix]))
                names = {name: name.removesuffix(f"_{suffix}") for name in columns if name.endswith(f"_{suffix}")}
                out_tables.append(number_rows({short: columns[name] for name, short in names.items()}, table.notes))
        else:
            out_inputs.append(entry)
            out_tables.append(table)
    return out_inputs, out_tables


def load_arrays(inputs: Sequence[InputFile], tables: Sequence[RawTable], options: ColumnOptions) -> FileSamples:
    """Return the samples of npz files with inputs of any shape."""
    first = inputs[0].path
    roles = find_roles(inputs, tables[0], options)
    name = _find_inputs(first, tables[0], roles.label)
    for entry, table in zip(inputs, tables, strict=True):
        _check_arrays(entry, table, name, roles.label, first, tables[0])
    if options.scale != ColumnOptions.scale:
        raise GpflError(
            f"data.scale is '{options.scale}', but the array '{name}' of {first.name} is never scaled: leave it out"
        )
    # Other arrays may have any length, and number_rows counts the longest.
    aligned = [{key: v for key, v in t.columns.items() if v.ndim and len(v) == len(t.columns[name])} for t in tables]
    tables = [number_rows(columns) for columns in aligned]
    for key in roles.names[1:]:
        for entry, table in zip(inputs, tables, strict=True):
            if key not in table.columns or table.columns[key].ndim != 1:
                count = len(table.columns[name])
                raise GpflError(f"{entry.path} has no array '{key}' with one value for each of its {count:,} rows")
    rows = read_rows(inputs, tables, roles, [name], options)
    x = _as_images(np.concatenate([table.columns[name] for table in rows.tables]))
    _check_finite(x, rows.locator)
    kind = "bytes read as pixels" if x.dtype == np.uint8 else "numbers as they are"
    return FileSamples(
        x,
        rows.labels,
        rows.clients,
        rows.splits,
        rows.groups,
        f"rows of shape {x.shape[1:]}, {kind}",
        roles.label,
        roles.client,
        rows.metadata,
        rows.notes,
        rows.locator,
    )


def _find_inputs(path: Path, table: RawTable, label: str) -> str:
    name = next((name for name in INPUT_NAMES if name in table.columns), None)
    others = [key for key, array in table.columns.items() if array.ndim > 1 and key != label]
    if name is None and len(others) == 1:
        name = others[0]
    if name is None:
        raise GpflError(f"{path} holds {', '.join(table.columns)}: name the inputs x and the labels y")
    return name


def _check_arrays(entry: InputFile, table: RawTable, name: str, label: str, first: Path, pattern: RawTable) -> None:
    for key in (name, label):
        if key not in table.columns:
            raise GpflError(f"{entry.path} has no array '{key}', which {first.name} has; it has {', '.join(table.columns)}")
    x, y, expected = table.columns[name], table.columns[label], pattern.columns[name]
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise GpflError(f"{entry.path} has {name} of shape {x.shape} and {label} of shape {y.shape}; give one label per row")
    if x.dtype.kind not in "biuf":
        raise GpflError(f"{entry.path} has {name} of type {x.dtype}; inputs must be numbers")
    if (x.shape[1:], x.dtype) != (expected.shape[1:], expected.dtype):
        raise GpflError(
            f"{entry.path} has rows of shape {x.shape[1:]} ({x.dtype}), {first.name} of {expected.shape[1:]} "
            f"({expected.dtype}); they must agree"
        )


def _as_images(x: Array) -> Array:
    """Return bytes as (samples, channels, height, width); other arrays stay."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def _check_finite(x: Array, locator: RowLocator) -> None:
    bad = find_missing(x)
    if bad.any():
        raise GpflError(
            f"{int(bad.sum()):,} of {len(x):,} rows hold NaN or infinity, first {locator.describe_first(bad)}: "
            "fill them, or leave them out with --missing drop"
        )
