"""Rows of columns as samples: numbers scaled, categories one-hot, and a record of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gpfl.data.files.arrays import divide_by_split, load_arrays
from gpfl.data.files.columns import (
    Column,
    describe_id,
    encode_column,
    find_problem,
    is_constant,
    parse_column,
    raise_problems,
)
from gpfl.data.files.raw_table import Array, Mask, RawTable, RowLocator, ignore_flag, join_column, join_names
from gpfl.data.files.roles import find_roles, find_splits, read_roles
from gpfl.data.files.samples import ColumnOptions, FileSamples
from gpfl.errors import GpflError, did_you_mean, pluralize


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
    training = samples.splits == "train" if samples.splits is not None else np.ones(len(locator), dtype=bool)
    # One at a time, because a column may be large.
    columns = (parse_column(name, join_column(tables, name), samples.decimal_commas) for name in features)
    samples.x, encodings, summaries = _encode(columns, training, samples.decimal_commas, locator, options)
    samples.input_description = _describe_inputs(encodings, options.scale)
    samples.metadata |= {"scale": options.scale, "columns": encodings}
    samples.notes += _describe_columns(summaries, options.ignore)
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


def _encode(
    columns: Iterable[Column], training: Mask, decimal_commas: bool, locator: RowLocator, options: ColumnOptions
) -> tuple[Array, list[dict[str, Any]], list[_Summary]]:
    """Return inputs (rows, width), how each column was encoded, and a summary of each; raise for all bad columns at once."""
    inputs, encodings, summaries, problems = [], [], [], []
    for column in columns:
        problem = find_problem(column, options.missing == "mean", training, decimal_commas, locator)
        if problem is not None:
            problems.append(problem)
        elif not problems:
            values, encoding = encode_column(column, training, options.scale)
            inputs.append(values)
            encodings.append(encoding)
            summaries.append(_Summary(column))
    raise_problems(problems, options.ignore)
    return np.concatenate(inputs, axis=1), encodings, summaries


class _Summary:
    """What the user should know of a column, without its values."""

    def __init__(self, column: Column) -> None:
        self.name, self.missing, self.comma_example = column.name, int(column.missing.sum()), column.comma_example
        self.numeric, self.id, self.constant = column.numeric, describe_id(column), is_constant(column)


def _describe_columns(columns: Sequence[_Summary], ignored: Sequence[str]) -> list[str]:
    """Return lines about columns that the user should check."""
    lines = []
    commas = [column for column in columns if column.comma_example]
    if commas:
        example = commas[0].comma_example
        listed = join_names([column.name for column in commas])
        lines.append(f"Read with decimal commas: {listed} ({example} is {example.replace(',', '.')}).")
    for numeric, change in ((True, "filled with the mean of their column"), (False, "made a category")):
        counts = [f"{column.name} {column.missing:,}" for column in columns if column.missing and column.numeric is numeric]
        lines += [f"Missing values {change}: {join_names(counts)}."] if counts else []
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


def _describe_inputs(encodings: Sequence[Mapping[str, Any]], scale: str) -> str:
    numeric = [str(encoding["name"]) for encoding in encodings if "mean" in encoding]
    categorical = [
        f"{join_names([encoding['name']])} ({_list_categories(encoding['values'])})"
        for encoding in encodings
        if "values" in encoding
    ]
    parts = []
    if numeric:
        how = "scaled to mean 0 and std 1" if scale != "none" else "not scaled"
        parts.append(f"{pluralize(len(numeric), 'numeric column')} ({join_names(numeric)}), {how}")
    if categorical:
        more = f", … ({len(categorical) - 12} more)" if len(categorical) > 12 else ""
        parts.append(f"{pluralize(len(categorical), 'categorical column')}, one-hot: {', '.join(categorical[:12])}{more}")
    return "; ".join(parts)


def _list_categories(values: Sequence[str]) -> str:
    names = [join_names([value]) for value in values if value] + ["missing"] * ("" in values)
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
