"""Tables and figures of all stored trials of experiments."""

from collections.abc import Sequence

from gpfl.cli.terminal import print_error, print_line, table_console
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import features
from gpfl.experiments.compare import parse_methods
from gpfl.experiments.definitions import Cell, Selection, TableColumn, load_experiments
from gpfl.experiments.grid import GridPlan, Job, Problems, TableResults, collect_results, find_jobs
from gpfl.experiments.stored_runs import merge_configs
from gpfl.io import files
from gpfl.io.provenance import command_line, current_commit
from gpfl.report import feature_tables, pages, paper_tables


def write_stored_tables(selection: Selection, plan: GridPlan, figures: bool) -> None:
    """Write tables and figures of finished runs, from run folders or the archive. Nothing is run."""
    jobs, problems = find_jobs([*selection.cells, *_other_cells(selection, plan)], plan)
    selected = set(selection.cells)
    if not any(selected.intersection(job.cells) and job.finished(plan.seeds) for job in jobs):
        print_problems(problems)
        seeds = ", ".join(map(str, plan.seeds))
        raise GpflError(
            f"{plan.out} holds no finished run of these cells with {pluralize(plan.rounds, 'round')}, patience "
            f"{plan.patience}, protocol {plan.protocol} and seeds {seeds}: use the flags of the runs, or omit --only-tables"
        )
    print_problems(problems)
    process_group().run_on_main(lambda: _write_tables(selection, plan, figures, jobs, problems))


def write_run_tables(selection: Selection, plan: GridPlan, figures: bool, jobs: Sequence[Job], problems: Problems) -> None:
    """Write tables and figures of the jobs and of all other stored trials of their experiments."""
    others, ambiguous = find_jobs(_other_cells(selection, plan), plan)
    print_problems(ambiguous)
    _write_tables(selection, plan, figures, [*jobs, *others], problems)


def print_problems(problems: Problems) -> None:
    """Print the problems of cells."""
    for line in paper_tables.group_problems(problems):
        print_error(f"  {line}")


def _write_tables(selection: Selection, plan: GridPlan, figures: bool, jobs: Sequence[Job], problems: Problems) -> None:
    from gpfl.report import experiment_figures  # with scipy, which takes half a second

    if plan.tuned:
        print_line(f"Hyperparameters were chosen by gpfl tune; the search is copied to {plan.tuned.copy_to(plan.out)}.")
    origin = paper_tables.Origin(command_line(), current_commit())
    for experiment in selection.experiments:
        results = collect_results(
            experiment,
            jobs,
            plan,
            columns=[column.key for column in selection.columns[experiment.name]],
            extra_rows=selection.rows[experiment.name],
            problems=_describe_divergence(jobs, plan.seeds) | problems,
        )
        if not any(results.trials.values()) and not results.problems:
            print_line(f"{experiment.title}: no run has finished, so no table is written.")
            continue
        print_line(paper_tables.describe_setting(results))
        for table in paper_tables.terminal_tables(results):
            table_console().print(table)
            print_line("")
        folder = plan.out / results.name
        if figures and experiment.measure == "features":
            _measure_features(results)
        paths = paper_tables.save(results, folder, origin)
        if figures:
            try:
                drawn = experiment_figures.draw(results, folder)
                files.write_text(paths[0], paths[0].read_text(encoding="utf-8") + pages.markdown_images(drawn))
                paths += drawn
            except GpflError as error:
                print_line(f"{experiment.name}: no figure: {error}")
        print_line(f"{experiment.title}: {', '.join(str(path) for path in paths)}")


def _measure_features(results: TableResults) -> None:
    methods = [trials for trials in results.trials.values() if trials]
    if not all(map(features.is_measured, methods)):
        print_line("Measuring features and drawing them by t-SNE, which takes minutes.")
    for trials in methods:
        features.measure_trials(trials, print_line)
    for line in feature_tables.describe_metrics(results):
        print_line(line)


def _describe_divergence(jobs: Sequence[Job], seeds: Sequence[int]) -> Problems:
    rounds = {job: job.diverged(seeds) for job in jobs}
    return {
        cell.key: "; ".join(f"seed {seed} diverged in round {round_}" for seed, round_ in diverged.items())
        for job, diverged in rounds.items()
        if diverged
        for cell in job.cells
    }


def _other_cells(selection: Selection, plan: GridPlan) -> list[Cell]:
    """Return the cells that were not selected, so that tables show earlier runs too, with methods that the paper lacks."""
    labels = {row.label for experiment in load_experiments().values() for row in experiment.rows}
    extra_rows = [row for row in parse_methods("all") if row.label not in labels]
    selected = set(selection.cells)
    cells = [
        Cell(experiment, column, row)
        for experiment in selection.experiments
        for column in _distinct_columns(experiment.columns, selection.columns[experiment.name], plan)
        for row in (*experiment.rows, *extra_rows)
    ]
    return [cell for cell in cells if cell not in selected]


def _distinct_columns(columns: Sequence[TableColumn], selected: Sequence[TableColumn], plan: GridPlan) -> list[TableColumn]:
    """Return the selected columns, and others that differ from them and each other under --set.

    Of equal columns, the one with the most settings of its own is kept.
    """
    distinct = list(selected)
    others = [column for column in columns if column not in selected]
    for column in sorted(others, key=lambda column: -sum(map(len, column.settings.values()))):
        settings = merge_configs(column.settings, plan.common)
        if all(settings != merge_configs(other.settings, plan.common) for other in distinct):
            distinct.append(column)
    return distinct
