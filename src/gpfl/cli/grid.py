"""Cells of a grid: their list before they are run, and their progress."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_error, print_line, table_console
from gpfl.errors import pluralize
from gpfl.experiments import grid_runner
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.io.provenance import command_line, current_commit
from gpfl.report.paper_tables import describe_rounds, group_problems
from gpfl.report.tables import MeanStd, ResultColumn, ResultTable, format_bytes, format_duration, format_value


def print_plan(
    jobs: Sequence[Job], plan: GridPlan, problems: Problems, missing_data: Mapping[str, Sequence[str]] | None = None
) -> bool:
    """Print the cells of a grid, and those that cannot be run. Return whether all can.

    `missing_data` lists the columns that lack their data, by dataset.
    """
    unfinished = grid_runner.unfinished_jobs(jobs, plan)
    columns: Mapping[ResultColumn, Callable[[Job], str]] = {
        ResultColumn("cell"): lambda job: job.cells[0].column.key,
        ResultColumn("method", align="left"): lambda job: job.cells[0].variant.label,
        ResultColumn("seeds\ndone"): lambda job: f"{len(job.finished(plan.seeds))}/{len(plan.seeds)}",
        ResultColumn("memory"): lambda job: f"about {format_bytes(job.memory)}" if job in unfinished else "",
        ResultColumn("tables", align="left", hide=1): lambda job: ", ".join(
            dict.fromkeys(cell.experiment.name for cell in job.cells)
        ),
        ResultColumn("folder", align="left", hide=2): lambda job: job.folder.name,
    }
    if jobs:
        table_console().print(ResultTable.from_items(columns, jobs))
    for problem in group_problems(problems):
        print_error(f"cannot be run: {problem}")
    counts = f"{pluralize(len(unfinished), 'cell')} to run, {len(jobs) - len(unfinished)} done"
    print_line(f"{counts}; {describe_rounds(plan.rounds, plan.patience)}.")
    if missing_data:
        keys = ", ".join(key for keys in missing_data.values() for key in keys)
        print_line(f"Left out because their data are missing: {keys}.")
    return not problems


def run_missing(jobs: Sequence[Job], plan: GridPlan, noun: str) -> dict[Path, str]:
    """Run the unfinished jobs, and return why some failed, by folder. `noun` is the word for a job in messages."""
    missing = grid_runner.unfinished_jobs(jobs, plan)
    if len(missing) < len(jobs):
        print_line(f"Already finished: {len(jobs) - len(missing)} of {pluralize(len(jobs), noun)}.")
    with GridReporter(console, missing, plan.seeds) as reporter:
        provenance = {"command": command_line(), "commit": current_commit()}
        return grid_runner.run_all(missing, plan, reporter.callback, provenance, reporter.end)


class GridReporter(ProgressReporter):
    """Shows the finished cells of a grid, the time left estimated from their mean time, and the current runs.

    `reporter.end(job, problem)` ends a cell.
    """

    def __init__(self, console: Console, jobs: Sequence[Job], seeds: Sequence[int]) -> None:
        super().__init__(console, "{}", time_remaining=False)
        self._seeds, self._waiting = seeds, len(jobs)
        self._durations: list[float] = []  # seconds of successful cells
        self._start = time.monotonic()
        self._cells = self.add_task("cells", total=len(jobs), status="", visible=bool(jobs))

    def end(self, job: Job, problem: str) -> None:
        """Print the result of a cell and the time left."""
        seconds = time.monotonic() - self._start
        self._start += seconds
        if not problem:
            self._durations.append(seconds)
        self._waiting -= 1
        for task in set(self.task_ids) - {self._cells}:
            self.remove_task(task)
        left, total = self.time_left(), self._tasks[self._cells].total or 0
        self.update(self._cells, advance=1, status=left)
        failed = problem if problem == grid_runner.LOCKED else f"failed: {problem}"
        result = f"{failed if problem else _format_result(job, self._seeds)} ({format_duration(seconds)})"
        self.print_line(f"{job.label}: {result}; {total - self._waiting:.0f}/{total:.0f} cells{left and f', {left}'}")

    def time_left(self) -> str:
        """Return the time left as text, "" before a cell has finished."""
        if not self._durations or not self._waiting:
            return ""
        return f"about {format_duration(self._waiting * sum(self._durations) / len(self._durations))} left"


def _format_result(job: Job, seeds: Sequence[int]) -> str:
    trials = job.trials("", seeds)
    if trials is None:
        return "not run"
    accuracy = format_value(MeanStd.from_trials(trials, "best_accuracy"), ".2f")
    return f"{accuracy} %, best round {trials.mean('best_round'):.0f}"
