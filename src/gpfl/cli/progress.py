"""Progress: live lines on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from gpfl.training.callbacks import Callback, RunInfo
from gpfl.training.run_dir import MetricsRecord, metric

LOG_INTERVAL = 10.0  # seconds between two lines of a run when the output is not a terminal


class _StatusColumn(TextColumn):
    """The status of a line, which a narrow terminal truncates before anything else."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap = True
        return text


class ProgressReporter(Progress):
    """Progress of runs; the callback of a run is `reporter.callback(label)`.

    On a terminal each run has a line of name, bar, count and status that fits the width; elsewhere nothing is drawn.
    """

    def __init__(self, console: Console, count: str = "round {}", *, time_remaining: bool = True) -> None:
        width = max(4, min(24, console.width // 8))
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=width, table_column=Column(no_wrap=True, width=width)),
            TextColumn(count.format("{task.completed:.0f}/{task.total:.0f}")),
            _StatusColumn("{task.fields[status]}", markup=False, table_column=Column(overflow="ellipsis")),
            *([TimeRemainingColumn(table_column=Column(no_wrap=True))] if time_remaining else []),
            console=console,
            disable=not console.is_terminal,
        )
        self.printed: set[str] = set()  # notes, which several runs may share

    def stop(self) -> None:
        """End the live lines; without them, earlier versions of rich would print an empty line."""
        if not self.disable:
            super().stop()

    def print_line(self, text: str) -> None:
        """Print text above the live lines, without markup."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def callback(self, label: str) -> Callback:
        """Return the callback of one run."""
        return _RunProgress(self, label)


class _RunNotes(Callback):
    """Callback that prints the notes on a run that no other run of the reporter has printed."""

    def __init__(self, reporter: ProgressReporter, label: str) -> None:
        self.reporter, self.label, self.rounds = reporter, label, 1

    def on_run_start(self, run: RunInfo) -> None:
        self.rounds = run.rounds
        for note in run.notes:
            if note not in self.reporter.printed:
                self.reporter.printed.add(note)
                self.reporter.print_line(f"{self.label}: {note}")


class _RunProgress(_RunNotes):
    """Callback that shows the rounds of a run.

    On a terminal one line is redrawn each round. Elsewhere there is a line for the first and the last evaluation, and at most
    one every `LOG_INTERVAL` between.
    """

    _last_time = -math.inf
    _task: TaskID | None = None

    def on_evaluate(self, record: MetricsRecord) -> None:
        number, accuracy = metric(record, "round"), metric(record, "accuracy")
        if self.reporter.disable:
            now = time.monotonic()
            if number == self.rounds or now - self._last_time >= LOG_INTERVAL:
                self._last_time = now
                result = f"accuracy {accuracy:.2%}, loss {metric(record, 'loss'):.4f}"
                self.reporter.print_line(f"{self.label}: round {number}/{self.rounds}, {result}")
            return
        status = f"{accuracy:.2%} accuracy"
        if self._task is None:
            self._task = self.reporter.add_task(self.label, total=self.rounds, status=status)
        self.reporter.update(self._task, completed=number, status=status)


class RepeatsReporter(ProgressReporter):
    """Progress of repeated runs: one line for all repeats of a method. Labels of runs end in "repeat N".

    Elsewhere than on a terminal, a line is printed when a method has finished, and at most one every `LOG_INTERVAL` before.
    """

    def __init__(self, console: Console, repeats: int) -> None:
        super().__init__(console, "{} repeats")
        self._repeats = repeats
        self._methods: dict[str, TaskID] = {}
        self._last_time = time.monotonic()

    def callback(self, label: str) -> Callback:
        """Return the callback of one run."""
        name, _, repeat = label.rpartition(" repeat ")
        if name not in self._methods:  # repeats before the first one have finished
            self._methods[name] = self.add_task(name, total=self._repeats, completed=int(repeat), status="")
        return _RepeatProgress(self, name)

    def count(self, method: str, share: float) -> None:
        """Advance the line of a method by a share of a repeat."""
        self.advance(self._methods[method], share)
        if self.disable:
            done = round(self._tasks[self._methods[method]].completed, 6)
            if done >= self._repeats or time.monotonic() - self._last_time >= LOG_INTERVAL:
                self._last_time = time.monotonic()
                self.print_line(f"{method}: {int(done)}/{self._repeats} repeats")


class _RepeatProgress(_RunNotes):
    """Callback of one repeat, which advances the line of its method by the share of its rounds that has finished."""

    reporter: RepeatsReporter
    _left = 1.0

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        if round < self.rounds:  # the last one is counted below
            self._left -= 1 / self.rounds
            self.reporter.count(self.label, 1 / self.rounds)

    def on_run_end(self, summary: Mapping[str, object]) -> None:
        self.reporter.count(self.label, self._left)  # more than a round after an early stop
