"""Check input columns, and describe what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpfl.data.columns import ColumnSchema, Floats, RawColumns, Schema
from gpfl.data.files.cells import ParsedColumn
from gpfl.data.files.raw_table import RawTable, ignore_flag, join_names
from gpfl.data.files.roles import ColumnOptions
from gpfl.errors import GpflError, pluralize

MAX_CATEGORIES = 50  # largest number of different texts in a categorical column
ID_SHARE = 0.95  # a column with at least this share of different values is reported as a possible id
MIN_ROWS_FOR_ID = 20  # if the table has so many rows
MAX_FLOAT = float(np.finfo(np.float32).max)
SCALES = {
    "federated": "scaled to mean 0 and std 1",
    "local": "scaled to mean 0 and std 1 at each client",
    "none": "not scaled",
}


@dataclass(frozen=True)
class Problem:
    """Why a column cannot be an input, and what the user can do besides leaving it out."""

    name: str
    reason: str
    fix: str = ""
    missing: bool = False


def check_columns(columns: Sequence[ParsedColumn], options: ColumnOptions, table: RawTable, client: str) -> None:
    """Raise one error for all columns that cannot be inputs, with every fix; `client` is the column of clients, if any."""
    problems = [problem for column in columns if (problem := _find_problem(column, options, table, client))]
    if not problems:
        return
    reasons = [f"column '{problem.name}' {problem.reason}" for problem in problems[:5]]
    if len(problems) > len(reasons):
        reasons.append(f"{pluralize(len(problems) - len(reasons), 'more column')} cannot be inputs either")
    fixes = list(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    others = [problem.name for problem in problems if not problem.missing]
    if len(others) < len(problems):
        flag = f" {ignore_flag(options.ignore, others)}" if others else ""
        fixes += [f"fill missing values with --missing mean{flag}", f"leave such rows out with --missing drop{flag}"]
    subject = "the column" if len(problems) == 1 else "all these columns"
    flag = ignore_flag(options.ignore, [problem.name for problem in problems])
    fixes.append(f"{'or ' if fixes else ''}leave {subject} out with {flag}")
    raise GpflError(f"{'; '.join(reasons)}: {', '.join(fixes)}")


def _find_problem(column: ParsedColumn, options: ColumnOptions, table: RawTable, client: str) -> Problem | None:
    name, rows = column.schema.name, len(column.values)
    if column.unreadable.any() and options.unreadable == "error":
        return Problem(name, *describe_unreadable(column, table))
    if column.missing.all():
        return Problem(name, "is empty in every row")
    if column.schema.kind == "date" and options.dates == "error":
        return Problem(
            name, "holds dates", "read dates as days with --dates days, leave columns of dates out with --dates ignore"
        )
    too_large = ~column.missing & ~(np.abs(column.values) < MAX_FLOAT)
    if too_large.any():
        value, where = column.values[too_large][0], table.locate_first(too_large)
        return Problem(name, f"holds {value:g} in {where}, which is too large for a float32", "correct the file")
    categories = column.schema.categories
    if len(categories) > MAX_CATEGORIES:
        is_client = not client and 2 * len(categories) <= rows
        return Problem(
            name,
            f"holds {len(categories):,} different texts, such as '{categories[0][:40]}' (at most {MAX_CATEGORIES} can be "
            "categories)",
            f"choose it with --client {name} if it names the clients" if is_client else "",
        )
    if options.missing == "error" and column.missing.any():
        return Problem(name, f"has {table.describe_missing(column.missing)}", missing=True)
    return None


def describe_unreadable(column: ParsedColumn, table: RawTable) -> tuple[str, str]:
    """Return which cells of a column cannot be read, and the fix."""
    kind = "dates" if column.schema.kind == "date" else "numbers"
    where = table.locate_first(column.unreadable)
    reason = f"has cells that are not {kind} in {_describe_share(column)}, first '{column.unreadable_cell[:40]}' in {where}"
    return reason, "correct the file, read such cells as missing values with --unreadable missing"


def _describe_share(column: ParsedColumn) -> str:
    rows = column.unreadable
    percent = 100 * rows.mean()
    return f"{int(rows.sum()):,} of {pluralize(len(rows), 'row')} ({percent:.{'2g' if percent < 10 else '0f'}} %)"


def describe_reading(columns: Sequence[ParsedColumn]) -> list[str]:
    """Return lines about notations of numbers and dates, and about unreadable cells."""
    lines = []
    for notation in dict.fromkeys(column.notation for column in columns if column.notation):
        same = [column for column in columns if column.notation == notation]
        lines.append(f"Read {notation}: {join_names([column.schema.name for column in same])} ({same[0].example}).")
    unreadable = [
        f"{column.schema.name} in {_describe_share(column)}, such as '{column.unreadable_cell[:40]}'"
        for column in columns
        if column.unreadable.any()
    ]
    return [*lines, f"Unreadable cells read as missing values: {'; '.join(unreadable)}."] if unreadable else lines


def describe_values(raw: RawColumns, options: ColumnOptions) -> list[str]:
    """Return lines about missing values, possible ids and constant columns."""
    lines = []
    columns = list(zip(raw.schema.columns, raw.values.T, strict=True))
    value = {"most_frequent": "most frequent value"}.get(options.missing, options.missing)
    for categorical, fill in ((False, value), (True, "most frequent category")):
        counts = [
            f"{schema.name} {int(np.isnan(values).sum()):,}"
            for schema, values in columns
            if schema.is_categorical is categorical and np.isnan(values).any()
        ]
        lines += [f"Missing values filled with the {fill} of training samples: {join_names(counts)}."] if counts else []
    ids = {schema.name: kind for schema, values in columns if (kind := _describe_id(schema, values))}
    for kind in dict.fromkeys(ids.values()):
        names = [name for name in ids if ids[name] == kind]
        flag = ignore_flag(options.ignore, names)
        if len(names) == 1:
            lines.append(f"Column '{names[0]}' has {kind}; if it is an id: {flag}")
        else:
            lines.append(f"{pluralize(len(names), 'column')} have {kind}: {join_names(names)}; if they are ids: {flag}")
    constant = [schema.name for schema, values in columns if len(values) > 1 and bool((values == values[0]).all())]
    if constant:
        subject = f"Column '{constant[0]}' has" if len(constant) == 1 else f"Columns {join_names(constant)} have"
        flag = ignore_flag(options.ignore, constant)
        lines.append(f"{subject} the same value in every row and carries no information: {flag}")
    return lines


def _describe_id(schema: ColumnSchema, values: Floats) -> str:
    """Return how a possible id varies ("a different text in every row"), or "" if values repeat."""
    present = values[~np.isnan(values)]
    if len(values) < MIN_ROWS_FOR_ID or schema.kind == "date" or not np.array_equal(present, np.floor(present)):
        return ""
    share = len(np.unique(present)) / len(present)
    kind = "text" if schema.is_categorical else "whole number"
    return f"a different {kind} in {'every' if share == 1 else 'nearly every'} row" if share >= ID_SHARE else ""


def describe_columns(schema: Schema, scale: str) -> str:
    """Return what the columns are and how they become inputs."""
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
    names = [join_names([value if len(value) <= 40 else f"{value[:39]}…"]) for value in values[:4]]
    return ", ".join(names) + (" …" if len(values) > 4 else "")
