"""The recorded federation of tests/oracles, and runs on it to compare with the recordings."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.core.net import Net
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, Engine, RunSpec
from gpfl.federation import Shard
from gpfl.models.architectures import CNN4, net_from_architecture

FOLDER = Path(__file__).parent / "oracles"
Arrays = dict[str, npt.NDArray[np.float32]]
PARTS = ("base", "head", "gce", "cov")


@cache
def recording(name: str) -> Arrays:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def federation() -> gpfl.Federation:
    """Return the four clients, samples in the order of the file."""
    data = recording("data")
    xs, ys, shards, start = [], [], [], 0
    empty = np.zeros(0, dtype=np.int64)
    for client in range(4):
        indices = []
        for split in ("train", "test"):
            xs.append(data[f"client{client}/{split}/x"])
            ys.append(data[f"client{client}/{split}/y"])
            indices.append(np.arange(start, start := start + len(xs[-1])))
        shards.append(Shard(str(client), indices[0], empty, indices[1]))
    table = gpfl.Table(np.concatenate(xs), np.concatenate(ys), classes=10, name="oracle")
    return gpfl.Federation(table, shards)


def net(clients: gpfl.Federation) -> Net:
    example = clients.table.inputs(torch.arange(2))
    return net_from_architecture(CNN4(channels=(4, 8), hidden=32), "cnn4", example, 10)


def recorded_tree(arrays: Arrays, prefix: str = "") -> Tree:
    """Return the arrays under a prefix as a tree {part: {name: tensor}}."""
    out: Tree = {}
    for key, value in arrays.items():
        if key.startswith(prefix):
            part, _, name = key.removeprefix(prefix).partition(".")
            if part in PARTS:
                tree.branch({**out, part: out.setdefault(part, {})}, part)[name] = torch.from_numpy(value)
    return out


def with_weights(state: Tree, start: Tree) -> Tree:
    """Return a state whose net parts, at any depth, are the recorded initial ones."""
    out: Tree = {}
    for key, value in state.items():
        if key in start and isinstance(value, dict) and set(value) == set(tree.branch(start, key)):
            out[key] = tree.map_leaves(torch.clone, tree.branch(start, key))
        elif isinstance(value, dict):
            out[key] = with_weights(value, start)
        else:
            out[key] = value
    return out


class Replay:
    """A run of a method on the recorded federation, from the recorded weights, round by round."""

    def __init__(self, method: Method, engine: str) -> None:
        self.federation = federation()
        bound = method.bind(net(self.federation), lr=0.005, epochs=1)
        spec = RunSpec(bound, self.federation, Schedule(seed=0, rounds=3, shuffle=False), class_counts="used")
        self.method, self.engine = bound, ENGINES[engine](spec)
        start = recorded_tree(recording("init"))
        shared, private = bound.init(0)
        self.round, self.shared = 0, with_weights(shared, start)
        self.private = tree.repeat(with_weights(private, start), 4)

    def advance(self) -> dict[str, torch.Tensor]:
        """Run a round and return its loss terms."""
        cohort = self.engine.train(self.shared, self.private, range(4), self.round)
        self.shared, self.private = self.method.aggregate(self.shared, cohort.mean), cohort.private
        self.round += 1
        return cohort.terms

    def correct(self) -> list[int]:
        return self.engine.evaluate(self.shared, self.private, self.round, "test").correct.astype(int).tolist()

    def logits(self, client: int = 0) -> torch.Tensor:
        """Return the logits of the personal model on a client's first ten test samples."""
        indices = self.federation.shards[client].test[:10]
        weights = personal_weights(self.engine, self.shared, self.private, self.round, client)
        x = self.federation.table.inputs(torch.from_numpy(indices))
        return self.method.logits(gpfl.core.net.Model(self.method.net, weights), x)


def personal_weights(engine: Engine, shared: Tree, private: Tree, round: int, client: int) -> Tree:
    info = engine.client_info(range(len(engine.federation)), round).select(client)
    batch = engine.federation.table.batch(engine.adaptation_indices(client))
    return engine.method.personal_weights(shared, tree.take(private, client), batch, info)


def gap(ours: Tree, theirs: Tree) -> float:
    """Return the largest difference over all recorded tensors."""
    actual, recorded = tree.flatten(ours), tree.flatten(theirs)
    assert recorded
    return max(float((actual[key] - recorded[key]).abs().max()) for key in recorded)
