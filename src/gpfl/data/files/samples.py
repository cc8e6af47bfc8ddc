"""Samples of rows of columns, of arrays and of folders of images, with the labels and clients that belong to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gpfl.data.columns import RawColumns, Schema
from gpfl.data.encoders import GREY, ImageFormat, read_header
from gpfl.data.files.cells import parse_column
from gpfl.data.files.checks import check_columns, describe_columns, describe_reading, describe_values
from gpfl.data.files.layout import SPLIT_NAMES, InputFile, class_folders, image_files
from gpfl.data.files.raw_table import Array, RawTable, find_missing, join_names, join_tables, number_rows
from gpfl.data.files.roles import ColumnOptions, Roles, find_complete_rows, find_roles
from gpfl.errors import GpflError, did_you_mean, pluralize

INPUT_NAMES = ("x", "data", "images", "features")


@dataclass(frozen=True, kw_only=True)
class FileSamples:
    """The samples of all files."""

    x: Array | RawColumns  # inputs
    table: RawTable  # the rows of the samples, with the columns of their roles
    roles: Roles  # columns that are not inputs
    description: str  # what the inputs are
    metadata: dict[str, object]  # how the files were read; saved with the manifest
    classes: tuple[str, ...] = ()  # declared classes of the label
    notes: list[str] = field(default_factory=list)  # lines for the user
    encoder: ImageFormat | None = None  # format of images


def load_rows(files: Iterable[RawTable], options: ColumnOptions) -> FileSamples:
    """Return the samples of files of rows: arrays if there are any, else columns."""
    tables = list(files)
    known = {name for table in tables for name in table.columns}
    for name in options.ignore:
        if name not in known:
            raise GpflError(f"data.ignore names column '{name}'; {did_you_mean(name, known)}")
        for table in tables:
            table.columns.pop(name, None)
    tables = [part for table in tables for part in _divide_by_split(table)]
    arrays = any(values.ndim != 1 for table in tables for values in table.columns.values())
    return (_load_arrays if arrays else _load_columns)(tables, options)


# Columns.


def _load_columns(tables: Sequence[RawTable], options: ColumnOptions) -> FileSamples:
    table = join_tables(tables)
    schema = Schema.read(Path(options.schema)) if options.schema else Schema(())
    options = replace(options, label=options.label or schema.label)
    roles = find_roles(table, options)
    features = [name for name in table.columns if name not in (*roles.names, roles.split_column)]
    if schema.declared:
        features = schema.find_columns(features)
    if not features:
        raise GpflError(f"{table.path} has no column of inputs besides {', '.join(sorted({*table.columns, *options.ignore}))}")
    kinds = {column.name: column.kind for column in schema.columns}
    columns = [parse_column(name, table.columns[name], not table.decimal_commas, kind=kinds.get(name)) for name in features]
    dates = [column.schema.name for column in columns if column.schema.kind == "date" and options.dates == "ignore"]
    columns = [column for column in columns if column.schema.name not in dates]
    check_columns(columns, options, table, roles.client)
    if not columns:
        raise GpflError(f"{table.path} has no column of inputs besides dates, which --dates ignore leaves out")
    missing = {column.schema.name: column.missing for column in columns}
    complete, notes = find_complete_rows(table, roles, missing, options)
    rows: slice | Array = slice(None)
    if complete is not None:
        table, rows = table.filter(complete), complete
    raw = RawColumns(Schema(tuple(c.schema for c in columns)), np.stack([c.values[rows] for c in columns], axis=1))
    if schema.declared:
        raw, outside = _conform(raw, schema, table, options)
        notes += outside
    notes += [f"Columns of dates left out: {join_names(dates)}."] if dates else []
    return FileSamples(
        x=raw,
        table=table,
        roles=roles,
        description=describe_columns(raw.schema, options.scale),
        metadata=roles.metadata(options) | {"scale": options.scale},
        classes=schema.classes,
        notes=[*table.notes, *notes, *describe_reading(columns), *describe_values(raw, options)],
    )


def _conform(raw: RawColumns, schema: Schema, table: RawTable, options: ColumnOptions) -> tuple[RawColumns, list[str]]:
    """Return the columns of a declared schema; raise for values outside it, unless missing values are filled."""
    conforming, outside = raw.conform(schema)
    if not outside:
        return conforming, []
    if options.fills:
        counts = join_names([f"{name} {count:,}" for name, count in outside.items()])
        return conforming, [f"Values outside the schema count as missing: {counts}."]
    name, count = next(iter(outside.items()))
    column, values = conforming.column(name)
    where = table.locate_first(np.isnan(values) & ~np.isnan(raw.column(name)[1]))
    others = pluralize(len(outside) - 1, "other column")
    more = f", and {others} have some as well" if len(outside) > 1 else ""
    raise GpflError(
        f"column '{name}' has {pluralize(count, 'value')} outside {column.limits}, which {options.schema} declares, first in "
        f"{where}{more}: correct the file or the schema, or count such values as missing with --missing mean"
    )


# Arrays.


def _divide_by_split(table: RawTable) -> list[RawTable]:
    """Return a table with arrays x_train, y_train, x_test and y_test as one table for each split."""
    suffixes = {name.rpartition("_")[2] for name in table.columns if name.startswith(("x_", "y_"))}
    if "train" not in suffixes or not suffixes <= SPLIT_NAMES.keys() or table.files[0].split:
        return [table]
    parts = []
    for suffix in sorted(suffixes):
        columns = {
            name.removesuffix(f"_{suffix}"): values for name, values in table.columns.items() if name.endswith(f"_{suffix}")
        }
        parts.append(number_rows(replace(table.files[0], split=SPLIT_NAMES[suffix]), columns))
    return parts


def _load_arrays(tables: Sequence[RawTable], options: ColumnOptions) -> FileSamples:
    first = tables[0]
    roles = find_roles(first, options)
    name = find_input_array(first, roles.label)
    tables = [_keep_values_of_rows(table, first, name, roles, options) for table in tables]
    common = set.intersection(*(set(table.columns) for table in tables))
    tables = [replace(table, columns={key: table.columns[key] for key in first.columns if key in common}) for table in tables]
    if options.scale != ColumnOptions.scale:
        raise GpflError(
            f"data.scale is '{options.scale}', but the array '{name}' of {first.path.name} is never scaled: leave it out"
        )
    table = join_tables(tables)
    roles = find_roles(table, options)
    x = table.columns.pop(name)
    missing = find_missing(x)
    if options.missing != "drop" and missing.any():
        raise GpflError(
            f"{int(missing.sum()):,} of {len(x):,} rows hold NaN or infinity, first "
            f"{table.locate_first(missing)}: fill them, or leave them out with --missing drop"
        )
    complete, notes = find_complete_rows(table, roles, {name: missing}, options)
    if complete is not None:
        table, x = table.filter(complete), x[complete]
    x = as_images(x)
    kind = "bytes read as pixels" if x.dtype == np.uint8 else "numbers as they are"
    return FileSamples(
        x=x,
        table=table,
        roles=roles,
        description=f"rows of shape {x.shape[1:]}, {kind}",
        metadata=roles.metadata(options),
        notes=[*table.notes, *notes],
    )


def find_input_array(table: RawTable, label: str) -> str:
    """Return the name of the array of inputs."""
    name = next((name for name in INPUT_NAMES if name in table.columns), None)
    others = [key for key, array in table.columns.items() if array.ndim > 1 and key != label]
    if name is None and len(others) == 1:
        name = others[0]
    if name is None:
        raise GpflError(f"{table.path} holds {', '.join(table.columns)}: name the inputs x and the labels y")
    return name


def _keep_values_of_rows(table: RawTable, first: RawTable, name: str, roles: Roles, options: ColumnOptions) -> RawTable:
    """Return the inputs and the arrays with a value for each row; raise if the inputs or a role have none."""
    path, first_name, label = table.path, first.path.name, roles.label
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
    columns = {key: values for key, values in table.columns.items() if key == name or values.shape == (len(x),)}
    for key in filter(None, (roles.client, roles.group, options.split_column)):
        if key not in columns:
            raise GpflError(f"{path} has no array '{key}' with one value for each of its {len(x):,} rows")
    return number_rows(table.files[0], columns)


def as_images(x: Array) -> Array:
    """Return bytes as (samples, channels, height, width); other arrays stay."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


# Images.


def load_images(inputs: Sequence[InputFile], side: int) -> FileSamples:
    """Return all images as bytes (samples, channels, height, width), resized to `side` pixels unless it is 0."""
    tables, paths = [], []
    for entry in inputs:
        files = [(folder.name, file) for folder in class_folders(entry) for file in image_files(folder)]
        tables.append(number_rows(entry, {"class": np.array([name for name, _ in files], dtype=str)}))
        paths += [file for _, file in files]
    headers = [read_header(file) for file in paths]
    channels = 1 if all(mode in GREY for mode, _ in headers) else 3
    width, height = (side, side) if side else headers[0][1]
    for file, (_, size) in zip(paths, headers, strict=True):
        if not side and size != headers[0][1]:
            raise GpflError(
                f"{file} is {size[0]}×{size[1]}, {paths[0].name} is {width}×{height}: "
                "give all images the same size, or resize them with --image-size 64"
            )
    images = ImageFormat(channels, height, width, resize=bool(side))
    return FileSamples(
        x=images.read(paths),
        table=join_tables(tables),
        roles=Roles("class"),
        description=str(images) + (", resized" if side else ""),
        metadata={"image_size": side},
        encoder=images,
    )
