"""What files tell of their rows besides inputs: labels, clients, parts and what stays together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpfl.data.files.columns import look
from gpfl.data.files.csv_reader import is_number
from gpfl.data.files.gathered import Columned, Gathered, refuse_missing
from gpfl.data.files.layout import PART_NAMES, Piece
from gpfl.data.files.sheet import NO_VALUE, Array, Places, Sheet, as_text, column, missing_in, shortened
from gpfl.errors import GpflError, did_you_mean

LABEL_NAMES = ("label", "labels", "y", "target", "targets", "class")
CLIENT_NAMES = ("client", "clients", "client_id")
PART_COLUMNS = ("part", "split")
MANY_CLASSES = 1000


def find(columned: Columned, what: str, usual: Sequence[str], sheet: Sheet, *, needed: bool = True) -> str:
    """Gives the column that the user named, or the first of the usual names there is; "" where it need not be there."""
    named = {what: getattr(columned, what) for what in ("label", "client", "split_column", "group")}
    wanted: str = named[what]
    if wanted:
        if wanted not in sheet.columns:
            raise GpflError(f"data.{what} is '{wanted}', which is no column; {did_you_mean(wanted, sheet.columns)}")
        return wanted
    lower = {name.lower(): name for name in sheet.columns if name not in named.values()}
    found = next((lower[name] for name in usual if name in lower), "")
    if needed and not found:
        there = shortened(list(sheet.columns), 20) or "none"
        raise GpflError(f"which column holds the {what}? Say --{what} NAME; there are {there}")
    return found


def find_client(pieces: Sequence[Piece], sheet: Sheet, columned: Columned) -> str:
    """Gives the column that tells clients: a named one, else none (""), where the files' places do, else a usual one."""
    placed = all(piece.client for piece in pieces)
    return find(columned, "client", () if placed else CLIENT_NAMES, sheet, needed=False)


def told_by(sheets: Sequence[Sheet], name: str, places: Places) -> Array:
    """Gives what a column tells of each row; refuses one with missing values."""
    values = column(sheets, name)
    refuse_missing(name, missing_in(values, NO_VALUE), places)
    return as_text(values)


def told_clients(pieces: Sequence[Piece], sheets: Sequence[Sheet], name: str, places: Places) -> Array | None:
    """Gives each row's client by a column, or by the file's place; None where neither tells it."""
    if name:
        return told_by(sheets, name, places)
    if not all(piece.client for piece in pieces):
        return None
    return np.repeat([piece.client for piece in pieces], [len(sheet.numbers) for sheet in sheets])


def find_parts(
    pieces: Sequence[Piece], sheets: Sequence[Sheet], columned: Columned, places: Places
) -> tuple[Array | None, str]:
    """Gives each row's part, where files or a column tell it, and that column; no part where all rows are for training."""
    placed = [bool(piece.part) for piece in pieces]
    if any(placed) and not all(placed):
        with_, without = pieces[placed.index(True)], pieces[placed.index(False)]
        raise GpflError(f"{with_.path} is a {with_.part} part, but {without.path} is not divided: divide all clients or none")
    name = ""
    if all(placed):
        parts = np.repeat([piece.part for piece in pieces], [len(sheet.numbers) for sheet in sheets])
    else:
        name = find(columned, "split_column", PART_COLUMNS, sheets[0], needed=False)
        if not name:
            return None, ""
        said = np.char.lower(as_text(column(sheets, name)))
        unknown = ~np.isin(said, list(PART_NAMES))
        if unknown.any():
            if not columned.split_column:
                return None, ""  # a column of that name that is about something else
            row = int(np.flatnonzero(unknown)[0])
            raise GpflError(
                f"column '{name}' holds '{said[row]}' in {places.name(row)}; it must hold train, validation or test"
            )
        parts = np.array([PART_NAMES[value] for value in said])
    return checked_parts(parts), name


def checked_parts(parts: Array) -> Array | None:
    """Gives the parts of rows, or None where all are for training; refuses such as have none for it."""
    if set(parts.tolist()) == {"train"}:
        return None
    if "train" not in parts:
        raise GpflError(f"there are {' and '.join(sorted(set(parts.tolist())))} rows, but none for training")
    return parts


def number_values(text: Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Gives every text its number, and the texts in order: as numbers where all are numbers, else by the alphabet."""
    kinds, inverse = np.unique(text, return_inverse=True)
    if all(is_number(kind) for kind in kinds):
        order = np.argsort([float(kind) for kind in kinds], kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return place[inverse.ravel()], kinds[order].tolist()
    return inverse.ravel().astype(np.int64), kinds.tolist()


def number_classes(gathered: Gathered) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Gives labels from 0 on and the classes' names; refuses what cannot be classes."""
    name = gathered.label_name
    looked = look(name, gathered.labels, gathered.commas, NO_VALUE if gathered.places else frozenset())  # a folder is there
    if gathered.places is not None:
        refuse_missing(name, looked.missing, gathered.places)
    if looked.numbers is not None:
        whole = np.isfinite(looked.numbers) & (looked.numbers == np.floor(looked.numbers))
        if not whole.all():
            odd = looked.numbers[~whole][0]
            raise GpflError(
                f"'{name}' holds {odd:g}; labels are whole numbers or names of classes: name another column with --label"
            )
    text = as_text(looked.numbers) if looked.numbers is not None else looked.texts
    numbered, names = number_values(text if text is not None else gathered.labels)
    if len(names) < 2:
        raise GpflError(f"every row is of one class, '{names[0]}'; there must be at least two")
    if len(names) > MANY_CLASSES or (len(names) > 20 and 2 * len(names) > len(numbered)):
        raise GpflError(
            f"'{name}' holds {len(names):,} different values in {len(numbered):,} rows, too many for classes: "
            "name another column with --label"
        )
    return numbered, names
