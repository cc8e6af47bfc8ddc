"""The command `gpfl personalize`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from conftest import Command, assert_error, read_files
from patients import fit, make_rows, write_rows

import gpfl


def test_a_new_client_gets_a_model_beside_those_of_the_run(command: Command) -> None:
    fit(Path(), method="ditto", validation_fraction=0.3)
    before = read_files(Path("run"))
    write_rows(Path("west.csv"), make_rows(40, seed=7), ("chol", "pain", "age", "outcome"))
    result = command("personalize", "run", "--data", "west.csv", "--rounds", 3)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "west.csv: 40 samples of client west: 21 for training, 9 for validation, 10 for testing."
    assert [line.split("  ")[0] for line in lines if "model  " in line] == ["model", "personal model", "shared model"]
    path = Path("run/models/client-west.safetensors")
    assert lines[-1] == f"Model of client west: {path}. Use it with gpfl predict run --client west DATA"
    assert {name: content for name, content in read_files(Path("run")).items() if "west" not in name} == before
    model = gpfl.load_model("run", "west")
    predicted = command("predict", "run", "--client", "west", "west.csv", "-o", "out.csv")
    assert predicted.code == 0, predicted.err
    written = np.loadtxt("out.csv", delimiter=",", skiprows=1, usecols=(1, 2))
    assert np.abs(written - model.predict_proba("west.csv")).max() < 1e-6

    again = command("personalize", "run", "--data", "west.csv")
    assert_error(again, f"{path} exists and no model is overwritten: choose another --client or -o")
    assert command("personalize", "run", "--data", "west.csv", "--rounds", 0, "-o", "w.safetensors").code == 0
    assert gpfl.load_model("w.safetensors").name == "west"


def test_mistakes_are_one_line(command: Command) -> None:
    fit(Path(), rounds=1)
    write_rows(Path("west.csv"), make_rows(40, seed=7))
    call = ("personalize", "run", "--data", "west.csv")
    assert_error(command(*call, "--client", "north"), "client 'north' took part in training and has a model: choose another")
    assert_error(command(*call, "--client", "wst"), "column 'hospital' of west.csv does not name client 'wst'; did you mean")
    assert_error(command(*call, "-o", "w.txt"), "cannot write w.txt: its name must end in .safetensors")
    assert_error(command("personalize", "nowhere", "--data", "west.csv"), "nowhere holds no run (no config.toml)")
    assert_error(command("personalize", "run", "--data", "none.csv"), "there is no file none.csv")
    assert_error(command("personalize", "run"), "Missing option '--data'")
    Path("run/summary.json").unlink()
    assert_error(command(*call), "the run in run has not finished: gpfl resume run")
