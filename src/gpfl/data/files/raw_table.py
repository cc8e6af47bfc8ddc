"""Columns as read from files, before they become inputs and labels, and where each row stands in its file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.data.files.layout import InputFile

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Columns = dict[str, Array]
"""Arrays of the same length by name: text as objects, numbers, or samples of any shape."""

MISSING_LABELS = frozenset(("", "na", "n/a", "nan", "null"))
"""Lower-case texts of a missing label or client; a class may be named "none" or "unknown"."""
MISSING = MISSING_LABELS | {"none", "?", "-", "--", ".", "#n/a", "unknown", "missing"}
"""Lower-case texts of a missing input."""
UNREAD: Array = np.empty(0)  # stands for a column that is ignored


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, and the index of each row in it."""

    source: InputFile
    columns: Columns
    rows: npt.NDArray[np.int64]
    line_of: Callable[[int], int] | None = None  # returns the line of a row, if the file has lines
    decimal_commas: bool = False  # whether a comma may be a decimal comma, because it does not separate cells
    notes: tuple[str, ...] = ()  # what the user should know of the reading

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.source.path

    def drop(self, names: Sequence[str]) -> RawTable:
        """Return the table without some columns."""
        return replace(self, columns={name: values for name, values in self.columns.items() if name not in names})

    def filter(self, mask: Mask) -> RawTable:
        """Return the table with the rows where `mask` is true."""
        columns = {name: values[mask] for name, values in self.columns.items()}
        return replace(self, columns=columns, rows=self.rows[mask])

    def __len__(self) -> int:
        return len(self.rows)


def number_rows(source: InputFile, columns: Columns, notes: tuple[str, ...] = ()) -> RawTable:
    """Return the table of a file that has rows and no lines."""
    rows = max((len(values) for values in columns.values() if values.ndim), default=0)
    return RawTable(source, columns, np.arange(rows), notes=notes)


class RowLocator:
    """Where the rows of joined tables stand in their files."""

    def __init__(self, tables: Sequence[RawTable]) -> None:
        self._tables, self._ends = tables, np.cumsum([len(table) for table in tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def describe(self, row: int) -> str:
        """Return the file and line of a row; with the folder if several files have that name."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        table, path = self._tables[index], self._tables[index].path
        row = int(table.rows[row - int(self._ends[index] - len(table))])
        place = f"line {table.line_of(row)}" if table.line_of else f"row {row + 1}"
        unique = all(other.path == path or other.path.name != path.name for other in self._tables)
        return f"{path.name if unique else f'{path.parent.name}/{path.name}'}, {place}"

    def describe_first(self, mask: Mask) -> str:
        """Return the file and line of the first row where `mask` is true."""
        return self.describe(int(np.flatnonzero(mask)[0]))


def join_column(tables: Sequence[RawTable], name: str) -> Array:
    """Return one column of all files; as text if it is text in any of them."""
    parts = [table.columns[name] for table in tables]
    if len({part.dtype.kind in "biuf" for part in parts}) > 1:
        parts = [to_text(part) for part in parts]
    return np.concatenate(parts)


def to_text(values: Array) -> Array:
    """Return a column as text, whole numbers without a point."""
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (values == np.floor(values))
        return np.array([str(int(v)) if w else str(v) for v, w in zip(values, whole, strict=True)])
    return values.astype(str)


def as_text(cells: Sequence[str]) -> Array:
    """Return texts without spaces around them as an array of objects, in which equal ones are the same object."""
    shared: dict[str, str] = {}
    array = np.empty(len(cells), dtype=object)
    array[:] = [shared.setdefault(cell, cell) for cell in map(str.strip, cells)]
    return array


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def find_missing(values: Array, missing: frozenset[str] = MISSING) -> Mask:
    """Return which rows are missing: NaN (in arrays also infinity) or a text in `missing`."""
    if values.dtype.kind == "f":
        return np.asarray(~np.isfinite(values.reshape(len(values), -1)).all(1) if values.ndim > 1 else np.isnan(values))
    if values.dtype.kind in "biu":
        return np.zeros(len(values), dtype=bool)
    cells = values.tolist()
    absent = {cell: cell.strip().lower() in missing for cell in set(cells)}
    return np.array([absent[cell] for cell in cells], dtype=bool)


def ignore_flag(ignored: Sequence[str], names: Iterable[str]) -> str:
    """Return the flag that leaves out `names` in addition to the columns that are ignored already, quoted for a shell."""
    return f"--ignore {shlex.quote(','.join(map(_list_entry, dict.fromkeys([*ignored, *names]))))}"


def _list_entry(name: str) -> str:
    plain = name == name.strip() and not name.startswith("[") and not any(mark in name for mark in ',"')
    return name if plain else '"' + name.replace('"', '""') + '"'


def join_names(names: Sequence[str], limit: int = 12) -> str:
    """Return a list for a message, shortened after `limit` names; empty names and names with a comma are quoted."""
    quoted = [f"'{name}'" if not name or "," in name else name for name in names[:limit]]
    return ", ".join(quoted) + (f", … ({len(names) - limit} more)" if len(names) > limit else "")
