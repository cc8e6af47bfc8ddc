"""The command `gpfl evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gpfl.cli import new_data
from gpfl.cli.command import Command
from gpfl.cli.options import option
from gpfl.cli.terminal import print_line, table_console
from gpfl.core.metrics import METRICS
from gpfl.inference.predict import ClientChoice
from gpfl.inference.predict import evaluate as evaluate_samples
from gpfl.report.client_tables import client_table


@click.command(cls=Command)
@new_data.run_argument
@new_data.data_argument
@click.option("--label", default="", metavar="COLUMN", help="Column of labels  [default: that of the training data]")
@new_data.client_options
@new_data.output_option("File to write all metrics to (.json).")
@click.option("--json", "as_json", is_flag=True, help="Print all metrics as JSON.")
@new_data.force_option
@option(
    "--metric",
    type=click.Choice(list(METRICS)),
    default="accuracy",
    metavar="NAME",
    help=f"Metric by which clients are ranked in the table: {', '.join(METRICS)}.",
)
@new_data.threshold_option
@new_data.choice_option(
    "--missing", ("error", "drop"), "Rows with missing inputs that the model does not fill: an error, or left out."
)
@new_data.choice_option("--missing-labels", ("error", "drop"), "Rows without a label: an error, or left out.")
@new_data.read_options
def evaluate(
    run: Path,
    data: Path,
    label: str,
    client: str,
    client_column: str,
    out: Path | None,
    as_json: bool,
    force: bool,
    metric: str,
    threshold: float | None,
    missing_labels: str,
    **reading: str,
) -> None:
    """Evaluate models on new labelled samples.

    Prints the metrics of each client with bootstrap intervals, as `gpfl run` does.
    """
    new_data.check_file(out, (".json",), overwrite=force)
    evaluation = evaluate_samples(
        run,
        data,
        ClientChoice(client, client_column),
        new_data.make_read_options(**reading),
        label=label,
        missing_labels="drop" if missing_labels == "drop" else "error",
        threshold=threshold,
    )
    text = json.dumps(evaluation.to_dict(), ensure_ascii=False, allow_nan=False)
    new_data.print_notes(evaluation.describe(), stderr=as_json)
    if as_json:
        print_line(text)
    else:
        table_console().print(client_table(evaluation.report, metric))
    if out is not None:
        new_data.write_output(out, (text + "\n").encode())
        new_data.print_notes([f"Metrics: {out}"], stderr=as_json)
