"""Progress of runs: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from gpfl.cli.progress import ProgressReporter, RepeatsReporter
from gpfl.training.callbacks import Callback, RunInfo


def start(callback: Callback, rounds: int, *notes: str) -> None:
    callback.on_run_start(RunInfo("gpfl", rounds, 0, None, notes))


def record(round: int, accuracy: float) -> dict[str, object]:
    return {"round": round, "accuracy": accuracy, "loss": 1.0}


def test_terminal_has_a_live_line_with_round_and_accuracy() -> None:
    screen = io.StringIO()
    with ProgressReporter(Console(file=screen, force_terminal=True, width=120)) as reporter:
        callback = reporter.callback("[bold]a[/b]")
        start(callback, 2)
        for k, accuracy in enumerate((0.25, 0.75, 0.5)):
            callback.on_evaluate(record(k, accuracy))
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()[-1]
    assert "[bold]a[/b]" in line
    assert "round 2/2" in line
    assert "50.00% accuracy" in line


def test_each_run_has_its_own_live_line() -> None:
    with ProgressReporter(Console(file=io.StringIO(), force_terminal=True, width=120)) as reporter:
        for label in ("one", "two"):
            reporter.callback(label).on_evaluate(record(0, 0.5))
        assert [task.description for task in reporter.tasks] == ["one", "two"]


def test_elsewhere_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(Console(force_terminal=False)) as reporter:
        callback = reporter.callback("gpfl")
    start(callback, 100)
    for k in range(101):
        callback.on_evaluate(record(k, k / 100))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["gpfl: round 0/100, accuracy 0.00%, loss 1.0000", "gpfl: round 100/100, accuracy 100.00%, loss 1.0000"]


def test_notes_that_runs_share_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter(Console(force_terminal=False)) as reporter:
        for label, notes in (("a", ("both", "one")), ("b", ("both", "other"))):
            start(reporter.callback(label), 1, *notes)
    assert capsys.readouterr().out.splitlines() == ["a: both", "a: one", "b: other"]


def run_repeat(reporter: RepeatsReporter, label: str, rounds: int = 2, stop_after: int = 2) -> None:
    callback = reporter.callback(label)
    start(callback, rounds, "note")
    for k in range(stop_after):
        callback.on_round_end(k + 1, {})
    callback.on_run_end({})


def test_repeats_of_a_method_share_a_line() -> None:
    with RepeatsReporter(Console(file=io.StringIO(), force_terminal=True, width=120), 3) as reporter:
        for label in ("a repeat 1", "a repeat 2", "b repeat 0"):  # a has finished repeat 0 in an earlier call
            run_repeat(reporter, label)
        tasks = reporter.tasks
        assert [(task.description, task.completed, task.total) for task in tasks] == [("a", 3, 3), ("b", 1, 3)]


def test_repeats_elsewhere_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with RepeatsReporter(Console(force_terminal=False), 2) as reporter:
        run_repeat(reporter, "25% of samples: a repeat 0", rounds=9, stop_after=4)
        run_repeat(reporter, "25% of samples: a repeat 1")
    assert capsys.readouterr().out.splitlines() == ["25% of samples: a: note", "25% of samples: a: 2/2 repeats"]
