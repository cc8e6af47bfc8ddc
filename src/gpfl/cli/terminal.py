"""Words for the terminal. Of several process_group, the first speaks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gpfl.data import FileDataset
from gpfl.data.published.dataset import provenance_warning
from gpfl.data.table import Table
from gpfl.experiments.trials import Trials
from gpfl.report import method_tables
from gpfl.training import config as configs
from gpfl.training.result import Result

SILENT = os.environ.get("RANK", "0") != "0"
console = Console(quiet=SILENT)


def table_console() -> Console:
    """Gives the terminal, or where output is none, one as wide as a table needs."""
    return console if console.is_terminal else Console(width=160, quiet=SILENT)


def print_line(text: str) -> None:
    """Prints a line as it is."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Prints one line of complaint."""
    Console(stderr=True, quiet=SILENT).print(f"gpfl: {text}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_method_table(rows: list[Trials], title: str, notes: Sequence[str] = ()) -> None:
    """Prints the table of methods and what must be known of it; where output is not a terminal it is as wide as it needs."""
    place = table_console()
    place.print(method_tables.rich_table(rows, title, place.width))
    for note in (*method_tables.format_idle_notes(rows), *notes):
        print_line(note)


def print_dataset_caveat(table: Table) -> None:
    """Prints what nobody vouches for in a published set: rows that it lacks, files that were not checked."""
    words = provenance_warning(table)
    if words:
        print_line(words)


def print_data_warnings(config: configs.Config) -> None:
    """Prints what should be known of the data before hours of training: what a person's own files hold, what a set lacks."""
    if config.source is not None:
        print_dataset_caveat(config.source.load())
    if isinstance(config.source, FileDataset):
        print_line(config.source.load().description)
        for words in config.federation().data_warnings():
            print_line(words)


def print_run_summary(result: Result, folder: Path) -> None:
    """Prints the outcome of a run."""
    s = result.summary
    print_line(
        f"{s['method']}: best accuracy {s['best_accuracy']:.2%} at round {s['best_round']}, last {s['last_accuracy']:.2%}, "
        f"std over clients {s['std']:.2%}, {s['seconds']:.1f} s ({s['engine']} on {s['device']})."
    )
    if "validation_best_accuracy" in s:
        print_line(f"At the best round on validation rows ({s['validation_best_round']}): {s['validation_best_accuracy']:.2%}.")
    if s["idle_clients"]:
        print_line(method_tables.format_idle_note(s))
    print_line(f"Run: {folder}. Each client's model (round {s['selected_round']}): {folder / 'models'}")


def print_trials_summary(trials: Trials, folder: Path) -> None:
    """Prints the outcome of trials."""
    print_method_table([trials], f"{len(trials.summaries)} trials, mean ± std over them")
    print_line(f"Trials: {folder}")
