"""Progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from gpfl.training.callbacks import Callback, RunInfo
from gpfl.training.run_dir import MetricsRecord, metric

LOG_INTERVAL = 10.0  # seconds between two lines of a run when the output is not a terminal


class ProgressReporter:
    """Progress of runs; the callback of a run is `reporter.callback(label)`."""

    def __init__(self, console: Console) -> None:
        self._progress = progress_bars(console, "round {task.completed:.0f}/{task.total:.0f}", time_remaining_column())
        self._printed: set[str] = set()  # notes, which several runs may share

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._progress.disable:
            self._progress.stop()

    def callback(self, label: str) -> Callback:
        """Return the callback of one run."""
        return RunProgress(self._progress, label, self._printed)


class RepeatsReporter(ProgressReporter):
    """Progress of repeated runs: one line for all repeats of a method. Labels of runs end in "repeat N".

    Elsewhere than on a terminal, a line is printed when a method has finished, and at most one every `LOG_INTERVAL` before.
    """

    def __init__(self, console: Console, repeats: int) -> None:
        super().__init__(console)
        self._progress = progress_bars(console, "{task.completed:.0f}/{task.total:.0f} repeats", time_remaining_column())
        self._repeats = repeats
        self._tasks: dict[str, TaskID] = {}
        self._last_time = time.monotonic()

    def callback(self, label: str) -> Callback:
        """Return the callback of one run."""
        name, _, repeat = label.rpartition(" repeat ")
        if name not in self._tasks:  # repeats before the first one have finished
            self._tasks[name] = self._progress.add_task(name, total=self._repeats, completed=int(repeat), status="")
        return RepeatProgress(RunProgress(self._progress, name, self._printed), lambda share: self._advance(name, share))

    def _advance(self, name: str, share: float) -> None:
        self._progress.advance(self._tasks[name], share)
        if self._progress.disable:
            done = round(self._progress.tasks[self._tasks[name]].completed, 6)
            if done >= self._repeats or time.monotonic() - self._last_time >= LOG_INTERVAL:
                self._last_time = time.monotonic()
                text = f"{name}: {int(done)}/{self._repeats} repeats"
                self._progress.console.print(text, highlight=False, markup=False, emoji=False)


class StatusColumn(TextColumn):
    """The status of a line, which a narrow terminal truncates before anything else."""

    def __init__(self) -> None:
        super().__init__("{task.fields[status]}", markup=False, table_column=Column(overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        """Return the status as one line."""
        text = super().render(task)
        text.no_wrap = True
        return text


def progress_bars(console: Console, count: str, *more: ProgressColumn) -> Progress:
    """Return lines of name, bar, count and status that fit the terminal; they are disabled where there is no terminal."""
    width = max(4, min(24, console.width // 8))
    bar = BarColumn(bar_width=width, table_column=Column(no_wrap=True, width=width))
    name = TextColumn("{task.description}", markup=False)
    return Progress(name, bar, TextColumn(count), StatusColumn(), *more, console=console, disable=not console.is_terminal)


def time_remaining_column() -> ProgressColumn:
    """Return the column of the time remaining."""
    return TimeRemainingColumn(table_column=Column(no_wrap=True))


class RunProgress(Callback):
    """Callback that prints the notes on a run and shows its rounds.

    On a terminal one line is redrawn each round. Elsewhere there is a line for the first and the last evaluation, and at most
    one every `LOG_INTERVAL` between. Runs that share `printed` print equal notes once.
    """

    def __init__(self, progress: Progress, label: str, printed: set[str]) -> None:
        self._progress, self._label, self._printed = progress, label, printed
        self._rounds, self._last_time = 0, -math.inf
        self._task: TaskID | None = None

    def on_run_start(self, run: RunInfo) -> None:
        """Print the notes."""
        self._rounds = run.rounds
        for note in run.notes:
            if note not in self._printed:
                self._printed.add(note)
                self._print(note)

    def on_evaluate(self, record: MetricsRecord) -> None:
        """Show the round and its accuracy."""
        number, accuracy = metric(record, "round"), metric(record, "accuracy")
        if self._progress.disable:
            now = time.monotonic()
            if number == self._rounds or now - self._last_time >= LOG_INTERVAL:
                self._last_time = now
                self._print(f"round {number}/{self._rounds}, accuracy {accuracy:.2%}, loss {metric(record, 'loss'):.4f}")
            return
        status = f"{accuracy:.2%} accuracy"
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=self._rounds, status=status)
        self._progress.update(self._task, completed=number, status=status)

    def _print(self, text: str) -> None:
        self._progress.console.print(f"{self._label}: {text}", highlight=False, markup=False, emoji=False, soft_wrap=True)


class RepeatProgress(Callback):
    """Callback of one repeat: prints notes, and advances by the share of its rounds that has finished."""

    def __init__(self, notes: Callback, advance: Callable[[float], None]) -> None:
        self._notes, self._advance = notes, advance
        self._left, self._rounds = 1.0, 1

    def on_run_start(self, run: RunInfo) -> None:
        """Print the notes that no other run has printed."""
        self._rounds = run.rounds
        self._notes.on_run_start(run)

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        """Count the round; `on_run_end` counts the last one."""
        if round < self._rounds:
            self._left -= 1 / self._rounds
            self._advance(1 / self._rounds)

    def on_run_end(self, summary: Mapping[str, object]) -> None:
        """Count the rest, which is more than a round after an early stop."""
        self._advance(self._left)
