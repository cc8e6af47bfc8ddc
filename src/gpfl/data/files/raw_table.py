"""Columns as read from files, before they become inputs and labels, and where each row stands in its file."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.data.files.layout import InputFile
from gpfl.errors import GpflError, pluralize

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Columns = dict[str, Array]  # arrays of the same length by name: text as objects, numbers, or samples of any shape

MISSING_LABELS = frozenset(("", "na", "n/a", "nan", "null"))
"""Lower-case texts of a missing label or client; a class may be named "none" or "unknown"."""
MISSING = MISSING_LABELS | {"none", "?", "-", "--", ".", "#n/a", "unknown", "missing"}
"""Lower-case texts of a missing input."""
UNREAD: Array = np.empty(0)  # stands for a column that is ignored


@dataclass(frozen=True)
class RawTable:
    """Columns of one or more files."""

    columns: Columns  # values by name of the column
    files: tuple[InputFile, ...]  # the files
    file_of: npt.NDArray[np.int32]  # index of each row's file
    rows: npt.NDArray[np.int64]  # index of each row in its file
    decimal_commas: bool = False  # whether a comma may be a decimal comma because it does not separate cells
    notes: tuple[str, ...] = ()  # notes for the user on how the data were read

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.files[0].path

    def filter(self, mask: Mask) -> "RawTable":
        """Return the table with the rows where `mask` is true."""
        columns = {name: values[mask] for name, values in self.columns.items()}
        return replace(self, columns=columns, file_of=self.file_of[mask], rows=self.rows[mask])

    def locate_first(self, mask: Mask) -> str:
        """Return the file and line of the first row where `mask` is true; with the folder if several files have that name."""
        first = int(mask.argmax())
        file, row = self.files[self.file_of[first]], int(self.rows[first])
        place = f"line {file.line_of(row)}" if file.line_of else f"row {row + 1}"
        unique = all(other.path == file.path or other.path.name != file.path.name for other in self.files)
        return f"{file.path.name if unique else f'{file.path.parent.name}/{file.path.name}'}, {place}"

    def describe_missing(self, mask: Mask) -> str:
        """Return the number and the first place of missing values."""
        first = f"{'first ' if mask.sum() > 1 else ''}in {self.locate_first(mask)}"
        return f"{pluralize(int(mask.sum()), 'missing value')}, {first}"


def number_rows(file: InputFile, columns: Columns, notes: tuple[str, ...] = (), decimal_commas: bool = False) -> RawTable:
    """Return the table of one file."""
    n_rows = max((len(values) for values in columns.values() if values.ndim), default=0)
    return RawTable(columns, (file,), np.zeros(n_rows, np.int32), np.arange(n_rows), decimal_commas, notes)


def join_tables(tables: Sequence[RawTable]) -> RawTable:
    """Return the rows of tables with the same columns, which are taken out of them: large ones would not fit twice.

    A column that is text in one of the tables becomes text. Raise if columns or their lengths differ.
    """
    first = tables[0]
    for table in tables:
        if different := sorted(first.columns.keys() ^ table.columns.keys()):
            name = different[0]
            has, lacks = (table, first) if name in table.columns else (first, table)
            raise GpflError(f"column '{name}' is in {has.path}, but not in {lacks.path}; all files must have the same columns")
        sizes = {name: len(values) for name, values in table.columns.items()}
        if len(set(sizes.values())) > 1:
            raise GpflError(f"{table.path} has arrays of different length: {sizes}")
    notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    n_rows = [len(table) for table in tables]
    return RawTable(
        {name: _concatenate([table.columns.pop(name) for table in tables]) for name in list(first.columns)},
        tuple(table.files[0] for table in tables),
        np.repeat(np.arange(len(tables), dtype=np.int32), n_rows),
        np.concatenate([table.rows for table in tables]),
        all(table.decimal_commas for table in tables),
        (*notes[:3], *([f"The same in {len(notes) - 3} more files."] if len(notes) > 3 else [])),
    )


def _concatenate(parts: Sequence[Array]) -> Array:
    if len({part.dtype.kind in "biuf" for part in parts}) > 1:
        parts = [to_text(part) for part in parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
