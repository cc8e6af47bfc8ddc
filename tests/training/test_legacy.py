"""Runs, models and manifests that gpfl 0.1.0 wrote without a format version open, resume and load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from torch import nn

import gpfl
from gpfl.experiments.stored_runs import StoredRun
from gpfl.federation import Federation
from gpfl.io.legacy import FORMAT_VERSION, list_client_accuracies
from gpfl.training import config
from gpfl.training.run_dir import RunDir

RECORDED = Path(__file__).parent / "format_1"
LOSSES = [
    *(1.1168573213660198, 1.118094361346701, 1.120735375777535, 1.1236927198327107, 1.1255965440169624),
    *(1.1337211235709812, 1.1365483118140178),
]
"""Losses of the run `unfinished` in gpfl 0.1.0, run to its end."""


def arrays() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    sizes = {"north": 24, "south": 30, "west": 36}
    return {name: (rng.normal(size=(n, 4)).round(3).astype(np.float32), np.arange(n) % 3) for name, n in sizes.items()}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recorded runs."""
    return Path(shutil.copytree(RECORDED, tmp_path / "runs"))


def test_a_finished_run_loads_with_its_models(folder: Path) -> None:
    result = gpfl.load(folder / "finished")
    recorded = json.loads((RECORDED / "finished" / "summary.json").read_text())
    assert result.accuracy == recorded["selected_accuracy"]
    assert [record["loss"] for record in result.history] == [
        json.loads(line)["loss"] for line in (RECORDED / "finished" / "metrics.jsonl").read_text().splitlines()
    ]
    x = result.federation.table.x[:50]
    for client in result.clients:
        single = gpfl.load_model(RECORDED / "finished" / "models" / f"client-{client.name}.safetensors")
        assert np.array_equal(single.logits(x), client.logits(x))


def test_an_unfinished_run_resumes_to_the_same_numbers(folder: Path) -> None:
    federation = gpfl.federate(arrays(), validation_fraction=0.2)
    result = gpfl.resume(folder / "unfinished", federation=federation, net=module)
    assert [record["loss"] for record in result.history] == LOSSES


def test_a_config_is_read_with_the_names_of_today() -> None:
    old = config.resolve_config(config.read_config(RECORDED / "finished" / "config.toml"))
    new = config.resolve_config(
        {
            "run": {"seed": 1, "engine": "vmap", "checkpoint_every": 2},
            "partition": {
                "name": "dirichlet",
                "clients": 3,
                "total_clients": 30,
                "beta": 5.0,
                "min_samples": 20,
                "rng": "pfllib",
                "validation_fraction": 0.2,
            },
            "net": {"hidden": [4]},
            "train": {"rounds": 3, "client_fraction": 0.7, "lr": 0.05},
            "method": {"lam": 0.01, "mu": 0.1},
        }
    )
    assert old == new


def test_a_manifest_gives_the_federation_of_its_config(folder: Path) -> None:
    made = config.resolve_config(config.read_config(RECORDED / "finished" / "config.toml")).federation()
    assert Federation.load(RECORDED / "finished" / "federation.toml").manifest() == made.manifest()


def test_old_metrics_and_summaries_have_the_keys_of_today(folder: Path) -> None:
    run_dir = RunDir(folder / "finished")
    assert run_dir.read_summary()["min_samples"] == 1
    record = run_dir.read_complete_metrics()[-1]
    assert record["participants"] == 2
    accuracies = list_client_accuracies(record)
    assert accuracies is not None
    assert len(accuracies) == 3
    assert StoredRun(folder / "finished").accuracies(3) == (accuracies, record["accuracy"])
    summary = run_dir.read_summary()
    assert summary["selected_std"] == summary["std"]  # the selected round was the best one
    assert (summary["metric"], "selected_std" in json.loads((RECORDED / "finished" / "summary.json").read_text())) == (
        "accuracy",
        False,
    )
    assert record["validation_accuracy"] == pytest.approx(0.2692, abs=1e-4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, gpfl.Federation]:
    """A run of today."""
    out, federation = tmp_path_factory.mktemp("run") / "run", gpfl.federate(arrays())
    gpfl.fit("fedavg", federation, net="mlp", hidden=[4], rounds=1, out=out)
    return out, federation


def newer(text: str) -> str:
    return re.sub(r'(format_version"?\W+)2', r"\g<1>9", text)


@pytest.mark.parametrize("name", ["config.toml", "federation.toml", "summary.json"])
def test_a_text_file_of_a_newer_version_is_an_error(run: tuple[Path, gpfl.Federation], tmp_path: Path, name: str) -> None:
    out = Path(shutil.copytree(run[0], tmp_path / "run"))
    text = (out / name).read_text()
    assert newer(text) != text
    (out / name).write_text(newer(text))
    with pytest.raises(gpfl.GpflError, match=rf"{name} has format_version 9; this gpfl reads versions up to 2: install"):
        gpfl.load(out, federation=run[1])


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "models/client-north.safetensors"])
def test_a_tensor_file_carries_the_version(run: tuple[Path, gpfl.Federation], name: str) -> None:
    with safe_open(run[0] / name, framework="pt") as file:
        assert json.loads(file.metadata()["gpfl"])["format_version"] == FORMAT_VERSION
