"""Progress of a grid: the time left follows from the cells that have finished."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from gpfl.cli import grid
from gpfl.cli.grid import GridReporter
from gpfl.cli.progress import ProgressReporter
from gpfl.experiments.grid import Job
from gpfl.experiments.stored_runs import StoredTrials


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    now = [0.0]
    monkeypatch.setattr(grid.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(grid, "_format_result", lambda job, seeds: "done")
    monkeypatch.setattr(Job, "label", "cell")
    return now


def reporter(cells: int, seeds: tuple[int, ...] = (0,)) -> tuple[GridReporter, list[Job]]:
    jobs = [Job((), {}, StoredTrials(Path(f"cell-{number}")), "") for number in range(cells)]
    return GridReporter(Console(quiet=True), jobs, seeds), jobs


@pytest.mark.parametrize(
    ("width", "time_remaining", "words"),
    [
        (130, False, "and a long text after that"),
        (80, False, "about 5 min left"),
        (80, True, "about"),
        (60, False, "about"),
    ],
)
def test_narrow_terminal_keeps_name_bar_and_count_and_cuts_words(width: int, time_remaining: bool, words: str) -> None:
    shown = ProgressReporter(Console(width=width), "{}", time_remaining=time_remaining)
    shown.add_task("cells", total=4, completed=1, status="about 5 min left and a long text after that")
    shown.add_task("cifar100/practical perfedavg seed 2", total=400, completed=138, status="96.72% accuracy, best 97.16%")
    console = Console(width=width, record=True, quiet=False, file=io.StringIO())
    console.print(shown.get_renderable())
    cells, run = console.export_text().splitlines()
    assert "━" in cells
    assert "1/4" in cells
    assert words in cells
    assert run.startswith("cifar100/practical perfedavg seed 2 ━")
    assert "138/400 96.72%" in run


def test_time_left_is_unknown_before_the_first_cell_has_finished(clock: list[float]) -> None:
    progress, _ = reporter(2)
    clock[0] = 6.0
    assert progress.time_left() == ""


def test_waiting_cells_take_as_long_as_the_average_one(clock: list[float]) -> None:
    progress, jobs = reporter(4)
    clock[0] = 10.0
    progress.end(jobs[0], "")
    assert progress.time_left() == "about 30 s left"
    clock[0] = 40.0
    progress.end(jobs[1], "")
    assert progress.time_left() == "about 40 s left"


def test_failed_cells_do_not_count(clock: list[float]) -> None:
    progress, jobs = reporter(3)
    clock[0] = 10.0
    progress.end(jobs[0], "")
    clock[0] = 10.1
    progress.end(jobs[1], "no data")
    assert progress.time_left() == "about 10 s left"
