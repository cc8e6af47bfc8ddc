"""Text files with rows: CSV and TSV, cut at commas, semicolons, tabs or bars."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from gpfl.data.files.sheet import UNREAD, Array, Columns, Sheet
from gpfl.errors import GpflError, pluralize

CELL = 1 << 20
"""Characters that a cell of a CSV file may hold."""
BLOCK = 10_000
"""Lines that are held as Python's own texts, which take far more room than numpy's."""
MARKS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""What may separate cells, and its name."""
EXCEL_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)
"""A first line with which Excel names the mark."""
UNNAMED = re.compile(r"(Unnamed: \d+)?")
"""The names that pandas gives to a column without one, when it writes and when it reads."""


def read_csv(path: Path, ignore: Collection[str] = ()) -> Sheet:
    """Gives the columns of a CSV or TSV file as text; its first line names them."""
    csv.field_size_limit(CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            mark, before = find_mark(path, file)
            records = csv.reader(file, delimiter=mark, strict=True)
            names = [name.strip() for name in next(records, [])]
            check_first_line(names, path, mark)
            columns, lines = gather_blocks(records_of(records, names, path, mark, before), names, ignore)
    except UnicodeDecodeError:
        raise GpflError(f"{path} is not UTF-8 text (byte {first_odd_byte(path)}): save it as UTF-8") from None
    except (OSError, csv.Error) as problem:
        raise GpflError(f"{path} cannot be read as CSV ({problem})") from None
    if not len(lines):
        raise GpflError(f"{path} has no rows below its first line")
    return without_unnamed(names, columns, lines, path, mark)


def find_mark(path: Path, file: TextIO) -> tuple[str, int]:
    """Gives the mark between cells and the lines before the names; the file is left at the names.

    The mark is the one most frequent in the first line outside quotes, or the one that Excel's line names.
    """
    start = file.readline()
    named = EXCEL_LINE.fullmatch(start)
    if named and named[1] in MARKS:
        return named[1], 1
    file.seek(0)
    if path.suffix.lower() == ".tsv":
        return "\t", 0
    outside = "".join(start.split('"')[::2])
    return max(MARKS, key=outside.count), 0


def check_first_line(names: list[str], path: Path, mark: str) -> None:
    """Refuses a first line that does not name the columns."""
    if not names:
        raise GpflError(f"{path} is empty")
    if all(is_number(name) for name in names):
        raise GpflError(f"{path} begins with numbers ({', '.join(names[:3])} …); its first line must name the columns")
    if len(names) == 1:
        raise GpflError(
            f"{path} has one column, '{names[0][:40]}', when cut at {MARKS[mark]}; its first line must name the columns, "
            f"with {', '.join(MARKS.values())} between"
        )
    check_names([name for name in names if name], path)


def check_names(names: Sequence[str], path: Path) -> None:
    """Refuses a name that two columns have."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GpflError(f"{path} has two columns named '{twice}'")


def records_of(
    records: Iterator[list[str]], names: Sequence[str], path: Path, mark: str, before: int
) -> Iterator[tuple[int, list[str]]]:
    """Gives the cells of each row with the line it begins on; refuses one that has more or fewer cells than there are names."""
    begins = records.line_num + before + 1  # type: ignore[attr-defined]
    for cells in records:
        if cells:
            if len(cells) != len(names):
                raise GpflError(
                    f"{path}, line {begins}, has {pluralize(len(cells), 'cell')}, cut at {MARKS[mark]}; "
                    f"the first line names {len(names)}"
                )
            yield begins, cells
        begins = records.line_num + before + 1  # type: ignore[attr-defined]


def gather_blocks(
    records: Iterator[tuple[int, list[str]]], names: Sequence[str], ignore: Collection[str]
) -> tuple[list[Array], Array]:
    """Gives the columns, and the line of each row; a column to be ignored is UNREAD."""
    wanted = [place for place, name in enumerate(names) if not name or name not in ignore]
    columns: list[list[Array]] = [[] for _ in names]
    lines: list[int] = []
    block: list[list[str]] = []

    def close_block() -> None:
        whole = list(zip(*block, strict=True))
        for place in wanted:
            columns[place].append(np.array(whole[place]))
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


def without_unnamed(names: Sequence[str], columns: Sequence[Array], lines: Array, path: Path, mark: str) -> Sheet:
    """Gives the sheet without columns that have no name and hold nothing or, being the first, the numbers of rows."""
    kept: Columns = {}
    left: list[str] = []
    for place, (name, values) in enumerate(zip(names, columns, strict=True)):
        if UNNAMED.fullmatch(name) and values is not UNREAD:
            if not np.char.strip(values).astype(bool).any():
                left.append("an empty column without a name")
                continue
            if place == 0 and all(cell.isdecimal() for cell in values.tolist()) and len(np.unique(values)) == len(values):
                left.append("the first column, which has no name and numbers the rows")
                continue
        if not name:
            raise GpflError(f"{path} has a column without a name, the {place + 1}. of {len(names)}: name it in the first line")
        kept[name] = values
    notes = tuple(f"Left out of {path.name}: {words}." for words in dict.fromkeys(left))
    return Sheet(kept, lines, "line", commas=mark != ",", notes=notes)


def first_odd_byte(path: Path) -> int:
    """Gives the place of the first byte that is not UTF-8; one that a file read in pieces names is counted from its piece."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError as problem:
        return problem.start
    return 0


def is_number(text: str) -> bool:
    """Tells whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
