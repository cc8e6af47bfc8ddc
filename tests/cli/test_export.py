"""The command `gpfl export`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, assert_error
from exported import run_example
from patients import fit, make_rows, write_rows

import gpfl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patients")
    fit(folder, validation_fraction=0.3)
    return folder


@pytest.fixture
def trained(command: Command, folder: Path) -> Command:
    """The command in a folder with a run on visits.csv, and new.csv."""
    shutil.copytree(folder, Path(), dirs_exist_ok=True)
    write_rows(Path("new.csv"), make_rows(30, seed=1))
    return command


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_exported_models_predict_as_gpfl_predict_does(format: str, trained: Command) -> None:
    result = trained("export", "run", "--client", "St. Mary", "--format", format)
    assert (result.code, result.err) == (0, "")
    out = Path("run") / "exports" / f"St.%20Mary-{format}"
    first, second = result.out.splitlines()
    assert first.startswith(f"Model of client St. Mary: {out} (model.{format}, ")
    assert second == f"Try it with python {out}/example.py FILE; README.md is the model card."
    model = gpfl.load_model("run", "St. Mary")
    assert model.threshold is not None
    predictions, probabilities = run_example(out, Path("new.csv"))
    assert np.abs(probabilities - model.predict_proba("new.csv")).max() < 1e-5
    assert predictions == model.predict("new.csv").tolist()
    again = trained("export", "run", "--client", "St. Mary", "--format", format)
    assert_error(again, f"{out} exists and nothing is overwritten: choose another -o, or remove it")


def test_errors_name_the_fix(trained: Command) -> None:
    assert_error(
        trained("export", "run", "--client", "nort", "-o", "out"), "run has no model of a client 'nort'; did you mean 'north'?"
    )
    assert_error(trained("export", "run"), "run has the models of 3 clients: name one with --client (St. Mary, north, south)")
    assert_error(trained("export", "runs", "--client", "north"), "there is no run or model runs")
    shutil.rmtree(Path("run") / "models")
    assert_error(
        trained("export", "run", "--client", "north"), "run has no models; they were deleted: train again with gpfl run"
    )
    assert not Path("out").exists()
