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
from gpfl.training.callbacks import Callback, RunInfo
from gpfl.training.run_dir import MetricsRecord, metric


class GridReporter:
    """Shows the cells of a grid and the time left, which it extrapolates from the rounds that were run.

    The callback of a run is `reporter.callback(label)`. `reporter.end(job, problem)` ends a cell.
    """

    def __init__(self, console: Console, jobs: Sequence[Job], seeds: Sequence[int]) -> None:
        self._console, self._jobs, self._seeds = console, list(jobs), seeds
        self._runs = [len(seeds) - len(job.finished(seeds)) for job in self._jobs]
        self._durations: list[float] = []  # seconds of successful cells
        self._shares: dict[str, tuple[float, float]] = {}  # rounds of each run in the current cell: at its start and now
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

    def callback(self, label: str) -> GridRunProgress:
        """Return the callback of one run."""
        return GridRunProgress(self, label, RunProgress(self._progress, label, self._printed))

    def update(self, label: str, round: float, rounds: int) -> None:
        """Set the round that a run of the current cell has reached, the first time the one it starts from."""
        share = min(1.0, round / rounds)
        self._shares[label] = (self._shares.get(label, (share, share))[0], share)
        if self._bar is not None:
            self._progress.update(self._bar, status=self.time_left())

    def end(self, job: Job, problem: str) -> None:
        """Print the result of a cell and the time left."""
        seconds = time.monotonic() - self._start
        if not problem:
            self._durations.append(seconds)
        self._shares, self._start = {}, time.monotonic()
        self._done += 1
        if self._bar is not None:
            for task in [task.id for task in self._progress.tasks if task.id != self._bar]:
                self._progress.remove_task(task)
            self._progress.update(self._bar, completed=self._done, status=self.time_left())
        result = problem if problem == LOCKED else f"failed: {problem}" if problem else _format_result(job, self._seeds)
        left = f", {text}" if (text := self.time_left()) else ""
        line = f"{job.label}: {result} ({format_duration(seconds)}); {self._done}/{len(self._jobs)} cells{left}"
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def time_left(self) -> str:
        """Return the time left as text; waiting cells count as long as the average one."""
        if self._done == len(self._jobs):
            return ""
        n_runs = max(1, self._runs[self._done])
        start, now = (sum(share[k] for share in self._shares.values()) / n_runs for k in (0, 1))
        durations, rest = list(self._durations), None
        if now > start:
            per_share = (time.monotonic() - self._start) / (now - start)
            durations, rest = [*durations, per_share], per_share * (1 - now)
        if not durations:
            return ""
        average = sum(durations) / len(durations)
        waiting = len(self._jobs) - self._done - 1
        return f"about {format_duration((average if rest is None else rest) + waiting * average)} left"


class GridRunProgress(Callback):
    """Shows one run of a cell and updates the grid's bar."""

    def __init__(self, reporter: GridReporter, label: str, progress: RunProgress) -> None:
        self._reporter, self._label, self._progress = reporter, label, progress
        self._rounds = 0

    def on_run_start(self, run: RunInfo) -> None:
        """Print the notes."""
        self._rounds = run.rounds
        self._progress.on_run_start(run)
        self._reporter.update(self._label, run.start_round, run.rounds)

    def on_evaluate(self, record: MetricsRecord) -> None:
        """Show the round."""
        self._progress.on_evaluate(record)
        self._reporter.update(self._label, metric(record, "round"), self._rounds)


def _format_result(job: Job, seeds: Sequence[int]) -> str:
    trials = job.trials("", seeds)
    if trials is None:
        return "not run"
    return f"{MeanStd.from_trials(trials, 'best_accuracy'):.2f} %, best round {trials.mean('best_round'):.0f}"
