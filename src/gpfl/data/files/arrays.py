"""npz files with an array of inputs of any shape and an array of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpfl.data.files.layout import SPLIT_NAMES
from gpfl.data.files.raw_table import Array, RawTable, RowLocator, find_missing, number_rows
from gpfl.data.files.roles import find_roles, read_roles
from gpfl.data.files.samples import ColumnOptions, FileSamples
from gpfl.errors import GpflError

INPUT_NAMES = ("x", "data", "images", "features")


def divide_by_split(tables: Sequence[RawTable]) -> list[RawTable]:
    """Return tables with arrays x_train, y_train, x_test and y_test as one table per split."""
    divided = []
    for table in tables:
        source, columns = table.source, table.columns
        suffixes = {name.rpartition("_")[2] for name in columns if name.startswith(("x_", "y_"))}
        if "train" in suffixes and suffixes <= SPLIT_NAMES.keys() and not source.split:
            for suffix in sorted(suffixes):
                names = [name for name in columns if name.endswith(f"_{suffix}")]
                arrays = {name.removesuffix(f"_{suffix}"): columns[name] for name in names}
                divided.append(number_rows(replace(source, split=SPLIT_NAMES[suffix]), arrays, table.notes))
        else:
            divided.append(table)
    return divided


def load_arrays(tables: Sequence[RawTable], options: ColumnOptions) -> FileSamples:
    """Return the samples of npz files with inputs of any shape."""
    roles = find_roles(tables, options)
    name = find_input_array(tables[0], roles.label)
    for table in tables:
        _check_arrays(table, name, roles.label, tables[0])
    if options.scale != ColumnOptions.scale:
        raise GpflError(
            f"data.scale is '{options.scale}', but the array '{name}' of {tables[0].path.name} is never scaled: leave it out"
        )
    # Other arrays may have any length, and number_rows counts the longest.
    tables = [
        number_rows(t.source, {key: v for key, v in t.columns.items() if v.ndim and len(v) == len(t.columns[name])})
        for t in tables
    ]
    for key in roles.names[1:]:
        for table in tables:
            if key not in table.columns or table.columns[key].ndim != 1:
                raise GpflError(f"{table.path} has no array '{key}' with one value for each of its {len(table):,} rows")
    x = np.concatenate([table.columns[name] for table in tables])
    missing = find_missing(x)
    if options.missing != "drop" and missing.any():
        raise GpflError(
            f"{int(missing.sum()):,} of {len(x):,} rows hold NaN or infinity, first "
            f"{RowLocator(tables).describe_first(missing)}: fill them, or leave them out with --missing drop"
        )
    samples, rows = read_roles(tables, roles, {name: missing}, options)
    samples.x = as_images(x[rows])
    kind = "bytes read as pixels" if samples.x.dtype == np.uint8 else "numbers as they are"
    samples.input_description = f"rows of shape {samples.x.shape[1:]}, {kind}"
    return samples


def find_input_array(table: RawTable, label: str) -> str:
    """Return the name of the array of inputs."""
    name = next((name for name in INPUT_NAMES if name in table.columns), None)
    others = [key for key, array in table.columns.items() if array.ndim > 1 and key != label]
    if name is None and len(others) == 1:
        name = others[0]
    if name is None:
        raise GpflError(f"{table.path} holds {', '.join(table.columns)}: name the inputs x and the labels y")
    return name


def _check_arrays(table: RawTable, name: str, label: str, first: RawTable) -> None:
    path, first_name = table.path, first.path.name
    for key in (name, label):
        if key not in table.columns:
            raise GpflError(f"{path} has no array '{key}', which {first_name} has; it has {', '.join(table.columns)}")
    x, y, expected = table.columns[name], table.columns[label], first.columns[name]
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise GpflError(f"{path} has {name} of shape {x.shape} and {label} of shape {y.shape}; give one label per row")
    if x.dtype.kind not in "biuf":
        raise GpflError(f"{path} has {name} of type {x.dtype}; inputs must be numbers")
    if (x.shape[1:], x.dtype) != (expected.shape[1:], expected.dtype):
        raise GpflError(
            f"{path} has rows of shape {x.shape[1:]} ({x.dtype}), {first_name} of {expected.shape[1:]} "
            f"({expected.dtype}); they must agree"
        )


def as_images(x: Array) -> Array:
    """Return bytes as (samples, channels, height, width); other arrays stay."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x
