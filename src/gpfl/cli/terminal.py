"""Printing on the terminal. Of several ranks, only rank 0 prints."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gpfl.core.metrics import METRICS
from gpfl.data import FileDataset
from gpfl.data.preprocessing import PreprocessingOptions
from gpfl.data.published.dataset import provenance_warning
from gpfl.data.table import Table
from gpfl.experiments.stored_runs import Trials
from gpfl.inference.threshold import describe_thresholds
from gpfl.report.client_tables import client_table
from gpfl.report.method_tables import REPORTED_ROUNDS, format_idle_note, method_table
from gpfl.training.config import Config
from gpfl.training.result import Result

QUIET = os.environ.get("RANK", "0") != "0"
console = Console(quiet=QUIET)


def table_console() -> Console:
    """Return the console for tables, with wide lines if the output is not a terminal."""
    return console if console.is_terminal else Console(width=1000, quiet=QUIET)


def print_line(text: str, *, stderr: bool = False) -> None:
    """Print text as it is, without markup."""
    target = Console(stderr=True, quiet=QUIET) if stderr else console
    target.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Print one line to stderr."""
    print_line(f"gpfl: {text}", stderr=True)


def print_method_table(methods: Sequence[Trials], title: str, notes: Sequence[str] = ()) -> None:
    """Print the table of methods and notes."""
    table_console().print(method_table(methods, title, notes))


def print_dataset_warning(table: Table) -> None:
    """Print a warning if a published dataset is incomplete or unverified."""
    if text := provenance_warning(table):
        print_line(text)


def print_data_warnings(config: Config) -> None:
    """Print warnings about the data before training starts, and how files were read."""
    if config.source is not None:
        print_dataset_warning(config.source.load())
    if not isinstance(config.source, PreprocessingOptions):
        return
    if isinstance(config.source, FileDataset):
        print_line(config.source.load().description)
    federation = config.federation()
    for warning in federation.data_warnings():
        print_line(warning)
    if federation.preprocessing is not None:
        print_line(federation.preprocessing.describe())


def print_run_summary(result: Result, folder: Path) -> None:
    """Print the result of a run."""
    s = result.summary
    chosen_round, name = REPORTED_ROUNDS[str(s["selected_by"])], str(s["metric"])
    other = "" if name == "accuracy" else f"{METRICS[name].label} {s[f'selected_{name}']:.4f}, "
    std = f"std over clients {s['selected_std']:.2%}, " if "selected_std" in s else ""
    print_line(
        f"{s['method']}: {other}accuracy {s['selected_accuracy']:.2%} at round {s['selected_round']} ({chosen_round}), "
        f"{std}{s['seconds']:.1f} s ({s['engine']} on {s['device']})."
    )
    table_console().print(client_table(result.metrics, name))
    for line in describe_thresholds(result.thresholds, result.federation.class_names[-1]):
        print_line(f"{line} Saved models use it; the table takes the more probable class, and metrics.json has both.")
    if s["idle_clients"]:
        print_line(format_idle_note(s))
    print_line(f"Run: {folder}. Each client's model (round {s['selected_round']}): {folder / 'models'}")
