"""Progress of a grid: cells done and time left, and the runs of the cell that is at work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, TaskID

from gpfl.cli.progress import LiveProgress, PlainProgress, RunProgress, progress_bars
from gpfl.experiments.estimate import Estimate, duration, work_of
from gpfl.experiments.grid import BUSY, Job
from gpfl.report.tables import MeanStd
from gpfl.training.callbacks import Callback, RunInfo
from gpfl.training.run_dir import MetricsRecord, metric


class GridReporter:
    """Shows a grid; the callback of a run is `reporter.callback(label)`, and `reporter.end(job, problem)` ends a cell."""

    def __init__(self, console: Console, jobs: Sequence[Job], seeds: Sequence[int], estimates: Mapping[Path, Estimate]) -> None:
        """`jobs` are those that have something to run with these seeds, in their order."""
        self._console, self._jobs, self._seeds, self._estimates = console, list(jobs), seeds, estimates
        self._runs = [len(seeds) - len(job.finished(seeds)) for job in self._jobs]
        self._expected = [estimates[job.folder].seconds for job in self._jobs]
        self._took: dict[int, float] = {}  # seconds of cells that ended well, by their places
        self._work: dict[int, float | None] = {}  # of cells without an estimate and those that ended, as counted
        self._shares: dict[str, float] = {}  # of the runs of the cell at work
        self._began = time.monotonic()
        self._done = 0
        self._printed: set[str] = set()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and self._jobs:
            self._progress = progress_bars(self._console, "{task.completed:.0f}/{task.total:.0f}")
            self._progress.start()
            self._bar = self._progress.add_task("cells", total=len(self._jobs), status="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def callback(self, label: str) -> GridRunProgress:
        """Return the callback of one run."""
        if self._progress:
            return GridRunProgress(self, label, LiveProgress(self._progress, label, self._printed))
        return GridRunProgress(self, label, PlainProgress(self._console, label, self._printed))

    def move(self, label: str, done: float, rounds: int) -> None:
        """Hears how many of at most so many rounds a run of the cell at work has done."""
        expected = self._estimates[self._jobs[self._done].folder].rounds or rounds
        self._shares[label] = min(1.0, done / expected)
        if self._progress and self._bar is not None:
            self._progress.update(self._bar, status=self.left())

    def end(self, job: Job, problem: str) -> None:
        """Says how a cell ended, and how much is left."""
        took = time.monotonic() - self._began
        if not problem:
            self._took[self._done] = took
        self._shares = {}
        self._done += 1
        self._count()
        self._began = time.monotonic()
        if self._progress and self._bar is not None:
            for task in [task.id for task in self._progress.tasks if task.id != self._bar]:
                self._progress.remove_task(task)
            self._progress.update(self._bar, completed=self._done, status=self.left())
        failed = "" if problem == BUSY else "failed: "
        words = f"{failed}{problem}" if problem else outcome(job, self._seeds)
        text = f"{job.label}: {words} ({duration(took)}); {self._done}/{len(self._jobs)} cells{tail(self.left())}"
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def left(self) -> str:
        """The time left: of estimates, as much longer as ended cells took; without one, by operations, or their mean."""
        waiting = range(self._done, len(self._jobs))
        if not waiting:
            return ""
        seconds = [self._seconds(place) for place in waiting]
        if any(value is None for value in seconds):
            return "time left unknown until a cell has ended"
        first, *rest = [value for value in seconds if value is not None]
        share = sum(self._shares.values()) / max(self._runs[self._done], 1)  # none where another process ended it just before
        told = any(self._expected[place] for place in self._took)
        early = not told and any(self._estimates[self._jobs[place].folder].most for place in waiting if self._expected[place])
        less = ", less where patience ends a run" if early else ""
        return f"about {duration((1 - share) * first + sum(rest))} left{less}"

    def _seconds(self, place: int) -> float | None:
        """How long a cell may take; None where nothing tells."""
        expected = self._expected[place]
        if expected is not None:
            return expected * (self._times_as_long(self._expected) or 1.0)
        work, times = self._work.get(place), self._times_as_long([self._work.get(each) for each in range(len(self._jobs))])
        if work and times:
            return work * times
        return sum(self._took.values()) / len(self._took) if self._took else None

    def _times_as_long(self, expected: Sequence[float | None]) -> float | None:
        """How many times as long as expected the cells took that have ended well; None where nothing was."""
        known = [(took, value) for place, took in self._took.items() if (value := expected[place])]
        return sum(took for took, _ in known) / sum(value for _, value in known) if known else None

    def _count(self) -> None:
        """Counts the work of cells that are left without an estimate, and of those that have ended, each once."""
        left = [place for place in range(self._done, len(self._jobs)) if self._expected[place] is None]
        for place in (*self._took, *left) if left and self._took else ():
            if place not in self._work:
                self._work[place] = work_of(self._jobs[place], self._runs[place])


class GridRunProgress(Callback):
    """Shows one run of a cell and moves the grid's bar."""

    def __init__(self, reporter: GridReporter, label: str, progress: RunProgress) -> None:
        self._reporter, self._label, self._progress = reporter, label, progress
        self._rounds = 0

    def on_run_start(self, run: RunInfo) -> None:
        """Print the notes."""
        self._rounds = run.rounds
        self._progress.on_run_start(run)

    def on_evaluate(self, record: MetricsRecord) -> None:
        """Show the round."""
        self._progress.on_evaluate(record)
        self._reporter.move(self._label, metric(record, "round"), self._rounds)


def outcome(job: Job, seeds: Sequence[int]) -> str:
    """Gives a cell's accuracy in words."""
    trials = job.trials("", seeds)
    if trials is None:
        return "not run"
    return f"{MeanStd.from_trials(trials, 'best_accuracy'):.2f} %, best round {trials.mean('best_round'):.0f}"


def tail(words: str) -> str:
    """Gives words after a comma, if there are any."""
    return f", {words}" if words else ""
