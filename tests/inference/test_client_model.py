"""Personal models: predictions, modules and files."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import nn

import gpfl
from gpfl.methods import METHODS

PROTOCOLS = ("corrected", "reference")


@functools.cache
def fitted(method: str, **settings: object) -> gpfl.Result:
    return gpfl.fit(method, toy_federation(), **{"net": "mlp", "rounds": 3, "lr": 0.1, "engine": "loop", **settings})


@functools.cache
def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_models_have_the_reported_accuracies(method: str, protocol: str) -> None:
    result = fitted(method, protocol=protocol)
    table = result.federation.table
    found = {}
    for shard, client in zip(result.federation.shards, result.clients, strict=True):
        x, y = table.x[torch.from_numpy(shard.test)], table.y[torch.from_numpy(shard.test)]
        found[client.name] = client.score(x, y)
        assert np.array_equal(client.predict(x), client.logits(x).argmax(1))
    assert found == result.history[-1]["client_accuracies"]


@every_method
def test_module_returns_the_logits_of_the_client_model(method: str) -> None:
    result = fitted(method, net=batch_norm_net())
    x = result.federation.table.x
    for client in result.clients:
        module = client.module()
        assert not module.training
        with torch.no_grad():
            assert np.allclose(module(x).numpy(), client.logits(x), atol=1e-6)


@every_method
def test_state_dict_of_a_module_holds_the_full_model(method: str) -> None:
    result = fitted(method)
    x = result.federation.table.x
    one, other = result.clients[0].module(), result.clients[1].module()
    other.load_state_dict(one.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))


@every_method
def test_training_a_module_does_not_change_the_result(method: str) -> None:
    result = fitted(method)
    table, client = result.federation.table, result.clients[0]
    before = client.logits(table.x)
    module = client.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(table.x), table.y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(p.grad is not None for p in module.parameters())
    assert losses[-1] < losses[0]
    assert np.array_equal(client.logits(table.x), before)


def test_module_can_be_copied() -> None:
    client = fitted("gpfl").clients[0]
    module = client.module()
    x = torch.ones(2, 6)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(module)(x), module(x))


@every_method
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_saved_model_has_the_same_logits_when_loaded(tmp_path: Path, method: str, protocol: str) -> None:
    result = fitted(method, protocol=protocol)
    x = result.federation.table.x
    for i, client in enumerate(result.clients):
        client.save(tmp_path / "model.safetensors")
        again = gpfl.load_model(tmp_path / "model.safetensors")
        assert np.array_equal(again.logits(x), client.logits(x))
        assert (again.name, again.method.name) == (str(i), method)
        assert repr(again) == repr(client)


def test_loaded_model_of_pixels_takes_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 17, size=(40, 1, 5, 5)).astype(np.uint8)
    table = gpfl.Table(pixels, np.arange(40) % 2, name="squares", pixel_max=16)
    result = gpfl.fit("gpfl", gpfl.federate(table, clients=2, balanced=True), net="cnn4", rounds=1, lr=0.05)
    client = result.clients[0]
    client.save(tmp_path / "model.safetensors")
    assert np.array_equal(gpfl.load_model(tmp_path / "model.safetensors").logits(pixels), client.logits(pixels))
    with torch.no_grad():
        scaled = client.module()(torch.from_numpy(pixels) / 8.0 - 1.0)
    assert np.allclose(scaled.numpy(), client.logits(pixels), atol=1e-6)


def test_saved_model_with_batch_norm_can_be_loaded(tmp_path: Path) -> None:
    result = fitted("gpfl", net=batch_norm_net())
    x = result.federation.table.x
    for client in result.clients:
        client.save(tmp_path / "model.safetensors")
        again = gpfl.load_model(tmp_path / "model.safetensors", net=batch_norm_net())
        assert np.array_equal(again.logits(x), client.logits(x))
    one, other = (client.weights["batch_norm_stats"]["base"]["1.running_mean"] for client in result.clients[:2])
    assert not torch.equal(one, other)


def test_samples_of_another_shape_and_nan_are_an_error() -> None:
    client = fitted("local").clients[0]
    with pytest.raises(gpfl.GpflError, match=r"x has rows of shape \(5,\); they must be of shape \(6,\)"):
        client.predict(np.zeros((2, 5)))
    with pytest.raises(gpfl.GpflError, match="NaN"):
        client.predict(np.full((2, 6), np.nan))


def test_prediction_does_not_depend_on_the_batch_size() -> None:
    client = fitted("gpfl").clients[0]
    x = np.random.default_rng(0).normal(size=(2500, 6)).astype(np.float32)
    full = client.logits(x)
    assert full.shape == (2500, 3)
    assert np.allclose(full[2040:2060], client.logits(x[2040:2060]), atol=1e-5)
    assert client.predict(x[:0]).shape == (0,)


def test_model_of_pixels_takes_whole_numbers_of_any_type_only() -> None:
    federation = gpfl.federate("digits", clients=5, classes_per_client=4)
    client = gpfl.fit("fedavg", federation, rounds=1).clients[0]
    pixels = federation.table.x[:5].numpy()
    for kind in (np.float64, np.int64, np.float32):
        assert np.array_equal(client.logits(pixels.astype(kind)), client.logits(pixels))
    for other in (pixels / 16, pixels.astype(np.int64) + 1, pixels.astype(np.int64) - 1):
        with pytest.raises(gpfl.GpflError, match="whole numbers from 0 to 16"):
            client.predict(other)


def test_bytes_for_a_model_of_floats_are_an_error() -> None:
    client = gpfl.fit("fedavg", toy_federation(), rounds=1).clients[0]
    with pytest.raises(gpfl.GpflError, match="holds bytes"):
        client.predict(np.zeros((2, 6), dtype=np.uint8))
