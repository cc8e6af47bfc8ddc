"""Every method against its plain computation, with several epochs, shuffling, partial participation and unequal clients."""

from __future__ import annotations

import copy
import math

import numpy as np
import plain
import pytest
import torch
from conftest import toy_table
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.core.randomness import normal, random_key
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, RunSpec
from gpfl.federation import Shard
from gpfl.methods import METHODS
from gpfl.models.custom import net_from_module

ROUNDS = 3
SCHEDULE = Schedule(seed=5, rounds=ROUNDS, client_fraction=0.75)
LIMIT = 1e-5
CLASSES = 5

SIZES = (30, 20, 24, 6)
"""Training samples of each client: the last one has less than a batch, so it never trains with Per-FedAvg."""

LABELS = ((0, 1), (0, 2), (0, 1), (1, 3))
"""Training classes of each client: no client sends class 2 in rounds 0 and 2, class 3 in round 1, or class 4 ever."""

TEST_CLASSES = (5, 4, 4, 4)
"""Number of test classes of each client, more than it trains on; the first is tested on class 4 too, which none trains on."""


def skewed_federation() -> gpfl.Federation:
    """Return clients of unequal sizes and labels."""
    table = toy_table(300, CLASSES)
    labels = table.y.numpy()
    free = np.arange(len(table))
    shards = []
    for client, (size, classes, test_classes) in enumerate(zip(SIZES, LABELS, TEST_CLASSES, strict=True)):
        train = np.concatenate([free[labels[free] == u][: size // len(classes)] for u in classes])
        free = np.setdiff1d(free, train)
        test = free[::-1][labels[free[::-1]] < test_classes][:10]
        free = np.setdiff1d(free, test)
        shards.append(Shard(str(client), train, train[:0], test))
    return gpfl.Federation(table, shards)


def new_net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


class LibraryRun:
    """Three rounds of a method with the library."""

    def __init__(
        self,
        method: Method,
        engine: str = "loop",
        epochs: int = 1,
        *,
        federation: gpfl.Federation | None = None,
        module: nn.Module | None = None,
        batch_norm: str = "local",
    ) -> None:
        federation = federation or skewed_federation()
        net = net_from_module(module or new_net(), federation.table.inputs(torch.arange(2)), CLASSES)
        self.method = method.bind(net, lr=plain.LR, epochs=epochs, batch_norm=batch_norm)
        runner = ENGINES[engine](RunSpec(self.method, federation, SCHEDULE))
        shared, private = self.method.init(0)
        self.start = copy.deepcopy((shared, private))
        private = tree.repeat(private, 4)
        for number in range(ROUNDS):
            clients = [client for client in SCHEDULE.sample_clients(number, 4) if runner.can_train(client)]
            index = torch.tensor(clients)
            cohort = runner.train(shared, tree.take(private, index), clients, number)
            shared = self.method.aggregate(shared, cohort.mean)
            tree.index_copy_(private, index, cohort.private)
        self.shared, self.private = shared, private
        self.evaluation = runner.evaluate(shared, private, ROUNDS, "test")
        self.world = plain.World(federation, SCHEDULE, epochs)


def split_net() -> plain.Split:
    net = new_net()
    return plain.Split(nn.Sequential(net[0], net[1], nn.Identity()), net[2])


def gap(ours: Tree, theirs: plain.State) -> float:
    """Return the largest difference between two states of the same names."""
    expected = {}
    for name, value in theirs.items():
        named = {name: value} if isinstance(value, torch.Tensor) else dict(value.named_parameters(prefix=name))
        expected |= {path: weight.detach() for path, weight in named.items()}
    found = {path.replace("/", "."): weight for path, weight in tree.flatten(ours).items()}
    assert found.keys() == expected.keys()
    differences = [(found[path] - expected[path]).abs().max() for path in found]
    return float(torch.stack(differences).max()) if differences else 0.0


def state_gap(ours: LibraryRun, theirs: plain.Outcome) -> float:
    """Return the largest difference between two runs in the shared state and all private ones."""
    private = [
        gap(tree.drop(tree.take(ours.private, client), ("alpha",)), state) for client, state in enumerate(theirs.private)
    ]
    return float(np.max([gap(ours.shared, theirs.shared), *private]))


def evaluate(world: plain.World, outcome: plain.Outcome) -> list[tuple[int, float]]:
    """Return the correct predictions and the summed loss of each client's model on its test samples."""
    results = []
    for shard, model in zip(world.federation.shards, outcome.logits, strict=True):
        x, y = world.samples(shard.test)
        with torch.no_grad():
            logits = model(x)
        results.append((int((logits.argmax(1) == y).sum()), float(nn.functional.cross_entropy(logits, y, reduction="sum"))))
    return results


def plain_gpfl(ours: LibraryRun, net: plain.Split, without: tuple[str, ...] = (), **options: float) -> plain.Outcome:
    """Return the outcome of GPFL from the library's initial embeddings, valve and constant contexts."""
    shared, private = ours.start
    valve, embeddings = plain.Valve(8), nn.Embedding(CLASSES, 8)
    state = {**shared, **private}
    if "cov" in state:
        valve.load_state_dict(tree.branch(state, "cov"))
    if "gce" in shared:
        embeddings.load_state_dict(tree.branch(shared, "gce"))
    constants = tree.branch(private, "constants") if "constants" in private else None
    noise = None
    if "alpha" in private:
        salt = tree.leaf(tree.branch(private, "alpha"), "salt")
        noise = [normal(random_key(salt, "alpha", torch.tensor(client)), "alpha", (CLASSES,)) for client in range(4)]
    model = plain.GPFLNet(net, valve, embeddings)
    return plain.gpfl_(ours.world, model, ROUNDS, **options, without=without, constants=constants, noise=noise)


def plain_run(ours: LibraryRun, options: dict) -> plain.Outcome:
    """Return the outcome of the library run's method."""
    if ours.method.name == "gpfl":
        return plain_gpfl(ours, split_net(), **options)
    return getattr(plain, ours.method.name.replace("-", "_"))(ours.world, split_net(), ROUNDS, **options)


GPFL = {"lam": 0.03, "mu": 0.2}
PFEDME = {"lam": 3.0, "p_lr": 0.03, "beta": 0.8, "steps": 3, "theta_decay": 0.02}

CASES: dict[str, tuple[str, dict]] = {
    "fedavg": ("fedavg", {}),
    "local": ("local", {}),
    "fedprox": ("fedprox", {"mu": 0.5}),
    "perfedavg": ("perfedavg", {"alpha": 0.08, "beta": 0.03}),
    "perfedavg-defaults": ("perfedavg", {}),
    "pfedme": ("pfedme", PFEDME),
    "pfedme-defaults": ("pfedme", {}),
    "pfedme-local_w": ("pfedme", {**PFEDME, "eval_model": "local_w"}),
    "ditto": ("ditto", {"lam": 0.5, "personal_epochs": 1}),
    "ditto-personal_epochs": ("ditto", {"lam": 0.5, "personal_epochs": 2}),
    "fedper": ("fedper", {}),
    "fedrep": ("fedrep", {"head_epochs": 1}),
    "fedrep-head_epochs": ("fedrep", {"head_epochs": 2}),
    "fedrod": ("fedrod", {}),
    "fedphp-mix": ("fedphp", {"mu": 0.9, "lam": 0.2}),
    "fedphp-inherit": ("fedphp", {"mu": 0.9, "lam": 0.2, "variant": "inherit"}),
    "fedproto-running": ("fedproto", {"lam": 2.0}),
    "fedproto-after": ("fedproto", {"lam": 2.0, "prototypes": "after"}),
    "fedavg-ft": ("fedavg-ft", {"ft_epochs": 5}),
    "fedavg-ft-head": ("fedavg-ft", {"ft_epochs": 2, "ft_parts": "head", "ft_lr": 0.02}),
    "fedavg-ft-base": ("fedavg-ft", {"ft_epochs": 3, "ft_parts": "base", "ft_lr": 0.08}),
    "gpfl": ("gpfl", GPFL),
    "gpfl-without-pci": ("gpfl", {**GPFL, "without": ("pci",)}),
    "gpfl-without-cov": ("gpfl", {**GPFL, "without": ("cov",)}),
    "gpfl-without-mlg": ("gpfl", {**GPFL, "without": ("mlg",)}),
    "gpfl-without-gce": ("gpfl", {**GPFL, "without": ("gce",)}),
    "gpfl-without-cov-gce": ("gpfl", {**GPFL, "without": ("cov", "gce")}),
    "gpfl-guidance": ("gpfl", {**GPFL, "guidance": "embeddings"}),
    "gpfl-valve-gradient": ("gpfl", {**GPFL, "valve_gradient": "global"}),
    "gpfl-private-valve": ("gpfl", {**GPFL, "share_valve": False}),
    "gpfl-alpha-levels": ("gpfl", {**GPFL, "alpha_levels": 3}),
    "gpfl-alpha-noise": ("gpfl", {**GPFL, "alpha_noise": 0.1}),
}
"""A method and its options, for the library and the plain computation."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_library_agrees_with_the_plain_computation(case: str, epochs: int, engine: str) -> None:
    name, options = CASES[case]
    ours = LibraryRun(METHODS[name](**options), engine, epochs)
    theirs = plain_run(ours, options)
    assert state_gap(ours, theirs) < LIMIT
    for client, (correct, loss) in enumerate(evaluate(ours.world, theirs)):
        assert ours.evaluation.correct[client] == correct
        if (name, client) == ("fedproto", 0):  # has a test class without a prototype, whose plain distance is infinite
            assert math.isinf(loss)
            assert math.isfinite(ours.evaluation.loss_sum[client])
        else:
            assert ours.evaluation.loss_sum[client] == pytest.approx(loss, abs=10 * LIMIT)


WRONG: list[tuple[str, dict]] = [
    ("fedprox", {"mu": 0.45}),
    ("perfedavg", {"alpha": 0.07}),
    ("perfedavg", {"beta": 0.028}),
    ("pfedme", {"lam": 2.9}),
    ("pfedme", {"p_lr": 0.028}),
    ("pfedme", {"beta": 1.0}),
    ("pfedme", {"steps": 4}),
    ("pfedme", {"theta_decay": 0.0}),
    ("pfedme", {"eval_model": "local_w"}),
    ("pfedme-defaults", {"theta_decay": 0.0}),
    ("ditto", {"lam": 0.45}),
    ("ditto", {"personal_epochs": 2}),
    ("fedrep", {"head_epochs": 2}),
    ("fedphp-mix", {"mu": 0.8}),
    ("fedphp-mix", {"lam": 0.18}),
    ("fedphp-mix", {"variant": "inherit"}),
    ("fedphp-inherit", {"mu": 0.8}),
    ("fedphp-inherit", {"lam": 0.18}),
    ("fedproto-running", {"lam": 1.8}),
    ("fedproto-running", {"prototypes": "after"}),
    ("gpfl", {"lam": 0.02}),
    ("gpfl", {"mu": 0.18}),
    ("gpfl", {"without": ("mlg",)}),
    ("gpfl", {"valve_gradient": "global"}),
    ("gpfl", {"guidance": "embeddings"}),
    ("gpfl-alpha-noise", {"alpha_noise": 0.09}),
]
"""Options of the plain computation that differ from the library's."""


@pytest.mark.parametrize(("case", "wrong"), WRONG, ids=[f"{case}-{next(iter(wrong))}" for case, wrong in WRONG])
def test_comparison_detects_a_wrong_option(case: str, wrong: dict) -> None:
    name, options = CASES[case]
    ours = LibraryRun(METHODS[name](**options))
    assert state_gap(ours, plain_run(ours, {**options, **wrong})) > 5 * LIMIT


def test_federation_has_absent_clients_missing_classes_and_one_too_small_for_two_batches() -> None:
    world = plain.World(skewed_federation(), SCHEDULE)
    assert tuple(world.n_samples) == SIZES
    assert [clients for _, clients in world.cohorts(ROUNDS)] == [[0, 2, 3], [0, 1, 2], [0, 2, 3]]
    assert [clients for _, clients in world.cohorts(ROUNDS, 2 * SCHEDULE.batch_size)] == [[0, 2], [0, 1, 2], [0, 2]]
    sent = [{u for client in clients for u in LABELS[client]} for _, clients in world.cohorts(ROUNDS)]
    assert sent == [{0, 1, 3}, {0, 1, 2}, {0, 1, 3}]
    for client, labels in enumerate(LABELS):
        assert set(world.counts(client).nonzero().flatten().tolist()) == set(labels)
