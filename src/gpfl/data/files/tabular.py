"""Rows of columns as samples, and what the user should know of the columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gpfl.data.columns import RawColumns, Schema
from gpfl.data.files.arrays import divide_by_split, load_arrays
from gpfl.data.files.columns import (
    Column,
    describe_id,
    find_problem,
    is_constant,
    parse_column,
    raise_problems,
    raw_column,
)
from gpfl.data.files.raw_table import RawTable, RowLocator, ignore_flag, join_column, join_names
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
    names = list(tables[0].columns)
    roles = find_roles(tables, options)
    _, split_column = find_splits(tables, options)
    features = [name for name in names if name not in (*roles.names, split_column)]
    if not features:
        raise GpflError(f"{tables[0].path} has no column of inputs besides {', '.join(sorted({*names, *options.ignore}))}")
    samples, tables = read_roles(tables, roles, features, options)
    locator = RowLocator(tables)
    samples.decimal_commas = all(table.decimal_commas for table in tables)
    # One at a time, because a column may be large.
    columns = (parse_column(name, join_column(tables, name), samples.decimal_commas) for name in features)
    samples.x, summaries = _read_columns(columns, samples.decimal_commas, locator, options)
    samples.input_description = _describe_inputs(samples.x.schema, options.scale)
    samples.metadata |= {"scale": options.scale}
    samples.notes += _describe_columns(summaries, options)
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


def _read_columns(
    columns: Iterable[Column], decimal_commas: bool, locator: RowLocator, options: ColumnOptions
) -> tuple[RawColumns, list[_Summary]]:
    """Return the columns as numbers, and a summary of each; raise for all bad columns at once."""
    schemas, values, summaries, problems = [], [], [], []
    for column in columns:
        problem = find_problem(column, options.fills, decimal_commas, locator)
        if problem is not None:
            problems.append(problem)
        elif not problems:
            schema, numbers = raw_column(column)
            schemas.append(schema)
            values.append(numbers)
            summaries.append(_Summary(column))
    raise_problems(problems, options.ignore)
    return RawColumns(Schema(tuple(schemas)), np.stack(values, axis=1)), summaries


class _Summary:
    """What the user should know of a column, without its values."""

    def __init__(self, column: Column) -> None:
        self.name, self.missing, self.comma_example = column.name, int(column.missing.sum()), column.comma_example
        self.numeric, self.id, self.constant = column.numeric, describe_id(column), is_constant(column)


def _describe_columns(columns: Sequence[_Summary], options: ColumnOptions) -> list[str]:
    """Return lines about columns that the user should check."""
    lines, ignored = [], options.ignore
    commas = [column for column in columns if column.comma_example]
    if commas:
        example = commas[0].comma_example
        listed = join_names([column.name for column in commas])
        lines.append(f"Read with decimal commas: {listed} ({example} is {example.replace(',', '.')}).")
    value = {"most_frequent": "most frequent value"}.get(options.missing, options.missing)
    for numeric, fill in ((True, value), (False, "most frequent category")):
        counts = [f"{column.name} {column.missing:,}" for column in columns if column.missing and column.numeric is numeric]
        lines += [f"Missing values filled with the {fill} of training samples: {join_names(counts)}."] if counts else []
    for kind in dict.fromkeys(column.id for column in columns if column.id):
        names = [column.name for column in columns if column.id == kind]
        flag = ignore_flag(ignored, names)
        if len(names) == 1:
            lines.append(f"Column '{names[0]}' has {kind}; if it is an id: {flag}")
        else:
            lines.append(f"{pluralize(len(names), 'column')} have {kind}: {join_names(names)}; if they are ids: {flag}")
    constant = [column.name for column in columns if column.constant]
    if constant:
        subject = f"Column '{constant[0]}' has" if len(constant) == 1 else f"Columns {join_names(constant)} have"
        lines.append(f"{subject} the same value in every row, which is no information: {ignore_flag(ignored, constant)}")
    return lines


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
    names = [join_names([value]) for value in values]
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
