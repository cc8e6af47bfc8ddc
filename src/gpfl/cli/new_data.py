"""Options of the commands that apply models to new data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from gpfl.cli.command import Argument
from gpfl.cli.options import PATH, CommaList, Decorator, compose, option
from gpfl.cli.terminal import QUIET
from gpfl.data.files.writer import check_output
from gpfl.data.preprocessing import UNSEEN
from gpfl.errors import GpflError
from gpfl.inference.inputs import ReadOptions
from gpfl.io import files

STDOUT = Path("-")

run_argument = click.argument(
    "run", cls=Argument, metavar="RUN", type=PATH, help="Folder of a finished run, a folder of models, or a model file."
)
data_argument = click.argument(
    "data",
    cls=Argument,
    metavar="DATA",
    type=PATH,
    help="Table (.csv, .tsv, .parquet), folder with one per client, folder of images, or .npz file, as in training.",
)
client_options = compose(
    click.option("--client", default="", metavar="NAME", help="Client whose model predicts all samples."),
    click.option("--client-column", default="", metavar="COLUMN", help="Column that names the client of each row."),
)
threshold_option = click.option(
    "--threshold",
    type=float,
    metavar="X",
    help="Probability from which the second of two classes is predicted  [default: that of the model, chosen on validation "
    "samples; else 0.5]",
)
force_option = click.option("--force", is_flag=True, help="Overwrite an existing file.")
unseen_option = click.option(
    "--unseen",
    type=click.Choice(UNSEEN),
    help="Categories that no client trained on: an error, or ignored  [default: as the model was trained to]",
)
text_option = click.option(
    "--text", "text_columns", type=CommaList(str), default=[], help="Columns that make up a text, for models of texts."
)


def choice_option(flag: str, choices: Sequence[str], description: str) -> Decorator:
    """Add an option with some choices, of which the first is the default."""
    return option(flag, type=click.Choice(choices), default=choices[0], help=description)


read_options = compose(
    unseen_option,
    choice_option(
        "--unreadable", ("error", "missing"), "Cells such as >100 in a column of numbers or dates: an error, or missing values."
    ),
    text_option,
)


def output_option(description: str, default: str | None = None) -> Decorator:
    """Add -o, the file to write."""
    return option("-o", "--out", type=PATH, default=default, metavar="FILE", help=description)


def make_read_options(unseen: str | None, unreadable: str, text_columns: Sequence[str], missing: str = "error") -> ReadOptions:
    """Return how to read new data, from the flags of `read_options`."""
    return ReadOptions(
        unseen=unseen or "",
        unreadable="missing" if unreadable == "missing" else "error",
        missing="drop" if missing == "drop" else "error",
        text_columns=tuple(text_columns),
    )


def check_file(path: Path | None, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    """Raise, before anything is computed, if an output file cannot be written."""
    if path is not None and path != STDOUT:
        check_output(path, suffixes, overwrite=overwrite)


def write_output(path: Path, content: bytes) -> None:
    """Write a file atomically, or to the standard output if the path is -."""
    if path != STDOUT:
        files.write_bytes(path, content)
    elif not QUIET:
        try:
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        except BrokenPipeError:
            raise GpflError("the standard output was closed before all was written") from None


def print_notes(lines: Sequence[str], *, stderr: bool) -> None:
    """Print lines, to stderr if the standard output is for data."""
    console = Console(stderr=stderr, quiet=QUIET)
    for line in lines:
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
