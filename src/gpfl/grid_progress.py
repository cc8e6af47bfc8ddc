"""Progress of a grid: cells done and time left, and the runs of the cell that is at work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from gpfl.progress import LiveLine, PlainLines
from gpfl.report.beside import Spread
from gpfl.report.paper import spread
from gpfl.runs import Line
from gpfl.simulate import number
from gpfl.study.estimate import Estimate, duration
from gpfl.study.grid import Job


class GridReporter:
    """Shows a grid; the watch of a run is `reporter.watch(label)`, and `reporter.end(job, problem)` ends a cell."""

    def __init__(self, console: Console, jobs: Sequence[Job], estimates: Mapping[Path, Estimate]) -> None:
        """`jobs` are those that have something to run, in their order."""
        self._console, self._jobs, self._estimates = console, list(jobs), estimates
        self._took: list[float] = []  # seconds of cells that have ended
        self._share = 0.0  # of the cell at work
        self._began = time.monotonic()
        self._done = 0
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and self._jobs:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[words]}", markup=False),
                console=self._console,
            )
            self._progress.start()
            self._bar = self._progress.add_task("cells", total=len(self._jobs), words="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def watch(self, label: str) -> RunWatch:
        """Gives the watch of one run."""
        return RunWatch(self, LiveLine(self._progress, label) if self._progress else PlainLines(self._console, label))

    def move(self, share: float) -> None:
        """Hears how far the cell at work is."""
        self._share = share
        if self._progress and self._bar is not None:
            self._progress.update(self._bar, words=self.left())

    def end(self, job: Job, problem: str) -> None:
        """Says how a cell ended, and how much is left."""
        now = time.monotonic()
        self._took.append(now - self._began)
        self._began, self._share = now, 0.0
        self._done += 1
        if self._progress and self._bar is not None:
            for task in [task.id for task in self._progress.tasks if task.id != self._bar]:
                self._progress.remove_task(task)
            self._progress.update(self._bar, completed=self._done, words=self.left())
        words = f"failed: {problem}" if problem else outcome(job)
        text = f"{job.label}: {words} ({duration(self._took[-1])}); {self._done}/{len(self._jobs)} cells{tail(self.left())}"
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def left(self) -> str:
        """The time left in words: of estimates, and of the mean of ended cells where there is none."""
        waiting = self._jobs[self._done :]
        if not waiting:
            return ""
        usual = float(np.mean(self._took)) if self._took else None
        known = [self._estimates[job.folder].seconds if job.folder in self._estimates else None for job in waiting]
        seconds = [usual if value is None else value for value in known]
        if any(value is None for value in seconds):
            return "time left unknown until a cell has ended"
        first, *rest = [value for value in seconds if value is not None]
        return f"about {duration((1 - self._share) * first + sum(rest))} left"


class RunWatch:
    """The watch of one run of a cell."""

    def __init__(self, reporter: GridReporter, shown: LiveLine | PlainLines) -> None:
        self._reporter, self._shown = reporter, shown

    def line(self, line: Line, rounds: int) -> None:
        """Shows the round."""
        self._shown.line(line, rounds)
        self._reporter.move(number(line, "round") / rounds)


def outcome(job: Job) -> str:
    """Gives a cell's accuracy in words."""
    seeds = range(2**32)  # all that are there
    trials = job.trials("", seeds)
    if trials is None:
        return "not run"
    count = len(trials.summaries)
    return f"{spread(Spread.of(trials, 'best_accuracy'), count)} %, best round {trials.mean('best_round'):.0f}"


def tail(words: str) -> str:
    """Gives words after a comma, if there are any."""
    return f", {words}" if words else ""
