"""The command `gpfl reproduce`: any cell, row, column or all of the paper's tables and figures, ours beside theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from gpfl.cli import privacy as privacy_command
from gpfl.cli.command import Argument, Command
from gpfl.cli.data import download_datasets
from gpfl.cli.grid_plan import print_plan
from gpfl.cli.grid_progress import GridReporter
from gpfl.cli.grid_tables import show_held, tell_problems, write
from gpfl.cli.interrupt import StoppedError, interruptible, same_command
from gpfl.cli.options import Folder, config_option, option, out_option, parse_options, seeds_option, set_option
from gpfl.cli.overrides import check_method_set, parse_method_set
from gpfl.cli.terminal import console, print_error, print_line
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import grid
from gpfl.experiments import privacy_table as nine
from gpfl.experiments.definitions import PATIENCE, ROUNDS, Cell, find_experiments, load_experiments
from gpfl.experiments.grid import FederationCache, GridPlan, Job, Problems
from gpfl.experiments.selection import Selection, parse_names, select_cells
from gpfl.experiments.tuned_values import TunedValues
from gpfl.io import files
from gpfl.io.provenance import command_line, current_commit
from gpfl.report import paper_tables
from gpfl.training.config import ConfigDict
from gpfl.training.devices import find_device

ATTACKS = ("privacy", "table5")
"""What the table is called that attacks on uploads make."""

OF_ATTACKS = "gpfl privacy attacks --help lists its options"

RUN_FLAGS = ("protocol", "device", "engine", "precision", "compile", "checkpoint_every")
HAVE_FLAGS = {
    ("train", "rounds"): "--rounds",
    ("train", "patience"): "--patience",
    ("partition", "validation_fraction"): "--validation-fraction",
    **{("run", key): f"--{key.replace('_', '-')}" for key in RUN_FLAGS},
}
"""Settings that tables name, and that --set must not change behind their back."""

OTHERS = ("runs", "problems", "tuned", "privacy", "leaks", "defences")
"""What lies in a folder of results beside the tables of this command."""


@click.command(cls=Command, flags={f"{section}.{key}": flag for (section, key), flag in HAVE_FLAGS.items()})
@click.argument(
    "names",
    nargs=-1,
    cls=Argument,
    metavar="[EXPERIMENT]…",
    help="Experiments, such as effectiveness, table1, scalability, figure3, privacy, or all. Without one they are listed.",
)
@option(
    "--methods",
    default="all",
    metavar="NAME,…",
    help="Rows: names, all, or ablations. A method that the paper lacks, such as local, is added.",
)
@click.option(
    "--cells", metavar="KEY,…", help="Columns: keys such as cifar100/practical, patterns such as fmnist/*, or half a key."
)
@seeds_option("0,1,2", "Seeds of the trials; the paper has three.")
@option(
    "--rounds",
    default=ROUNDS,
    metavar="N",
    help=f"Maximum rounds; the paper has {ROUNDS}.",
)
@option(
    "--patience", default=PATIENCE, metavar="N", help="End a run after this many rounds without a better accuracy; 0: never."
)
@option(
    "--validation-fraction",
    "validation",
    default=0.0,
    metavar="X",
    help="Fraction of training samples for validation, such as 0.1; adds the accuracy of the round that they select.",
)
@out_option("Folder; runs it already holds are not repeated.", "results")
@click.option("--table", metavar="NAME", help="Name of the table's folder in --out, instead of the experiment's.")
@click.option("--dry-run", is_flag=True, help="List the cells with their state, estimated time and memory; run nothing.")
@click.option("--only-tables", is_flag=True, help="Write tables and figures from finished runs; run nothing.")
@option("--figures/--no-figures", default=True, help="Draw the figures of the experiments.")
@click.option("--keep-weights", is_flag=True, help="Keep checkpoints and models of all runs: gigabytes per cell.")
@click.option("--tuned", type=Folder(), metavar="DIR", help="Use the values that gpfl tune chose, from its --out.")
@set_option("Set any option of the config, or of one method, such as fedprox.mu=0.01.")
@config_option("run", *RUN_FLAGS)
def reproduce(
    names: tuple[str, ...],
    methods: str,
    cells: str | None,
    seeds: list[int],
    rounds: int,
    patience: int,
    validation: float,
    out: Path,
    table: str | None,
    dry_run: bool,
    only_tables: bool,
    figures: bool,
    keep_weights: bool,
    tuned: Path | None,
    assignments: tuple[str, ...],
    **values: object,
) -> None:
    """Reproduce the paper's tables and figures.

    Runs any cell, row, column or table, and shows the results next to the paper's.
    """
    if not names:
        list_experiments()
        return
    words = tuple(dict.fromkeys(word for name in names for word in parse_names("EXPERIMENT", name.lower())))
    if dry_run and only_tables:
        raise GpflError("--dry-run and --only-tables were both given: leave one out")
    if {*ATTACKS} & {*words}:
        given = {
            "--methods": methods != "all",
            "--cells": cells is not None,
            "--validation-fraction": validation != 0,
            "--table": table is not None,
            "--tuned": tuned is not None,
            "--only-tables": only_tables,
            "--no-figures": not figures,
        }
        refuse_unheard_by_attacks(words, [flag for flag, said in given.items() if said], assignments, values)
        make_attacks(seeds, rounds, patience, assignments, values, out, dry_run)
        return
    asked = select_cells(find_experiments(words, ATTACKS), cells, methods)
    plan = planned(asked, seeds, rounds, patience, validation, out, table, assignments, tuned, keep_weights, values)
    failed = make_tables(asked, plan, dry_run, only_tables, figures)
    if "all" in words:
        print_line("All but privacy, which is made by attacks: gpfl reproduce privacy.")
    if failed:
        process_group().barrier()  # a process that ended before the first has spoken would take it along
        raise click.exceptions.Exit(1)


def make_tables(asked: Selection, plan: GridPlan, dry_run: bool, only_tables: bool, figures: bool) -> bool:
    """Tells whether something failed, having run what was asked for and is missing, and written its tables and figures."""
    grid.check_cells(asked.cells, plan)
    if only_tables:
        show_held(asked, plan, figures)
        return False
    check_device(plan)
    if not dry_run:
        files.make_folder(plan.out / "runs")
    here, wanting = divided(asked, dry_run)
    with console.status("Laying out the cells"):
        jobs, wrong = grid.make_jobs(here, plan, FederationCache())
    sound = print_plan(jobs, plan, wrong, wanting) if dry_run else True
    for words in dict.fromkeys(job.caveat for job in jobs if job.caveat):
        print_line(words)
    if dry_run:
        return not sound
    problems = run(jobs, plan, asked, wrong, figures) | wrong
    if problems:
        print_error(f"{pluralize(len(problems), 'cell')} of {len(here)} failed; once that is mended, the same command goes on:")
        tell_problems(problems)
    return bool(problems)


def make_attacks(
    seeds: Sequence[int],
    rounds: int,
    patience: int,
    assignments: tuple[str, ...],
    values: Mapping[str, object],
    out: Path,
    dry_run: bool,
) -> None:
    """Makes the table of attacks on the runs of the first seed."""
    given = parse_options(values).get("run", {})
    device, engine = (str(given.get(key, "auto")) for key in ("device", "engine"))
    if len(seeds) > 1:
        print_line(f"Attacks are on the runs of one seed, {seeds[0]}.")
    refuse_flagged(parse_method_set(assignments)[0])
    with interruptible(same_command):
        click.get_current_context().invoke(
            privacy_command.attacks,
            seed=seeds[0],
            rounds=rounds,
            patience=patience,
            assignments=assignments,
            device=device,
            engine=engine,
            out=out,
            dry_run=dry_run,
        )


def refuse_unheard_by_attacks(
    words: Sequence[str], deaf: Sequence[str], assignments: tuple[str, ...], values: Mapping[str, object]
) -> None:
    """Refuses to make the table of attacks together with others, or by flags that it does not listen to."""
    if others := [word for word in words if word not in ATTACKS]:
        raise GpflError(f"privacy is made by attacks, which {others[0]} is not: ask for one at a time; {OF_ATTACKS}")
    _, own = parse_method_set(assignments)
    of_runs = parse_options(values).get("run", {})
    deaf = [
        *deaf,
        *(f"--set {name}.…" for name in own if name not in nine.METHODS),
        *(f"--{key.replace('_', '-')}" for key in of_runs if key not in ("device", "engine")),
    ]
    if deaf:
        raise GpflError(f"privacy does not listen to {', '.join(deaf)}: leave out one or the other; {OF_ATTACKS}")


# What is asked.


def planned(
    asked: Selection,
    seeds: list[int],
    rounds: int,
    patience: int,
    validation: float,
    out: Path,
    table: str | None,
    assignments: tuple[str, ...],
    tuned: Path | None,
    keep_weights: bool,
    values: Mapping[str, object],
) -> GridPlan:
    """Gives the plan of the flags."""
    settings, own = parse_method_set(assignments)
    running = [row.method["name"] for rows in asked.rows.values() for row in rows]
    check_method_set(settings, own, running)
    refuse_flagged(settings)
    if "name" in settings.get("data", {}):
        raise GpflError("--set data.name would put other data under the names of the paper's: gpfl compare --data is for them")
    chosen = TunedValues.read(tuned) if tuned is not None else None
    if chosen:
        chosen.check_overrides(own, settings)
    by_flags = parse_options(values).get("run", {})
    protocol = by_flags.pop("protocol", "corrected")
    return GridPlan(
        out=out,
        seeds=tuple(seeds),
        rounds=rounds,
        patience=patience,
        protocol=str(protocol),
        validation=validation,
        run=by_flags,
        common=settings,
        own=own,
        weights=keep_weights,
        tuned=chosen,
        table=table_name(table, [one.name for one in asked.experiments], out) if table is not None else "",
    )


def refuse_flagged(settings: ConfigDict) -> None:
    """Refuses settings that have a flag of their own, by which tables name them."""
    for (section, key), name in HAVE_FLAGS.items():
        if key in settings.get(section, {}):
            raise GpflError(f"--set {section}.{key} would not be named in tables: give {name}")


def table_name(name: str, asked: Sequence[str], out: Path) -> str:
    """Gives the name of --table; refuses one that is not a folder's, or whose folder holds something else."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise GpflError(
            f"--table is '{name}'; give a folder's name of letters, digits, '-', '_' and '.', a letter or a digit first"
        )
    if len(asked) > 1:
        raise GpflError(f"--table {name} names one table, {', '.join(asked)} are {len(asked)}: ask for one at a time")
    folder, way = out / name, f"give another name, such as {asked[0]}-2"
    if name.lower() in {*OTHERS, *load_experiments()} - {*asked}:
        raise GpflError(f"--table is '{name}', which has another meaning below {out}: {way}")
    if folder.exists() and not folder.is_dir():
        raise GpflError(f"--table is '{name}', but {folder} is a file: {way}")
    if folder.is_dir() and any(folder.iterdir()) and paper_tables.saved_experiment(folder) != asked[0]:
        raise GpflError(f"--table is '{name}', but {folder} holds something other than a table of {asked[0]}: {way}")
    return name


def check_device(plan: GridPlan) -> None:
    """Raise if the device is missing or lacks the precision, before every cell fails."""
    device = find_device(str(plan.run.get("device", "auto")))
    precision = plan.run.get("precision", "float32")
    if precision != "float32" and device.type != "cuda":
        raise GpflError(f"run.precision is '{precision}', which is for a GPU; run.device is '{device}': leave it out")


def divided(asked: Selection, dry_run: bool) -> tuple[list[Cell], dict[str, list[str]]]:
    """Gives the cells whose data are on this machine, and the columns of those that are not by data.

    Where nothing else was asked for, the data are got.
    """
    needed = {column.data for columns in asked.columns.values() for column in columns}
    absent = process_group().run_on_main(lambda: {name for name in needed if not grid.has_data(name)})
    wanting: dict[str, list[str]] = {
        name: list(dict.fromkeys(c.key for columns in asked.columns.values() for c in columns if c.data == name))
        for name in sorted(absent)
    }
    here = [cell for cell in asked.cells if cell.column.data not in absent]
    if not here and not dry_run:
        download_datasets(sorted(absent))
        return asked.cells, {}
    for name, keys in wanting.items():
        print_line(f"{', '.join(keys)}: data not here: gpfl data get {name}")
    return here, wanting


def list_experiments() -> None:
    """Prints what can be reproduced."""
    for one in load_experiments().values():
        print_line(f"{one.name} ({', '.join(one.aliases)}): {one.title}; {len(one.rows)} methods")
        for column in one.columns:
            missing = "" if grid.has_data(column.data) else f"; data not here: gpfl data get {column.data}"
            extra = "; only where --cells names it" if column.extra else ""
            print_line(f"  {column.key:<26}{column.heading}, {column.group}{extra}{missing}")
    missing = "" if grid.has_data("cifar100") else "; data not here: gpfl data get cifar100"
    print_line(f"privacy (table5): attacks on uploads, nine columns on Cifar100; {OF_ATTACKS}{missing}")
    print_line("")
    print_line("gpfl reproduce table1 --methods gpfl,fedavg --cells cifar100/practical    # a name, its rows and its columns")
    print_line("gpfl reproduce all --dry-run                                              # what would be run, and how long")


# Running.


def run(
    jobs: Sequence[Job],
    plan: GridPlan,
    asked: Selection,
    wrong: Problems,
    figures: bool,
) -> Problems:
    """Gives what went wrong by column and row, having run what is missing and written tables and figures of all there is."""
    facts = {"command": command_line(), "commit": current_commit()}
    lacking = grid.unfinished_jobs(jobs, plan)
    if len(lacking) < len(jobs):
        print_line(f"Run before: {len(jobs) - len(lacking)} of {pluralize(len(jobs), 'cell')}.")
    try:
        with GridReporter(console, lacking, plan.seeds) as reporter:
            failed = grid.run_all(lacking, plan, reporter.callback, facts, reporter.end)
    except KeyboardInterrupt:
        if process_group().is_main:
            with suppress(GpflError):
                write(jobs, plan, asked, {}, figures=False)
        raise StoppedError(same_command()) from None
    if left := [job.label for job in jobs if failed.get(job.folder) == grid.LOCKED]:
        print_line(f"Skipped: {', '.join(left)}. Another process is running it.")
    problems = {
        (cell.column.key, cell.variant.label): failed[job.folder]
        for job in jobs
        if job.folder in failed and failed[job.folder] != grid.LOCKED
        for cell in job.cells
    }
    process_group().run_on_main(lambda: write(jobs, plan, asked, problems | wrong, figures))
    return problems
