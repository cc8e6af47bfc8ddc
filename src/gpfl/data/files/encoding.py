"""Rows of own files as inputs: numbers scaled, categories one-hot, all of it written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gpfl.data.files.arrays import divided, gather_arrays
from gpfl.data.files.columns import Column, inputs, is_constant, look, problem_of, refuse, resembles_id
from gpfl.data.files.gathered import Columned, Gathered, read_as, without_missing
from gpfl.data.files.labels import LABEL_NAMES, find, find_client, find_parts, told_by, told_clients
from gpfl.data.files.layout import Piece
from gpfl.data.files.sheet import Array, Mask, Places, Sheet, column, ignoring, shortened
from gpfl.errors import GpflError, did_you_mean, pluralize


def gather(pieces: Sequence[Piece], sheets: Sequence[Sheet], columned: Columned) -> Gathered:
    """Gives the rows of files, as arrays where they hold some, else column by column."""
    notes = list(dict.fromkeys(note for sheet in sheets for note in sheet.notes))
    pieces, sheets = divided(pieces, without_ignored(sheets, columned.ignore))
    arrays = any(array.ndim != 1 for sheet in sheets for array in sheet.columns.values())
    gathered = (gather_arrays if arrays else gather_columns)(pieces, sheets, columned)
    if len(notes) > 3:
        notes = [*notes[:3], f"The same of {len(notes) - 3} more files."]
    gathered.notes = [*notes, *gathered.notes]
    return gathered


def without_ignored(sheets: Sequence[Sheet], ignore: Sequence[str]) -> list[Sheet]:
    """Gives the columns that are not ignored; refuses the name of one that no file has."""
    known = {name for sheet in sheets for name in sheet.columns}
    for name in ignore:
        if name not in known:
            raise GpflError(f"data.ignore names column '{name}'; {did_you_mean(name, known)}")
    return [sheet.without(ignore) for sheet in sheets]


def gather_columns(pieces: Sequence[Piece], sheets: Sequence[Sheet], columned: Columned) -> Gathered:
    """Gives the rows of CSV and Parquet files."""
    check_same(pieces, sheets)
    names = list(sheets[0].columns)
    label = find(columned, "label", LABEL_NAMES, sheets[0])
    client = find_client(pieces, sheets[0], columned)
    bundle = find(columned, "group", (), sheets[0], needed=False)
    parts, part = find_parts(pieces, sheets, columned, Places(pieces, sheets))
    left = [name for name in names if name not in (label, client, part, bundle)]
    if not left:
        raise GpflError(f"{pieces[0].path} has no column of inputs besides {', '.join(sorted({*names, *columned.ignore}))}")
    notes = []
    if columned.missing == "drop":
        needed = [name for name in (label, client, bundle) if name]
        pieces, sheets, note = without_missing(pieces, sheets, needed, left, columned.ignore)
        parts, _ = find_parts(pieces, sheets, columned, Places(pieces, sheets))
        notes.append(note)
    places, commas = Places(pieces, sheets), all(sheet.commas for sheet in sheets)
    clients = told_clients(pieces, sheets, client, places)
    together = told_by(sheets, bundle, places) if bundle else None
    training = parts == "train" if parts is not None else np.ones(len(places), dtype=bool)
    looked = (look(name, column(sheets, name), commas) for name in left)  # one at a time: a column may be large
    x, steps, told = encode(looked, training, commas, places, columned)
    recipe = {**read_as(columned, label, client, part), "scale": columned.scale, "columns": steps}
    words = column_words(steps, columned.scale)
    notes += remarks(told, columned.ignore)
    labels = column(sheets, label)
    return Gathered(x, labels, clients, parts, together, words, label, client, recipe, notes, places, commas)


def encode(
    columns: Iterable[Column], training: Mask, commas: bool, places: Places, columned: Columned
) -> tuple[Array, list[dict[str, Any]], list[Told]]:
    """Gives columns as inputs (rows, width), how that was done, and what to say of them; refuses all bad ones at once."""
    encoded, told, problems = [], [], []
    for one in columns:
        problem = problem_of(one, columned.missing == "mean", training, commas, places)
        if problem is not None:
            problems.append(problem)
        elif not problems:
            encoded.append(inputs(one, training, columned.scale))
            told.append(Told(one))
    refuse(problems, columned.ignore)
    return np.concatenate([values for values, _ in encoded], axis=1), [step for _, step in encoded], told


def check_same(pieces: Sequence[Piece], sheets: Sequence[Sheet]) -> None:
    """Refuses files of other columns than the first has, and columns of other lengths."""
    names = list(sheets[0].columns)
    for piece, sheet in zip(pieces, sheets, strict=True):
        odd = sorted(set(names) ^ set(sheet.columns))
        if odd:
            has, lacks = (piece, pieces[0]) if odd[0] in sheet.columns else (pieces[0], piece)
            raise GpflError(
                f"column '{odd[0]}' is in {has.path}, but not in {lacks.path}; all files must have the same columns"
            )
        sizes = {name: len(values) for name, values in sheet.columns.items()}
        if len(set(sizes.values())) > 1:
            raise GpflError(f"{piece.path} has arrays of different length: {sizes}")


# Words.


class Told:
    """What is to be said of a column: the column itself may be large, and is let go."""

    def __init__(self, column: Column) -> None:
        self.name, self.missing, self.example = column.name, int(column.missing.sum()), column.example
        self.number, self.id, self.constant = column.numbers is not None, resembles_id(column), is_constant(column)


def remarks(columns: Sequence[Told], ignore: Sequence[str]) -> list[str]:
    """Gives lines about columns that a person should look at again."""
    said = []
    comma = [column for column in columns if column.example]
    if comma:
        shown, names = comma[0].example, shortened([column.name for column in comma])
        said.append(f"Read with decimal commas: {names} ({shown} is {shown.replace(',', '.')}).")
    means = [f"{column.name} {column.missing:,}" for column in columns if column.missing and column.number]
    kinds = [f"{column.name} {column.missing:,}" for column in columns if column.missing and not column.number]
    said += [f"Missing values filled with the mean of their column: {shortened(means)}."] if means else []
    said += [f"Missing values made a category of their own: {shortened(kinds)}."] if kinds else []
    for kind in dict.fromkeys(told.id for told in columns if told.id):
        said += advice([told.name for told in columns if told.id == kind], kind, ignore)
    constant = [column.name for column in columns if column.constant]
    if constant:
        which = f"Column '{constant[0]}' holds" if len(constant) == 1 else f"Columns {shortened(constant)} hold"
        said.append(
            f"{which} the same in every row, and tell{'s' if len(constant) == 1 else ''} nothing: {ignoring(ignore, constant)}"
        )
    return said


def advice(names: Sequence[str], what: str, ignore: Sequence[str]) -> list[str]:
    """Gives the line that says how to leave out columns that look like ids."""
    if len(names) == 1:
        return [f"Column '{names[0]}' has {what}; if it is an id: {ignoring(ignore, names)}"]
    return [f"{pluralize(len(names), 'column')} have {what}: {shortened(names)}; if they are ids: {ignoring(ignore, names)}"]


def column_words(recipe: Sequence[Mapping[str, Any]], scale: str) -> str:
    """Gives what was made of the columns."""
    plain = [str(step["name"]) for step in recipe if "mean" in step]
    coded = [f"{quoted(step['name'])} ({kinds(step['values'])})" for step in recipe if "values" in step]
    said = []
    if plain:
        how = "scaled to mean 0 and std 1" if scale != "none" else "as they are"
        said.append(f"{len(plain)} of numbers ({shortened(plain)}), {how}")
    if coded:
        more = f", … ({len(coded) - 12} more)" if len(coded) > 12 else ""
        said.append(f"{len(coded)} of categories, one-hot: {', '.join(coded[:12])}{more}")
    return f"columns: {'; '.join(said)}"


def kinds(values: Sequence[str]) -> str:
    """Gives the first categories of a column; the missing one last."""
    said = [quoted(value) for value in values if value] + ["missing"] * ("" in values)
    return ", ".join(said[:4]) + (" …" if len(said) > 4 else "")


def quoted(name: str) -> str:
    """Gives a name, in quotes where it holds a comma."""
    return shortened([name])
