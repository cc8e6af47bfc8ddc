"""The commands `gpfl predict` and `gpfl evaluate`."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, assert_error
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


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_run_shows_the_thresholds_that_its_models_have(command: Command) -> None:
    write_rows(Path("visits.csv"), make_rows())
    flags = "--data visits.csv --client hospital --label outcome --ignore patient --missing mean --rounds 1 --out run"
    assert "Saved models" not in command("run", *flags.split()).out, "there are no validation samples"
    shutil.rmtree("run")
    lines = command("run", *flags.split(), "--validation-fraction", 0.3).out.splitlines()
    thresholds = {name: gpfl.load_model("run", name).threshold for name in ("St. Mary", "north", "south")}
    assert [name for name, own in thresholds.items() if own is None] == ["south"]
    listed = ", ".join(f"{own.value:.3f} ({name})" for name, own in thresholds.items() if own is not None)
    assert lines[-2] == (
        f"Decision threshold for 'well': {listed}, the best for balanced accuracy on "
        "validation samples. It is 0.5 for south, with fewer than 5 validation samples of a class. Saved models use it; the "
        "table takes the more probable class, and metrics.json has both."
    )


def test_predict_writes_what_the_model_predicts(trained: Command) -> None:
    result = trained("predict", "run", "--client", "north", "new.csv", "-o", "out/predictions.csv", "--keep", "patient")
    assert (result.code, result.err) == (0, "")
    first, threshold, last = result.out.splitlines()
    assert first == "new.csv: 30 samples, predicted by the model of client north (fedper)."
    model = gpfl.load_model("run", "north")
    assert model.threshold is not None
    assert threshold == (
        f"Decision threshold for 'well': {model.threshold.value:.3f}, the best for balanced accuracy on "
        f"validation samples ({model.threshold.score:.3f} on {model.threshold.n_samples} samples, "
        f"{model.threshold.score_at_half:.3f} at 0.5)."
    )
    found = records(Path("out/predictions.csv").read_text())
    counts = [sum(row["prediction"] == name for row in found) for name in ("ill", "well")]
    assert last == f"Predictions: out/predictions.csv (ill {counts[0]}, well {counts[1]})"
    assert [row["patient"] for row in found] == [f"{k:04d}" for k in range(30)]
    assert [row["prediction"] for row in found] == model.predict("new.csv").tolist()
    assert np.allclose([float(row["probability_well"]) for row in found], model.predict_proba("new.csv")[:, 1], atol=1e-6)
    files = sorted(path.name for path in Path("out").iterdir())
    again = trained("predict", "run", "--client", "north", "new.csv", "-o", "out/predictions.csv")
    assert_error(again, "out/predictions.csv exists and is not overwritten: choose another file, or add --force")
    assert trained("predict", "run", "--client", "south", "new.csv", "-o", "out/predictions.csv", "--force").code == 0
    assert records(Path("out/predictions.csv").read_text())[0].keys() == {"prediction", "probability_ill", "probability_well"}
    assert sorted(path.name for path in Path("out").iterdir()) == files, "no temporary file is left"


def test_predictions_alone_go_to_the_standard_output(trained: Command) -> None:
    one = trained("predict", "run/models/client-south.safetensors", "new.csv", "--threshold", 0.2)
    assert one.code == 0
    assert one.err.splitlines()[-1] == "Decision threshold for 'well': 0.2 (--threshold)."
    assert {(row["prediction"] == "well") == (float(row["probability_well"]) >= 0.2) for row in records(one.out)} == {True}
    result = trained("predict", "run/models", "new.csv", "--client-column", "hospital", "-o", "-")
    assert result.err.startswith("new.csv: 30 samples, predicted by the models of 3 clients.\n")
    assert [row["hospital"] for row in records(result.out)] == [row[2] for row in make_rows(30)]


def test_policies_for_unseen_categories_and_unreadable_cells(trained: Command) -> None:
    rows = make_rows(3, seed=1)
    unseen = (*rows[0][:3], "dull", *rows[0][4:])
    write_rows(Path("odd.csv"), [unseen, *rows[1:]])
    call = ("predict", "run", "--client", "north", "odd.csv")
    assert_error(
        trained(*call),
        "column 'pain' holds 'dull', which the model does not know, first in odd.csv, line 2; it knows absent, atypical, "
        "typical: correct the data, or accept unknown categories with --unseen ignore",
    )
    assert (
        "Column 'pain': 1 value that the model does not know (dull), encoded as zeros."
        in trained(*call, "--unseen", "ignore").err
    )
    write_rows(Path("odd.csv"), [(*rows[0][:1], ">300", *rows[0][2:]), *rows[1:]])
    assert_error(trained(*call), "column 'chol' has cells that are not numbers in 1 of 3 rows", "--unreadable missing")
    assert "Column 'chol': 1 unreadable cell read as missing." in trained(*call, "--unreadable", "missing").err


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ("predict nowhere new.csv", "there is no run or model nowhere"),
        ("predict run new.csv", "run has the models of 3 clients: name one with --client"),
        ("predict run new.csv --client west", "run has no model of a client 'west'; "),
        ("predict run missing.csv --client north", "there is no file missing.csv"),
        ("predict run run --client north", "run/models holds no file that can be read: give a file or sub-folder per client"),
        ("predict run run/config.toml --client north", "cannot read run/config.toml: give a .csv, .tsv"),
        ("predict run empty.csv --client north", "empty.csv is empty"),
        ("predict run header.csv --client north", "header.csv has no rows below its first line"),
        ("predict run short.csv --client north", "lacks 2 columns that the model needs: age (did you mean 'Age'?), pain"),
        ("predict run new.csv --client north -o out.xlsx", "cannot write out.xlsx: its name must end in .csv or .parquet"),
        (
            "predict run new.csv --client north --keep patients",
            "--keep names 'patients', which is not a column of new.csv; did",
        ),
        ("evaluate run new.csv --client north -o out.csv", "cannot write out.csv: its name must end in .json"),
        ("evaluate run new.csv --client north --label sick", "--label is 'sick', which is not a column of new.csv; known: "),
    ],
)
def test_mistakes_are_one_line(trained: Command, arguments: str, phrase: str) -> None:
    Path("empty.csv").write_text("")
    Path("header.csv").write_text("age,pain,chol\n")
    Path("short.csv").write_text("Age,chol\n3,4\n")
    assert_error(trained(*arguments.split()), phrase)
    assert not list(Path().glob("out*"))


def test_an_unfinished_run_has_no_models(trained: Command) -> None:
    Path("run/summary.json").unlink()
    for name in ("predict", "evaluate"):
        result = trained(name, "run", "new.csv", "--client", "north")
        assert_error(result, "run is not finished, so it has no models yet: gpfl resume run")


def test_evaluate_prints_a_table_and_writes_all_metrics(trained: Command) -> None:
    result = trained("evaluate", "run", "new.csv", "--client-column", "hospital", "-o", "metrics.json")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "new.csv: 30 samples, predicted by the models of 3 clients."
    rows = ["St. Mary", "north", "south", "mean over clients", "worst tenth", "all samples"]
    assert [line.split("  ")[0] for line in lines if line.split("  ")[0] in rows] == rows
    assert lines[-1] == "Metrics: metrics.json"
    saved = json.loads(Path("metrics.json").read_text())
    assert saved["test"]["overall"]["samples"] == 30
    assert saved["thresholds"].keys() == saved["test"]["clients"].keys() == {"St. Mary", "north", "south"}
    printed = trained("evaluate", "run", "new.csv", "--client-column", "hospital", "--json")
    assert json.loads(printed.out) == saved
    assert printed.err.splitlines() == lines[:2]
    one = trained("evaluate", "run", "new.csv", "--client", "north", "--label", "outcome", "--metric", "brier")
    assert "Brier" in one.out
    assert "mean over clients" not in one.out
    again = trained("evaluate", "run", "new.csv", "--client", "north", "-o", "metrics.json")
    assert_error(again, "metrics.json exists and is not overwritten")
