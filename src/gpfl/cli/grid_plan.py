"""The cells of a grid before they are run: finished seeds, estimated time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpfl.cli.terminal import print_error, print_line, table_console
from gpfl.errors import pluralize
from gpfl.experiments import grid, grid_runner
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.report.paper_tables import describe_rounds, group_problems
from gpfl.report.tables import ResultColumn, ResultTable, format_bytes, format_duration

COLUMNS = (
    ResultColumn("cell"),
    ResultColumn("method", align="left"),
    ResultColumn("seeds\ndone"),
    ResultColumn("time", align="left"),
    ResultColumn("memory", hide=1),
    ResultColumn("tables", align="left", hide=2),
    ResultColumn("folder", align="left", hide=3),
)


def print_plan(
    jobs: Sequence[Job], plan: GridPlan, problems: Problems, missing_data: Mapping[str, Sequence[str]] | None = None
) -> bool:
    """Print the cells of a grid, and those that cannot be run. Return whether all can.

    `missing_data` lists the columns that lack their data, by dataset.
    """
    damaged = {job: damage for job in jobs if (damage := grid_runner.find_damage(job, plan.seeds))}
    unfinished = [job for job in grid_runner.unfinished_jobs(jobs, plan) if job not in damaged]
    seconds = grid.estimate_seconds(unfinished, plan)
    upper = "up to" if 0 < plan.patience < plan.rounds else "about"
    if jobs:
        rows = []
        for job in jobs:
            cell, done = job.cells[0], f"{len(job.finished(plan.seeds))}/{len(plan.seeds)}"
            tables = ", ".join(dict.fromkeys(cell.experiment.name for cell in job.cells))
            time = "damaged" if job in damaged else "done"
            if job in unfinished:
                time = f"{upper} {format_duration(value)}" if (value := seconds.get(job.folder)) else "unknown"
            memory = f"about {format_bytes(job.memory)}" if job in unfinished else ""
            rows.append([cell.column.key, cell.variant.label, done, time, memory, tables, job.folder.name])
        table_console().print(ResultTable(COLUMNS, rows))
    problems = problems | {cell.key: damage for job, damage in damaged.items() for cell in job.cells}
    for problem in group_problems(problems):
        print_error(f"cannot be run: {problem}")
    n_done = len(jobs) - len(unfinished) - len(damaged)
    print_line(f"{pluralize(len(unfinished), 'cell')} to run, {n_done} done; {describe_rounds(plan.rounds, plan.patience)}.")
    if seconds:
        cells = "" if len(seconds) == len(unfinished) else f" of {len(seconds)} of them"
        print_line(
            f"Time{cells}: {upper} {format_duration(sum(seconds.values()))}, at the speed of finished runs in {plan.out}."
        )
    if missing_data:
        print_line(
            f"Left out because their data are missing: {', '.join(key for keys in missing_data.values() for key in keys)}."
        )
    return not problems
