"""The grid: cells of the paper's tables as jobs, of which each config is run once, whatever tables it belongs to."""

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
from gpfl.experiments.definitions import PATIENCE, ROUNDS, Cell, CellKey
from gpfl.experiments.run_checks import (
    UNCOMPARED,
    Sections,
    find_folder_damage,
    find_trial_damage,
    merge_configs,
)
from gpfl.experiments.run_index import config_hash, folder_name, is_named_by_hash
from gpfl.experiments.stored_runs import PROVENANCE_FILE, FolderTrials, StoredTrials, Trials, read_provenance
from gpfl.experiments.trials import CallbackFactory, delete_weights, run_trials
from gpfl.experiments.tuned_values import TunedValues
from gpfl.federation import Federation
from gpfl.io import files, toml
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict
from gpfl.training.devices import device_name, find_device
from gpfl.training.prepare import prepare

CHECKPOINT_EVERY = 10
"""Rounds between checkpoints of a state of at most `CHECKPOINT_BYTES`; larger states are saved less often."""

CHECKPOINT_BYTES = 256 * 2**20

Problems = dict[CellKey, str]
"""Why cells failed or cannot run."""

LOCKED = "another process is running it"


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


@dataclass(frozen=True)
class Job:
    """The trials of one or several cells with the same config."""

    cells: tuple[Cell, ...]
    settings: ConfigDict = field(hash=False)
    folder: Path
    caveat: str  # about the data
    memory: int = 0  # bytes of a trial in training
    data_bytes: int = 0
    complete: Sections | None = field(default=None, compare=False)  # config; None if the trials were found by theirs
    stored: StoredTrials | None = field(default=None, compare=False)  # None: those in `folder`

    @property
    def label(self) -> str:
        """Name on the terminal."""
        return " ".join(self.cells[0].key)

    @property
    def damage(self) -> str:
        """Why its folder cannot be used, and the fix; "" if it can."""
        return find_folder_damage(self.folder, self.complete)

    def finished(self, seeds: Iterable[int]) -> list[int]:
        """Return the seeds whose trials have finished and are undamaged."""
        source = self._source()
        return [seed for seed in seeds if source.run(seed)] if self.stored or not self.damage else []

    def trials(self, label: str, seeds: Iterable[int]) -> Trials | None:
        """Return the finished trials of these seeds, or None.

        It does not depend on trials.json, so run folders from several machines can be put together.
        """
        source = self._source()
        runs = [run for seed in self.finished(seeds) if (run := source.run(seed))]
        return Trials(label, runs) if runs else None

    def diverged(self, seeds: Iterable[int]) -> dict[int, int]:
        """Return the rounds in which trials diverged, by seed."""
        rounds = {seed: self._source().diverged_round(seed) for seed in seeds}
        return {seed: round_ for seed, round_ in rounds.items() if round_ is not None}

    def _source(self) -> StoredTrials:
        return self.stored or FolderTrials(self.folder)


# Planning.


class FederationCache:
    """Federations by config, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, Federation | GpflError] = {}

    def federation(self, config: Config) -> Federation:
        """Return the federation of a config. Raise the same error each time if it cannot be made."""
        sections = config.sections()
        key = toml.dump({"data": sections["data"], "partition": sections["partition"]})
        if key not in self._made:
            try:
                self._made[key] = config.federation()
            except GpflError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, GpflError):
            raise made
        return made


def has_data(name: str) -> bool:
    """Return whether a dataset is on this machine. A damaged one is: its error appears when it is loaded."""
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
        try:
            configs.resolve_config(plan.config(cell))
        except GpflError as error:
            raise GpflError(f"{cell.column.key} {cell.variant.label}: {error}") from None


def make_jobs(cells: Iterable[Cell], plan: GridPlan, cache: FederationCache) -> tuple[list[Job], Problems]:
    """Return the jobs of cells, one per config, and why other cells cannot run."""
    jobs: dict[Path, Job] = {}
    problems: Problems = {}
    renamed = _find_renamed(plan.out)
    for cell in cells:
        try:
            job = make_job(cell, plan, cache)
        except GpflError as error:
            problems[cell.key] = str(error)
            continue
        if not job.folder.exists():
            job = dataclasses.replace(job, folder=renamed.get(job.folder.name.rsplit("-", 1)[1], job.folder))
        known = jobs.get(job.folder)
        jobs[job.folder] = dataclasses.replace(job, cells=(*known.cells, cell)) if known else job
    return list(jobs.values()), problems


def _find_renamed(out: Path) -> dict[str, Path]:
    """Return the folders in `out` whose names do not end in the hash of their content, by that hash."""
    folders = [path.parent for path in sorted(out.glob("runs/*/config.toml"), reverse=True)]
    trials = [FolderTrials(folder) for folder in folders if not find_folder_damage(folder)]
    return {config_hash(each.config, each.data_hash): each.path for each in trials if not is_named_by_hash(each)}


def make_job(cell: Cell, plan: GridPlan, cache: FederationCache) -> Job:
    """Return the job of a cell."""
    settings = plan.config(cell)
    # Results do not depend on the device, so the job is planned on the CPU and takes no GPU memory.
    on_cpu = configs.resolve_config(merge_configs(settings, {"run": {"device": "cpu", "precision": "float32"}}))
    federation = cache.federation(on_cpu)
    config, spec = prepare(on_cpu, federation, None, None)
    complete = merge_configs(config.sections(), {"run": {"precision": settings["run"].get("precision", "float32")}})
    folder = plan.out / "runs" / folder_name(config, config_hash(complete, federation.table.digest))
    state, memory = _count_bytes(spec)
    every = CHECKPOINT_EVERY * math.ceil(state / CHECKPOINT_BYTES)
    return Job(
        cells=(cell,),
        settings=merge_configs({"run": {"checkpoint_every": every}}, settings),
        folder=folder,
        caveat=provenance_warning(federation.table),
        memory=memory,
        data_bytes=federation.table.x.element_size() * federation.table.x.nelement(),
        complete=complete,
    )


def _first_equal_protocol(settings: ConfigDict) -> ConfigDict:
    """Return the config under the first protocol under which it is the same, so that equal runs are shared."""

    def resolve(config: ConfigDict) -> dict[str, str]:  # text, since NaN equals nothing
        sections = configs.resolve_config(config).sections()
        return {section: str(values) for section, values in sections.items() if section != "run"}

    wanted = resolve(settings)
    candidates = (merge_configs(settings, {"run": {"protocol": protocol}}) for protocol in configs.PROTOCOLS)
    return next((config for config in candidates if resolve(config) == wanted), settings)


def _count_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return the bytes of a trial's state, and those in training.

    In training, each client holds its private state and a copy of all that it trains, its gradients and the new values, as
    if all clients were trained at the same time.
    """
    shared, private = (tree.count_bytes(part) for part in spec.method.init(0))
    clients = len(spec.federation)
    return shared + clients * private, shared + clients * (private + 3 * (shared + private))


def estimate_seconds(jobs: Iterable[Job], plan: GridPlan) -> dict[Path, float]:
    """Return the time for all rounds of the missing seeds, by folder, from finished runs in the folder of results.

    These have the same data, net, method and device. Jobs without such runs are left out.
    """
    device = device_name(find_device(str(plan.run.get("device", "auto"))))
    seconds: dict[tuple[object, ...], float] = defaultdict(float)
    rounds: dict[tuple[object, ...], int] = defaultdict(int)
    for path in plan.out.glob("runs/*/seed-*/summary.json"):
        run = FolderTrials(path.parents[1]).run(int(path.parent.name.removeprefix("seed-")))
        if run and run.summary["device"] == device:
            seconds[_workload(run.config())] += cast(float, run.summary["seconds"])
            rounds[_workload(run.config())] += cast(int, run.summary["rounds"])
    return {
        job.folder: (len(plan.seeds) - len(job.finished(plan.seeds))) * plan.rounds * seconds[workload] / rounds[workload]
        for job in jobs
        if job.complete and rounds[workload := _workload(job.complete)]
    }


def _workload(config: Sections) -> tuple[object, ...]:
    return tuple(config[section]["name"] for section in ("data", "net", "method"))


# Running.


def run_all(
    jobs: Iterable[Job],
    plan: GridPlan,
    make_callback: CallbackFactory,
    provenance: Mapping[str, object],
    on_end: Callable[[Job, str], None] = lambda job, problem: None,
) -> dict[Path, str]:
    """Run jobs and return why some failed, by folder. A failed job does not stop the others.

    Unexpected errors are written to OUT/problems. In several processes, all get the problems of the first; if one of them
    fails alone, all stop.

    Args:
        jobs: What to run.
        plan: How to run it.
        make_callback: Called with the label of each run.
        provenance: What is noted beside each run, with the key "commit".
        on_end: Called with each job and its problem or "".

    """
    problems: dict[Path, str] = {}
    locked: list[Job] = []
    for job in jobs:
        try:
            if not run(job, plan, make_callback, provenance):
                problems[job.folder] = LOCKED
                locked.append(job)
        except ProcessFailedError:
            raise
        except GpflError as error:
            problems[job.folder] = str(error)
        except Exception as error:
            path = plan.out / "problems" / f"{job.folder.name}.txt"
            if process_group().is_main:
                files.write_text(path, traceback.format_exc())
            first_line = (str(error).splitlines() or [""])[0]
            problems[job.folder] = f"{type(error).__name__}: {first_line}; traceback: {path}"
        _free_memory()
        on_end(job, problems.get(job.folder, ""))
    finished = {job.folder for job in locked} - {job.folder for job in unfinished_jobs(locked, plan)}  # by other processes
    return process_group().broadcast({folder: text for folder, text in problems.items() if folder not in finished})


def run(job: Job, plan: GridPlan, make_callback: CallbackFactory, provenance: Mapping[str, object]) -> bool:
    """Run the missing seeds of a job, at the same time if memory suffices. Return False if another process runs it."""
    with lock_folder(job.folder) as locked:
        if not locked:
            return False
        missing = process_group().run_on_main(lambda: _find_missing(job, plan.seeds))

        def make_noting_callback(label: str) -> Callback:
            if process_group().is_main:
                _note_provenance(job, missing, provenance)
            return make_callback(label)

        try:
            _run_seeds(job, missing, make_noting_callback)
        finally:  # if one seed diverges, the others have finished
            if not (plan.weights or any(cell.column.weights for cell in job.cells)) and process_group().is_main:
                for seed in job.finished(plan.seeds):
                    delete_weights(job.folder / f"seed-{seed}")
    return True


def unfinished_jobs(jobs: Iterable[Job], plan: GridPlan) -> list[Job]:
    """Return the jobs with missing seeds."""
    jobs = list(jobs)
    folders = process_group().run_on_main(
        lambda: [job.folder for job in jobs if len(job.finished(plan.seeds)) < len(plan.seeds)]
    )
    return [job for job in jobs if job.folder in folders]


def find_damage(job: Job, seeds: Iterable[int]) -> str:
    """Return why a job cannot run, and the fix: its folder or one of these trials is damaged. "" if it can."""
    damages = (job.damage, *(find_trial_damage(job.folder / f"seed-{seed}") for seed in seeds))
    return next(filter(None, damages), "")


def _find_missing(job: Job, seeds: Sequence[int]) -> list[int]:
    """Return the missing seeds. Raise if anything is damaged: the user may want to restore it."""
    if damage := find_damage(job, seeds):
        raise GpflError(damage)
    finished = job.finished(seeds)
    return [seed for seed in seeds if seed not in finished]


def _run_seeds(job: Job, seeds: Sequence[int], make_callback: CallbackFactory) -> None:
    """Run seeds at the same time, or one by one if memory is short. Raise for the first that diverged after all ended."""
    if not seeds:
        return
    try:
        run_trials(job.settings, seeds, job.folder, make_callback, label=job.label)
        return
    except torch.OutOfMemoryError:
        if len(seeds) == 1:
            raise
    diverged: list[DivergenceError] = []
    for seed in seeds:  # outside the handler, since the error holds the tensors of the failed attempt
        _free_memory()
        try:
            run_trials(job.settings, [seed], job.folder, make_callback, label=job.label)
        except DivergenceError as error:
            diverged.append(error.with_traceback(None))
    if diverged:
        raise diverged[0]


def _note_provenance(job: Job, seeds: Iterable[int], provenance: Mapping[str, object]) -> None:
    """Write beside each run how it is made. The commits of resumed runs are collected."""
    note = {key: value for key, value in provenance.items() if key != "commit"}
    for seed in seeds:
        path = job.folder / PROVENANCE_FILE.format(seed)
        commits = dict.fromkeys([*cast(list[str], read_provenance(path).get("commits", [])), provenance["commit"]])
        files.write_text(path, json.dumps({**note, "commits": list(commits), "data": job.caveat}, indent=2) + "\n")


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a job's folder and yield whether that succeeded. The lock ends with the process; of several, the first holds it."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield True
        return
    path = folder.parent / f".{folder.name}.lock"
    handles: list[int] = []

    def acquire() -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handles.append(os.open(path, os.O_CREAT | os.O_RDWR))
        except OSError as error:
            raise GpflError(f"cannot write to {folder.parent}: {error.strerror}; choose another --out") from None
        try:
            fcntl.flock(handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    try:
        locked = process_group().run_on_main(acquire)
        yield locked
        if locked and handles:
            path.unlink(missing_ok=True)
    finally:
        for handle in handles:
            os.close(handle)


def _free_memory() -> None:
    """Free the GPU memory of the last job."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
