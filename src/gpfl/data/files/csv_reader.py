"""CSV and TSV files, with cells separated by commas, semicolons, tabs or bars."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from gpfl.data.files.layout import InputFile
from gpfl.data.files.raw_table import UNREAD, Array, Columns, RawTable
from gpfl.errors import GpflError, pluralize

MAX_CELL = 1 << 20  # largest number of characters in a cell
BLOCK = 10_000  # lines that are kept as Python strings, which take far more memory than numpy's
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
EXCEL_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # a first line in which Excel names the delimiter
UNNAMED = re.compile(r"(Unnamed: \d+)?")
"""The names that pandas gives to a column without one, when it writes and when it reads."""


def read_csv(source: InputFile, ignore: Collection[str] = ()) -> RawTable:
    """Return the columns of a CSV or TSV file as text; its first line names them."""
    csv.field_size_limit(MAX_CELL)
    path = source.path
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter, before = _find_delimiter(path, file)
            records = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(records, [])]
            _check_header(names, path, delimiter)
            columns, lines = _collect(_read_rows(records, names, path, delimiter, before), names, ignore)
    except UnicodeDecodeError:
        raise GpflError(f"{path} is not UTF-8 text (byte {_first_invalid_byte(path)}): save it as UTF-8") from None
    except (OSError, csv.Error) as problem:
        raise GpflError(f"{path} cannot be read as CSV ({problem})") from None
    if not len(lines):
        raise GpflError(f"{path} has no rows below its first line")
    return _drop_unnamed(names, columns, lines, source, delimiter)


def _find_delimiter(path: Path, file: TextIO) -> tuple[str, int]:
    """Return the delimiter and the number of lines before the header; leave the file at the header.

    The delimiter is the one in Excel's line, or the most frequent one in the first line outside quotes.
    """
    start = file.readline()
    named = EXCEL_LINE.fullmatch(start)
    if named and named[1] in DELIMITERS:
        return named[1], 1
    file.seek(0)
    if path.suffix.lower() == ".tsv":
        return "\t", 0
    unquoted = "".join(start.split('"')[::2])
    return max(DELIMITERS, key=unquoted.count), 0


def _check_header(names: list[str], path: Path, delimiter: str) -> None:
    if not names:
        raise GpflError(f"{path} is empty")
    if all(is_number(name) for name in names):
        raise GpflError(f"{path} begins with numbers ({', '.join(names[:3])} …); its first line must name the columns")
    if len(names) == 1:
        raise GpflError(
            f"{path} has one column, '{names[0][:40]}', when split at {DELIMITERS[delimiter]}; its first line must name the "
            f"columns, separated by {', '.join(DELIMITERS.values())}"
        )
    check_unique([name for name in names if name], path)


def check_unique(names: Sequence[str], path: Path) -> None:
    """Raise if two columns have the same name."""
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise GpflError(f"{path} has two columns named '{duplicate}'")


def _read_rows(
    records: Iterator[list[str]], names: Sequence[str], path: Path, delimiter: str, before: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the cells of each row; raise if a row has more or fewer cells than the header."""
    line = records.line_num + before + 1  # type: ignore[attr-defined]
    for cells in records:
        if cells:
            if len(cells) != len(names):
                raise GpflError(
                    f"{path}, line {line}, has {pluralize(len(cells), 'cell')} when split at {DELIMITERS[delimiter]}; "
                    f"the first line has {len(names)}"
                )
            yield line, cells
        line = records.line_num + before + 1  # type: ignore[attr-defined]


def _collect(
    records: Iterator[tuple[int, list[str]]], names: Sequence[str], ignore: Collection[str]
) -> tuple[list[Array], Array]:
    """Return the columns, ignored ones UNREAD, and the line of each row."""
    wanted = [index for index, name in enumerate(names) if not name or name not in ignore]
    columns: list[list[Array]] = [[] for _ in names]
    lines: list[int] = []
    block: list[list[str]] = []

    def close_block() -> None:
        cells = list(zip(*block, strict=True))
        for index in wanted:
            columns[index].append(np.array(cells[index]))
        block.clear()

    for line, cells in records:
        lines.append(line)
        block.append(cells)
        if len(block) == BLOCK:
            close_block()
    if block:
        close_block()
    joined = []
    for blocks in columns:
        joined.append(np.concatenate(blocks) if blocks else UNREAD)
        blocks.clear()
    return joined, np.array(lines, dtype=np.int64)


def _drop_unnamed(names: Sequence[str], columns: Sequence[Array], lines: Array, source: InputFile, delimiter: str) -> RawTable:
    """Return the table without unnamed columns that are empty or, if first, number the rows."""
    named: Columns = {}
    dropped: list[str] = []
    for index, (name, values) in enumerate(zip(names, columns, strict=True)):
        if UNNAMED.fullmatch(name) and values is not UNREAD:
            if not np.char.strip(values).astype(bool).any():
                dropped.append("an empty column without a name")
                continue
            if index == 0 and all(cell.isdecimal() for cell in values.tolist()) and len(np.unique(values)) == len(values):
                dropped.append("the first column, which has no name and numbers the rows")
                continue
        if not name:
            raise GpflError(f"{source.path}: column {index + 1} of {len(names)} has no name: name it in the first line")
        named[name] = values
    notes = tuple(f"Left out of {source.path.name}: {reason}." for reason in dict.fromkeys(dropped))
    return RawTable(source, named, lines, "line", decimal_commas=delimiter != ",", notes=notes)


def _first_invalid_byte(path: Path) -> int:
    try:  # the error of a file that is read in blocks counts from its block
        path.read_bytes().decode()
    except UnicodeDecodeError as problem:
        return problem.start
    return 0


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
