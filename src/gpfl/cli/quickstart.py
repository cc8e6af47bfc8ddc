"""The command `gpfl quickstart`."""

from __future__ import annotations

from pathlib import Path

import click

from gpfl.cli.command import Command
from gpfl.cli.interrupt import interruptible, program, same_command
from gpfl.cli.options import out_option
from gpfl.cli.overrides import new_folder
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_line, print_method_table
from gpfl.experiments import quickstart as experiment
from gpfl.report import figures, method_tables
from gpfl.training.run_dir import make_empty_folder


@click.command(cls=Command)
@out_option("Folder for the results; an interrupted quickstart in it is resumed.")
def quickstart(out: Path | None) -> None:
    """Train GPFL, FedAvg and local models on digits in under two minutes.

    Each runs with three seeds. Prints a table and draws the accuracies.
    """
    folder = new_folder(out, Path("runs") / "quickstart")
    if not experiment.was_started(folder):
        make_empty_folder(folder)
    print_line("1,797 handwritten digits on 20 clients; each has 4 of the 10 classes, in unequal numbers.")
    with interruptible(lambda: same_command(*() if out else ("--out", str(folder)))):
        with ProgressReporter(console) as reporter:
            rows = experiment.quickstart(folder, reporter.callback)
        title = "Digits, 20 clients with 4 classes each: mean ± std over 3 seeds"
        print_method_table(rows, title)
        figures.draw_learning_curves(rows, [folder / "curves.png"], "Digits, 20 clients with 4 classes each, 3 seeds")
        method_tables.save(rows, folder, title)
    print_line(f"Curves: {folder / 'curves.png'}. Table: {folder / 'table.md'}. Models: {rows[0].runs[0].path / 'models'}")
    print_line(
        "fedavg trains one model for all clients, gpfl one per client with shared features, local each client alone. Four "
        "classes are so easy that local training is hard to beat here; one model for all clients is clearly worse."
    )
    print_line(f"Next: {program()} run --method gpfl --partition dirichlet --beta 0.1")
