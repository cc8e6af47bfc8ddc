"""Run the jobs of a grid: reuse and resume runs, continue after failures, share a folder with other processes."""

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from gpfl.engine.distributed import ProcessFailedError, process_group
from gpfl.errors import GpflError
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.stored_runs import PROVENANCE_FILE, read_provenance
from gpfl.experiments.trials import CallbackFactory, delete_weights, run_trials
from gpfl.io import files
from gpfl.training.callbacks import Callback

LOCKED = "another process is running it"


def run_all(
    jobs: Iterable[Job],
    plan: GridPlan,
    make_callback: CallbackFactory,
    provenance: Mapping[str, object],
    on_end: Callable[[Job, str], None] = lambda job, problem: None,
) -> dict[Path, str]:
    """Run jobs and return why some failed, by folder. A failed job does not stop the others.

    Unexpected errors are written to OUT/problems. In several processes, all get the problems of the first; if one of them
    fails alone, all stop. `provenance` is recorded beside each run; `on_end` gets each job and its problem or "".
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
        finished = process_group().run_on_main(lambda: job.finished(plan.seeds))
        missing = [seed for seed in plan.seeds if seed not in finished]

        def make_recording_callback(label: str) -> Callback:
            if process_group().is_main:
                _record_provenance(job, missing, provenance)
            return make_callback(label)

        try:
            if missing:
                run_trials(job.settings, missing, job.folder, make_recording_callback, label=job.label)
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


def _record_provenance(job: Job, seeds: Iterable[int], provenance: Mapping[str, object]) -> None:
    """Write the provenance of each run beside it. The commits of resumed runs are collected."""
    record = {key: value for key, value in provenance.items() if key != "commit"}
    for seed in seeds:
        commits = dict.fromkeys([*read_provenance(job.folder / f"seed-{seed}").get("commits", []), provenance["commit"]])
        files.write_text(
            job.folder / PROVENANCE_FILE.format(seed),
            json.dumps({**record, "commits": list(commits), "data": job.caveat}, indent=2) + "\n",
        )


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder and yield whether that succeeded. The lock ends with the process; of several ranks, the first holds it."""
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
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
