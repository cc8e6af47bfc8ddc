"""What a file of rows gives: its columns, and where each row stands in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.data.files.layout import Piece

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Columns = dict[str, Array]
"""Arrays by name, all of one length: text as read, numbers, or rows of any shape."""

NO_VALUE = frozenset(("", "na", "n/a", "nan", "null"))
"""What stands for a missing label or client, in small letters; a class may well be named 'none' or 'unknown'."""
MISSING = NO_VALUE | {"none", "?", "-", "--", ".", "#n/a", "unknown", "missing"}
"""What stands for a missing value in a column of inputs, in small letters."""
UNREAD: Array = np.empty(0)
"""What stands for a column that is to be ignored."""


@dataclass(frozen=True)
class Sheet:
    """The columns of a file and, for each row, its number: that of a line of text, or of a row, the first being 1."""

    columns: Columns
    numbers: npt.NDArray[np.int64]
    unit: str = "row"
    commas: bool = False
    """Tells whether a comma may be a decimal one, because it does not separate cells."""
    notes: tuple[str, ...] = ()
    """What a person should know of the reading."""

    def without(self, names: Sequence[str]) -> Sheet:
        """Gives the sheet without some columns."""
        return replace(self, columns={name: values for name, values in self.columns.items() if name not in names})

    def rows(self, kept: Mask) -> Sheet:
        """Gives the sheet with some of its rows."""
        columns = {name: values[kept] for name, values in self.columns.items()}
        return replace(self, columns=columns, numbers=self.numbers[kept])


def numbered(columns: Columns, notes: tuple[str, ...] = ()) -> Sheet:
    """Gives the sheet of a file that has rows and no lines."""
    rows = max((len(values) for values in columns.values() if values.ndim), default=0)
    return Sheet(columns, np.arange(1, rows + 1), notes=notes)


class Places:
    """Where the rows of a joined table stand in their files."""

    def __init__(self, pieces: Sequence[Piece], sheets: Sequence[Sheet]) -> None:
        self._pieces, self._sheets = pieces, sheets
        self._ends = np.cumsum([len(sheet.numbers) for sheet in sheets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, row: int) -> str:
        """Gives the file and the line or row in it; the folder too, where several files have one name."""
        place = int(np.searchsorted(self._ends, row, side="right"))
        sheet, path = self._sheets[place], self._pieces[place].path
        number = sheet.numbers[row - int(self._ends[place] - len(sheet.numbers))]
        alone = all(piece.path == path or piece.path.name != path.name for piece in self._pieces)
        return f"{path.name if alone else f'{path.parent.name}/{path.name}'}, {sheet.unit} {number}"

    def first(self, rows: Mask) -> str:
        """Gives the place of the first of these rows."""
        return self.name(int(np.flatnonzero(rows)[0]))


def joined(parts: Sequence[Array]) -> Array:
    """Gives one column of all files; as text where one of them has text."""
    if len({part.dtype.kind in "biuf" for part in parts}) > 1:
        parts = [as_text(part) for part in parts]
    return np.concatenate(parts)


def column(sheets: Sequence[Sheet], name: str) -> Array:
    """Gives one column of all files by its name."""
    return joined([sheet.columns[name] for sheet in sheets])


def as_text(values: Array) -> Array:
    """Gives a column as text, whole numbers without a point."""
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (values == np.floor(values))
        return np.array([str(int(v)) if w else str(v) for v, w in zip(values, whole, strict=True)])
    return np.char.strip(values.astype(str))


def missing_in(values: Array, words: frozenset[str] = MISSING) -> Mask:
    """Tells of each row whether its value is missing: NaN, in arrays infinity too, or one of the words."""
    if values.dtype.kind == "f":
        return np.asarray(~np.isfinite(values.reshape(len(values), -1)).all(1) if values.ndim > 1 else np.isnan(values))
    if values.dtype.kind in "biu":
        return np.zeros(len(values), dtype=bool)
    cells = values.tolist()
    absent = {cell: cell.strip().lower() in words for cell in set(cells)}
    return np.array([absent[cell] for cell in cells], dtype=bool)


def ignoring(already: Sequence[str], names: Iterable[str]) -> str:
    """Gives the flag that leaves out columns besides those that are left out already, as a shell takes it."""
    return f"--ignore {shlex.quote(','.join(map(list_entry, dict.fromkeys([*already, *names]))))}"


def list_entry(name: str) -> str:
    """Gives a name as it stands in a list with commas: quoted where it would be taken for something else."""
    plain = name == name.strip() and not name.startswith("[") and not any(mark in name for mark in ',"')
    return name if plain else '"' + name.replace('"', '""') + '"'


def shortened(names: Sequence[str], most: int = 12) -> str:
    """Gives a list in words, cut after some; a name that holds a comma, or nothing, is quoted."""
    said = [f"'{name}'" if not name or "," in name else name for name in names[:most]]
    return ", ".join(said) + (f", … ({len(names) - most} more)" if len(names) > most else "")
