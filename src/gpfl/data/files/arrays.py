"""Rows of npz files that hold arrays: inputs of any shape, and a label for each row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpfl.data.files.gathered import Columned, Gathered, read_as, without_missing
from gpfl.data.files.labels import LABEL_NAMES, find, find_client, find_parts, told_by, told_clients
from gpfl.data.files.layout import PART_NAMES, Piece
from gpfl.data.files.sheet import Array, Places, Sheet, column, missing_in, numbered
from gpfl.errors import GpflError

INPUT_NAMES = ("x", "data", "images", "features")


def divided(pieces: Sequence[Piece], sheets: Sequence[Sheet]) -> tuple[list[Piece], list[Sheet]]:
    """Gives pieces that hold x_train, y_train, x_test and y_test as one piece for each part."""
    out_pieces, out_sheets = [], []
    for piece, sheet in zip(pieces, sheets, strict=True):
        columns = sheet.columns
        endings = {name.rpartition("_")[2] for name in columns if name.startswith(("x_", "y_"))}
        if "train" in endings and endings <= PART_NAMES.keys() and not piece.part:
            for ending in sorted(endings):
                out_pieces.append(Piece(piece.path, piece.client, PART_NAMES[ending]))
                names = {name: name.removesuffix(f"_{ending}") for name in columns if name.endswith(f"_{ending}")}
                out_sheets.append(numbered({short: columns[name] for name, short in names.items()}, sheet.notes))
        else:
            out_pieces.append(piece)
            out_sheets.append(sheet)
    return out_pieces, out_sheets


def gather_arrays(pieces: Sequence[Piece], sheets: Sequence[Sheet], columned: Columned) -> Gathered:
    """Gives the rows of npz files that hold inputs of any shape and labels."""
    label = find(columned, "label", LABEL_NAMES, sheets[0])
    name = find_inputs(pieces[0], sheets[0], label)
    client = find_client(pieces, sheets[0], columned)
    bundle = find(columned, "group", (), sheets[0], needed=False)
    for piece, sheet in zip(pieces, sheets, strict=True):
        check_arrays(piece, sheet, name, label, pieces[0], sheets[0])
    if columned.scale != Columned.scale:
        raise GpflError(
            f"data.scale is '{columned.scale}', but the array '{name}' of {pieces[0].path.name} is never scaled: leave it out"
        )
    # Arrays beside these may be of any length, and rows are counted by the longest.
    wanted = [{key: v for key, v in sheet.columns.items() if v.ndim and len(v) == len(sheet.columns[name])} for sheet in sheets]
    sheets, notes = [numbered(columns) for columns in wanted], []
    for key in filter(None, (client, bundle)):
        for piece, sheet in zip(pieces, sheets, strict=True):
            if key not in sheet.columns or sheet.columns[key].ndim != 1:
                raise GpflError(
                    f"{piece.path} has no array '{key}' with one value for each of its {len(sheet.columns[name]):,} rows"
                )
    if columned.missing == "drop":
        needed = [key for key in (label, client, bundle) if key]
        pieces, sheets, note = without_missing(pieces, sheets, needed, [name], columned.ignore)
        notes.append(note)
    places = Places(pieces, sheets)
    clients = told_clients(pieces, sheets, client, places)
    parts, part = find_parts(pieces, sheets, columned, places)
    together = told_by(sheets, bundle, places) if bundle else None
    x = as_images(np.concatenate([sheet.columns[name] for sheet in sheets]))
    check_finite(x, places)
    words = f"rows of shape {x.shape[1:]}, {'bytes taken as pixels' if x.dtype == np.uint8 else 'numbers taken as they are'}"
    recipe = read_as(columned, label, client, part)
    return Gathered(x, column(sheets, label), clients, parts, together, words, label, client, recipe, notes, places)


def find_inputs(piece: Piece, sheet: Sheet, label: str) -> str:
    """Gives the name of the array of inputs."""
    name = next((name for name in INPUT_NAMES if name in sheet.columns), None)
    others = [key for key, array in sheet.columns.items() if array.ndim > 1 and key != label]
    if name is None and len(others) == 1:
        name = others[0]
    if name is None:
        raise GpflError(f"{piece.path} holds {', '.join(sheet.columns)}: name the inputs x and the labels y")
    return name


def check_arrays(piece: Piece, sheet: Sheet, name: str, label: str, first: Piece, pattern: Sheet) -> None:
    """Refuses arrays that do not go together, or not with those of the first file."""
    for key in (name, label):
        if key not in sheet.columns:
            raise GpflError(
                f"{piece.path} has no array '{key}', which {first.path.name} has; it has {', '.join(sheet.columns)}"
            )
    x, y, like = sheet.columns[name], sheet.columns[label], pattern.columns[name]
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        raise GpflError(f"{piece.path} has {name} of shape {x.shape} and {label} of shape {y.shape}; give a label for each row")
    if x.dtype.kind not in "biuf":
        raise GpflError(f"{piece.path} has {name} of type {x.dtype}; inputs must be numbers")
    if (x.shape[1:], x.dtype) != (like.shape[1:], like.dtype):
        raise GpflError(
            f"{piece.path} has rows of shape {x.shape[1:]} ({x.dtype}), {first.path.name} of {like.shape[1:]} "
            f"({like.dtype}); they must agree"
        )


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
    bad = missing_in(x)
    if bad.any():
        raise GpflError(
            f"{int(bad.sum()):,} of {len(x):,} rows hold NaN or infinity, first {places.first(bad)}: "
            "fill them, or leave them out with --missing drop"
        )
