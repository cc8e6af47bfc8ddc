"""The engine that `auto` selects, and the number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import nn

import gpfl
from gpfl.engine import RunSpec, limit_threads, make_engine
from gpfl.engine.selection import find_vmap_error, select_engine
from gpfl.engine.vmap import Vmap
from gpfl.methods import METHODS
from gpfl.methods.fedavg import FedAvg
from gpfl.methods.gpfl import GPFL
from gpfl.training import config as configs
from gpfl.training.prepare import prepare


def fedavg_spec(federation: gpfl.Federation, net: str | nn.Module = "mlp", **options: object) -> RunSpec:
    """Return the spec of a FedAvg run on a federation."""
    named = isinstance(net, str)
    sections: configs.ConfigDict = {
        "method": {"name": "fedavg"},
        "train": dict(options),
        **({"net": {"name": net}} if named else {}),
    }
    config = configs.resolve_config(sections, federation=federation, custom_net=not named)
    return prepare(config, federation, None if named else net, None)[1]  # type: ignore[arg-type]


def images(side: int, clients: int = 2) -> gpfl.Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 1, side, side)).astype(np.float32), np.arange(8) % 2
    return gpfl.federate([(x, y)] * clients)


def texts() -> gpfl.Federation:
    words = np.random.default_rng(0).integers(0, 20_000, (40, 6))
    return gpfl.federate(gpfl.Table(words, np.arange(40) % 2, kind="tokens"), partition="dirichlet", beta=10.0, clients=2)


class Recurrent(nn.Module):
    """A recurrent net that takes one feature per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.unsqueeze(-1))[0][:, -1])


@pytest.mark.parametrize(
    ("federation", "net", "engine"),
    [
        (toy_federation(), "mlp", "vmap"),
        (toy_federation((40,)), "mlp", "workers"),
        (toy_federation(), Recurrent(), "loop"),
        (images(16), "cnn4", "vmap"),
        (images(28), "cnn4", "workers"),
        (images(28), "mlp", "vmap"),
        (texts(), "fasttext", "vmap"),
        (images(16), nn.Sequential(nn.Flatten(), nn.Linear(256, 2000), nn.ReLU(), nn.Linear(2000, 2)), "workers"),
    ],
    ids=[
        "small",
        "one client",
        "recurrent",
        "small images",
        "large images",
        "large images without convolutions",
        "embeddings",
        "large net",
    ],
)
def test_auto_selects_the_engine_that_was_measured_fastest(
    federation: gpfl.Federation, net: str | nn.Module, engine: str
) -> None:
    spec = fedavg_spec(federation, net)
    assert select_engine(spec) == engine
    assert make_engine("auto", spec).name == engine
    assert make_engine("loop", spec).name == "loop"


def test_unknown_engine_raises() -> None:
    with pytest.raises(gpfl.GpflError, match=r"unknown engine 'lop'; did you mean 'loop'\?"):
        make_engine("lop", fedavg_spec(toy_federation()))


def test_only_methods_and_nets_of_users_are_tried_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(FedAvg):
        pass

    def fail(engine: Vmap) -> None:
        raise RuntimeError("tried")

    monkeypatch.setattr(Vmap, "check_vmappable", fail)
    spec = fedavg_spec(toy_federation())
    for method in (*(method() for method in METHODS.values()), GPFL(valve="full"), GPFL(guidance="embeddings")):
        bound = method.bind(spec.method.net, lr=0.01, epochs=1)
        assert find_vmap_error(dataclasses.replace(spec, method=bound)) is None
    own = Own().bind(spec.method.net, lr=0.01, epochs=1)
    assert str(find_vmap_error(dataclasses.replace(spec, method=own))) == "tried"
    assert str(find_vmap_error(fedavg_spec(toy_federation(), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))))) == "tried"


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_small_products_run_on_one_thread_and_large_ones_on_all() -> None:
    small, large = fedavg_spec(toy_federation()), fedavg_spec(toy_federation(), batch_size=10_000)
    for spec, threads in ((small, 1), (large, 3), (fedavg_spec(images(8), "cnn4"), 3)):
        with limit_threads(spec):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_number_of_threads_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), limit_threads(fedavg_spec(toy_federation())):
        raise KeyError
    assert torch.get_num_threads() == 3
