"""Loading the models of a run by client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import toy_table
from user_files import message_of, write

import gpfl
from gpfl.inference import load_model, load_models

X = np.asarray(toy_table(60).x)
Y = np.asarray(toy_table(60).y)
NAMES = ["2", "10", "St. Mary/east"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three clients."""
    folder = tmp_path_factory.mktemp("run") / "run"
    federation = gpfl.federate({name: (X[k::3], Y[k::3]) for k, name in enumerate(NAMES)})
    gpfl.fit("gpfl", federation, net="mlp", rounds=1, lr=0.1, out=folder)
    return folder


def test_models_are_loaded_by_client_from_a_run_its_models_or_a_file(run: Path) -> None:
    for source in (run, run / "models", str(run)):
        models = load_models(source)
        assert {name: model.name for name, model in models.items()} == {name: name for name in models}
        assert list(models) == ["St. Mary/east", "2", "10"]
        assert list(load_models(source, ["10"])) == ["10"]
        assert load_model(source, "10").name == "10"
    file = run / "models" / "client-10.safetensors"
    assert list(load_models(file)) == ["10"]
    assert load_model(file).name == load_model(file, "10").name == "10"
    assert message_of(lambda: load_model(file, "2")) == (f"{file} is the model of client '10', not of '2': leave out --client")


def test_the_client_must_be_named_if_there_are_several(run: Path, tmp_path: Path) -> None:
    assert message_of(lambda: load_model(run)) == (
        f"{run} has the models of 3 clients: name one with --client (St. Mary/east, 2, 10)"
    )
    assert message_of(lambda: load_models(run, ["2", "St. Mary"])) == (
        f"{run} has no model of a client 'St. Mary'; did you mean 'St. Mary/east'?"
    )
    assert message_of(lambda: load_model(run, "xyz")) == (f"{run} has no model of a client 'xyz'; known: 10, 2, St. Mary/east")
    load_model(run, "2").save(tmp_path / "client-2.safetensors")
    assert load_model(tmp_path).name == "2"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "there is no run or model {run}"),
        (("x.csv",), "{run} holds no models: give the folder of a run, or a model file from its folder models"),
        (("config.toml",), "{run} is not finished, so it has no models yet: gpfl resume {run}"),
        (("config.toml", "models/client-0.safetensors"), "{run} is not finished, so it has no models yet: gpfl resume {run}"),
        (
            ("config.toml", "diverged.json"),
            "{run} has no models, because its loss became NaN or infinite: train again with a lower --lr",
        ),
        (("config.toml", "summary.json"), "{run} has no models; they were deleted: train again with gpfl run"),
        (
            ("config.toml", "trials.json", "seed-3/config.toml", "seed-4/config.toml"),
            "{run} holds the trials of 2 seeds: choose one of them, such as {run}/seed-3",
        ),
        (
            ("gpfl/config.toml", "gpfl/seed-0/config.toml", "ditto/seed-0/config.toml"),
            "{run} holds the runs of several methods: choose one of them, such as {run}/ditto/seed-0",
        ),
    ],
)
def test_a_folder_without_models_is_an_error(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for file in files:
        write(folder / file, json.dumps({}))
    calls: tuple[Callable[[], object], ...] = (lambda: load_model(folder), lambda: load_models(folder))
    for call in calls:
        assert message_of(call) == message.format(run=folder)
