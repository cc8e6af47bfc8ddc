"""Turn the cells of a column into numbers, dates or categories."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

import numpy as np
import numpy.typing as npt

from gpfl.data.columns import ColumnSchema, Floats
from gpfl.data.files.raw_table import MISSING, Array, Mask, to_text

MAJORITY = 0.9  # a column with at least this share of numbers or dates is numeric or a date; other cells are unreadable
MIN_ROWS_FOR_MAJORITY = 10  # if it has more rows than this; otherwise all cells must be numbers or dates
SPACES = "' \u00a0\u202f’"
GROUPED = {
    decimal: re.compile(rf"[-+]?\d{{1,3}}([{thousands}{SPACES}])\d{{3}}(\1\d{{3}})*({re.escape(decimal)}\d*)?")
    for decimal, thousands in ((".", ","), (",", "."))
}
"""Numbers with thousands marks, by decimal mark."""
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
ALMOST_NUMBER = re.compile(r"[<>≤≥~≈]=?\s*[-+]?\d.*|[-+]?\d[\d.,]*\s*%|[-+]?\d[\d.,]*")
"""Unreadable cells that still suggest a numeric column: censored values (<5), percentages, numbers in another notation."""
DATE = re.compile(
    r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})"
    r"([T ,]\s*(?P<hour>\d{1,2}):(?P<minute>\d{2})(:(?P<second>\d{2}(\.\d+)?))?\s*(?P<half>[aApP][mM])?\s*"
    r"(?P<zone>Z|[-+]\d{2}:?\d{2})?)?"
)
DATE_ORDERS = {"year first": (0, 1, 2), "day first": (2, 1, 0), "month first": (2, 0, 1)}  # places of year, month and day
EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True, eq=False)
class ParsedColumn:
    """A column as numbers or as indices of categories."""

    schema: ColumnSchema  # name, kind and categories
    values: Floats  # value of each row, NaN where it is missing or unreadable
    unreadable: Mask  # rows of a numeric or date column whose cells cannot be read
    unreadable_cell: str = ""  # the first such cell
    notation: str = ""  # how the cells were read if that is not obvious, such as "with decimal commas"
    example: str = ""  # a cell in that notation and its value: "61,5 is 61.5"

    @property
    def missing(self) -> Mask:
        """Rows without a value."""
        return np.isnan(self.values)


@dataclass(frozen=True)
class _Reading:
    """One way to read the cells of a column: the value of each text that it can read."""

    kind: str
    values: Mapping[str, float]
    notation: str = ""
    marks: str = ""  # a cell with one of these characters shows the notation

    def rows(self, counts: Mapping[str, int]) -> int:
        return sum(counts[text] for text in self.values)


def parse_column(
    name: str, cells: Array, comma_separated: bool, missing: frozenset[str] = MISSING, kind: str | None = None
) -> ParsedColumn:
    """Return a column as numbers or dates if (nearly) all its cells are, else as categories.

    Cells are numbers, or texts without spaces around them; lower-case texts in `missing` are missing values. If commas separate
    the cells of the file, the comma in 1,234 is a thousands mark, else a decimal comma, unless other cells show the opposite. A
    column of a given `kind` is read as that kind, however few cells fit.
    """
    no_row = np.zeros(len(cells), dtype=bool)
    if cells.dtype.kind in "biuf" and kind != "categorical":
        return ParsedColumn(ColumnSchema(name, kind or "numeric"), cells.astype(np.float64), no_row)
    texts = to_text(cells).tolist()
    counts = Counter(text for text in texts if text.lower() not in missing)
    reading = None if kind == "categorical" else _choose_reading(counts, comma_separated, kind)
    if reading is None:
        categories = sorted(counts)
        index = {category: float(i) for i, category in enumerate(categories)}
        return ParsedColumn(ColumnSchema(name, "categorical", tuple(categories)), _look_up(index, texts), no_row)
    values = _look_up(reading.values, texts)
    unreadable = np.array([text in counts and text not in reading.values for text in texts], dtype=bool)
    cell = texts[int(unreadable.argmax())] if unreadable.any() else ""
    schema = ColumnSchema(name, reading.kind)
    shown = (text for text in reading.values if any(mark in text for mark in reading.marks))
    example = next((f"{text} is {reading.values[text]:.10g}" for text in shown), "")
    return ParsedColumn(schema, values, unreadable, cell, reading.notation if example else "", example)


def _look_up(values: Mapping[str, float], texts: Iterable[str]) -> npt.NDArray[np.float64]:
    return np.array([values.get(text, np.nan) for text in texts], dtype=np.float64)


def _choose_reading(counts: Mapping[str, int], comma_separated: bool, kind: str | None) -> _Reading | None:
    """Return the reading of most cells, or None if the cells are categories."""
    total = sum(counts.values())
    if not total:
        return _Reading(kind or "numeric", {})
    best = None
    for reading in _readings(counts, comma_separated):
        if kind in (None, reading.kind):
            if best is None or reading.rows(counts) > best.rows(counts):
                best = reading
            if best.rows(counts) == total:
                return best
    if kind is not None or best is None:
        return best
    read = best.rows(counts)
    pattern = DATE if best.kind == "date" else ALMOST_NUMBER
    almost = sum(count for text, count in counts.items() if text not in best.values and pattern.fullmatch(text))
    if 2 * read >= total and read + almost >= (MAJORITY * total if total > MIN_ROWS_FOR_MAJORITY else total):
        return best
    return None


def _readings(texts: Iterable[str], comma_separated: bool) -> Iterator[_Reading]:
    """Yield the possible readings, of two that read the same number of cells the likelier one first."""
    points_first = comma_separated or not any("," in text for text in texts) or any("." in text for text in texts)
    decimals = (".", ",") if points_first else (",", ".")
    for decimal in decimals:
        notation = "with thousands marks" if decimal == "." else "with decimal commas"
        yield _read(texts, "numeric", partial(_read_number, decimal=decimal), notation, "," + SPACES)
    for decimal in decimals:
        yield _read(texts, "numeric", partial(_read_percentage, decimal=decimal), "as fractions", "%")
    year_first, day_first, month_first = (
        _read(texts, "date", partial(_read_date, order=order), f"as days since 1970-01-01 ({name})", "-/.")
        for name, order in DATE_ORDERS.items()
    )
    slashes = any("/" in text for text in texts)
    likelier, other = (month_first, day_first) if slashes else (day_first, month_first)
    yield year_first
    if likelier.values.keys() == other.values.keys() and likelier.values != other.values:
        doubt = f"{likelier.notation[:-1]}, although the {'day' if slashes else 'month'} may come first)"
        likelier = replace(likelier, notation=doubt)
    yield likelier
    yield other


def _read(texts: Iterable[str], kind: str, read: Callable[[str], float | None], notation: str, marks: str) -> _Reading:
    values = {text: value for text in texts if (value := read(text)) is not None}
    return _Reading(kind, values, notation, marks)


def _read_number(text: str, decimal: str) -> float | None:
    if GROUPED[decimal].fullmatch(text):
        text = re.sub(rf"[^-+\d{decimal}]", "", text).replace(decimal, ".")
    elif decimal == "," and DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


def _read_percentage(text: str, decimal: str) -> float | None:
    number = _read_number(text[:-1].rstrip(), decimal) if text.endswith("%") else None
    return None if number is None else number / 100


def _read_date(text: str, order: tuple[int, int, int]) -> float | None:
    """Return days since 1970-01-01; of a time with a zone, in UTC."""
    match = DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day = ((match[1], match[3], match[4])[place] for place in order)
    if len(year) == 2 and order[0] == 2:
        year = ("19" if int(year) > 68 else "20") + year  # as POSIX reads two digits
    if len(year) != 4:
        return None
    hour = int(match["hour"] or 0)
    if match["half"]:
        hour = hour % 12 + (12 if match["half"].lower() == "pm" else 0)
    try:
        midnight = datetime(int(year), int(month), int(day))
    except ValueError:
        return None
    time = timedelta(hours=hour, minutes=int(match["minute"] or 0), seconds=float(match["second"] or 0))
    zone = match["zone"]
    if zone and zone != "Z":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
        time -= -offset if zone[0] == "-" else offset
    return (midnight - EPOCH + time) / timedelta(days=1)
