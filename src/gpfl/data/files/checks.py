"""Check input columns, and describe what was read."""

from collections.abc import Sequence

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


def check_columns(columns: Sequence[ParsedColumn], options: ColumnOptions, table: RawTable, client: str) -> None:
    """Raise one error for all columns that cannot be inputs, with every fix; `client` is the column of clients, if any."""
    found = {column.schema.name: _find_problem(column, options, table, client) for column in columns}
    problems = {name: problem for name, problem in found.items() if problem}
    if not problems:
        return
    reasons = [f"column '{name}' {reason}" for name, (reason, _) in problems.items()][:5]
    if len(problems) > len(reasons):
        reasons.append(f"{pluralize(len(problems) - len(reasons), 'more column')} cannot be inputs either")
    fixes = list(dict.fromkeys(fix for _, fix in problems.values() if fix))
    others = [name for name, (_, fix) in problems.items() if fix is not None]
    if len(others) < len(problems):
        flag = f" {ignore_flag(options.ignore, others)}" if others else ""
        fixes += [f"fill missing values with --missing mean{flag}", f"leave such rows out with --missing drop{flag}"]
    subject = "the column" if len(problems) == 1 else "all these columns"
    fixes.append(f"{'or ' if fixes else ''}leave {subject} out with {ignore_flag(options.ignore, problems)}")
    raise GpflError(f"{'; '.join(reasons)}: {', '.join(fixes)}")


def _find_problem(column: ParsedColumn, options: ColumnOptions, table: RawTable, client: str) -> tuple[str, str | None] | None:
    """Return why a column cannot be an input, and the fix: "" to leave it out, None to handle its missing values."""
    missing, categories = column.missing, column.schema.categories
    if column.unreadable.any() and options.unreadable == "error":
        return describe_unreadable(column, table)
    if missing.all():
        return "is empty in every row", ""
    if column.schema.kind == "date" and options.dates == "error":
        return "holds dates", "read dates as days with --dates days, leave columns of dates out with --dates ignore"
    too_large = ~missing & ~(np.abs(column.values) < MAX_FLOAT)
    if too_large.any():
        value, where = column.values[too_large][0], table.locate_first(too_large)
        return f"holds {value:g} in {where}, which is too large for a float32", "correct the file"
    if len(categories) > MAX_CATEGORIES:
        limit = f"(at most {MAX_CATEGORIES} can be categories)"
        may_be_client = not client and 2 * len(categories) <= len(missing)
        fix = f"choose it with --client {column.schema.name} if it names the clients" if may_be_client else ""
        return f"holds {len(categories):,} different texts, such as '{categories[0][:40]}' {limit}", fix
    if options.missing == "error" and missing.any():
        return f"has {table.describe_missing(missing)}", None
    return None


def describe_unreadable(column: ParsedColumn, table: RawTable) -> tuple[str, str]:
    """Return which cells of a column cannot be read, and the fix."""
    kind = "dates" if column.schema.kind == "date" else "numbers"
    where = table.locate_first(column.unreadable)
    reason = f"has cells that are not {kind} in {_describe_share(column)}, first '{column.unreadable_cell[:40]}' in {where}"
    return reason, "correct the file, read such cells as missing values with --unreadable missing"


def _describe_share(column: ParsedColumn) -> str:
    percent = 100 * column.unreadable.mean()
    count = f"{column.unreadable.sum():,} of {pluralize(len(column.unreadable), 'row')}"
    return f"{count} ({percent:.{'2g' if percent < 10 else '0f'}} %)"


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
    columns = list(zip(raw.schema.columns, raw.values.T, strict=True))
    lines = []
    for categorical, fill in ((False, options.missing.replace("_", " ") + " value"), (True, "most frequent category")):
        missing = {s.name: int(np.isnan(values).sum()) for s, values in columns if s.is_categorical is categorical}
        counts = [f"{name} {count:,}" for name, count in missing.items() if count]
        lines += [f"Missing values filled with the {fill} of training samples: {join_names(counts)}."] if counts else []
    groups: dict[str, list[str]] = {}
    for schema, values in columns:
        if kind := _describe_id(schema, values):
            groups.setdefault(f"{kind}, as in an id", []).append(schema.name)
    if constant := [schema.name for schema, values in columns if len(values) > 1 and bool((values == values[0]).all())]:
        groups["The same value in every row"] = constant
    return lines + [
        f"{what}: {join_names(names)}; leave out with {ignore_flag(options.ignore, names)}." for what, names in groups.items()
    ]


def _describe_id(schema: ColumnSchema, values: Floats) -> str:
    """Return how a possible id varies ("A different text in every row"), or "" if values repeat."""
    present = values[~np.isnan(values)]
    if len(values) < MIN_ROWS_FOR_ID or schema.kind == "date" or not np.array_equal(present, np.floor(present)):
        return ""
    share = len(np.unique(present)) / len(present)
    kind = "text" if schema.is_categorical else "whole number"
    return f"A different {kind} in {'every' if share == 1 else 'nearly every'} row" if share >= ID_SHARE else ""


def describe_columns(schema: Schema, scale: str) -> str:
    """Return what the columns are and how they become inputs."""
    numeric = [column.name for column in schema.columns if not column.is_categorical]
    categorical = [f"{join_names([c.name])} ({_list_categories(c.categories)})" for c in schema.columns if c.is_categorical]
    parts = [f"{pluralize(len(numeric), 'numeric column')} ({join_names(numeric)}), {SCALES[scale]}"] if numeric else []
    if categorical:
        more = f", … ({len(categorical) - 12} more)" if len(categorical) > 12 else ""
        parts.append(f"{pluralize(len(categorical), 'categorical column')}, one-hot: {', '.join(categorical[:12])}{more}")
    return "; ".join(parts)


def _list_categories(values: Sequence[str]) -> str:
    names = [join_names([value if len(value) <= 40 else f"{value[:39]}…"]) for value in values[:4]]
    return ", ".join(names) + (" …" if len(values) > 4 else "")
