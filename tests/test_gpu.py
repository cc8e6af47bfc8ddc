"""The same numbers on a GPU; run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from conftest import toy_federation
from torch import nn

import gpfl
from gpfl.methods import METHODS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", METHODS)
def test_gpu_gives_what_the_cpu_gives(method: str) -> None:
    runs = {}
    for device in ("cpu", "cuda"):
        for engine in ("loop", "vmap"):
            result = gpfl.fit(method, toy_federation(), rounds=3, lr=0.05, device=device, engine=engine)
            runs[device, engine] = torch.tensor([line["loss"] for line in result.history])
    for losses in runs.values():
        torch.testing.assert_close(losses, runs["cpu", "loop"], rtol=1e-4, atol=1e-4)


def test_models_trained_on_a_gpu_are_used_on_the_cpu(tmp_path) -> None:
    federation = toy_federation()
    result = gpfl.fit("gpfl", federation, rounds=2, lr=0.05, device="cuda", out=tmp_path / "run")
    rows = federation.shards[0].test
    x = federation.table.x[rows]
    loaded = gpfl.load_model(tmp_path / "run" / "models" / "client-0.safetensors")
    assert (loaded.predict(x) == result.clients[0].predict(x)).all()
    assert result.clients[0].module()(x).device.type == "cpu"
    assert result.welcome(x, federation.table.y[rows], rounds=1).predict(x).shape == (len(rows),)


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "gpfl"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_constants_of_a_net_go_to_the_gpu_with_it_and_come_back_in_modules(tmp_path, method: str, engine: str) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3).cuda()).cuda()
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    federation = toy_federation()
    result = gpfl.fit(method, federation, net=module, rounds=2, lr=0.05, device="cuda", engine=engine, out=tmp_path / "run")
    own, x = result.clients[0].module(), federation.table.x
    assert torch.equal(own.base[0].weight, module[0].weight.cpu())
    assert torch.allclose(own(x), torch.from_numpy(result.clients[0].logits(x)), atol=1e-5)
    gpfl.load_model(tmp_path / "run" / "models" / "client-0.safetensors", net=module)
