"""Rows of columns as samples, and what the user should know of the columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpfl.data.columns import RawColumns, Schema
from gpfl.data.files.arrays import divide_by_split, load_arrays
from gpfl.data.files.cells import parse_column
from gpfl.data.files.checks import check_columns, describe_reading, describe_values
from gpfl.data.files.raw_table import RawTable, RowLocator, join_column, join_names
from gpfl.data.files.roles import find_roles, find_splits, read_roles
from gpfl.data.files.samples import ColumnOptions, FileSamples
from gpfl.errors import GpflError, did_you_mean, pluralize

SCALES = {
    "federated": "scaled to mean 0 and std 1",
    "local": "scaled to mean 0 and std 1 at each client",
    "none": "not scaled",
}


def load_rows(tables: Sequence[RawTable], options: ColumnOptions) -> FileSamples:
    """Return the samples of files of rows: arrays if there are any, else columns."""
    notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    tables = divide_by_split(_drop_ignored(tables, options.ignore))
    arrays = any(array.ndim != 1 for table in tables for array in table.columns.values())
    samples = (load_arrays if arrays else _load_columns)(tables, options)
    if len(notes) > 3:
        notes = [*notes[:3], f"The same in {len(notes) - 3} more files."]
    samples.notes = [*notes, *samples.notes]
    return samples


def _drop_ignored(tables: Sequence[RawTable], ignore: Sequence[str]) -> list[RawTable]:
    known = {name for table in tables for name in table.columns}
    for name in ignore:
        if name not in known:
            raise GpflError(f"data.ignore names column '{name}'; {did_you_mean(name, known)}")
    return [table.drop(ignore) for table in tables]


def _load_columns(tables: Sequence[RawTable], options: ColumnOptions) -> FileSamples:
    _check_same_columns(tables)
    schema = Schema.read(Path(options.schema)) if options.schema else None
    if schema is not None and not options.label:
        options = replace(options, label=schema.label)
    names = list(tables[0].columns)
    roles = find_roles(tables, options)
    _, split_column = find_splits(tables, options)
    features = [name for name in names if name not in (*roles.names, split_column)]
    if schema is not None:
        features = schema.find_columns(features)
    if not features:
        raise GpflError(f"{tables[0].path} has no column of inputs besides {', '.join(sorted({*names, *options.ignore}))}")
    comma_separated = not all(table.decimal_commas for table in tables)
    kinds = {column.name: column.kind for column in schema.columns} if schema is not None else {}
    columns = [parse_column(name, join_column(tables, name), comma_separated, kind=kinds.get(name)) for name in features]
    dates = [column.schema.name for column in columns if column.schema.kind == "date" and options.dates == "ignore"]
    columns = [column for column in columns if column.schema.name not in dates]
    check_columns(columns, options, RowLocator(tables), roles.client)
    if not columns:
        raise GpflError(f"{tables[0].path} has no column of inputs besides dates, which --dates ignore leaves out")
    samples, rows = read_roles(tables, roles, {column.schema.name: column.missing for column in columns}, options)
    raw = RawColumns(Schema(tuple(c.schema for c in columns)), np.stack([c.values[rows] for c in columns], axis=1))
    if schema is not None:
        raw, samples.classes = _conform(samples, raw, schema, options), schema.classes
    samples.x = raw
    samples.input_description = _describe_inputs(raw.schema, options.scale)
    samples.metadata |= {"scale": options.scale}
    samples.notes += [f"Columns of dates left out: {join_names(dates)}."] if dates else []
    samples.notes += [*describe_reading(columns), *describe_values(raw, options)]
    return samples


def _check_same_columns(tables: Sequence[RawTable]) -> None:
    names = set(tables[0].columns)
    for table in tables:
        different = sorted(names ^ set(table.columns))
        if different:
            name = different[0]
            has, lacks = (table, tables[0]) if name in table.columns else (tables[0], table)
            raise GpflError(f"column '{name}' is in {has.path}, but not in {lacks.path}; all files must have the same columns")
        sizes = {name: len(values) for name, values in table.columns.items()}
        if len(set(sizes.values())) > 1:
            raise GpflError(f"{table.path} has arrays of different length: {sizes}")


def _conform(samples: FileSamples, raw: RawColumns, schema: Schema, options: ColumnOptions) -> RawColumns:
    """Return the columns of a declared schema; raise for values outside it, unless missing values are filled."""
    conforming, outside = raw.conform(schema)
    if not outside:
        return conforming
    if options.fills:
        counts = join_names([f"{name} {count:,}" for name, count in outside.items()])
        samples.notes.append(f"Values outside the schema count as missing: {counts}.")
        return conforming
    name, count = next(iter(outside.items()))
    column, _ = conforming.column(name)
    assert samples.locator is not None
    where = samples.locator.describe_first(np.isnan(conforming.column(name)[1]) & ~np.isnan(raw.column(name)[1]))
    others = pluralize(len(outside) - 1, "other column")
    more = f", and {others} have some as well" if len(outside) > 1 else ""
    raise GpflError(
        f"column '{name}' has {pluralize(count, 'value')} outside {column.limits}, which {options.schema} declares, first in "
        f"{where}{more}: correct the file or the schema, or count such values as missing with --missing mean"
    )


def _describe_inputs(schema: Schema, scale: str) -> str:
    numeric = [column.name for column in schema.columns if not column.is_categorical]
    categorical = [f"{join_names([c.name])} ({_list_categories(c.categories)})" for c in schema.columns if c.is_categorical]
    parts = []
    if numeric:
        parts.append(f"{pluralize(len(numeric), 'numeric column')} ({join_names(numeric)}), {SCALES[scale]}")
    if categorical:
        more = f", … ({len(categorical) - 12} more)" if len(categorical) > 12 else ""
        parts.append(f"{pluralize(len(categorical), 'categorical column')}, one-hot: {', '.join(categorical[:12])}{more}")
    return "; ".join(parts)


def _list_categories(values: Sequence[str]) -> str:
    names = [join_names([value if len(value) <= 40 else f"{value[:39]}…"]) for value in values]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
