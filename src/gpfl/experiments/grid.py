"""The grid: cells of the paper's tables as jobs, one for each config, whatever tables it belongs to, and their results."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from gpfl.core import tree
from gpfl.core.net import Net
from gpfl.data import DATASETS, PublishedDataset
from gpfl.data.published.dataset import provenance_warning
from gpfl.engine import RunSpec
from gpfl.errors import GpflError, error_prefix
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import PATIENCE, ROUNDS, Cell, CellKey, Experiment, TableColumn
from gpfl.experiments.stored_runs import UNCOMPARED, Sections, StoredTrials, Trials, merge_configs, read_stored_trials
from gpfl.experiments.tuned_values import TunedValues
from gpfl.federation import Federation
from gpfl.io import toml
from gpfl.models.custom import net_name
from gpfl.training import config as configs
from gpfl.training.config import Config, ConfigDict
from gpfl.training.prepare import prepare

CHECKPOINT_EVERY = 10  # rounds between checkpoints of a state of at most `CHECKPOINT_BYTES`; larger states are saved less often

CHECKPOINT_BYTES = 256 * 2**20

Problems = dict[CellKey, str]  # why cells failed or cannot run


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    """How cells are run."""

    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = ROUNDS
    patience: int = PATIENCE
    protocol: str = "corrected"
    validation: float = 0.0
    run: Mapping[str, object] = field(default_factory=dict)  # engine, device, precision, …
    common: ConfigDict = field(default_factory=dict)  # settings of all cells
    overrides: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # settings of single methods by name
    weights: bool = False  # keep the weights of finished runs
    tuned: TunedValues | None = None
    table: str = ""  # name of the table's folder instead of the experiment's
    federations: dict[str, Federation] = field(default_factory=dict, compare=False)  # those made so far, by config

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that affect results and were set by hand, such as "train.lr = 0.1"."""
        sections = {"run": self.run, **self.common, **self.overrides}
        return tuple(
            f"{section}.{key} = {toml.format_value(value)}"
            for section, values in sections.items()
            for key, value in values.items()
            if (section, key) not in UNCOMPARED
        )

    def config(self, cell: Cell) -> ConfigDict:
        """Return the config of a cell."""
        name = str(cell.variant.method["name"])
        flags: ConfigDict = {
            "run": {"protocol": self.protocol, **self.run},
            "train": {"rounds": self.rounds, "patience": self.patience},
            "partition": {"validation_fraction": self.validation} if self.validation else {},
        }
        method = {**self.overrides.get(name, {}), **cell.variant.method}
        config = merge_configs(cell.column.settings, flags, self.common, {"method": method})
        tuned = self.tuned.config_for(name, config, cell.column.key) if self.tuned else {}
        return _first_equal_protocol(merge_configs(tuned, config))

    def federation(self, config: Config) -> Federation:
        """Return the federation of a config, made once."""
        sections = config.sections()
        key = toml.dump({"data": sections["data"], "partition": sections["partition"]})
        if key not in self.federations:
            self.federations[key] = config.federation()
        return self.federations[key]


@dataclass(frozen=True)
class Job:
    """The trials of one or several cells with the same config."""

    cells: tuple[Cell, ...]
    settings: ConfigDict = field(hash=False)
    stored: StoredTrials = field(compare=False)
    caveat: str  # about the data
    memory: int = 0  # bytes of all trials in training, and of the data

    @property
    def folder(self) -> Path:
        """Folder of the trials."""
        return self.stored.path

    @property
    def label(self) -> str:
        """Name on the terminal."""
        return " ".join(self.cells[0].key)

    def trials(self, label: str, seeds: Iterable[int]) -> Trials | None:
        """Return the finished trials of these seeds, or None.

        It does not depend on trials.json, so run folders from several machines can be put together.
        """
        runs = [run for seed in seeds if (run := self.stored.run(seed))]
        return Trials(label, runs) if runs else None

    def finished(self, seeds: Iterable[int]) -> list[int]:
        """Return the seeds whose trials have finished."""
        trials = self.trials("", seeds)
        return [run.seed for run in trials.runs] if trials else []

    def diverged(self, seeds: Iterable[int]) -> dict[int, int]:
        """Return the rounds in which trials diverged, by seed."""
        return {seed: round_ for seed in seeds if (round_ := self.stored.diverged_round(seed)) is not None}


def config_hash(config: Sections, data_hash: str) -> str:
    """Return eight hex digits of a complete config without the settings in `UNCOMPARED`, and of the data's hash."""
    compared = {
        section: {key: value for key, value in values.items() if (section, key) not in UNCOMPARED}
        for section, values in config.items()
    }
    return hashlib.sha256(json.dumps([compared, data_hash], sort_keys=True).encode()).hexdigest()[:8]


def folder_name(config: Config, hash_: str) -> str:
    """Return the name of a folder of trials: data, partition, net, method and hash."""
    partition = config.partition
    clients = f"-{partition.clients}" if partition and partition.clients else ""
    total = f"of{partition.total_clients}" if partition and partition.total_clients else ""
    without = "".join(f"-without-{part}" for part in getattr(config.method, "without", ()))
    net = net_name(config.net) if config.net else configs.CUSTOM
    partition_name = partition.name if partition else "manifest"
    return f"{config.data}-{partition_name}{clients}{total}-{net}-{config.method.name}{without}-{hash_}"


def has_data(name: str) -> bool:
    """Return whether a dataset is on this machine. A damaged one counts, so that loading it raises its error."""
    source = DATASETS.get(name)
    if not isinstance(source, PublishedDataset):
        return True
    try:
        return source.is_available()
    except GpflError:
        return True


def check_cells(cells: Iterable[Cell], plan: GridPlan) -> None:
    """Raise for settings that no run can have, before any data is read."""
    for cell in cells:
        with error_prefix(" ".join(cell.key)):
            configs.resolve_config(plan.config(cell))


def make_jobs(cells: Iterable[Cell], plan: GridPlan) -> tuple[list[Job], Problems]:
    """Return the jobs of cells, one per config, and why other cells cannot run."""
    jobs: dict[Path, Job] = {}
    problems: Problems = {}
    for cell in cells:
        try:
            job = _make_job(cell, plan)
        except GpflError as error:
            problems[cell.key] = str(error)
            continue
        known = jobs.get(job.folder)
        jobs[job.folder] = dataclasses.replace(job, cells=(*known.cells, cell)) if known else job
    return list(jobs.values()), problems


def _make_job(cell: Cell, plan: GridPlan) -> Job:
    settings = plan.config(cell)
    config, spec = prepare_cell(cell, plan)
    table = spec.federation.table
    complete = merge_configs(config.sections(), {"run": {"precision": settings["run"].get("precision", "float32")}})
    state, in_training = _count_bytes(spec)
    every = CHECKPOINT_EVERY * math.ceil(state / CHECKPOINT_BYTES)
    return Job(
        cells=(cell,),
        settings=merge_configs({"run": {"checkpoint_every": every}}, settings),
        stored=StoredTrials(plan.out / "runs" / folder_name(config, config_hash(complete, table.digest))),
        caveat=provenance_warning(table),
        memory=table.x.nbytes + len(plan.seeds) * in_training,
    )


def prepare_cell(cell: Cell, plan: GridPlan) -> tuple[Config, RunSpec]:
    """Return the complete config and the run of a cell, on the CPU: planning takes no GPU memory."""
    config = configs.resolve_config(merge_configs(plan.config(cell), {"run": {"device": "cpu", "precision": "float32"}}))
    return prepare(config, plan.federation(config), None, None)


def _first_equal_protocol(settings: ConfigDict) -> ConfigDict:
    """Return the config under the first protocol under which it is the same, so that equal runs are shared."""

    def resolve(config: ConfigDict) -> dict[str, str]:  # text, since NaN equals nothing
        sections = configs.resolve_config(config).sections()
        return {section: str(values) for section, values in sections.items() if section != "run"}

    resolved = resolve(settings)
    candidates = (merge_configs(settings, {"run": {"protocol": protocol}}) for protocol in configs.PROTOCOLS)
    return next((config for config in candidates if resolve(config) == resolved), settings)


def _count_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return the bytes of a trial's state, and those in training.

    In training, each client holds its private state and a copy of all that it trains, its gradients and the new values, as
    if all clients were trained at the same time.
    """
    shared, private = (tree.count_bytes(part) for part in spec.method.init(0))
    clients = len(spec.federation)
    return shared + clients * private, shared + clients * (private + 3 * (shared + private))


@dataclass(frozen=True)
class TableResults:
    """The trials of an experiment's cells, and how they were made."""

    experiment: Experiment
    plan: GridPlan
    trials: Mapping[CellKey, Trials | None]
    columns: tuple[TableColumn, ...] = ()
    rows: tuple[MethodVariant, ...] = ()
    caveats: Mapping[str, str] = field(default_factory=dict)  # about the data, by column
    problems: Mapping[CellKey, str] = field(default_factory=dict)
    tuned: str = ""  # tuned values and how they were searched
    commits: Mapping[CellKey, tuple[str, ...]] = field(default_factory=dict)  # of the code that made the runs

    @property
    def name(self) -> str:
        """Name of the table and of its folder."""
        return self.plan.table or self.experiment.name

    def column_trials(self, column: TableColumn) -> dict[str, Trials]:
        """Return the trials of a column that have finished, by row label."""
        found = {row.label: self.trials.get((column.key, row.label)) for row in self.rows}
        return {label: trials for label, trials in found.items() if trials}

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
        experiment,
        plan,
        trials=cells,
        columns=table_columns,
        rows=rows,
        caveats={key: text for key, text in caveats.items() if key in shown},
        problems={key: text for key, text in (problems or {}).items() if key in cells},
        tuned=plan.tuned.describe(str(row.method["name"]) for row in rows) if plan.tuned else "",
        commits={key: each.commits for key, each in trials.items()},
    )
