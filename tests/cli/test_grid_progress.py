"""The time left of a grid follows what its cells took."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import ProgressColumn

from gpfl.cli import grid_progress
from gpfl.cli.grid_progress import GridReporter
from gpfl.cli.progress import progress_bars, time_remaining_column
from gpfl.experiments.estimate import Estimate
from gpfl.experiments.grid import Job


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [0.0]
    monkeypatch.setattr(grid_progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(grid_progress, "outcome", lambda job, seeds: "done")
    monkeypatch.setattr(Job, "label", "cell")
    return now


def reporter(expected: list[float | None], most: bool = False) -> tuple[GridReporter, list[Job]]:
    jobs = [Job((), {}, Path(f"cell-{number}"), "") for number in range(len(expected))]
    estimates = {job.folder: Estimate(seconds, most, memory=0) for job, seconds in zip(jobs, expected, strict=True)}
    return GridReporter(Console(quiet=True), jobs, [0], estimates), jobs


@pytest.mark.parametrize(
    ("width", "more", "words"),
    [
        (130, (), "less where patience ends a run"),
        (80, (), "about 5 min left"),
        (80, (time_remaining_column(),), "about"),
        (60, (), "about"),
    ],
)
def test_narrow_terminal_keeps_name_bar_and_count_and_cuts_words(
    width: int, more: tuple[ProgressColumn, ...], words: str
) -> None:
    shown = progress_bars(Console(width=width), "{task.completed:.0f}/{task.total:.0f}", *more)
    shown.add_task("cells", total=4, completed=1, status="about 5 min left, less where patience ends a run")
    shown.add_task("cifar100/practical perfedavg seed 2", total=400, completed=138, status="96.72% accuracy, best 97.16%")
    console = Console(width=width, record=True, quiet=False, file=io.StringIO())
    console.print(shown.get_renderable())
    cells, run = console.export_text().splitlines()
    assert "━" in cells
    assert "1/4" in cells
    assert words in cells
    assert run.startswith("cifar100/practical perfedavg seed 2 ━")
    assert "138/400 96.72%" in run


def test_estimates_are_as_much_longer_as_ended_cells_took(clock: list[float]) -> None:
    shown, jobs = reporter([10.0, 20.0, 40.0])
    assert shown.left() == "about 70 s left"
    clock[0] = 30.0  # three times as long
    shown.end(jobs[0], "")
    assert shown.left() == "about 3 min left"


def test_estimates_for_all_rounds_may_be_too_long_until_a_cell_has_ended(clock: list[float]) -> None:
    shown, jobs = reporter([10.0, 20.0], most=True)
    assert shown.left() == "about 30 s left, less where patience ends a run"
    clock[0] = 5.0
    shown.end(jobs[0], "")
    assert shown.left() == "about 10 s left"


def test_a_cell_that_failed_at_once_says_nothing_of_others(clock: list[float]) -> None:
    shown, jobs = reporter([10.0, 20.0])
    clock[0] = 0.1
    shown.end(jobs[0], "no data")
    assert shown.left() == "about 20 s left"


def test_cells_without_an_estimate_are_as_long_as_others_were(clock: list[float]) -> None:
    shown, jobs = reporter([None, None])
    assert shown.left() == "time left unknown until a cell has ended"
    clock[0] = 30.0
    shown.end(jobs[0], "")
    assert shown.left() == "about 30 s left"


def test_time_without_an_estimate_is_no_bound(clock: list[float]) -> None:
    shown, jobs = reporter([None, None], most=True)
    clock[0] = 25.0
    shown.end(jobs[0], "")
    assert shown.left() == "about 25 s left"


def test_cells_without_an_estimate_take_as_much_longer_as_their_operations_say(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[str] = []

    def work(job: Job, trials: int) -> float | None:
        counts.append(job.folder.name)
        return {"cell-0": 2.0, "cell-1": 6.0, "cell-2": None, "cell-3": 1.0}[job.folder.name] if trials else None

    monkeypatch.setattr(grid_progress, "work_of", work)
    shown, jobs = reporter([None, None, None, 5.0])
    assert counts == [], "nothing is counted before a cell has ended"
    clock[0] = 20.0
    shown.end(jobs[0], "")
    assert shown.left() == "about 85 s left", "60 of three times the work, 20 as none was counted, 5 as was estimated"
    clock[0] = 100.0
    shown.end(jobs[1], "")
    assert shown.left() == "about 55 s left", "the mean of 20 and 80, and 5"
    assert counts == ["cell-0", "cell-1", "cell-2"]


def test_cell_that_failed_is_no_measure_of_cells_without_an_estimate(clock: list[float]) -> None:
    shown, jobs = reporter([None, None])
    clock[0] = 0.1
    shown.end(jobs[0], "no data")
    assert shown.left() == "time left unknown until a cell has ended"
