"""The plan of a grid on the terminal: its cells, what is done of them, time and memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from gpfl.cli.terminal import print_error, print_line, table_console
from gpfl.errors import pluralize
from gpfl.experiments import grid
from gpfl.experiments.estimate import Estimate
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.report.paper_tables import describe_rounds, group_problems
from gpfl.report.tables import format_bytes

COUNTED = (
    "Counted: the operations of a round at the speed of this machine now; nothing was timed, perhaps half as long, or twice."
)
UP_TO = (
    "Up to: for all rounds. Patience may end a run long before: of ours with at most 300 rounds it ended all on Amazon, most "
    "on Cifar100, less than half on FMNIST, few on HAR and AG News."
)
HEADINGS = ("cell", "method", "seeds\ndone", "time", "memory", "in", "folder")
LESSER = ("folder", "in", "memory")
"""Columns of a dry run that a narrow terminal does not show, the first to go first."""


def print_plan(
    jobs: Sequence[Job], plan: GridPlan, about: Mapping[Path, Estimate], wrong: Problems, wanting: Mapping[str, list[str]]
) -> bool:
    """Prints what would be run: cells, what is done of them, time and memory; tells whether all of it can be.

    What cannot be run is named with the way out.
    """
    rows = []
    damaged = {job: fault for job in jobs if (fault := grid.fault_of(job, plan.seeds))}
    lacking = [job for job in grid.unfinished_jobs(jobs, plan) if job not in damaged]
    for job in jobs:
        needed = about[job.folder]
        tables = ", ".join(dict.fromkeys(cell.experiment.name for cell in job.cells))
        needs = (needed.words, f"about {format_bytes(needed.memory)}") if job in lacking else ("done", "")
        if job in damaged:
            needs = ("damaged", "")
        done = f"{len(job.finished(plan.seeds))}/{len(plan.seeds)}"
        rows.append((job.cells[0].column.key, job.cells[0].variant.label, done, *needs, tables, job.folder.name))
    if jobs:
        table_console().print(plan_table(rows, table_console().width if table_console().is_terminal else sys.maxsize))
    faults = {(cell.column.key, cell.variant.label): fault for job, fault in damaged.items() for cell in job.cells}
    for words in group_problems(wrong | faults):
        print_error(f"cannot be run: {words}")
    rounds = describe_rounds(plan.rounds, plan.patience)
    print_line(f"{pluralize(len(lacking), 'cell')} to run, {len(jobs) - len(lacking) - len(damaged)} done; {rounds}.")
    timed = [each for job in lacking if (each := about[job.folder]).seconds is not None]
    if timed:
        which = "" if len(timed) == len(lacking) else f" of {len(timed)} of them"
        words = Estimate(sum(each.seconds or 0.0 for each in timed), any(each.most for each in timed), 0).words
        print_line(f"Time{which}: {words}, from {'; '.join(sorted({each.source for each in timed}))}.")
    if len(timed) < len(lacking):
        unknown = pluralize(len(lacking) - len(timed), "cell")
        print_line(f"Unknown: {unknown} of kinds that were not timed here and cannot be pluralize; known once one ran.")
    if any(each.way == "counted" for each in timed):
        print_line(COUNTED)
    if any(each.most for each in timed):
        print_line(UP_TO)
    if wanting:
        print_line(f"Left out for want of data: {', '.join(key for keys in wanting.values() for key in keys)}.")
    return not (wrong or damaged)


def plan_table(rows: Sequence[Sequence[str]], width: int) -> RichTable:
    """Gives the table of cells for a terminal of so many columns: nothing is shortened, lesser columns are left out."""
    cells = zip(HEADINGS, *rows, strict=True)
    wanted = {h: max(len(line) for text in (h, *texts) for line in re.split(r"\n| (?=\()", text)) for h, *texts in cells}

    def fits() -> bool:
        return sum(wanted.values()) + 3 * (len(wanted) - 1) <= width

    for heading in LESSER:
        if not fits():
            del wanted[heading]
    table = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in wanted:  # what may not be wrapped is cut where it does not fit
        table.add_column(heading, no_wrap=fits() and heading not in ("time", "folder"), overflow="fold")
    for row in rows:
        table.add_row(*(cell for heading, cell in zip(HEADINGS, row, strict=True) if heading in wanted))
    return table
