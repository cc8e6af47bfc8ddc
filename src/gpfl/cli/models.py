"""The commands that use or make models: `gpfl predict`, `gpfl evaluate`, `gpfl personalize` and `gpfl export`."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from gpfl.cli.command import Argument, Command
from gpfl.cli.options import PATH, CommaList, Decorator, compose, option, run_argument
from gpfl.cli.terminal import QUIET, print_line, table_console
from gpfl.core.metrics import METRICS
from gpfl.data.files.writer import OUTPUT_SUFFIXES, check_output, format_table
from gpfl.data.preprocessing import UNSEEN
from gpfl.errors import GpflError, pluralize
from gpfl.inference import load_model
from gpfl.inference import predict as predicting
from gpfl.inference.client_model import model_file_name
from gpfl.inference.inputs import ReadOptions
from gpfl.inference.model_card import FILES
from gpfl.io import files
from gpfl.report.client_tables import client_table, model_table
from gpfl.report.model_card import find_run, model_card
from gpfl.training import execute
from gpfl.training.personalize import personalize_data

STDOUT = Path("-")

model_argument = click.argument(
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
    help="Probability at which the second of two classes is predicted  [default: that of the model, chosen on validation "
    "samples; else 0.5]",
)
force_option = click.option("--force", is_flag=True, help="Overwrite an existing file.")
unseen_option = click.option(
    "--unseen",
    type=click.Choice(UNSEEN),
    help="Categories that no client trained on: an error, or ignored  [default: as the model was trained to]",
)
text_option = click.option(
    "--text", "text_columns", type=CommaList(str), default=(), help="Columns that make up a text, for models of texts."
)


def choice_option(flag: str, choices: Sequence[str], description: str) -> Decorator:
    """Add an option with some choices, of which the first is the default."""
    return option(flag, type=click.Choice(choices), default=choices[0], help=description)


def output_option(description: str, default: str | None = None) -> Decorator:
    """Add -o, the file to write."""
    return option("-o", "--out", type=PATH, default=default, metavar="FILE", help=description)


read_options = compose(
    unseen_option,
    choice_option(
        "--unreadable", ("error", "missing"), "Cells such as >100 in a column of numbers or dates: an error, or missing values."
    ),
    text_option,
)


@click.command(cls=Command)
@model_argument
@data_argument
@client_options
@output_option(f"File to write ({', '.join(OUTPUT_SUFFIXES)}); - prints CSV.", "-")
@click.option("--keep", type=CommaList(str), default=(), help="Columns of the data to write next to predictions.")
@force_option
@threshold_option
@read_options
def predict(run: Path, data: Path, out: Path, keep: tuple[str, ...], force: bool, client_column: str, **flags: Any) -> None:
    """Predict classes and probabilities of new samples.

    Rows need the columns of the training data, in any order; labels and further columns are ignored.
    """
    if out != STDOUT:
        check_output(out, OUTPUT_SUFFIXES, overwrite=force)
    options = _pop_read_options(flags)
    predictions = predicting.predict(run, data, options, keep=keep, client_column=client_column, **flags)
    content = format_table(predictions.to_columns([*keep, client_column] if client_column else keep), out.suffix.lower())
    _print_notes(predictions.describe(), stderr=out == STDOUT)
    if out != STDOUT:
        files.write_bytes(out, content)
        counts = ", ".join(f"{name} {count:,}" for name, count in predictions.count_classes().items() if count)
        print_line(f"Predictions: {out} ({counts})")
    elif not QUIET:
        try:
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        except BrokenPipeError:
            raise GpflError("the standard output was closed before all was written") from None


@click.command(cls=Command)
@model_argument
@data_argument
@click.option("--label", default="", metavar="COLUMN", help="Column of labels  [default: that of the training data]")
@client_options
@output_option("File to write all metrics to (.json).")
@click.option("--json", "as_json", is_flag=True, help="Print all metrics as JSON.")
@force_option
@option(
    "--metric",
    type=click.Choice(list(METRICS)),
    default="accuracy",
    metavar="NAME",
    help=f"Metric by which clients are ranked in the table: {', '.join(METRICS)}.",
)
@threshold_option
@choice_option("--missing", ("error", "drop"), "Rows with missing inputs that the model does not fill: an error, or left out.")
@choice_option("--missing-labels", ("error", "drop"), "Rows without a label: an error, or left out.")
@read_options
def evaluate(run: Path, data: Path, out: Path | None, as_json: bool, force: bool, metric: str, **flags: Any) -> None:
    """Evaluate models on new labelled samples.

    Prints the metrics of each client with bootstrap intervals, as `gpfl run` does.
    """
    if out is not None:
        check_output(out, (".json",), overwrite=force)
    evaluation = predicting.evaluate(run, data, _pop_read_options(flags), **flags)
    text = json.dumps(evaluation.to_dict(), ensure_ascii=False, allow_nan=False)
    _print_notes(evaluation.describe(), stderr=as_json)
    if as_json:
        print_line(text)
    else:
        table_console().print(client_table(evaluation.report, metric))
    if out is not None:
        files.write_text(out, text + "\n")
        _print_notes([f"Metrics: {out}"], stderr=as_json)


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
    "name",
    default="",
    metavar="NAME",
    help="Name of the client  [default: that in the run's column of clients, else the name of the file]",
)
@click.option("--label", default="", metavar="COLUMN", help="Column of labels  [default: that of the run]")
@output_option("Model file to write (.safetensors)  [default: in the folder models of the run]")
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
@unseen_option
@text_option
def personalize(run: Path, data: Path, out: Path | None, **flags: Any) -> None:
    """Make a model for a client that was not in training.

    The data of the run must be where they were in training. The run itself and existing models do not change.
    """
    result = execute.load(run)
    if out is not None:
        _check_model_file(out)
    new = personalize_data(result, data, options=_pop_read_options(flags), **flags)
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


@click.command(cls=Command)
@model_argument
@click.option("--client", default="", metavar="NAME", help="Client whose model is exported; not needed if there is one.")
@choice_option("--format", list(FILES), "Weights with JSON and Python source for torch, or one ONNX graph (needs gpfl[onnx]).")
@click.option("-o", "--out", type=PATH, metavar="FOLDER", help="New folder  [default: in the folder exports of the run]")
def export(run: Path, client: str, format: str, out: Path | None) -> None:
    """Write a client's model for use without gpfl.

    The folder holds the model with its preprocessing, an example that predicts raw samples, and a model card.
    """
    from gpfl.inference.export import check_export, export_model  # imports torch.export, which takes a second

    model = load_model(run, client)
    folder = out or (find_run(run) or run.parent) / "exports" / f"{quote(model.name, safe='')}-{format}"
    check_export(folder, format)
    source = run.name if run.is_absolute() else str(run)
    command = shlex.join(["gpfl", "export", source, "--client", model.name, "--format", format])
    paths = export_model(model, folder, format, model_card(model, run, format, command))
    print_line(f"Model of client {model.name}: {folder} ({', '.join(path.name for path in paths)}).")
    print_line(f"Try it with python {shlex.quote(str(folder / 'example.py'))} FILE; README.md is the model card.")


def _pop_read_options(flags: dict[str, Any]) -> ReadOptions:
    """Return how samples are read, and remove it from the flags of a command."""
    names = [name for name in ("unreadable", "missing") if name in flags]
    return ReadOptions(
        unseen=flags.pop("unseen") or "", text_columns=flags.pop("text_columns"), **{name: flags.pop(name) for name in names}
    )


def _print_notes(lines: Iterable[str], *, stderr: bool) -> None:
    """Print lines, to stderr if the standard output is for data."""
    for line in lines:
        print_line(line, stderr=stderr)


def _check_model_file(path: Path) -> None:
    if path.exists():
        raise GpflError(f"{path} exists and no model is overwritten: choose another --client or -o")
    check_output(path, (".safetensors",), overwrite=False)
