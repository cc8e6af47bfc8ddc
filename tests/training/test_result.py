"""Results: models of all clients, and of new ones."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation, toy_table
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.inference.metrics import softmax
from gpfl.methods import METHODS

PROTOCOLS = ("corrected", "reference")


@functools.cache
def fitted(method: str, **settings: object) -> gpfl.Result:
    return gpfl.fit(method, toy_federation(), **{"net": "mlp", "rounds": 3, "lr": 0.1, "engine": "loop", **settings})


@functools.cache
def normed_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


every_method = pytest.mark.parametrize("method", METHODS)


def test_export_writes_one_file_per_client(tmp_path: Path) -> None:
    result = fitted("gpfl")
    paths = result.export(tmp_path / "models")
    assert [path.name for path in paths] == [f"client-{k}.safetensors" for k in range(4)]
    x = result.federation.table.x
    for path, client in zip(paths, result.clients, strict=True):
        assert np.array_equal(gpfl.load_model(path).predict(x), client.predict(x))


def test_clients_with_similar_names_have_different_files(tmp_path: Path) -> None:
    table = toy_table(60)
    names = ("a/b", "a_b", "../a", "a b")
    parts = {name: (table.x[k::4], table.y[k::4]) for k, name in enumerate(names)}
    result = gpfl.fit("local", gpfl.federate(parts), net="mlp", rounds=1, lr=0.1, out=tmp_path / "run")
    paths = result.export(tmp_path / "models")
    assert len(set(paths)) == 4
    assert all(path.parent == tmp_path / "models" for path in paths)
    assert tuple(gpfl.load_model(path).name for path in paths) == names


def test_repr_is_one_line() -> None:
    result = fitted("gpfl")
    assert repr(result) == f"Result of gpfl on arrays: {result.accuracy:.2%} after round 3 of 3"
    assert result.best_accuracy == max(line["accuracy"] for line in result.history)


# New clients.


def new_client(classes: tuple[int, ...] = (0, 1)) -> tuple[np.ndarray, np.ndarray]:
    table = toy_table(150)
    rows = np.flatnonzero(np.isin(table.y.numpy(), classes))
    return table.x.numpy()[rows], table.y.numpy()[rows]


@every_method
def test_new_client_gets_an_accurate_model(method: str) -> None:
    result = fitted(method, rounds=6)
    x, y = new_client()
    half = len(x) // 2
    model = result.personalize(x[:half], y[:half])
    assert model.name == "new"
    assert model.score(x[half:], y[half:]) > 0.8
    assert model.module()(torch.from_numpy(x[:3])).shape == (3, 3)


@every_method
def test_new_client_does_not_change_shared_state_or_other_clients(method: str) -> None:
    result = fitted(method)
    x = result.federation.table.x
    state = result.outcome.selected
    before = {key: t.clone() for key, t in tree.flatten({"s": state.shared, "p": state.private}).items()}
    logits = [client.logits(x) for client in result.clients]
    result.personalize(*new_client())
    after = tree.flatten({"s": state.shared, "p": state.private})
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(np.array_equal(expected, client.logits(x)) for expected, client in zip(logits, result.clients, strict=True))


def test_new_client_trains_private_parts_only() -> None:
    result = fitted("gpfl")
    shared = result.outcome.selected.shared
    untrained, model = result.personalize(*new_client(), rounds=0), result.personalize(*new_client(), rounds=5)
    trained, start = tree.flatten(model.weights), tree.flatten(untrained.weights)
    assert all(torch.equal(trained[f"base/{key}"], value) for key, value in tree.flatten(shared["base"]).items())
    assert not torch.equal(trained["head/weight"], start["head/weight"])


def test_personal_context_of_a_new_client_uses_its_label_counts() -> None:
    result = fitted("gpfl")
    embeddings = result.outcome.selected.shared["gce"]["weight"]
    model = result.personalize(*new_client(classes=(2,)), rounds=0)
    assert torch.allclose(model.weights["context"]["p"], embeddings[2], atol=1e-6)


def test_new_client_of_fedavg_gets_the_global_model() -> None:
    result = fitted("fedavg")
    x, y = new_client()
    assert np.array_equal(result.personalize(x, y).logits(x), result.clients[0].logits(x))


def test_model_of_a_new_client_is_reproducible() -> None:
    result = fitted("gpfl")
    x, y = new_client()
    one, again = (result.personalize(x[:4], y[:4], rounds=3) for _ in range(2))
    assert np.array_equal(one.logits(x), again.logits(x))


def test_model_of_a_new_client_can_be_saved(tmp_path: Path) -> None:
    x, y = new_client()
    model = fitted("gpfl").personalize(x, y, name="late")
    model.save(tmp_path / "late.safetensors")
    again = gpfl.load_model(tmp_path / "late.safetensors")
    assert again.name == "late"
    assert np.array_equal(again.logits(x), model.logits(x))


@pytest.mark.parametrize(
    ("x", "y", "rounds", "message"),
    [
        (np.zeros((4, 5)), np.zeros(4), 1, r"client new has rows of shape \(5,\); they must be of shape \(6,\)"),
        (np.zeros((4, 6)), np.full(4, 3), 1, "has label 3 in row 0; labels must be 0 to 2"),
        (np.zeros((0, 6)), np.zeros(0), 1, "has no rows"),
        (np.full((4, 6), np.inf), np.zeros(4), 1, "NaN or infinity"),
        (np.zeros((4, 6)), np.zeros(4), -1, "rounds is -1; it must be an integer, at least 0"),
    ],
)
def test_new_client_with_unsuitable_samples_is_an_error(x: np.ndarray, y: np.ndarray, rounds: int, message: str) -> None:
    with pytest.raises(gpfl.GpflError, match=message):
        fitted("gpfl", rounds=1).personalize(x, y, rounds=rounds)


def test_models_are_those_of_the_selected_round() -> None:
    table = toy_table(160, classes=4, seed=3)
    federation = gpfl.federate(table, clients=4, classes_per_client=3, balanced=True)
    result = gpfl.fit("local", federation, net="mlp", lr=0.1, rounds=8, select="test", engine="loop")
    rounds = [line["round"] for line in result.history]
    chosen = result.history[rounds.index(result.summary["selected_round"])]
    assert 0 < chosen["round"] < 8
    shard, client = federation.shards[0], result.clients[0]
    rows = torch.from_numpy(shard.test)
    assert client.score(table.x[rows], table.y[rows]) == chosen["client_accuracies"][client.name]
    assert result.accuracy == chosen["accuracy"] == result.best_accuracy


def test_metrics_are_those_of_the_models_of_the_reported_round() -> None:
    table = toy_table(160, classes=4, seed=3)
    federation = gpfl.federate(table, clients=4, classes_per_client=3, balanced=True, validation_fraction=0.2)
    result = gpfl.fit("gpfl", federation, net="mlp", lr=0.1, rounds=4, engine="vmap")
    assert result.summary["selected_by"] == "validation"
    for split in ("test", "validation"):
        report = result.evaluate(split, n_resamples=0)
        labels, logits = [], []
        for shard, client in zip(federation.shards, result.clients, strict=True):
            rows = torch.from_numpy(shard.split(split))
            labels.append(table.y[rows].numpy())
            logits.append(client.logits(table.x[rows]))
            accuracy = client.score(table.x[rows], table.y[rows])
            assert report.clients[client.name].values["accuracy"] == pytest.approx(accuracy)
        y, p = np.concatenate(labels), softmax(np.concatenate(logits))
        assert report.overall.values["log_loss"] == pytest.approx(log_loss(y, p, labels=range(4)), rel=1e-5)
        assert report.overall.values["auroc"] == pytest.approx(roc_auc_score(y, p, multi_class="ovr"), abs=1e-5)
    assert result.metrics.overall.values["accuracy"] == pytest.approx(result.accuracy)
    interval = result.metrics.overall.intervals["accuracy"]
    assert interval is not None
    assert interval.low <= result.accuracy <= interval.high


def test_metrics_of_a_loaded_run_are_those_in_its_folder(tmp_path: Path) -> None:
    federation = toy_federation()
    result = gpfl.fit("fedper", federation, net="mlp", rounds=2, out=tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "metrics.json").read_text())
    loaded = gpfl.load(tmp_path / "run", federation=federation).metrics
    assert stored["test"] == json.loads(json.dumps(loaded.to_dict()))
    assert list(stored["test"]["clients"]) == [shard.name for shard in federation.shards]
    assert (stored["round"], stored["selected_by"], stored["calibration_bins"]) == (2, "last", 15)
    assert result.summary["metrics"] == result.metrics.summary()
    with pytest.raises(gpfl.GpflError, match="no client has validation samples: set --validation-fraction"):
        result.evaluate("validation")
    with pytest.raises(gpfl.GpflError, match="split is 'tests'; it must be one of train, validation, test"):
        result.evaluate("tests")


def test_models_run_in_float32_whatever_torchs_setting() -> None:
    seen: list[str] = []

    class Recording(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(x)

    federation = toy_federation()
    result = gpfl.fit(
        "perfedavg", federation, net=nn.Sequential(Recording(6, 5), nn.Linear(5, 3)), rounds=1, lr=0.05, batch_size=4
    )
    seen.clear()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        result.clients[0].predict(federation.table.x)
        result.personalize(federation.table.x, federation.table.y, rounds=1)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}
