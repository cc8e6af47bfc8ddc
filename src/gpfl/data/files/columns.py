"""A column of inputs: what it holds, what is wrong with it, and how it becomes numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpfl.data.columns import ColumnSchema, Floats
from gpfl.data.files.raw_table import MISSING, Array, Mask, RowLocator, find_missing, ignore_flag
from gpfl.data.files.samples import describe_missing
from gpfl.errors import GpflError, pluralize

MAX_CATEGORIES = 50  # largest number of different texts in a categorical column
MAJORITY = 0.9  # share of numbers or dates from which a column is meant to hold them
MIN_ROWS_FOR_MAJORITY = 10  # up to this number of rows nothing is concluded from such a share
MIN_ROWS_FOR_ID = 20
"""From this number of rows a column with different values in most of them is reported as a possible id."""
ID_SHARE = 0.95  # share of different values from which it is
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
THOUSANDS = re.compile(r"[-+]?\d{1,3}([,.' \u00a0\u202f]\d{3})+([.,]\d+)?")
PERCENT = re.compile(r"[-+]?\d+([.,]\d+)?\s*%")
DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ,]\s*\d{1,2}:\d{2}.*)?")
MAX_FLOAT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Column:
    """A column as numbers, or as stripped texts; NaN or "" where a value is missing."""

    name: str
    values: Array
    missing: Mask
    comma_example: str = ""  # a cell with a decimal comma

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers."""
        return self.values.dtype.kind == "f"


def parse_column(name: str, values: Array, decimal_commas: bool, missing_texts: frozenset[str] = MISSING) -> Column:
    """Return a column as numbers if all its cells are numbers or missing, else as texts."""
    if values.dtype.kind in "biuf":
        numbers = values.astype(np.float64)
        return Column(name, numbers, np.isnan(numbers))
    cells = values.tolist()
    try:  # several times as fast as numpy's conversion from text
        numbers = np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        pass
    else:
        return Column(name, numbers, np.isnan(numbers))
    stripped = {cell: cell.strip() for cell in set(cells)}
    present = {cell: text for cell, text in stripped.items() if text.lower() not in missing_texts}
    missing = find_missing(values, missing_texts)
    parsed = {cell: _parse_number(text, decimal_commas) for cell, text in present.items()}
    if None not in parsed.values():
        comma = next((cell for cell in cells if "," in cell), "").strip()
        return Column(name, np.array([parsed.get(cell, np.nan) for cell in cells], np.float64), missing, comma)
    return Column(name, np.array([present.get(cell, "") for cell in cells]), missing)


def _parse_number(text: str, decimal_commas: bool) -> float | None:
    if decimal_commas and DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Problem:
    """Why a column cannot be an input, and what the user can do besides leaving it out."""

    name: str
    reason: str
    fix: str = ""
    missing: bool = False


def find_problem(column: Column, fill: bool, decimal_commas: bool, locator: RowLocator) -> Problem | None:
    """Return why a column cannot be an input; missing values are a problem unless they are filled."""
    if column.missing.all():
        return Problem(column.name, "is empty in every row")
    problem = _number_problem(column, locator) if column.numeric else _text_problem(column, decimal_commas, locator)
    if problem is not None or not column.missing.any():
        return problem
    if not fill:
        return Problem(column.name, f"has {describe_missing(column.missing, locator)}", missing=True)
    return None


def _number_problem(column: Column, locator: RowLocator) -> Problem | None:
    too_large = ~column.missing & ~(np.abs(column.values) < MAX_FLOAT)
    if not too_large.any():
        return None
    value, where = column.values[too_large][0], locator.describe_first(too_large)
    return Problem(column.name, f"holds {value:g} in {where}, which is too large for a float32", "correct the file")


def _text_problem(column: Column, decimal_commas: bool, locator: RowLocator) -> Problem | None:
    name, cells = column.name, column.values.tolist()
    kinds = sorted(set(cells) - {""})
    not_numbers = {kind: _number_format(kind, decimal_commas) for kind in kinds if _parse_number(kind, decimal_commas) is None}
    present = [cell for cell in cells if cell]
    majority = MAJORITY * len(present) if len(present) > MIN_ROWS_FOR_MAJORITY else np.inf
    if sum(cell not in not_numbers or bool(not_numbers[cell]) for cell in present) >= majority:
        row = next(row for row, cell in enumerate(cells) if cell in not_numbers)
        found = not_numbers[cells[row]]
        reason = f"a number with {found}" if found else "but nearly all cells are numbers"
        return Problem(name, f"holds '{cells[row][:40]}' in {locator.describe(row)}, {reason}", "correct the file")
    if sum(DATE.fullmatch(cell) is not None for cell in present) >= min(majority, len(present)):
        return Problem(name, f"holds dates, such as '{kinds[0]}'", "convert dates to numbers")
    if len(kinds) > MAX_CATEGORIES:
        example = f"such as '{kinds[0][:40]}'"
        return Problem(name, f"holds {len(kinds):,} different texts, {example} (at most {MAX_CATEGORIES} can be categories)")
    return None


def _number_format(text: str, decimal_commas: bool) -> str:
    if PERCENT.fullmatch(text):
        return "a percent sign"
    if THOUSANDS.fullmatch(text):
        return "thousands separators"
    return "a decimal comma" if DECIMAL_COMMA.fullmatch(text) and not decimal_commas else ""


def raise_problems(problems: Sequence[Problem], ignored: Sequence[str]) -> None:
    """Raise one error for all columns that cannot be inputs, with every fix."""
    if not problems:
        return
    reasons = [f"column '{problem.name}' {problem.reason}" for problem in problems[:5]]
    if len(problems) > len(reasons):
        reasons.append(f"{pluralize(len(problems) - len(reasons), 'more column')} cannot be inputs either")
    fixes = list(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    others = [problem.name for problem in problems if not problem.missing]
    if len(others) < len(problems):
        flag = f" {ignore_flag(ignored, others)}" if others else ""
        fixes += [f"fill missing values with --missing mean{flag}", f"leave such rows out with --missing drop{flag}"]
    columns = "the column" if len(problems) == 1 else "all these columns"
    flag = ignore_flag(ignored, [problem.name for problem in problems])
    fixes.append(f"{'or ' if fixes else ''}leave {columns} out with {flag}")
    raise GpflError(f"{'; '.join(reasons)}: {', '.join(fixes)}")


def raw_column(column: Column) -> tuple[ColumnSchema, Floats]:
    """Return the schema and the values of a column: its numbers, or the indices of its texts; NaN where one is missing."""
    if column.numeric:
        return ColumnSchema(column.name), column.values.astype(np.float64, copy=False)
    kinds, codes = np.unique(column.values, return_inverse=True)
    codes = codes - (kinds[0] == "")  # the text of a missing value
    return ColumnSchema(column.name, "categorical", tuple(filter(None, kinds.tolist()))), np.where(codes < 0, np.nan, codes)


def describe_id(column: Column) -> str:
    """Return how a possible id varies ("a different text in every row"), or "" if values repeat."""
    if len(column.values) < MIN_ROWS_FOR_ID:
        return ""
    if column.numeric and not np.all((column.values == np.floor(column.values)) | column.missing):
        return ""
    present = column.values[~column.missing]
    share = len(np.unique(present)) / len(present)
    kind = "whole number" if column.numeric else "text"
    return f"a different {kind} in {'every' if share == 1 else 'nearly every'} row" if share >= ID_SHARE else ""


def is_constant(column: Column) -> bool:
    """Return whether a column of several rows has the same value in all of them."""
    values = column.values
    return len(values) > 1 and not column.missing.any() and bool((values == values[0]).all())
