"""Choose columns and rows of the experiments by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpfl.errors import GpflError, did_you_mean
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.methods import METHODS


@dataclass(frozen=True)
class Selection:
    """Columns and rows of experiments, by the experiment's name."""

    experiments: list[Experiment]
    columns: dict[str, list[TableColumn]]
    rows: dict[str, list[MethodVariant]]

    @property
    def cells(self) -> list[Cell]:
        """All cells, experiment by experiment, column by column."""
        return [
            Cell(experiment, column, row)
            for experiment in self.experiments
            for column in self.columns[experiment.name]
            for row in self.rows[experiment.name]
        ]


def select_cells(experiments: list[Experiment], cells: str | None, methods: str) -> Selection:
    """Return the columns and rows that --cells and --methods name. Raise if a name has no match."""
    columns = {each.name: [column for column in each.columns if not column.extra] for each in experiments}
    if cells is not None:
        names = parse_names("--cells", cells)
        for name in names:
            if not any(column.matches(name) for each in experiments for column in each.columns):
                keys = {column.key for each in experiments for column in each.columns}
                known = keys if "/" in name else {half for key in keys for half in key.split("/")}
                raise GpflError(f"--cells names '{name}', which is not a cell; {did_you_mean(name, known)}")
        columns = {
            each.name: [column for column in each.columns if any(column in _find_columns(name, each.columns) for name in names)]
            for each in experiments
        }
    names = parse_names("--methods", methods)
    rows = {each.name: [row for row in each.rows if any(_matches_row(name, row) for name in names)] for each in experiments}
    for name in names:
        if name in ("all", "ablations") or any(_matches_row(name, row) for each in experiments for row in each.rows):
            continue
        if name not in METHODS:
            known = {row.label for each in experiments for row in each.rows} | {*METHODS, "all", "ablations"}
            raise GpflError(f"--methods names '{name}', which is not a method; {did_you_mean(name, known)}")
        for experiment_rows in rows.values():  # a row that the paper does not have
            experiment_rows.append(MethodVariant(name, {"name": name}))
    selected = [each for each in experiments if columns[each.name] and rows[each.name]]
    if not selected:
        titles = ", ".join(each.name for each in experiments)
        labels = ", ".join(dict.fromkeys(row.label for each in experiments for row in each.rows))
        fix = f"; its rows are {labels}" if cells is None else f" in the columns of --cells {cells}: leave one of them out"
        raise GpflError(f"{titles} has no row of --methods {methods}{fix}")
    return Selection(selected, columns, rows)


def parse_names(flag: str, text: str) -> list[str]:
    """Return the names of a list separated by commas, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise GpflError(f"{flag} is '{text}'; it must be names separated by commas")
    return names


def _find_columns(name: str, columns: Sequence[TableColumn]) -> list[TableColumn]:
    """Return the columns that a name means. Half a key means an extra column only if it means no other."""
    matches = [column for column in columns if column.matches(name)]
    return [column for column in matches if not column.extra or "/" in name] or matches


def _matches_row(name: str, row: MethodVariant) -> bool:
    return name == "all" or name in (row.label, row.folder) or (name == "ablations" and "without" in row.label)
