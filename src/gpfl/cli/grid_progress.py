"""Progress of a grid: finished cells, time left, and the runs of the current cell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import TaskID

from gpfl.cli.progress import RunProgress, progress_bars
from gpfl.experiments.grid import Job
from gpfl.experiments.grid_runner import LOCKED
from gpfl.report.tables import MeanStd, format_duration


class GridReporter:
    """Shows the finished cells of a grid and the time left, at the average time of a finished cell.

    The callback of a run is `reporter.callback(label)`. `reporter.end(job, problem)` ends a cell.
    """

    def __init__(self, console: Console, jobs: Sequence[Job], seeds: Sequence[int]) -> None:
        self._console, self._jobs, self._seeds = console, list(jobs), seeds
        self._durations: list[float] = []  # seconds of successful cells
        self._start = time.monotonic()
        self._done = 0
        self._printed: set[str] = set()
        self._progress = progress_bars(console, "{task.completed:.0f}/{task.total:.0f}")
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and self._jobs:
            self._progress.start()
            self._bar = self._progress.add_task("cells", total=len(self._jobs), status="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._progress.stop()

    def callback(self, label: str) -> RunProgress:
        """Return the callback of one run."""
        return RunProgress(self._progress, label, self._printed)

    def end(self, job: Job, problem: str) -> None:
        """Print the result of a cell and the time left."""
        seconds = time.monotonic() - self._start
        self._start += seconds
        if not problem:
            self._durations.append(seconds)
        self._done += 1
        left = self.time_left()
        if self._bar is not None:
            for task in [task.id for task in self._progress.tasks if task.id != self._bar]:
                self._progress.remove_task(task)
            self._progress.update(self._bar, completed=self._done, status=left)
        result = problem if problem == LOCKED else f"failed: {problem}" if problem else _format_result(job, self._seeds)
        line = f"{job.label}: {result} ({format_duration(seconds)}); {self._done}/{len(self._jobs)} cells{left and f', {left}'}"
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def time_left(self) -> str:
        """Return the time left as text, "" before a cell has finished."""
        waiting = len(self._jobs) - self._done
        if not self._durations or not waiting:
            return ""
        return f"about {format_duration(waiting * sum(self._durations) / len(self._durations))} left"


def _format_result(job: Job, seeds: Sequence[int]) -> str:
    trials = job.trials("", seeds)
    if trials is None:
        return "not run"
    return f"{MeanStd.from_trials(trials, 'best_accuracy'):.2f} %, best round {trials.mean('best_round'):.0f}"
