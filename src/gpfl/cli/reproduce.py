"""The command `gpfl reproduce`: cells, rows, columns or all of the paper's tables and figures, next to the paper's numbers."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from gpfl.cli import options
from gpfl.cli.command import Argument, Command
from gpfl.cli.data import download_datasets
from gpfl.cli.grid import print_plan, run_missing
from gpfl.cli.interrupt import StoppedError, same_command
from gpfl.cli.options import option, parse_options
from gpfl.cli.overrides import parse_method_set
from gpfl.cli.terminal import console, print_error, print_line, table_console
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import definitions as experiments
from gpfl.experiments import features, grid, grid_runner
from gpfl.experiments.compare import parse_methods
from gpfl.experiments.definitions import Cell, Selection, TableColumn
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.experiments.stored_runs import merge_configs
from gpfl.experiments.tuned_values import TunedValues
from gpfl.io import files
from gpfl.io.provenance import command_line, current_commit
from gpfl.report import feature_tables, paper_tables, tables
from gpfl.report.figures import draw as draw_figures
from gpfl.training.devices import find_device

ATTACKS = ("privacy", "table5")  # names of the table that attacks on uploads produce

RUN_FLAGS = ("protocol", "device", "engine", "precision", "compile", "checkpoint_every")
FLAGS = {
    ("train", "rounds"): "--rounds",
    ("train", "patience"): "--patience",
    ("partition", "validation_fraction"): "--validation-fraction",
    **{("run", key): f"--{key.replace('_', '-')}" for key in RUN_FLAGS},
}
"""Settings with a flag of their own. Tables name them, so --set must not change them."""

RESERVED = ("runs", "problems", "tuned", "privacy", "leaks", "defences")
"""Folders of results that are not tables of this command."""


@click.command(cls=Command, flags={f"{section}.{key}": flag for (section, key), flag in FLAGS.items()})
@click.argument(
    "names",
    nargs=-1,
    cls=Argument,
    metavar="[EXPERIMENT]…",
    help="Experiments, such as table1, figure3 or all. Without one they are listed.",
)
@options.methods_option("Rows: names, all, or ablations. A method that the paper lacks, such as local, is added.")
@click.option(
    "--cells", metavar="KEY,…", help="Columns: keys such as cifar100/practical, patterns such as fmnist/*, or half a key."
)
@options.seeds_option("0,1,2", "Seeds of the trials; the paper has three.")
@option("--rounds", default=experiments.ROUNDS, metavar="N", help=f"Maximum rounds; the paper has {experiments.ROUNDS}.")
@options.patience_option(experiments.PATIENCE)
@option(
    "--validation-fraction",
    "validation",
    default=0.0,
    metavar="X",
    help="Fraction of training samples for validation, such as 0.1; adds the accuracy of the round that they select.",
)
@options.out_option("Folder; runs it already holds are not repeated.", "results")
@click.option("--table", metavar="NAME", help="Name of the table's folder in --out, instead of the experiment's.")
@click.option("--dry-run", is_flag=True, help="List the cells with their state and memory; run nothing.")
@click.option("--only-tables", is_flag=True, help="Write tables and figures from finished runs; run nothing.")
@option("--figures/--no-figures", default=True, help="Draw the figures of the experiments.")
@click.option("--keep-weights", "weights", is_flag=True, help="Keep checkpoints and models of all runs: gigabytes per cell.")
@click.option("--tuned", type=options.Folder(), metavar="DIR", help="Use the values that gpfl tune chose, from its --out.")
@options.set_option("Set any option of the config, or of one method, such as fedprox.mu=0.01.")
@options.config_option("run", *RUN_FLAGS)
def reproduce(
    names: tuple[str, ...], methods: str, cells: str | None, table: str | None, tuned: Path | None, dry_run: bool, **flags: Any
) -> None:
    """Reproduce the paper's tables and figures.

    Runs any cell, row, column or table, and shows the results next to the paper's.
    """
    if not names:
        _list_experiments()
        return
    chosen = tuple(dict.fromkeys(name for text in names for name in experiments.parse_names("EXPERIMENT", text.lower())))
    if dry_run and flags["only_tables"]:
        raise GpflError("--dry-run and --only-tables were both given: leave one out")
    if set(ATTACKS) & set(chosen):
        raise GpflError("the privacy table is made by attacks on uploads: gpfl privacy attacks")
    selection = experiments.select_cells(experiments.find_experiments(chosen, ATTACKS), cells, methods)
    selected = [row.method["name"] for rows in selection.rows.values() for row in rows]
    settings, overrides = parse_method_set(flags["assignments"], selected)
    for (section, key), flag in FLAGS.items():
        if key in settings.get(section, {}):
            raise GpflError(f"--set {section}.{key} would not be named in tables: use {flag}")
    if "name" in settings.get("data", {}):
        raise GpflError("--set data.name would put other data into the paper's tables: use gpfl compare --data")
    tuned_values = TunedValues.read(tuned) if tuned is not None else None
    if tuned_values:
        tuned_values.check_overrides(overrides, settings)
    run_options = parse_options(flags).get("run", {})
    plan = GridPlan(
        **{key: flags[key] for key in ("out", "seeds", "rounds", "patience", "validation", "weights")},
        protocol=str(run_options.pop("protocol", "corrected")),
        run=run_options,
        common=settings,
        overrides=overrides,
        tuned=tuned_values,
        table="" if table is None else _check_table_name(table, [each.name for each in selection.experiments]),
    )
    grid.check_cells(selection.cells, plan)
    if flags["only_tables"]:
        _write_stored_tables(selection, plan, flags["figures"])
        failed = False
    else:
        failed = _run_grid(selection, plan, dry_run, flags["figures"])
    if "all" in chosen:
        print_line("All but privacy, which is made by attacks: gpfl privacy attacks.")
    if failed:
        process_group().barrier()  # a process that exited earlier would abort the main one before it has printed
        raise click.exceptions.Exit(1)


def _check_table_name(name: str, selected: Sequence[str]) -> str:
    """Return the value of --table. Raise if it is not the name of a folder for this table."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise GpflError(f"--table is '{name}'; it must be letters, digits, '-', '_' and '.', starting with a letter or digit")
    if len(selected) > 1:
        raise GpflError(f"--table {name} names one table, but there are {len(selected)}: choose one of {', '.join(selected)}")
    if name.lower() in {*RESERVED, *experiments.load_experiments()} - {*selected}:
        raise GpflError(f"--table is '{name}', which is reserved: choose another name, such as {selected[0]}-2")
    return name


def _list_experiments() -> None:
    for experiment in experiments.load_experiments().values():
        aliases = ", ".join(experiment.aliases)
        print_line(f"{experiment.name} ({aliases}): {experiment.title}; {len(experiment.rows)} methods")
        width = max(len(column.key) for column in experiment.columns)
        for column in experiment.columns:
            extra = "; on request: name it in --cells" if column.extra else ""
            missing = "" if grid.has_data(column.data) else f"; data not downloaded: gpfl data get {column.data}"
            print_line(f"  {column.key:<{width}}  {column.heading}, {column.group}{extra}{missing}")
    print_line("privacy (table5): attacks on uploads: gpfl privacy attacks")
    print_line("")
    print_line("gpfl reproduce table1 --methods gpfl,fedavg --cells cifar100/practical    # two rows of one column")
    print_line("gpfl reproduce all --dry-run                                              # list all cells and what is done")


def _run_grid(selection: Selection, plan: GridPlan, dry_run: bool, figures: bool) -> bool:
    """Run the missing cells and write tables and figures, or list the cells. Return whether something failed."""
    find_device(str(plan.run.get("device", "auto")), str(plan.run.get("precision", "float32")))  # raises before every cell
    if not dry_run:
        files.make_folder(plan.out / "runs")
    cells, missing_data = _split_by_data(selection, dry_run)
    with console.status("Planning the cells"):
        jobs, invalid = grid.make_jobs(cells, plan)
    can_run = print_plan(jobs, plan, invalid, missing_data) if dry_run else True
    for caveat in dict.fromkeys(job.caveat for job in jobs if job.caveat):
        print_line(caveat)
    if dry_run:
        return not can_run
    try:
        failed = run_missing(jobs, plan, "cell")
    except KeyboardInterrupt:
        if process_group().is_main:
            with suppress(GpflError):
                _write_tables(selection, plan, False, jobs, {})
        raise StoppedError(same_command()) from None
    if locked := [job.label for job in jobs if failed.get(job.folder) == grid_runner.LOCKED]:
        print_line(f"Skipped: {', '.join(locked)}. Another process is running it.")
    failures = {cell.key: failed[job.folder] for job in jobs if job.folder in failed for cell in job.cells}
    problems = {key: problem for key, problem in failures.items() if problem != grid_runner.LOCKED} | invalid
    process_group().run_on_main(lambda: _write_tables(selection, plan, figures, jobs, problems))
    if problems:
        print_error(f"{pluralize(len(problems), 'cell')} of {len(cells)} failed; fix them and repeat the command to continue:")
        _print_problems(problems)
    return bool(problems)


def _split_by_data(selection: Selection, dry_run: bool) -> tuple[list[Cell], dict[str, list[str]]]:
    """Return the cells whose data are on this machine, and the columns of the others by dataset.

    If no selected cell has its data, the data are downloaded.
    """
    columns = [column for each in selection.columns.values() for column in each]
    names = sorted({column.data for column in columns})
    absent = process_group().run_on_main(lambda: [name for name in names if not grid.has_data(name)])
    cells = [cell for cell in selection.cells if cell.column.data not in absent]
    if not cells and not dry_run:
        download_datasets(absent)
        return selection.cells, {}
    missing = {name: list(dict.fromkeys(column.key for column in columns if column.data == name)) for name in absent}
    for name, keys in missing.items():
        print_line(f"{', '.join(keys)}: data not downloaded: gpfl data get {name}")
    return cells, missing


def _write_stored_tables(selection: Selection, plan: GridPlan, figures: bool) -> None:
    jobs, problems = grid.find_jobs(selection.cells, plan)
    _print_problems(problems)
    if not any(job.finished(plan.seeds) for job in jobs):
        seeds = ", ".join(map(str, plan.seeds))
        raise GpflError(
            f"{plan.out} holds no finished run of these cells with {pluralize(plan.rounds, 'round')}, patience "
            f"{plan.patience}, protocol {plan.protocol} and seeds {seeds}: use the flags of the runs, or omit --only-tables"
        )
    process_group().run_on_main(lambda: _write_tables(selection, plan, figures, jobs, problems))


def _print_problems(problems: Problems) -> None:
    for line in paper_tables.group_problems(problems):
        print_error(f"  {line}")


def _write_tables(selection: Selection, plan: GridPlan, figures: bool, jobs: Sequence[Job], problems: Problems) -> None:
    """Write tables and figures of the jobs and of all other stored trials of their experiments."""
    others, ambiguous = grid.find_jobs(_other_cells(selection, plan), plan)
    _print_problems(ambiguous)
    jobs, problems = [*jobs, *others], ambiguous | problems
    if plan.tuned:
        print_line(f"Hyperparameters were chosen by gpfl tune; the search is copied to {plan.tuned.copy_to(plan.out)}.")
    origin = paper_tables.Origin(command_line(), current_commit())
    for experiment in selection.experiments:
        results = grid.collect_results(
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
                drawn = draw_figures(results, folder)
                files.write_text(paths[0], paths[0].read_text(encoding="utf-8") + tables.markdown_images(drawn))
                paths += drawn
            except GpflError as error:
                print_line(f"{experiment.name}: no figure: {error}")
        print_line(f"{experiment.title}: {', '.join(str(path) for path in paths)}")


def _measure_features(results: grid.TableResults) -> None:
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
    labels = {row.label for experiment in experiments.load_experiments().values() for row in experiment.rows}
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
