"""Results of an experiment: the stored trials of its cells, and how they were made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from gpfl.core.net import Net
from gpfl.errors import GpflError
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.config_comparison import UNCOMPARED, Sections
from gpfl.experiments.definitions import Cell, CellKey, Experiment, TableColumn
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.experiments.stored_runs import Trials, read_stored_trials
from gpfl.models.custom import net_name
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict


@dataclass(frozen=True)
class TableResults:
    """The trials of an experiment's cells, and how they were made."""

    experiment: Experiment
    protocol: str
    rounds: int
    patience: int
    seeds: tuple[int, ...]
    trials: Mapping[CellKey, Trials | None]
    columns: tuple[TableColumn, ...] = ()
    rows: tuple[MethodVariant, ...] = ()
    caveats: Mapping[str, str] = field(default_factory=dict)  # about the data, by column
    problems: Mapping[CellKey, str] = field(default_factory=dict)
    validation: float = 0.0
    settings: tuple[str, ...] = ()  # set by hand, such as "train.lr = 0.1"
    tuned: str = ""  # tuned values and how they were searched
    table: str = ""  # --table
    commits: Mapping[CellKey, tuple[str, ...]] = field(default_factory=dict)  # of the code that made the runs

    @property
    def name(self) -> str:
        """Name of the table and of its folder."""
        return self.table or self.experiment.name

    def is_partial(self, key: str) -> bool:
        """Return whether a column's data have fewer samples than were published."""
        return " of the " in self.caveats.get(key, "")


def find_jobs(cells: Iterable[Cell], plan: GridPlan) -> tuple[list[Job], Problems]:
    """Return the jobs of cells with stored trials, and the cells with trials on different data.

    Trials are found by their configs, so the data need not be on this machine.
    """
    stored = read_stored_trials(plan.out)
    jobs: dict[Path, Job] = {}
    problems: Problems = {}
    for cell in cells:
        try:
            settings = plan.config(cell)
            requested = _resolve_without_data(settings)
        except GpflError:  # no run can have these settings
            continue
        matches = [trials for trials in stored if _is_requested(requested, trials.config)]
        if len({trials.data_hash for trials in matches}) > 1:
            names = ", ".join(trials.path.name for trials in matches)
            problems[cell.key] = f"several runs differ only in their data: remove all but one of {names}"
        elif matches:
            found = matches[0]
            earlier = jobs[found.path].cells if found.path in jobs else ()
            jobs[found.path] = Job((*earlier, cell), settings, found, found.data_warning)
    return list(jobs.values()), problems


def _resolve_without_data(settings: ConfigDict) -> Sections:
    """Return a config, complete except for what depends on the data."""
    config = configs.resolve_config(settings)
    if config.net is None:  # never in a cell
        return config.sections()
    lr = config.net.lr if math.isnan(config.train.lr) else config.train.lr
    net = cast(Net, SimpleNamespace(name=net_name(config.net)))  # options depend on the name only
    method = config.method.bind(net, lr=lr, epochs=config.train.epochs)
    train = dataclasses.replace(config.train, lr=lr)
    return dataclasses.replace(config, train=train, method=method).sections()


def _is_requested(requested: Sections, config: Sections) -> bool:
    """Return whether a complete config equals a requested one. The data set the options of a net that are 0."""
    return requested.keys() == config.keys() and all(
        values.get(key) == config[section].get(key)
        for section, values in requested.items()
        for key in values.keys() | config[section].keys()
        if (section, key) not in UNCOMPARED and not (section == "net" and values.get(key) == 0)
    )


def collect_results(
    experiment: Experiment,
    jobs: Iterable[Job],
    plan: GridPlan,
    *,
    columns: Iterable[str] = (),
    extra_rows: Iterable[MethodVariant] = (),
    problems: Mapping[CellKey, str] | None = None,
) -> TableResults:
    """Return the results of an experiment.

    It has the paper's rows, `extra_rows` and all others with results; its columns are those named and those with
    results.
    """
    trials: dict[CellKey, Trials] = {}
    caveats: dict[str, str] = {}
    variants = {row.label: row for row in (*experiment.rows, *extra_rows)}
    for job in jobs:
        for cell in job.cells:
            if cell.experiment.name != experiment.name:
                continue
            if finished := job.trials(cell.variant.label, plan.seeds):
                trials[cell.key] = finished
                variants.setdefault(cell.variant.label, cell.variant)
            if job.caveat:
                caveats[cell.column.key] = job.caveat
    shown = {*columns, *(key for key, _ in trials)}
    table_columns, rows = tuple(column for column in experiment.columns if column.key in shown), tuple(variants.values())
    cells = {(column.key, row.label): trials.get((column.key, row.label)) for column in table_columns for row in rows}
    return TableResults(
        experiment=experiment,
        protocol=plan.protocol,
        rounds=plan.rounds,
        patience=plan.patience,
        seeds=plan.seeds,
        trials=cells,
        columns=table_columns,
        rows=rows,
        caveats={key: text for key, text in caveats.items() if key in shown},
        problems={key: text for key, text in (problems or {}).items() if key in cells},
        validation=plan.validation,
        settings=plan.settings,
        tuned=plan.tuned.describe(str(row.method["name"]) for row in rows) if plan.tuned else "",
        table=plan.table,
        commits={key: each.commits for key, each in trials.items()},
    )
