"""Recorded numbers of all methods: three rounds on the digits, seed 0. `python tests/methods/test_goldens.py` writes them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import gpfl
from gpfl.core import tree
from gpfl.methods import METHODS

GOLDENS = Path(__file__).with_suffix(".json")


@cache
def federation() -> gpfl.Federation:
    return gpfl.federate("digits", partition="pathological", clients=20, classes_per_client=4)


def run(method: str) -> dict[str, object]:
    """Return the accuracy of each round, and the L2 norm of each part of the shared and the private state."""
    torch.set_num_threads(1)
    result = gpfl.fit(method, federation(), net="mlp", rounds=3, seed=0, engine="loop", lr=0.05)
    state = result.outcome.last
    norms = {
        f"{name}/{part}": float(tree.norm(tree.pick(parts, (part,))))
        for name, parts in (("shared", state.shared), ("private", state.private))
        for part in parts
    }
    return {"accuracy": [line["accuracy"] for line in result.history], "norm": norms}


@pytest.mark.parametrize("method", METHODS)
def test_method_reproduces_its_recorded_numbers(method: str) -> None:
    golden, actual = json.loads(GOLDENS.read_text(encoding="utf-8"))[method], run(method)
    assert actual["accuracy"] == pytest.approx(golden["accuracy"], abs=1e-6)
    assert actual["norm"] == pytest.approx(golden["norm"], rel=1e-6)


if __name__ == "__main__":
    GOLDENS.write_text(json.dumps({method: run(method) for method in METHODS}, indent=1) + "\n", encoding="utf-8")
