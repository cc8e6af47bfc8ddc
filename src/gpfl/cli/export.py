"""The command `gpfl export`."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import quote

import click

from gpfl.cli import new_data
from gpfl.cli.command import Command
from gpfl.cli.options import PATH
from gpfl.cli.terminal import print_line
from gpfl.inference.export import FORMATS, check_export, export_model
from gpfl.inference.load import load_model
from gpfl.report.model_card import find_run, model_card


@click.command(cls=Command)
@new_data.run_argument
@click.option("--client", default="", metavar="NAME", help="Client whose model is exported; not needed if there is one.")
@new_data.choice_option(
    "--format", FORMATS, "Weights with JSON and Python source for torch, or one ONNX graph (needs gpfl[onnx])."
)
@click.option("-o", "--out", type=PATH, metavar="FOLDER", help="New folder  [default: in the folder exports of the run]")
def export(run: Path, client: str, format: str, out: Path | None) -> None:
    """Write a client's model for use without gpfl.

    The folder holds the model with its preprocessing, an example that predicts raw samples, and a model card.
    """
    model = load_model(run, client)
    folder = out or (find_run(run) or run.parent) / "exports" / f"{quote(model.name, safe='')}-{format}"
    check_export(folder, format)
    command = shlex.join(
        ["gpfl", "export", run.name if run.is_absolute() else str(run), "--client", model.name, "--format", format]
    )
    paths = export_model(model, folder, format, model_card(model, run, format, command))
    print_line(f"Model of client {model.name}: {folder} ({', '.join(path.name for path in paths)}).")
    print_line(f"Try it with python {shlex.quote(str(folder / 'example.py'))} FILE; README.md is the model card.")
