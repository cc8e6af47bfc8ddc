"""The grid: cells of the paper's tables, each run once whatever tables it stands in, kept, skipped and gone on with."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from gpfl.core import tree
from gpfl.data import DATASETS, PublishedDataset
from gpfl.data.published.dataset import provenance_warning
from gpfl.engine import RunSpec
from gpfl.engine.distributed import ProcessFailedError, process_group
from gpfl.errors import DivergenceError, GpflError
from gpfl.experiments.definitions import PATIENCE, ROUNDS, Cell
from gpfl.experiments.run_checks import (
    UNCOMPARED,
    Sections,
    find_folder_damage,
    find_trial_damage,
    first_difference,
    is_finished,
    merge_configs,
)
from gpfl.experiments.run_hash import folder_name, held_configs, named_by_content
from gpfl.experiments.stored_runs import PROVENANCE_FILE, FolderRun, Trials, read_provenance
from gpfl.experiments.trials import CallbackFactory, delete_weights, run_trials
from gpfl.experiments.tuned_values import TunedValues
from gpfl.federation import Federation
from gpfl.io import files, toml
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict
from gpfl.training.devices import device_name, find_device
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir

CHECKPOINT = 10
"""Rounds between checkpoints of a state of LIGHT bytes or less; heavier ones are written more rarely, by their weight."""

LIGHT = 256 * 2**20

Problems = dict[tuple[str, str], str]
"""Words by column and row."""

LOCKED = "another process is running it"


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    """How cells are run. All but `out`, `seeds`, `weights`, `table` are part of a cell's content, where they change numbers."""

    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = ROUNDS
    patience: int = PATIENCE
    protocol: str = "corrected"
    validation: float = 0.0
    run: Mapping[str, object] = field(default_factory=dict)  # engine, device, precision and the like
    common: ConfigDict = field(default_factory=dict)  # settings of all cells
    own: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # settings of single methods by name
    weights: bool = False  # keep the weights of finished runs
    tuned: TunedValues | None = None  # values that were searched
    table: str = ""  # the folder of the table below `out`, where it is not the experiment's name

    @property
    def may_end_early(self) -> bool:
        """Tells whether patience can end a run before its last round."""
        return 0 < self.patience < self.rounds

    @property
    def settings(self) -> tuple[str, ...]:
        """What was set by hand and changes numbers, as sentences of a table name it."""
        sections = {"run": self.run, **self.common, **self.own}
        return tuple(
            f"{section}.{key} = {toml.format_value(value)}"
            for section, values in sections.items()
            for key, value in values.items()
            if (section, key) not in UNCOMPARED
        )

    def given(self, cell: Cell) -> ConfigDict:
        """Gives the config of a cell."""
        column, method = cell.column.given, cell.variant.method
        ours: ConfigDict = {
            "run": {"protocol": self.protocol, **self.run},
            "train": {"rounds": self.rounds, "patience": self.patience},
            "partition": {"validation_fraction": self.validation} if self.validation else {},
        }
        name = str(method["name"])
        given = merge_configs(column, ours, self.common, {"method": {**self.own.get(name, {}), **method}})
        chosen = self.tuned.config_for(name, given, cell.column.key) if self.tuned else {}
        return simplest_protocol(merge_configs(chosen, given))


@dataclass(frozen=True)
class Job:
    """The trials of one or several cells that have the same content."""

    cells: tuple[Cell, ...]
    given: ConfigDict = field(hash=False)
    folder: Path
    caveat: str  # what the data lack
    memory: int = 0  # bytes of a trial in training
    data_bytes: int = 0
    complete: Sections = field(default_factory=dict, compare=False)  # its config with all that is filled in

    @property
    def label(self) -> str:
        """The words for it on the terminal."""
        return f"{self.cells[0].column.key} {self.cells[0].variant.label}"

    def finished(self, seeds: Iterable[int]) -> list[int]:
        """Gives those of the seeds whose trials have ended and are whole, and this job's."""
        return [] if self.fault else [seed for seed in seeds if is_finished(self.folder / f"seed-{seed}")]

    @property
    def fault(self) -> str:
        """What is wrong with its folder, and the way out: the config is damaged, or another run's."""
        return find_folder_damage(self.folder, self.complete or None)

    def diverged(self, seeds: Iterable[int]) -> dict[int, int]:
        """Gives the rounds in which trials diverged, by their seeds."""
        runs = {seed: RunDir(self.folder / f"seed-{seed}") for seed in seeds}
        ends = {seed: run.diverged_round for seed, run in runs.items() if not run.finished}
        return {seed: end for seed, end in ends.items() if end is not None}

    def trials(self, label: str, seeds: Iterable[int]) -> Trials | None:
        """Gives the finished trials of these seeds; None where there are none.

        Run folders alone decide, so that those of one content which were made in several places may be put together.
        """
        runs = [FolderRun(self.folder / f"seed-{seed}") for seed in self.finished(seeds)]
        return Trials(label, runs) if runs else None


# Laying out.


class FederationCache:
    """The federations that cells are run on, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, Federation | GpflError] = {}

    def federation(self, config: Config) -> Federation:
        """Gives the federation of a config; one that cannot be made is refused each time with the same words."""
        sections = config.sections()
        key = toml.dump({"data": sections["data"], "partition": sections["partition"]})
        if key not in self._made:
            try:
                self._made[key] = config.federation()
            except GpflError as problem:
                self._made[key] = problem
        made = self._made[key]
        if isinstance(made, GpflError):
            raise made
        return made


def has_data(data: str) -> bool:
    """Tells whether data are on this machine, parsed or as files; a damaged table counts, as its complaint is worth hearing."""
    source = DATASETS.get(data)
    if not isinstance(source, PublishedDataset):
        return True
    try:
        return source.is_available()
    except GpflError:
        return True


def check_cells(cells: Iterable[Cell], plan: GridPlan) -> None:
    """Refuses settings that no run can have, before any data is read."""
    for cell in cells:
        try:
            configs.resolve_config(plan.given(cell))
        except GpflError as problem:
            raise GpflError(f"{cell.column.key} {cell.variant.label}: {problem}") from None


def make_jobs(cells: Iterable[Cell], plan: GridPlan, grounds: FederationCache) -> tuple[list[Job], Problems]:
    """Gives the jobs of cells, each content once, and what is wrong with cells that cannot be run, by column and row."""
    jobs: dict[Path, Job] = {}
    wrong: Problems = {}
    held = held_configs(plan.out)
    for cell in cells:
        try:
            job = found(make_job(cell, plan, grounds), held)
        except GpflError as problem:
            wrong[cell.column.key, cell.variant.label] = str(problem)
            continue
        known = jobs.get(job.folder)
        jobs[job.folder] = dataclasses.replace(job, cells=(*known.cells, cell)) if known else job
    return list(jobs.values()), wrong


def make_job(cell: Cell, plan: GridPlan, grounds: FederationCache) -> Job:
    """Gives the job of a cell."""
    given = plan.given(cell)
    # What decides the content does not depend on the device, so no GPU is filled by looking.
    asked = configs.resolve_config({**given, "run": {**given["run"], "device": "cpu", "precision": "float32"}})
    federation = grounds.federation(asked)
    config, setting = prepare(asked, federation, None, None)
    complete = config.sections()
    complete["run"]["precision"] = given["run"].get("precision", "float32")
    name = folder_name(config, complete, federation.table.digest)
    state, memory = weight(setting)
    usual = {"checkpoint_every": CHECKPOINT * math.ceil(state / LIGHT)}
    given = {**given, "run": {**usual, **given["run"]}}
    data_bytes = federation.table.x.element_size() * federation.table.x.nelement()
    warning = provenance_warning(federation.table)
    return Job((cell,), given, plan.out / "runs" / name, warning, memory, data_bytes, complete)


def found(job: Job, held: Mapping[Path, Sections]) -> Job:
    """Gives a job in the folder that holds it, whatever its name."""
    if not job.folder.exists():
        for folder, sections in held.items():
            if not first_difference(sections, job.complete) and named_by_content(job.folder, sections, folder):
                return dataclasses.replace(job, folder=folder)
    return job


def simplest_protocol(given: ConfigDict) -> ConfigDict:
    """Gives a config under the first protocol that it is the same under, so that runs which do not differ are shared."""
    wanted = {**sections_of(given), "run": None}
    for protocol in configs.PROTOCOLS:
        other: ConfigDict = {**given, "run": {**given["run"], "protocol": protocol}}
        if {**sections_of(other), "run": None} == wanted:
            return other
    return given


def sections_of(given: ConfigDict) -> dict[str, object]:
    """Gives the sections of a config with all that can be filled in without its data, NaN as text: it equals nothing."""
    return {section: str(values) for section, values in configs.resolve_config(given).sections().items()}


def weight(setting: RunSpec) -> tuple[int, int]:
    """Gives the bytes of a trial's state, and those that it takes in training.

    Each client keeps its private state and, as if all trained at once, has a copy of all that it trains, its gradients and the
    new values.
    """
    shared, private = (tree.count_bytes(part) for part in setting.method.init(0))
    clients = len(setting.federation)
    return shared + clients * private, shared + clients * (private + 3 * (shared + private))


def estimate_seconds(jobs: Iterable[Job], plan: GridPlan) -> dict[Path, float]:
    """Return the time that the missing seeds of jobs take for all their rounds, by folder.

    It goes by finished runs of the same data, net and method on the same device in the same folder. Jobs without such runs
    are left out.
    """
    device = device_name(find_device(str(plan.run.get("device", "auto"))))
    seconds: dict[tuple[object, ...], float] = defaultdict(float)
    rounds: dict[tuple[object, ...], int] = defaultdict(int)
    for path in plan.out.glob("runs/*/seed-*/summary.json"):
        run = FolderRun(path.parent)
        if is_finished(run.path) and run.summary["device"] == device:
            seconds[_workload(run.config())] += cast(float, run.summary["seconds"])
            rounds[_workload(run.config())] += cast(int, run.summary["rounds"])
    found = {}
    for job in jobs:
        if per := rounds[key := _workload(job.complete)]:
            missing = len(plan.seeds) - len(job.finished(plan.seeds))
            found[job.folder] = missing * plan.rounds * seconds[key] / per
    return found


def _workload(config: Sections) -> tuple[object, ...]:
    return tuple(config[section]["name"] for section in ("data", "net", "method"))


# Running.


def run(job: Job, plan: GridPlan, make_callback: CallbackFactory, facts: Mapping[str, object]) -> bool:
    """Runs what a job lacks of its seeds, and notes `facts` beside it; False where another process is at it.

    Seeds train at once where the engine can; where memory does not suffice for that, one after the other.
    """
    with lock_folder(job.folder) as mine:
        if not mine:
            return False
        missing = process_group().run_on_main(lambda: sound_missing(job, plan.seeds))

        def noted(label: str) -> Callback:
            if process_group().is_main:
                note_seeds(job, missing, facts)
            return make_callback(label)

        try:
            run_seeds(job, missing, noted)
        finally:  # other seeds than one that diverges have ended
            if not (plan.weights or any(cell.column.weights for cell in job.cells)) and process_group().is_main:
                for seed in job.finished(plan.seeds):
                    delete_weights(job.folder / f"seed-{seed}")
    return True


def unfinished_jobs(jobs: Iterable[Job], plan: GridPlan) -> list[Job]:
    """Gives the jobs that lack seeds."""
    jobs = list(jobs)
    folders = process_group().run_on_main(
        lambda: [job.folder for job in jobs if len(job.finished(plan.seeds)) < len(plan.seeds)]
    )
    return [job for job in jobs if job.folder in folders]


def sound_missing(job: Job, seeds: Iterable[int]) -> list[int]:
    """Gives the seeds that a job lacks; what is damaged of it is refused, not run over: it may be worth mending."""
    seeds = list(seeds)
    if fault := find_damage(job, seeds):
        raise GpflError(fault)
    return [seed for seed in seeds if not is_finished(job.folder / f"seed-{seed}")]


def find_damage(job: Job, seeds: Iterable[int]) -> str:
    """Gives what of a job's folder or of its trials is damaged, so that it is not run, and the way out; "" where nothing is."""
    faults = (job.fault, *(find_trial_damage(job.folder / f"seed-{seed}") for seed in seeds))
    return next((fault for fault in faults if fault), "")


def run_seeds(job: Job, seeds: Sequence[int], make_callback: CallbackFactory) -> None:
    """Runs a job with these seeds, at once or one after the other; one that diverges is told of when the others have ended."""
    if not seeds:
        return
    try:
        run_trials(job.given, seeds, job.folder, make_callback, label=job.label)
        return
    except torch.OutOfMemoryError:
        if len(seeds) == 1:
            raise
    diverged: list[DivergenceError] = []
    for seed in seeds:  # not within the handler: the error holds on to the tensors that were too many
        free_memory()
        try:
            run_trials(job.given, [seed], job.folder, make_callback, label=job.label)
        except DivergenceError as end:
            diverged.append(end.with_traceback(None))
    if diverged:
        raise diverged[0]


def note_seeds(job: Job, seeds: Iterable[int], facts: Mapping[str, object]) -> None:
    """Notes beside runs that are begun or gone on with what makes them; several commits have each a part in a run."""
    for seed in seeds:
        path = job.folder / PROVENANCE_FILE.format(seed)
        commits = dict.fromkeys([*cast(list[str], read_provenance(path).get("commits", [])), facts["commit"]])
        note = {**facts, "commits": list(commits), "data": job.caveat}
        del note["commit"]
        files.write_text(path, json.dumps(note, indent=2) + "\n")


def run_all(
    jobs: Iterable[Job],
    plan: GridPlan,
    make_callback: CallbackFactory,
    facts: Mapping[str, object],
    tell: Callable[[Job, str], None] = lambda job, problem: None,
) -> dict[Path, str]:
    """Gives what went wrong by the folder of the job; one that fails does not stop the others.

    `tell` hears of every job as it ends, with its problem or "". What is no mistake of the user's is kept whole in
    OUT/problems. A job that was left to another process is no problem where that has ended it meanwhile. Of several processes
    of a run all are given the first one's problems; where one of them fails alone, none goes on.
    """
    problems: dict[Path, str] = {}
    left: list[Job] = []
    for job in jobs:
        try:
            if not run(job, plan, make_callback, facts):
                problems[job.folder] = LOCKED
                left.append(job)
        except ProcessFailedError:
            raise
        except GpflError as problem:
            problems[job.folder] = str(problem)
        except Exception as problem:  # whatever it is, the other cells are worth having
            path = plan.out / "problems" / f"{job.folder.name}.txt"
            if process_group().is_main:
                files.write_text(path, traceback.format_exc())
            problems[job.folder] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}; all of it: {path}"
        free_memory()
        tell(job, problems.get(job.folder, ""))
    others = {job.folder for job in left} - {job.folder for job in unfinished_jobs(left, plan)}
    return process_group().broadcast({folder: words for folder, words in problems.items() if folder not in others})


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Tells whether this process alone may write to a job's folder; the claim ends with the process, however it ends.

    Of several processes of a run, the first has the claim for all.
    """
    try:
        import fcntl
    except ImportError:  # Windows: nobody else is expected
        yield True
        return
    path = folder.parent / f".{folder.name}.lock"
    handles: list[int] = []

    def claim() -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handles.append(os.open(path, os.O_CREAT | os.O_RDWR))
        except OSError as problem:
            raise GpflError(f"cannot write to {folder.parent}: {problem.strerror}; choose another --out") from None
        try:
            fcntl.flock(handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    try:
        mine = process_group().run_on_main(claim)
        yield mine
        if mine and handles:
            path.unlink(missing_ok=True)
    finally:
        for handle in handles:
            os.close(handle)


def free_memory() -> None:
    """Lets go of what the last cell held on a GPU."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
