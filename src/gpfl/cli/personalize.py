"""The command `gpfl personalize`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from gpfl.cli import new_data
from gpfl.cli.command import Command
from gpfl.cli.options import PATH, option, run_argument
from gpfl.cli.terminal import print_line, table_console
from gpfl.data.files.writer import check_output
from gpfl.errors import GpflError, pluralize
from gpfl.inference.client_model import model_file_name
from gpfl.inference.inputs import ReadOptions
from gpfl.report.client_tables import model_table
from gpfl.training import api
from gpfl.training.personalize import personalize_data


@click.command(cls=Command)
@run_argument
@click.option(
    "--data",
    required=True,
    type=PATH,
    metavar="DATA",
    help="The client's samples with labels: a table, folder of images, or .npz file, as in training.",
)
@click.option(
    "--client",
    default="",
    metavar="NAME",
    help="Name of the client  [default: that in the run's column of clients, else the name of the file]",
)
@click.option("--label", default="", metavar="COLUMN", help="Column of labels  [default: that of the run]")
@new_data.output_option("Model file to write (.safetensors)  [default: in the folder models of the run]")
@option("--rounds", type=click.IntRange(min=0), default=20, metavar="N", help="Rounds of local training.")
@click.option(
    "--test-fraction",
    type=click.FloatRange(0, 0.9),
    metavar="X",
    help="Fraction of the samples to measure the model on; 0 trains on all  [default: that of the run]",
)
@click.option(
    "--validation-fraction",
    type=click.FloatRange(0, 0.9),
    metavar="X",
    help="Fraction of the training samples to choose a decision threshold on  [default: that of the run]",
)
@new_data.unseen_option
@new_data.text_option
def personalize(
    run: Path,
    data: Path,
    client: str,
    label: str,
    out: Path | None,
    rounds: int,
    test_fraction: float | None,
    validation_fraction: float | None,
    unseen: str | None,
    text_columns: list[str],
) -> None:
    """Make a model for a client that was not in training.

    The data of the run must be where they were in training. The run itself and existing models do not change.
    """
    result = api.load(run)
    if out is not None:
        _check_model_file(out)
    new = personalize_data(
        result,
        data,
        name=client,
        label=label,
        rounds=rounds,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        options=ReadOptions(unseen=unseen or "", text_columns=tuple(text_columns)),
    )
    name = new.model.name
    path = out or run / "models" / model_file_name(name)
    _check_model_file(path)
    new.model.save(path)
    purposes = {"train": "training", "validation": "validation", "test": "testing"}
    sizes = ", ".join(f"{count:,} for {purposes[split]}" for split, count in new.n_samples.items())
    print_line(f"{data.name}: {pluralize(sum(new.n_samples.values()), 'sample')} of client {name}: {sizes}.")
    for line in new.notes:
        print_line(line)
    if new.reports:
        table_console().print(model_table(new.reports))
    source = f"{shlex.quote(str(run))} --client {shlex.quote(name)}" if out is None else shlex.quote(str(path))
    print_line(f"Model of client {name}: {path}. Use it with gpfl predict {source} DATA")


def _check_model_file(path: Path) -> None:
    if path.exists():
        raise GpflError(f"{path} exists and no model is overwritten: choose another --client or -o")
    check_output(path, (".safetensors",), overwrite=False)
