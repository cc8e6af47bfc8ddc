"""Progress of a grid: the time left follows from the cells that have finished."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import ProgressColumn

from gpfl.cli import grid_progress
from gpfl.cli.grid_progress import GridReporter
from gpfl.cli.progress import progress_bars, time_remaining_column
from gpfl.experiments.grid import Job
from gpfl.experiments.stored_runs import StoredTrials


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    now = [0.0]
    monkeypatch.setattr(grid_progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(grid_progress, "_format_result", lambda job, seeds: "done")
    monkeypatch.setattr(Job, "label", "cell")
    return now


def reporter(cells: int, seeds: tuple[int, ...] = (0,)) -> tuple[GridReporter, list[Job]]:
    jobs = [Job((), {}, StoredTrials(Path(f"cell-{number}")), "") for number in range(cells)]
    return GridReporter(Console(quiet=True), jobs, seeds), jobs


@pytest.mark.parametrize(
    ("width", "more", "words"),
    [
        (130, (), "and a long text after that"),
        (80, (), "about 5 min left"),
        (80, (time_remaining_column(),), "about"),
        (60, (), "about"),
    ],
)
def test_narrow_terminal_keeps_name_bar_and_count_and_cuts_words(
    width: int, more: tuple[ProgressColumn, ...], words: str
) -> None:
    shown = progress_bars(Console(width=width), "{task.completed:.0f}/{task.total:.0f}", *more)
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
    grid, _ = reporter(2)
    clock[0] = 6.0
    assert grid.time_left() == ""


def test_waiting_cells_take_as_long_as_the_average_one(clock: list[float]) -> None:
    grid, jobs = reporter(4)
    clock[0] = 10.0
    grid.end(jobs[0], "")
    assert grid.time_left() == "about 30 s left"
    clock[0] = 40.0
    grid.end(jobs[1], "")
    assert grid.time_left() == "about 40 s left"


def test_failed_cells_do_not_count(clock: list[float]) -> None:
    grid, jobs = reporter(3)
    clock[0] = 10.0
    grid.end(jobs[0], "")
    clock[0] = 10.1
    grid.end(jobs[1], "no data")
    assert grid.time_left() == "about 10 s left"
