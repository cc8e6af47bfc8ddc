"""The command `gpfl predict`."""

from __future__ import annotations

from pathlib import Path

import click

from gpfl.cli import new_data
from gpfl.cli.command import Command
from gpfl.cli.options import CommaList
from gpfl.data.files.writer import OUTPUT_SUFFIXES, format_table
from gpfl.inference.predict import ClientChoice
from gpfl.inference.predict import predict as predict_samples


@click.command(cls=Command)
@new_data.run_argument
@new_data.data_argument
@new_data.client_options
@new_data.output_option(f"File to write ({', '.join(OUTPUT_SUFFIXES)}); - prints CSV.", "-")
@click.option("--keep", type=CommaList(str), default=[], help="Columns of the data to write beside predictions.")
@new_data.force_option
@new_data.threshold_option
@new_data.read_options
def predict(
    run: Path,
    data: Path,
    client: str,
    client_column: str,
    out: Path,
    keep: list[str],
    force: bool,
    threshold: float | None,
    **reading: str,
) -> None:
    """Predict classes and probabilities of new samples.

    Rows need the columns of the training data, in any order; labels and further columns are ignored.
    """
    new_data.check_file(out, OUTPUT_SUFFIXES, overwrite=force)
    choice = ClientChoice(client, client_column)
    options = new_data.make_read_options(**reading)
    predictions = predict_samples(run, data, choice, options, keep=keep, threshold=threshold)
    kept = keep if not client_column else [*keep, client_column]
    content = format_table(predictions.to_columns(kept), out.suffix.lower())
    new_data.print_notes(predictions.describe(), stderr=out == new_data.STDOUT)
    new_data.write_output(out, content)
    if out != new_data.STDOUT:
        counts = ", ".join(f"{name} {count:,}" for name, count in predictions.count_classes().items() if count)
        new_data.print_notes([f"Predictions: {out} ({counts})"], stderr=False)
