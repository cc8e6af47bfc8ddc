"""The tables of a grid: written of all that a folder holds of them, drawn, and shown on the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gpfl.cli.terminal import print_error, print_line, table_console
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import feature_maps
from gpfl.experiments.compare import parse_methods
from gpfl.experiments.definitions import Cell, TableColumn, load_experiments
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.experiments.results import TableResults, collect_results
from gpfl.experiments.run_archive import ARCHIVE, unpack
from gpfl.experiments.run_checks import merge_configs
from gpfl.experiments.run_index import describe_damage, find_jobs
from gpfl.experiments.selection import Selection
from gpfl.io import files
from gpfl.io.provenance import command_line, current_commit
from gpfl.report import feature_tables, paper_tables, plotting
from gpfl.report.paper_tables import group_problems


def show_held(asked: Selection, plan: GridPlan, figures: bool) -> None:
    """Write tables and figures of finished runs, from run folders or the archive of recorded runs; nothing is run."""
    with _unpacked_runs(plan) as source:
        jobs, wrong = find_jobs(asked.cells, source)
        if not any(job.finished(plan.seeds) for job in jobs):
            seeds = ", ".join(map(str, plan.seeds))
            tell_damages(jobs, source, {})
            tell_problems(wrong)
            raise GpflError(
                f"{plan.out / 'runs'} holds no finished run of what was asked for with {pluralize(plan.rounds, 'round')}, "
                f"patience {plan.patience}, protocol {plan.protocol} and seeds {seeds}: ask as it was run, or leave out "
                "--only-tables"
            )
        process_group().run_on_main(lambda: write(jobs, plan, asked, wrong, figures, source))


@contextmanager
def _unpacked_runs(plan: GridPlan) -> Iterator[GridPlan]:
    """Yield the plan whose folder holds the runs: a temporary one if there is an archive instead of run folders."""
    archive = plan.out / ARCHIVE
    if not archive.exists() or (plan.out / "runs").exists():
        yield plan
        return
    with TemporaryDirectory(prefix="gpfl-") as folder:
        unpack(archive, Path(folder) / "runs")
        yield dataclasses.replace(plan, out=Path(folder))


def write(
    jobs: Sequence[Job],
    plan: GridPlan,
    asked: Selection,
    problems: Problems,
    figures: bool,
    source: GridPlan | None = None,
) -> None:
    """Write and print the tables and figures of the experiments; runs are read from the folder of `source`."""
    from gpfl.report import experiment_figures  # with scipy, which takes half a second

    source = source or plan
    besides, unclear = held_besides(asked, source)
    everything = [*jobs, *besides]
    tell_damages(everything, source, problems)
    tell_problems(unclear)
    if plan.tuned:
        print_line(f"Hyperparameters were chosen by gpfl tune; the search is copied to {plan.tuned.copy_to(plan.out)}.")
    origin = paper_tables.Origin(command_line(), current_commit())
    for one in asked.experiments:
        results = collect_results(
            one,
            everything,
            plan,
            columns=[column.key for column in asked.columns[one.name]],
            extra=asked.rows[one.name],
            problems=divergences(everything, plan.seeds) | problems,
        )
        if not any(results.trials.values()) and not results.problems:
            print_line(f"{one.title}: nothing of it has ended, so no table is written.")
            continue
        print_line(paper_tables.describe_setting(results))
        for table in paper_tables.terminal_tables(results):
            table_console().print(table)
            print_line("")
        folder = plan.out / results.name
        if figures and one.measure == "features":
            measure_features(results)
        paths = paper_tables.save(results, folder, origin)
        if figures:
            try:
                drawn = experiment_figures.draw(results, folder)
                files.write_text(paths[0], paths[0].read_text(encoding="utf-8") + plotting.markdown_images(drawn))
                paths += drawn
            except GpflError as problem:
                print_line(f"{one.name}: no figure: {problem}")
        print_line(f"{one.title}: {', '.join(str(path) for path in paths)}")


def measure_features(results: TableResults) -> None:
    """Measure the features of all trials and print the measures. They are kept next to the runs."""
    methods = [trials for trials in results.trials.values() if trials]
    if not all(map(feature_maps.is_measured, methods)):
        print_line("Measuring features and drawing them by t-SNE, which takes minutes.")
    for trials in methods:
        feature_maps.measure_trials(trials, print_line)
    for line in feature_tables.describe_metrics(results):
        print_line(line)


def divergences(jobs: Sequence[Job], seeds: Sequence[int]) -> Problems:
    """Gives the words about trials that diverged, by column and row."""
    found = {job: job.diverged(seeds) for job in jobs}
    return {
        (cell.column.key, cell.variant.label): "; ".join(f"seed {seed} diverged in round {ends[seed]}" for seed in ends)
        for job, ends in found.items()
        if ends
        for cell in job.cells
    }


def tell_damages(jobs: Sequence[Job], plan: GridPlan, problems: Problems) -> None:
    """Prints what tables of these jobs are without as it is damaged, but for what is told as the problem of a cell."""
    for words in describe_damage(plan.out, jobs, plan.seeds):
        if not any(words.endswith(problem) for problem in problems.values()):
            print_error(words)


def tell_problems(problems: Problems) -> None:
    """Prints what is wrong with cells."""
    for words in group_problems(problems):
        print_error(f"  {words}")


def held_besides(asked: Selection, plan: GridPlan) -> tuple[list[Job], Problems]:
    """Gives the jobs of the other cells of these experiments, so that tables show what was run before, and what is wrong.

    Methods that no table of the paper has are among them. Where settings make columns the same, one of them is.
    """
    taken = {(cell.experiment.name, cell.column.key, cell.variant.label) for cell in asked.cells}
    compared = {row.label for one in load_experiments().values() for row in one.rows}
    besides = [row for row in parse_methods("all") if row.label not in compared]
    others = [
        Cell(one, column, row)
        for one in asked.experiments
        for column in distinct(one.columns, asked.columns[one.name], plan)
        for row in (*one.rows, *besides)
        if (one.name, column.key, row.label) not in taken
    ]
    return find_jobs(others, plan)


def distinct(columns: Sequence[TableColumn], asked: Sequence[TableColumn], plan: GridPlan) -> list[TableColumn]:
    """Gives the columns that differ under what is set by hand: those asked for, and of the others that are the same one.

    That is the one which says most by itself.
    """
    kept = list(asked)
    others = [column for column in columns if column not in asked]
    for column in sorted(others, key=lambda one: -sum(map(len, one.given.values()))):
        given = merge_configs(column.given, plan.common)
        if all(given != merge_configs(one.given, plan.common) for one in kept):
            kept.append(column)
    return kept
