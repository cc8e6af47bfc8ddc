"""Results: what the runs of an experiment gave, run now or before, and what must be said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Experiment, TableColumn
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.stored_runs import Trials

CellKey = tuple[str, str]
"""A column's key and a row's label."""


@dataclass(frozen=True)
class TableResults:
    """What is known of an experiment: the trials of its cells, and how they were made."""

    experiment: Experiment
    protocol: str
    rounds: int
    patience: int
    seeds: tuple[int, ...]
    trials: Mapping[CellKey, Trials | None]
    columns: tuple[TableColumn, ...] = ()
    rows: tuple[MethodVariant, ...] = ()
    caveats: Mapping[str, str] = field(default_factory=dict)  # by column key: what the data lack
    problems: Mapping[CellKey, str] = field(default_factory=dict)
    validation: float = 0.0
    settings: tuple[str, ...] = ()  # that were given by hand, such as "train.lr = 0.1"
    tuned: str = ""  # how values were searched, and which they are
    table: str = ""  # the name that --table gave
    commits: Mapping[CellKey, tuple[str, ...]] = field(default_factory=dict)  # of the code that made the runs

    @property
    def name(self) -> str:
        """The name of the table and of its folder: the experiment's, unless --table gave another."""
        return self.table or self.experiment.name

    def is_partial(self, key: str) -> bool:
        """Tells whether the data of a column are fewer rows than were published; files that nobody checked are whole."""
        return " of the " in self.caveats.get(key, "")


def collect_results(
    experiment: Experiment,
    jobs: Iterable[Job],
    plan: GridPlan,
    *,
    columns: Iterable[str] = (),
    extra: Iterable[MethodVariant] = (),
    problems: Mapping[CellKey, str] | None = None,
) -> TableResults:
    """Gives what the jobs hold of an experiment.

    Columns are those named and those of which there is something; `extra` are rows that were asked for and that the paper may
    not have. Other such rows are shown where there is something of them.
    """
    trials: dict[CellKey, Trials | None] = {}
    caveats: dict[str, str] = {}
    commits: dict[CellKey, tuple[str, ...]] = {}
    found_rows: list[MethodVariant] = []
    for job in jobs:
        for cell in job.cells:
            if cell.experiment.name != experiment.name:
                continue
            place = (cell.column.key, cell.variant.label)
            trials[place] = found = job.trials(cell.variant.label, plan.seeds)
            if found:
                commits[place] = trial_commits(found)
                found_rows.append(cell.variant)
            if job.caveat:
                caveats[cell.column.key] = job.caveat
    shown = {*columns, *(key for (key, _), found in trials.items() if found)}
    known = {row.label for row in experiment.rows}
    more = {row.label: row for row in extra} | {row.label: row for row in found_rows}
    rows = (*experiment.rows, *(row for label, row in more.items() if label not in known))
    kept = tuple(column for column in experiment.columns if column.key in shown)
    whole = {(column.key, row.label): trials.get((column.key, row.label)) for column in kept for row in rows}
    return TableResults(
        experiment=experiment,
        protocol=plan.protocol,
        rounds=plan.rounds,
        patience=plan.patience,
        seeds=plan.seeds,
        trials=whole,
        columns=kept,
        rows=rows,
        caveats={key: words for key, words in caveats.items() if key in shown},
        problems={place: words for place, words in (problems or {}).items() if place in whole},
        validation=plan.validation,
        settings=plan.settings,
        tuned=plan.tuned.describe(str(row.method["name"]) for row in rows) if plan.tuned else "",
        commits=commits,
        table=plan.table,
    )


def trial_commits(trials: Trials) -> tuple[str, ...]:
    """Return the commits of the code that made trials; "unknown" if none was noted."""
    return tuple(sorted({commit for run in trials.runs for commit in run.provenance().commits or ("unknown",)}))
