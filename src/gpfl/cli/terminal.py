"""Words for the terminal. Of several ranks, the first speaks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gpfl.data import FileDataset
from gpfl.data.published.dataset import caveat
from gpfl.data.table import Table
from gpfl.experiments.trials import Trials
from gpfl.report import tables
from gpfl.training import config as configs
from gpfl.training.result import Result

SILENT = os.environ.get("RANK", "0") != "0"
console = Console(quiet=SILENT)


def wide() -> Console:
    """Gives the terminal, or where output is none, one as wide as a table needs."""
    return console if console.is_terminal else Console(width=160, quiet=SILENT)


def say(text: str) -> None:
    """Prints a line as it is."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def complain(text: str) -> None:
    """Prints one line of complaint."""
    Console(stderr=True, quiet=SILENT).print(f"gpfl: {text}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_rows(rows: list[Trials], title: str, notes: Sequence[str] = ()) -> None:
    """Prints the table of methods and what must be known of it; where output is not a terminal it is as wide as it needs."""
    place = wide()
    place.print(tables.rich_table(rows, title, place.width))
    for note in (*tables.idle_notes(rows), *notes):
        say(note)


def tell_caveat(table: Table) -> None:
    """Prints what nobody vouches for in a published set: rows that it lacks, files that were not checked."""
    words = caveat(table)
    if words:
        say(words)


def tell_data(config: configs.Config) -> None:
    """Prints what should be known of the data before hours of training: what a person's own files hold, what a set lacks."""
    if config.source is not None:
        tell_caveat(config.source.load())
    if isinstance(config.source, FileDataset):
        say(config.source.load().words)
        for words in config.federation().data_warnings():
            say(words)


def tell_run(result: Result, folder: Path) -> None:
    """Prints the outcome of a run."""
    s = result.summary
    say(
        f"{s['method']}: best accuracy {s['best_accuracy']:.2%} at round {s['best_round']}, last {s['last_accuracy']:.2%}, "
        f"std over clients {s['std']:.2%}, {s['seconds']:.1f} s ({s['engine']} on {s['device']})."
    )
    if "validation_best_accuracy" in s:
        say(f"At the best round on validation rows ({s['validation_best_round']}): {s['validation_best_accuracy']:.2%}.")
    if s["idle_clients"]:
        say(tables.idle_note(s))
    say(f"Run: {folder}. Each client's model (round {s['selected_round']}): {folder / 'models'}")


def tell_trials(trials: Trials, folder: Path) -> None:
    """Prints the outcome of trials."""
    show_rows([trials], f"{len(trials.summaries)} trials, mean ± std over them")
    say(f"Trials: {folder}")
