"""Rows of own files as inputs and labels: numbers scaled, categories one-hot, classes numbered, all of it written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.data.own.layout import PART_NAMES, Piece
from gpfl.data.own.read import MISSING, Array, Columns, is_number
from gpfl.errors import GpflError, did_you_mean

LABEL_NAMES = ("label", "labels", "y", "target", "targets", "class")
CLIENT_NAMES = ("client", "clients", "client_id")
PART_COLUMNS = ("part", "split")
INPUT_NAMES = ("x", "data", "images", "features")
MOST_VALUES = 50
"""Different texts that a column of categories may hold."""
MANY_CLASSES = 1000


@dataclass(frozen=True)
class Columned:
    """Which columns are not inputs, by the names that the user gave; "" is to be found."""

    label: str = ""
    client: str = ""
    part: str = ""
    ignore: Sequence[str] = ()
    scale: str = "standard"


@dataclass
class Gathered:
    """All rows of all pieces: inputs, labels as they stand in the files, whose and of which part, and the words about them."""

    x: Array
    labels: Array
    clients: Array | None
    parts: Array | None
    words: str
    label_name: str = "class"
    client_name: str = ""
    recipe: dict[str, object] = field(default_factory=dict)


class Places:
    """Where the rows of a joined table stand in their files."""

    def __init__(self, pieces: Sequence[Piece], sizes: Sequence[int]) -> None:
        self._pieces, self._ends = pieces, np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, row: int) -> str:
        """Gives file and row, the first row being 1."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return f"{self._pieces[number].path.name}, row {row - before + 1}"


def gather(pieces: Sequence[Piece], tables: Sequence[Columns], columned: Columned) -> Gathered:
    """Gives the rows of files, as arrays where they hold some, else column by column."""
    pieces, tables = divided(pieces, tables)
    if any(array.ndim != 1 for columns in tables for array in columns.values()):
        return gather_arrays(pieces, tables, columned)
    return gather_columns(pieces, tables, columned)


def divided(pieces: Sequence[Piece], tables: Sequence[Columns]) -> tuple[list[Piece], list[Columns]]:
    """Gives pieces that hold x_train, y_train, x_test and y_test as one piece for each part."""
    out_pieces, out_tables = [], []
    for piece, columns in zip(pieces, tables, strict=True):
        endings = {name.rpartition("_")[2] for name in columns if name.startswith(("x_", "y_"))}
        if "train" in endings and endings <= PART_NAMES.keys() and not piece.part:
            for ending in sorted(endings):
                out_pieces.append(Piece(piece.path, piece.client, PART_NAMES[ending]))
                names = {name: name.removesuffix(f"_{ending}") for name in columns if name.endswith(f"_{ending}")}
                out_tables.append({short: columns[name] for name, short in names.items()})
        else:
            out_pieces.append(piece)
            out_tables.append(columns)
    return out_pieces, out_tables


# Arrays: x of any shape.


def gather_arrays(pieces: Sequence[Piece], tables: Sequence[Columns], columned: Columned) -> Gathered:
    """Gives the rows of npz files that hold inputs of any shape and labels."""
    label = find(columned.label, LABEL_NAMES, tables[0], "label")
    name = next((name for name in INPUT_NAMES if name in tables[0]), None)
    others = [key for key, array in tables[0].items() if array.ndim > 1 and key != label]
    if name is None and len(others) == 1:
        name = others[0]
    if name is None:
        raise GpflError(f"{pieces[0].path} holds {', '.join(tables[0])}: name the inputs x and the labels y")
    inputs = []
    for piece, columns in zip(pieces, tables, strict=True):
        for key in (name, label):
            if key not in columns:
                raise GpflError(
                    f"{piece.path} has no array '{key}', which {pieces[0].path.name} has; it has {', '.join(columns)}"
                )
        x, y = columns[name], columns[label]
        if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
            raise GpflError(
                f"{piece.path} has {name} of shape {x.shape} and {label} of shape {y.shape}; give a label for each row"
            )
        if x.dtype.kind not in "biuf":
            raise GpflError(f"{piece.path} has {name} of type {x.dtype}; inputs must be numbers")
        first = tables[0][name]
        if (x.shape[1:], x.dtype) != (first.shape[1:], first.dtype):
            raise GpflError(
                f"{piece.path} has rows of shape {x.shape[1:]} ({x.dtype}), {pieces[0].path.name} of {first.shape[1:]} "
                f"({first.dtype}); they must agree"
            )
        inputs.append(x)
    x = as_images(np.concatenate(inputs))
    labels = joined([columns[label] for columns in tables])
    places = Places(pieces, [len(columns[label]) for columns in tables])
    clients, client_name = find_clients(pieces, tables, columned, places)
    parts, _ = find_parts(pieces, tables, columned, places)
    check_finite(x, places)
    words = f"rows of shape {x.shape[1:]}, {'bytes taken as pixels' if x.dtype == np.uint8 else 'numbers taken as they are'}"
    return Gathered(x, labels, clients, parts, words, label, client_name)


def as_images(x: Array) -> Array:
    """Gives bytes as images (channels, height, width): a channel is added to flat ones, a last one is moved."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def check_finite(x: Array, places: Places) -> None:
    """Refuses NaN and infinity in arrays."""
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x.reshape(len(x), -1)).all(1)
        if bad.any():
            first = places.name(int(np.flatnonzero(bad)[0]))
            raise GpflError(f"{int(bad.sum()):,} of {len(x):,} rows hold NaN or infinity, first {first}: fill or remove them")


# Columns: one value a row.


def gather_columns(pieces: Sequence[Piece], tables: Sequence[Columns], columned: Columned) -> Gathered:
    """Gives the rows of CSV and Parquet files."""
    names = list(tables[0])
    for piece, columns in zip(pieces, tables, strict=True):
        odd = sorted(set(names) ^ set(columns))
        if odd:
            has, lacks = (piece, pieces[0]) if odd[0] in columns else (pieces[0], piece)
            raise GpflError(
                f"column '{odd[0]}' is in {has.path}, but not in {lacks.path}; all files must have the same columns"
            )
        sizes = {name: len(values) for name, values in columns.items()}
        if len(set(sizes.values())) > 1:
            raise GpflError(f"{piece.path} has arrays of different length: {sizes}")
    places = Places(pieces, [len(next(iter(columns.values()))) for columns in tables])
    label = find(columned.label, LABEL_NAMES, tables[0], "label")
    clients, client_name = find_clients(pieces, tables, columned, places)
    parts, part_name = find_parts(pieces, tables, columned, places)
    for name in columned.ignore:
        if name not in names:
            raise GpflError(f"data.ignore names column '{name}'; {did_you_mean(name, names)}")
    left = [name for name in names if name not in (label, client_name, part_name, *columned.ignore)]
    if not left:
        raise GpflError(f"{pieces[0].path} has no column of inputs besides {', '.join(names)}")
    training = parts == "train" if parts is not None else np.ones(len(places), dtype=bool)
    encoded = [encode(name, joined([columns[name] for columns in tables]), training, columned.scale, places) for name in left]
    x = np.concatenate([values for values, _ in encoded], axis=1).astype(np.float32)
    recipe = {"columns": [step for _, step in encoded]}
    labels = joined([columns[label] for columns in tables])
    return Gathered(
        x, labels, clients, parts, column_words(recipe["columns"], columned.scale), label, client_name, dict(recipe)
    )


def joined(parts: Sequence[Array]) -> Array:
    """Gives one column of all files; as text where one of them has text."""
    if len({part.dtype.kind in "biuf" for part in parts}) > 1:
        parts = [part.astype(str) for part in parts]
    return np.concatenate(parts)


def numbers(values: Array) -> npt.NDArray[np.float64] | None:
    """Gives a column as numbers, NaN where one is missing; None where it holds other text."""
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    plain = np.char.lower(np.char.strip(values.astype(str)))
    filled = np.where(np.isin(plain, list(MISSING)), "nan", plain)
    try:
        return filled.astype(np.float64)
    except ValueError:
        return None


def encode(
    name: str, values: Array, training: npt.NDArray[np.bool_], scale: str, places: Places
) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
    """Gives a column as inputs (rows, width), and how that was done."""
    as_numbers = numbers(values)
    if as_numbers is not None:
        refuse_missing(name, ~(np.abs(as_numbers) < np.finfo(np.float32).max), places)
        if scale == "none":
            return as_numbers[:, None], {"name": name, "mean": 0.0, "std": 1.0}
        seen = as_numbers[training]
        mean, std = float(seen.mean()), float(seen.std())
        std = std if std > 0 and seen.min() < seen.max() else 1.0  # that of one value, over and over, may be 1e-17
        return (as_numbers[:, None] - mean) / std, {"name": name, "mean": mean, "std": std}
    text = np.char.strip(values.astype(str))
    refuse_missing(name, np.isin(np.char.lower(text), list(MISSING)), places)
    kinds = np.unique(text)
    if len(kinds) > MOST_VALUES:
        raise GpflError(
            f"column '{name}' holds {len(kinds):,} different texts, such as '{kinds[0][:40]}'; categories may be at most "
            f"{MOST_VALUES}: leave it out with --ignore {name}"
        )
    return (text[:, None] == kinds).astype(np.float64), {"name": name, "values": kinds.tolist()}


def refuse_missing(name: str, missing: npt.NDArray[np.bool_], places: Places, *, needed: bool = False) -> None:
    """Refuses a column with missing values; one that is needed cannot be left out."""
    if missing.any():
        first = places.name(int(np.flatnonzero(missing)[0]))
        way = "or remove those rows" if needed else f"remove those rows, or leave the column out with --ignore {name}"
        raise GpflError(
            f"column '{name}' has {int(missing.sum()):,} missing or infinite values, first in {first}: "
            f"fill them{' ' if needed else ', '}{way}"
        )


def column_words(recipe: Sequence[Mapping[str, Any]], scale: str) -> str:
    """Gives what was made of the columns."""
    plain = [str(step["name"]) for step in recipe if "mean" in step]
    coded = [
        f"{step['name']} ({', '.join(step['values'][:4])}{' …' if len(step['values']) > 4 else ''})"
        for step in recipe
        if "values" in step
    ]
    said = []
    if plain:
        how = "scaled to mean 0 and std 1" if scale != "none" else "as they are"
        said.append(f"{len(plain)} of numbers ({shortened(plain)}), {how}")
    if coded:
        said.append(f"{len(coded)} of categories, one-hot: {shortened(coded)}")
    return f"columns: {'; '.join(said)}"


def shortened(names: Sequence[str], most: int = 12) -> str:
    """Gives a list in words, cut after some."""
    return ", ".join(names[:most]) + (f", … ({len(names) - most} more)" if len(names) > most else "")


# Labels, clients and parts.


def find(wanted: str, usual: Sequence[str], columns: Columns, what: str, needed: bool = True) -> str:
    """Gives the column of that name, or the first of the usual names there is; "" where it need not be there."""
    if wanted:
        if wanted not in columns:
            raise GpflError(f"data.{what} is '{wanted}', which is no column; {did_you_mean(wanted, columns)}")
        return wanted
    lower = {name.lower(): name for name in columns}
    found = next((lower[name] for name in usual if name in lower), "")
    if needed and not found:
        raise GpflError(f"which column holds the {what}? Say --{what} NAME; there are {shortened(list(columns), 20)}")
    return found


def find_clients(
    pieces: Sequence[Piece], tables: Sequence[Columns], columned: Columned, places: Places
) -> tuple[Array | None, str]:
    """Gives each row's client and the column that tells it: a named one, else none (the files' places), else a usual one."""
    placed = all(piece.client for piece in pieces)
    name = find(columned.client, () if placed else CLIENT_NAMES, tables[0], "client", needed=False)
    if name:
        values = joined([columns[name] for columns in tables])
        text = as_text(values)
        refuse_missing(name, np.isin(np.char.lower(text), list(MISSING)), places, needed=True)
        return text, name
    if not placed:
        return None, ""
    sizes = [len(next(iter(columns.values()))) for columns in tables]
    return np.repeat([piece.client for piece in pieces], sizes), ""


def find_parts(
    pieces: Sequence[Piece], tables: Sequence[Columns], columned: Columned, places: Places
) -> tuple[Array | None, str]:
    """Gives each row's part, where files or a column tell it, and that column; no part where all rows are for training."""
    placed = [bool(piece.part) for piece in pieces]
    if any(placed) and not all(placed):
        with_, without = pieces[placed.index(True)], pieces[placed.index(False)]
        raise GpflError(f"{with_.path} is a {with_.part} part, but {without.path} is not divided: divide all clients or none")
    sizes = [len(next(iter(columns.values()))) for columns in tables]
    name = ""
    if all(placed):
        parts = np.repeat([piece.part for piece in pieces], sizes)
    else:
        name = find(columned.part, PART_COLUMNS, tables[0], "part", needed=False)
        if not name:
            return None, ""
        said = np.char.lower(as_text(joined([columns[name] for columns in tables])))
        unknown = ~np.isin(said, list(PART_NAMES))
        if unknown.any():
            if not columned.part:
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


def as_text(values: Array) -> Array:
    """Gives a column as text, whole numbers without a point."""
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (values == np.floor(values))
        return np.array([str(int(v)) if w else str(v) for v, w in zip(values, whole, strict=True)])
    return np.char.strip(values.astype(str))


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
    labels, name = gathered.labels, gathered.label_name
    as_numbers = numbers(labels)
    text = as_text(as_numbers if as_numbers is not None else labels)
    missing = np.isin(np.char.lower(text), list(MISSING))
    if missing.any():
        raise GpflError(f"'{name}' is missing in {int(missing.sum()):,} of {len(text):,} rows: every row needs a label")
    whole = np.isfinite(as_numbers) & (as_numbers == np.floor(as_numbers)) if as_numbers is not None else np.True_
    if as_numbers is not None and not np.all(whole):
        odd = as_numbers[~whole][0]
        raise GpflError(
            f"'{name}' holds {odd:g}; labels are whole numbers or names of classes: name another column with --label"
        )
    numbered, names = number_values(text)
    if len(names) < 2:
        raise GpflError(f"all {len(text):,} rows are of one class, '{names[0]}'; there must be at least two")
    if len(names) > MANY_CLASSES or (len(names) > 20 and 2 * len(names) > len(text)):
        raise GpflError(
            f"'{name}' holds {len(names):,} different values in {len(text):,} rows, too many for classes: "
            "name another column with --label"
        )
    return numbered, names
