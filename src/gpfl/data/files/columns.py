"""A column of inputs: what it holds, what is wrong with it, and how it becomes numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.data.files.sheet import MISSING, Array, Mask, Places, ignoring, missing_in
from gpfl.errors import GpflError, pluralize

Floats = npt.NDArray[np.float64]

MOST_VALUES = 50
"""Different texts that a column of categories may hold."""
NEARLY = 0.9
"""The share of numbers, or dates, from which a column is taken for one of them."""
FEW = 10
"""Rows up to which nothing is concluded from such a share."""
MANY = 20
"""Rows from which a column with another value in each is taken for an id."""
ID = 0.95
"""The share of rows with a value of their own from which it is."""
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
THOUSANDS = re.compile(r"[-+]?\d{1,3}([,.' \u00a0\u202f]\d{3})+([.,]\d+)?")
PERCENT = re.compile(r"[-+]?\d+([.,]\d+)?\s*%")
DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ,]\s*\d{1,2}:\d{2}.*)?")
BEYOND = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Column:
    """A column looked at: as numbers, or as texts without blanks around them; "" or NaN where a value is missing."""

    name: str
    missing: Mask
    numbers: Floats | None = None
    texts: Array | None = None
    example: str = ""
    """A cell with a decimal comma, where there is one."""


def look(name: str, values: Array, commas: bool, words: frozenset[str] = MISSING) -> Column:
    """Gives a column as numbers where all cells but missing ones are numbers, else as texts."""
    cells = values.tolist()
    try:  # several times as fast as numpy's own way from text to numbers
        plain = np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        pass
    else:
        return Column(name, np.isnan(plain), plain)
    kinds = {cell: cell.strip() for cell in set(cells)}
    present = {cell: kind for cell, kind in kinds.items() if kind.lower() not in words}
    missing = missing_in(values, words)
    numbers = {cell: as_number(kind, commas) for cell, kind in present.items()}
    if None not in numbers.values():
        comma = next((cell for cell in cells if "," in cell), "")
        return Column(name, missing, np.array([numbers.get(cell, np.nan) for cell in cells], np.float64), example=comma.strip())
    return Column(name, missing, texts=np.array([present.get(cell, "") for cell in cells]))


def as_number(text: str, commas: bool) -> float | None:
    """Gives a text as a number, one with a decimal comma too where commas may be such."""
    if commas and DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


# What is wrong.


@dataclass(frozen=True)
class Problem:
    """Why a column cannot be an input, and what can be done besides leaving it out."""

    name: str
    words: str
    way: str = ""
    missing: bool = False


def problem_of(column: Column, filled: bool, training: Mask, commas: bool, places: Places) -> Problem | None:
    """Gives what keeps a column from being an input; missing values do where they are not filled."""
    if column.missing.all():
        return Problem(column.name, "is empty in every row")
    problem = (
        number_problem(column, places) if column.texts is None else text_problem(column.name, column.texts, commas, places)
    )
    if problem is not None or not column.missing.any():
        return problem
    if not filled:
        first = f"{'first ' if column.missing.sum() > 1 else ''}in {places.first(column.missing)}"
        return Problem(column.name, f"has {pluralize(int(column.missing.sum()), 'missing value')}, {first}", missing=True)
    if column.numbers is not None and column.missing[training].all():
        return Problem(column.name, "has no value in any training row, so there is no mean to fill in")
    return None


def number_problem(column: Column, places: Places) -> Problem | None:
    """Gives what is wrong with numbers: those that no float32 holds."""
    if column.numbers is None:
        return None
    endless = ~column.missing & ~(np.abs(np.nan_to_num(column.numbers, posinf=np.inf, neginf=-np.inf)) < BEYOND)
    if not endless.any():
        return None
    odd = column.numbers[endless][0]
    return Problem(column.name, f"holds {odd:g} in {places.first(endless)}, beyond what a float32 holds", "mend the file")


def text_problem(name: str, texts: Array, commas: bool, places: Places) -> Problem | None:
    """Gives what is wrong with texts: nearly all are numbers, or dates, or there are too many different ones."""
    cells = texts.tolist()
    kinds = sorted(set(cells) - {""})
    odd = {kind: why_no_number(kind, commas) for kind in kinds if as_number(kind, commas) is None}
    held = [cell for cell in cells if cell]
    share = NEARLY * len(held) if len(held) > FEW else np.inf
    if sum(cell not in odd or bool(odd[cell]) for cell in held) >= share:
        row = next(row for row, cell in enumerate(cells) if cell in odd)
        reason = odd[cells[row]]
        why = f"a number with {reason}" if reason else "where nearly all cells are numbers"
        return Problem(name, f"holds '{cells[row][:40]}' in {places.name(row)}, {why}", "mend the file")
    if sum(DATE.fullmatch(cell) is not None for cell in held) >= min(share, len(held)):
        return Problem(name, f"holds dates, such as '{kinds[0]}'", "turn dates into numbers")
    if len(kinds) > MOST_VALUES:
        return Problem(
            name, f"holds {len(kinds):,} different texts, such as '{kinds[0][:40]}' (at most {MOST_VALUES} can be categories)"
        )
    return None


def why_no_number(text: str, commas: bool) -> str:
    """Gives what keeps a text from being the number that it looks like; "" where it looks like none."""
    if PERCENT.fullmatch(text):
        return "a percent sign"
    if THOUSANDS.fullmatch(text):
        return "marks between its thousands"
    return "a decimal comma" if DECIMAL_COMMA.fullmatch(text) and not commas else ""


def refuse(problems: Sequence[Problem], ignore: Sequence[str]) -> None:
    """Refuses all columns that cannot be inputs, with every way out, in one line."""
    if not problems:
        return
    said = [f"column '{problem.name}' {problem.words}" for problem in problems[:5]]
    if len(problems) > len(said):
        said.append(f"{pluralize(len(problems) - len(said), 'more column')} cannot be inputs either")
    raise GpflError(f"{'; '.join(said)}: {', '.join(ways_out(problems, ignore))}")


def ways_out(problems: Sequence[Problem], ignore: Sequence[str]) -> list[str]:
    """Gives what can be done, the last after an "or"; flags come with all that they must name."""
    ways = list(dict.fromkeys(problem.way for problem in problems if problem.way))
    lasting = [problem.name for problem in problems if not problem.missing]
    if len(lasting) < len(problems):
        rest = f" {ignoring(ignore, lasting)}" if lasting else ""
        ways += [f"fill missing values with --missing mean{rest}", f"leave such rows out with --missing drop{rest}"]
    which = "the column" if len(problems) == 1 else "all these columns"
    ways.append(f"{'or ' if ways else ''}leave {which} out with {ignoring(ignore, [problem.name for problem in problems])}")
    return ways


# Inputs.


def inputs(column: Column, training: Mask, scale: str) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
    """Gives a column as inputs (rows, width), and how that was done."""
    if column.numbers is None:
        texts = column.texts if column.texts is not None else np.array([])
        kinds = np.unique(texts)
        return (texts[:, None] == kinds).astype(np.float32), {"name": column.name, "values": kinds.tolist()}
    seen = column.numbers[training & ~column.missing]
    mean, std = float(seen.mean()), float(seen.std())
    std = std if std > 0 and seen.min() < seen.max() else 1.0  # that of one value, over and over, may be 1e-17
    filled = np.where(column.missing, mean, column.numbers)
    fill = {"missing": mean} if column.missing.any() else {}
    if scale == "none":
        return filled[:, None].astype(np.float32), {"name": column.name, "mean": 0.0, "std": 1.0, **fill}
    return ((filled[:, None] - mean) / std).astype(np.float32), {"name": column.name, "mean": mean, "std": std, **fill}


# Advice.


def resembles_id(column: Column) -> str:
    """Gives what a column has in (nearly) every row: "another whole number in every row"; "" where values come again."""
    values = column.numbers if column.numbers is not None else column.texts
    if values is None or len(values) < MANY:
        return ""
    if column.numbers is not None and not np.all((column.numbers == np.floor(column.numbers)) | column.missing):
        return ""
    held = values[~column.missing]
    share = len(np.unique(held)) / len(held)
    kind = "whole number" if column.numbers is not None else "text"
    return f"another {kind} in {'every' if share == 1 else 'nearly every'} row" if share >= ID else ""


def is_constant(column: Column) -> bool:
    """Tells whether a column holds one value in every row, of more than one."""
    values = column.numbers if column.numbers is not None else column.texts
    return values is not None and len(values) > 1 and not column.missing.any() and bool((values == values[0]).all())
