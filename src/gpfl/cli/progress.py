"""Progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from gpfl.training.round_loop import number
from gpfl.training.run_dir import MetricsRecord

LOG_INTERVAL = 10.0
"""Seconds between two plain lines of a run, besides its first and last."""


class ProgressReporter:
    """Shows runs as they go; a run's watch is `reporter.watch(label)`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._progress = progress_bars(self.console, "round {task.completed:.0f}/{task.total:.0f}", time_remaining_column())
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def watch(self, label: str) -> LiveProgress | PlainProgress:
        """Gives the watch of one run."""
        return LiveProgress(self._progress, label) if self._progress else PlainProgress(self.console, label)


class Words(TextColumn):
    """Words of a line that a narrow terminal cuts before it cuts anything else."""

    def __init__(self) -> None:
        super().__init__("{task.fields[words]}", markup=False, table_column=Column(overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        """Gives the words in one line."""
        text = super().render(task)
        text.no_wrap = True
        return text


def progress_bars(console: Console, count: str, *more: ProgressColumn) -> Progress:
    """Gives lines with a name, a bar, a count and words; where there is little room the bar is short, and the words are cut."""
    room = max(4, min(24, console.width // 8))
    bar = BarColumn(bar_width=room, table_column=Column(no_wrap=True, width=room))
    return Progress(TextColumn("{task.description}", markup=False), bar, TextColumn(count), Words(), *more, console=console)


def time_remaining_column() -> ProgressColumn:
    """Gives the time that is left of each line."""
    return TimeRemainingColumn(table_column=Column(no_wrap=True))


class LiveProgress:
    """One line of a terminal that is drawn anew each round."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress, self._label, self._best = progress, label, 0.0
        self._task: TaskID | None = None

    def line(self, line: MetricsRecord, rounds: int) -> None:
        """Draws the round."""
        self._best = max(self._best, number(line, "accuracy"))
        words = f"{number(line, 'accuracy'):.2%} accuracy, best {self._best:.2%}"
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=rounds, words=words)
        self._progress.update(self._task, completed=number(line, "round"), words=words)

    def note(self, words: str) -> None:
        """Prints a sentence above the line."""
        self._progress.console.print(f"{self._label}: {words}", highlight=False, markup=False, emoji=False, soft_wrap=True)


class PlainProgress:
    """A line for the first and the last round, and at most one in ten seconds between."""

    def __init__(self, console: Console, label: str) -> None:
        self._console, self._label = console, label
        self._told: float | None = None

    def line(self, line: MetricsRecord, rounds: int) -> None:
        """Prints the round, if it is time."""
        now = time.monotonic()
        if self._told is not None and line["round"] != rounds and now - self._told < LOG_INTERVAL:
            return
        self._told = now
        scores = f"accuracy {number(line, 'accuracy'):.2%}, loss {number(line, 'loss'):.4f}"
        text = f"{self._label}: round {line['round']}/{rounds}, {scores}"
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def note(self, words: str) -> None:
        """Prints a sentence."""
        self._console.print(f"{self._label}: {words}", highlight=False, markup=False, emoji=False, soft_wrap=True)
