"""A GPU computes the same numbers. Run with `pytest -m gpu`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.engine.base import Engine, TrainRequest
from gpfl.engine.vmap import Vmap
from gpfl.methods import METHODS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", METHODS)
def test_gpu_matches_the_cpu(method: str) -> None:
    runs = {}
    for device in ("cpu", "cuda"):
        for engine in ("loop", "vmap"):
            result = gpfl.fit(method, toy_federation(), rounds=3, lr=0.05, device=device, engine=engine)
            runs[device, engine] = torch.tensor([line["loss"] for line in result.history])
    for losses in runs.values():
        torch.testing.assert_close(losses, runs["cpu", "loop"], rtol=1e-4, atol=1e-4)


def test_samples_may_be_on_the_gpu_before_the_net_is_built() -> None:
    federation = toy_federation()
    from_gpu, from_cpu = (
        gpfl.fit("gpfl", each, rounds=2, lr=0.05, device="cuda") for each in (federation.to(torch.device("cuda")), federation)
    )
    assert [line["loss"] for line in from_gpu.history] == [line["loss"] for line in from_cpu.history]


def test_models_trained_on_a_gpu_are_used_on_the_cpu(tmp_path) -> None:
    federation = toy_federation()
    result = gpfl.fit("gpfl", federation, rounds=2, lr=0.05, device="cuda", out=tmp_path / "run")
    test = federation.shards[0].test
    x = federation.table.x[test]
    loaded = gpfl.load_model(tmp_path / "run" / "models" / "client-0.safetensors")
    assert (loaded.predict(x) == result.clients[0].predict(x)).all()
    assert result.clients[0].module()(x).device.type == "cpu"
    assert result.personalize(x, federation.table.y[test], rounds=1).predict(x).shape == (len(test),)


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "gpfl"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_constants_of_a_net_move_to_the_gpu_and_back(tmp_path, method: str, engine: str) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3).cuda()).cuda()
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    federation = toy_federation()
    result = gpfl.fit(method, federation, net=module, rounds=2, lr=0.05, device="cuda", engine=engine, out=tmp_path / "run")
    personal, x = result.clients[0].module(), federation.table.x
    assert torch.equal(personal.base[0].weight, module[0].weight.cpu())
    assert torch.allclose(personal(x), torch.from_numpy(result.clients[0].logits(x)), atol=1e-5)
    gpfl.load_model(tmp_path / "run" / "models" / "client-0.safetensors", net=module)


# Engines: the same numbers whether steps are traced, compiled or stacked, and wherever private state is.


def smooth_conv_net() -> tuple[gpfl.Federation, nn.Module]:
    """Return clients and a net without kinks, at which a last digit can switch a gradient off."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 3, 12, 12)).astype(np.float32), np.arange(n) % 4) for n in (61, 47, 53, 33, 55)]
    torch.manual_seed(0)
    first = nn.Conv2d(3, 20, 3, padding=1), nn.Softplus(), nn.AvgPool2d(2)
    second = nn.Conv2d(20, 40, 3, stride=2), nn.Tanh(), nn.Flatten()
    return gpfl.federate(clients), nn.Sequential(*first, *second, nn.Linear(160, 1000), nn.Tanh(), nn.Linear(1000, 4))


def states(method: str, **settings: object) -> dict[str, torch.Tensor]:
    federation, module = smooth_conv_net()
    settings = {"rounds": 3, "lr": 0.003, "client_fraction": 0.8, "device": "cuda", "allow_noop": True, **settings}
    selected = gpfl.fit(method, federation, net=module, **settings).outcome.selected  # type: ignore[arg-type]
    return {f"{part}/{name}": leaf.cpu() for part in ("shared", "private") for name, leaf in flat(selected, part).items()}


def flat(selected: object, part: str) -> dict[str, torch.Tensor]:
    return tree.flatten(getattr(selected, part))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("method", METHODS)
def test_traced_steps_match_the_loop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vmap, "min_calls_to_trace", 0)
    assert_near(states(method, engine="vmap"), states(method, engine="loop"))


@pytest.mark.parametrize("method", ["gpfl", "fedprox", "perfedavg", "pfedme", "fedphp"])
def test_compiled_steps_match_the_loop(method: str) -> None:
    assert_near(states(method, engine="vmap", compile="on"), states(method, engine="loop"))


def test_compiled_runs_are_bit_identical_twice() -> None:
    first, second = (states("gpfl", engine="vmap", compile="on") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_chunks_with_private_state_on_the_host_match_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = states("ditto", engine="vmap")
    for name, value in (("chunk_size", 2), ("max_slots", 2), ("min_calls_to_trace", 0)):
        monkeypatch.setattr(Vmap, name, value)
    monkeypatch.setattr(Engine, "private_memory_fraction", 0.0)
    assert_near(states("ditto", engine="vmap"), expected)


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_concurrent_trials_with_other_seeds_and_hyperparameters_match_each_alone(compiled: str) -> None:
    federation, module = smooth_conv_net()
    options = {"rounds": 40, "lr": 0.001, "device": "cuda", "engine": "vmap", "compile": compiled}
    engine = gpfl.fit("fedprox", federation, net=module, **{**options, "rounds": 1, "mu": 0.5}).engine  # type: ignore[arg-type]
    clients = list(range(len(federation)))
    requests = []
    for seed, mu in enumerate((0.5, 0.1, 2.0)):
        method = engine.method.replace(mu=mu)
        shared, private = (tree.to(part, engine.device) for part in method.init(seed))
        schedule = dataclasses.replace(engine.schedule, seed=seed)
        requests.append(TrainRequest(shared, tree.repeat(private, len(clients)), clients, 0, schedule, clients, method))
    concurrent, alone = engine.train_rounds(requests), [engine.train_rounds([request])[0] for request in requests]
    for found, expected in zip(concurrent, alone, strict=True):
        assert_near(tree.flatten(found.mean), tree.flatten(expected.mean))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_is_close_and_not_equal(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vmap, "min_calls_to_trace", 0)
    exact, rough = (states("gpfl", engine="vmap", precision=each) for each in ("float32", precision))
    gaps = [float((exact[name] - rough[name]).abs().max()) for name in exact if exact[name].is_floating_point()]
    assert 1e-7 < max(gaps) < 0.05
