"""What a run gives: each client's model as predictions, module and file, and a model for a client that was not there."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation, toy_table
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.methods import METHODS

PROTOCOLS = ("corrected", "reference")


@functools.cache
def fitted(method: str, **settings: object) -> gpfl.Result:
    return gpfl.fit(method, toy_federation(), **{"net": "mlp", "rounds": 3, "lr": 0.1, "engine": "loop", **settings})


@functools.cache
def normed_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_models_in_hand_have_the_accuracies_that_were_reported(method: str, protocol: str) -> None:
    result = fitted(method, protocol=protocol)
    table = result.federation.table
    found = []
    for shard, client in zip(result.federation.shards, result.clients, strict=True):
        x, y = table.x[torch.from_numpy(shard.test)], table.y[torch.from_numpy(shard.test)]
        found.append(client.accuracy(x, y))
        assert np.array_equal(client.predict(x), client.logits(x).argmax(1))
    assert found == result.history[-1]["client_accuracies"]


@every_method
def test_module_gives_the_logits_of_the_client_model(method: str) -> None:
    result = fitted(method, net=normed_net())
    x = result.federation.table.x
    for client in result.clients:
        module = client.module()
        assert not module.training
        with torch.no_grad():
            assert np.allclose(module(x).numpy(), client.logits(x), atol=1e-6)


@every_method
def test_module_has_a_state_dict_that_carries_the_whole_model(method: str) -> None:
    result = fitted(method)
    x = result.federation.table.x
    one, other = result.clients[0].module(), result.clients[1].module()
    other.load_state_dict(one.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))


@every_method
def test_module_can_be_trained_further_without_changing_the_result(method: str) -> None:
    result = fitted(method)
    table, client = result.federation.table, result.clients[0]
    before = client.logits(table.x)
    module = client.module()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(table.x), table.y)
        loss.backward()
        optimiser.step()
        seen.append(float(loss.detach()))
    assert all(p.grad is not None for p in module.parameters())
    assert seen[-1] < seen[0]
    assert np.array_equal(client.logits(table.x), before)


def test_module_can_be_copied() -> None:
    client = fitted("gpfl").clients[0]
    module = client.module()
    x = torch.ones(2, 6)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(module)(x), module(x))


@every_method
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_saved_model_comes_back_with_the_same_logits(tmp_path: Path, method: str, protocol: str) -> None:
    result = fitted(method, protocol=protocol)
    x = result.federation.table.x
    for place, client in enumerate(result.clients):
        client.save(tmp_path / "model.safetensors")
        again = gpfl.load_model(tmp_path / "model.safetensors")
        assert np.array_equal(again.logits(x), client.logits(x))
        assert (again.name, again.method.name) == (str(place), method)
        assert repr(again) == repr(client)


def test_saved_model_of_pixels_takes_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 17, size=(40, 1, 5, 5)).astype(np.uint8)
    table = gpfl.Table(pixels, np.arange(40) % 2, name="squares", pixel_max=16)
    result = gpfl.fit("gpfl", gpfl.federate(table, clients=2, balanced=True), net="cnn4", rounds=1, lr=0.05)
    client = result.clients[0]
    client.save(tmp_path / "model.safetensors")
    assert np.array_equal(gpfl.load_model(tmp_path / "model.safetensors").logits(pixels), client.logits(pixels))
    with torch.no_grad():
        scaled = client.module()(torch.from_numpy(pixels) / 8.0 - 1.0)
    assert np.allclose(scaled.numpy(), client.logits(pixels), atol=1e-6)


def test_saved_model_with_batch_norm_comes_back(tmp_path: Path) -> None:
    result = fitted("gpfl", net=normed_net())
    x = result.federation.table.x
    for client in result.clients:
        client.save(tmp_path / "model.safetensors")
        again = gpfl.load_model(tmp_path / "model.safetensors", net=normed_net())
        assert np.array_equal(again.logits(x), client.logits(x))
    one, other = (client.weights["batch_norm_stats"]["base"]["1.running_mean"] for client in result.clients[:2])
    assert not torch.equal(one, other)


def test_export_writes_one_readable_file_for_each_client(tmp_path: Path) -> None:
    result = fitted("gpfl")
    paths = result.export(tmp_path / "models")
    assert [path.name for path in paths] == [f"client-{k}.safetensors" for k in range(4)]
    x = result.federation.table.x
    for path, client in zip(paths, result.clients, strict=True):
        assert np.array_equal(gpfl.load_model(path).predict(x), client.predict(x))


def test_clients_whose_names_look_alike_do_not_share_a_file(tmp_path: Path) -> None:
    table = toy_table(60)
    names = ("a/b", "a_b", "../a", "a b")
    parts = {name: (table.x[k::4], table.y[k::4]) for k, name in enumerate(names)}
    result = gpfl.fit("local", gpfl.federate(parts), net="mlp", rounds=1, lr=0.1, out=tmp_path / "run")
    paths = result.export(tmp_path / "models")
    assert len(set(paths)) == 4
    assert all(path.parent == tmp_path / "models" for path in paths)
    assert tuple(gpfl.load_model(path).name for path in paths) == names


def test_rows_of_another_shape_and_nan_are_refused() -> None:
    client = fitted("local").clients[0]
    with pytest.raises(gpfl.GpflError, match=r"x has rows of shape \(5,\); they must be of shape \(6,\)"):
        client.predict(np.zeros((2, 5)))
    with pytest.raises(gpfl.GpflError, match="NaN"):
        client.predict(np.full((2, 6), np.nan))


def test_prediction_does_not_depend_on_how_many_rows_come_at_once() -> None:
    client = fitted("gpfl").clients[0]
    x = np.random.default_rng(0).normal(size=(2500, 6)).astype(np.float32)
    whole = client.logits(x)
    assert whole.shape == (2500, 3)
    assert np.allclose(whole[2040:2060], client.logits(x[2040:2060]), atol=1e-5)
    assert client.predict(x[:0]).shape == (0,)


def test_result_says_in_one_line_what_it_is() -> None:
    result = fitted("gpfl")
    assert repr(result) == f"Result of gpfl on arrays: {result.accuracy:.2%} after round 3 of 3"
    assert result.best_accuracy == max(line["accuracy"] for line in result.history)


# A client that was not there.


def new_client(classes: tuple[int, ...] = (0, 1)) -> tuple[np.ndarray, np.ndarray]:
    table = toy_table(150)
    rows = np.flatnonzero(np.isin(table.y.numpy(), classes))
    return table.x.numpy()[rows], table.y.numpy()[rows]


@every_method
def test_new_client_gets_a_good_model(method: str) -> None:
    result = fitted(method, rounds=6)
    x, y = new_client()
    half = len(x) // 2
    model = result.personalize(x[:half], y[:half])
    assert model.name == "new"
    assert model.accuracy(x[half:], y[half:]) > 0.8
    assert model.module()(torch.from_numpy(x[:3])).shape == (3, 3)


@every_method
def test_new_client_changes_neither_shared_state_nor_other_clients(method: str) -> None:
    result = fitted(method)
    x = result.federation.table.x
    state = result.outcome.selected
    before = {key: t.clone() for key, t in tree.flatten({"s": state.shared, "p": state.private}).items()}
    logits = [client.logits(x) for client in result.clients]
    result.personalize(*new_client())
    after = tree.flatten({"s": state.shared, "p": state.private})
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(np.array_equal(was, client.logits(x)) for was, client in zip(logits, result.clients, strict=True))


def test_new_client_takes_the_shared_parts_as_they_are_and_makes_the_private_ones_its_own() -> None:
    result = fitted("gpfl")
    shared = result.outcome.selected.shared
    untrained, model = result.personalize(*new_client(), rounds=0), result.personalize(*new_client(), rounds=5)
    own, start = tree.flatten(model.weights), tree.flatten(untrained.weights)
    assert all(torch.equal(own[f"base/{key}"], value) for key, value in tree.flatten(shared["base"]).items())
    assert not torch.equal(own["head/weight"], start["head/weight"])


def test_new_client_is_guided_by_its_own_label_counts() -> None:
    result = fitted("gpfl")
    embeddings = result.outcome.selected.shared["gce"]["weight"]
    model = result.personalize(*new_client(classes=(2,)), rounds=0)
    assert torch.allclose(model.weights["context"]["p"], embeddings[2], atol=1e-6)


def test_new_client_of_fedavg_gets_the_global_model() -> None:
    result = fitted("fedavg")
    x, y = new_client()
    assert np.array_equal(result.personalize(x, y).logits(x), result.clients[0].logits(x))


def test_new_client_gets_the_same_model_twice_and_needs_less_than_a_batch_of_rows() -> None:
    result = fitted("gpfl")
    x, y = new_client()
    one, again = (result.personalize(x[:4], y[:4], rounds=3) for _ in range(2))
    assert np.array_equal(one.logits(x), again.logits(x))


def test_model_of_a_new_client_is_saved_like_any_other(tmp_path: Path) -> None:
    x, y = new_client()
    model = fitted("gpfl").personalize(x, y, name="latecomer")
    model.save(tmp_path / "late.safetensors")
    again = gpfl.load_model(tmp_path / "late.safetensors")
    assert again.name == "latecomer"
    assert np.array_equal(again.logits(x), model.logits(x))


@pytest.mark.parametrize(
    ("x", "y", "rounds", "words"),
    [
        (np.zeros((4, 5)), np.zeros(4), 1, r"client new has rows of shape \(5,\); they must be of shape \(6,\)"),
        (np.zeros((4, 6)), np.full(4, 3), 1, "has label 3 in row 0; labels must be 0 to 2"),
        (np.zeros((0, 6)), np.zeros(0), 1, "has no rows"),
        (np.full((4, 6), np.inf), np.zeros(4), 1, "NaN or infinity"),
        (np.zeros((4, 6)), np.zeros(4), -1, "rounds is -1; it must be a whole number, at least 0"),
    ],
)
def test_new_client_with_unfit_rows_is_refused(x: np.ndarray, y: np.ndarray, rounds: int, words: str) -> None:
    with pytest.raises(gpfl.GpflError, match=words):
        fitted("gpfl", rounds=1).personalize(x, y, rounds=rounds)


def test_selected_round_is_the_one_the_models_are_of() -> None:
    table = toy_table(160, classes=4, seed=3)
    federation = gpfl.federate(table, clients=4, classes_per_client=3, balanced=True)
    result = gpfl.fit("local", federation, net="mlp", lr=0.1, rounds=8, select="test", engine="loop")
    rounds = [line["round"] for line in result.history]
    chosen = result.history[rounds.index(result.summary["selected_round"])]
    assert 0 < chosen["round"] < 8
    shard, client = federation.shards[0], result.clients[0]
    rows = torch.from_numpy(shard.test)
    assert client.accuracy(table.x[rows], table.y[rows]) == chosen["client_accuracies"][0]
    assert result.accuracy == chosen["accuracy"] == result.best_accuracy


def test_model_of_pixels_takes_whole_numbers_of_any_type_and_refuses_others() -> None:
    federation = gpfl.federate("digits", clients=5, classes_per_client=4)
    client = gpfl.fit("fedavg", federation, rounds=1).clients[0]
    pixels = federation.table.x[:5].numpy()
    for kind in (np.float64, np.int64, np.float32):
        assert np.array_equal(client.logits(pixels.astype(kind)), client.logits(pixels))
    for wrong in (pixels / 16, pixels.astype(np.int64) + 1, pixels.astype(np.int64) - 1):
        with pytest.raises(gpfl.GpflError, match="whole numbers from 0 to 16"):
            client.predict(wrong)


def test_model_of_floats_refuses_bytes() -> None:
    client = gpfl.fit("fedavg", toy_federation(), rounds=1).clients[0]
    with pytest.raises(gpfl.GpflError, match="holds bytes"):
        client.predict(np.zeros((2, 6), dtype=np.uint8))


def test_models_are_used_in_float32_whatever_torch_was_told() -> None:
    seen: list[str] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(x)

    federation = toy_federation()
    result = gpfl.fit(
        "perfedavg", federation, net=nn.Sequential(Watched(6, 5), nn.Linear(5, 3)), rounds=1, lr=0.05, batch_size=4
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
