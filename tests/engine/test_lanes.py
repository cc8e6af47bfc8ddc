"""Lanes run what slots run, in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpfl
from gpfl import tree
from gpfl.engine.lanes import split
from gpfl.engine.pack import Packing, pack
from gpfl.engine.vmap import Vmap


@pytest.mark.parametrize(("width", "count"), [(6, 1), (6, 2), (7, 2), (5, 3), (2, 4)])
def test_slots_are_divided_among_lanes_of_one_width(width: int, count: int) -> None:
    packing = pack([5, 3, 8, 1, 1, 2, 7], width)
    parts = split(packing, count)
    assert {len(part.slots) for part in parts} == {-(-width // count)}
    assert sorted(client for part in parts for slot in part.slots for client in slot) == list(range(7))
    assert max(part.steps for part in parts) == packing.steps


def test_lane_of_empty_slots_has_no_steps() -> None:
    parts = split(Packing([[0]], [4]), 2)
    assert [part.steps for part in parts] == [4, 0]
    assert parts[1].changes() == []


def final(method: str, batch_size: int) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(n, 5)).astype(np.float32), np.arange(n) % 3) for n in (61, 7, 53, 33, 12, 25, 40)]
    result = gpfl.fit(method, gpfl.federate(clients), net="mlp", rounds=3, lr=0.05, batch_size=batch_size, engine="vmap")
    return tree.flatten({"shared": result.outcome.selected.shared, "private": result.outcome.selected.private})


@pytest.mark.parametrize("traced_from", [0, 10**9], ids=["traced", "as it is"])
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("method", ["gpfl", "fedrep", "ditto"])
def test_lanes_give_what_one_gives(method: str, lanes: int, traced_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.engine.vmap.SEGMENT", 4)  # plans come in parts too
    monkeypatch.setattr(Vmap, "slots", 5)
    monkeypatch.setattr(Vmap, "trace_from", traced_from)
    one = final(method, 4)
    counts = []

    def count(self: Vmap, packing: Packing) -> int:
        counts.append(min(lanes, len(packing.slots)))
        return counts[-1]

    monkeypatch.setattr(Vmap, "_lane_count", count)
    several = final(method, 4)
    assert max(counts) == lanes
    for path, value in one.items():
        torch.testing.assert_close(several[path], value, rtol=1e-5, atol=1e-6)


def test_lanes_are_for_graphs_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(30, 5)).astype(np.float32), np.arange(30) % 3) for _ in range(20)]
    engine = gpfl.fit("fedavg", gpfl.federate(clients), net="mlp", rounds=1, batch_size=4, engine="vmap").engine
    assert isinstance(engine, Vmap)
    packing = pack([7] * 20, 20)
    assert engine._lane_count(packing) == 1
    monkeypatch.setattr(engine, "device", torch.device("cuda"))
    assert engine._lane_count(packing) == 1  # seven calls are not worth tracing
    monkeypatch.setattr(Vmap, "trace_from", 1)
    assert engine._lane_count(packing) == Vmap.lanes
    assert engine._lane_count(pack([7] * 7, 7)) == 1  # too few slots
