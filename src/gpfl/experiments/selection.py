"""What is asked of the experiments: columns by their keys and rows by their methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpfl.errors import GpflError, did_you_mean
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.methods import METHODS


@dataclass(frozen=True)
class Selection:
    """What of the experiments was asked for."""

    experiments: list[Experiment]
    columns: dict[str, list[TableColumn]]  # by the experiment's name
    rows: dict[str, list[MethodVariant]]

    @property
    def cells(self) -> list[Cell]:
        """All cells, experiment by experiment, column by column."""
        return [
            Cell(one, column, row)
            for one in self.experiments
            for column in self.columns[one.name]
            for row in self.rows[one.name]
        ]


def select_cells(named: list[Experiment], cells: str | None, methods: str) -> Selection:
    """Gives the columns and rows of experiments that were asked for; refuses words that mean nothing in them."""
    columns = {one.name: [column for column in one.columns if not column.extra] for one in named}
    if cells is not None:
        words = parse_names("--cells", cells)
        for word in words:
            if not any(column.named_by(word) for one in named for column in one.columns):
                keys = {column.key for one in named for column in one.columns}
                known = keys if "/" in word else {half for key in keys for half in key.split("/")}
                raise GpflError(f"--cells names '{word}', which is no cell here; {did_you_mean(word, known)}")
        columns = {one.name: [c for c in one.columns if any(c in meant(word, one.columns) for word in words)] for one in named}
    words = parse_names("--methods", methods)
    rows = {one.name: [row for row in one.rows if any(names_row(word, row) for word in words)] for one in named}
    for word in words:
        if word in ("all", "ablations") or any(names_row(word, row) for one in named for row in one.rows):
            continue
        if word not in METHODS:
            known = {row.label for one in named for row in one.rows} | {*METHODS, "all", "ablations"}
            raise GpflError(f"--methods names '{word}', which is no method; {did_you_mean(word, known)}")
        for one in named:  # a row that the paper does not have
            rows[one.name].append(MethodVariant(word, {"name": word}))
    kept = [one for one in named if columns[one.name] and rows[one.name]]
    if not kept:
        names = ", ".join(one.name for one in named)
        labels = ", ".join(dict.fromkeys(row.label for one in named for row in one.rows))
        way = f"; its rows are {labels}" if cells is None else f", in the columns of --cells {cells}: leave one of them out"
        raise GpflError(f"{names} has no row of --methods {methods}{way}")
    return Selection(kept, columns, rows)


def meant(word: str, columns: Sequence[TableColumn]) -> list[TableColumn]:
    """Gives the columns that a word of --cells means: an extra one by its key, or where half of a key means no other."""
    found = [column for column in columns if column.named_by(word)]
    return [column for column in found if not column.extra or "/" in word] or found


def names_row(word: str, row: MethodVariant) -> bool:
    """Tells whether a word means a row: its label, its folder's name, all, or the ablations."""
    return word == "all" or word in (row.label, row.folder) or (word == "ablations" and "without" in row.label)


def parse_names(flag: str, text: str) -> list[str]:
    """Gives the words of a list with commas between, each once."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(words):
        raise GpflError(f"{flag} is '{text}'; it must be names with commas between")
    return words
