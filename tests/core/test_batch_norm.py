"""BatchNorm against a plain computation with nn.BatchNorm1d: weights and running statistics, local or averaged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import plain
import pytest
import torch
from conftest import toy_table
from methods.test_plain import CLASSES, LIMIT, ROUNDS, SCHEDULE, LibraryRun, evaluate, state_gap
from plain import LR, Outcome, Split, State, parts_of, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import gpfl
from gpfl.engine import ENGINES
from gpfl.federation import Shard
from gpfl.methods import METHODS

SIZES = (30, 20, 40, 10)
"""Training samples of each client: full batches only."""


def even_federation() -> gpfl.Federation:
    """Clients of unequal sizes and centres, whose running statistics differ."""
    table = toy_table(sum(SIZES) + 40, CLASSES)
    order = np.argsort(table.x[:, 0].numpy(), kind="stable")
    shards = []
    for client, size in enumerate(SIZES):
        indices, order = np.random.default_rng(client).permutation(order[: size + 10]), order[size + 10 :]
        shards.append(Shard(str(client), indices[:size], indices[:0], indices[size:]))
    return gpfl.Federation(table, shards)


def new_net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def split_net() -> Split:
    net = new_net()
    return Split(nn.Sequential(net[0], net[1], net[2], nn.Identity()), net[3])


# The plain computation.


def statistics(net: Split) -> Iterator[tuple[str, Tensor]]:
    """Yield the running mean and variance by name."""
    return ((name, value) for name, value in net.named_buffers() if "running" in name)


def copy_statistics(source: Split, target: Split) -> None:
    for (_, a), (_, b) in zip(statistics(source), statistics(target), strict=True):
        b.copy_(a)


class World(plain.World):
    """Clients whose running statistics stay local or are averaged like weights."""

    def __init__(self, world: plain.World, net: Split, batch_norm: str) -> None:
        super().__init__(world.federation, world.schedule, world.epochs)
        self.local = self.copies(net)  # only their statistics matter
        self.batch_norm = batch_norm

    def received(self, net: Split, client: int) -> Split:
        """Return a client's copy of a net, with the statistics that apply to it."""
        model = copy.deepcopy(net).train()
        if self.batch_norm == "local":
            copy_statistics(self.local[client], model)
        return model

    def merge(self, net: Split, models: list[Split], clients: list[int]) -> None:
        """Average the weights, and the statistics unless they stay local."""
        self.average(net, models, clients)
        if self.batch_norm == "average":
            fractions = [float(self.n_samples[c] / sum(self.n_samples[clients])) for c in clients]
            for name, value in statistics(net):
                value.copy_(sum(fraction * dict(statistics(m))[name] for fraction, m in zip(fractions, models, strict=True)))
        else:
            for model, client in zip(models, clients, strict=True):
                copy_statistics(model, self.local[client])

    def outcome(self, net: Split, shared: State, private: list[State], models: list[Split]) -> Outcome:
        """Return the states with the statistics, and models that use them."""
        evaluated = [copy.deepcopy(model).eval() for model in models]
        sources = [net] * len(evaluated) if self.batch_norm == "average" else self.local
        for source, model in zip(sources, evaluated, strict=True):
            copy_statistics(source, model)
        if self.batch_norm == "average":
            return Outcome({**shared, **named(net)}, private, evaluated)
        return Outcome(shared, [{**state, **named(local)} for state, local in zip(private, self.local, strict=True)], evaluated)


def named(net: Split) -> State:
    """Return the statistics by the library's names."""
    return {f"batch_norm_stats.{name}": value for name, value in statistics(net)}


def fedavg(world: World, net: Split) -> Outcome:
    for number, clients in world.cohorts(ROUNDS):
        models = [world.received(net, client) for client in clients]
        for model, client in zip(models, clients, strict=True):
            world.train(model, client, number)
        world.merge(net, models, clients)
    return world.outcome(net, parts_of(net), [{} for _ in SIZES], [net for _ in SIZES])


def fedper(world: World, net: Split) -> Outcome:
    heads = world.copies(net.head)
    for number, clients in world.cohorts(ROUNDS):
        models = []
        for client in clients:
            model = world.received(net, client)
            model.head = heads[client]
            world.train(model, client, number)
            models.append(model)
        world.merge(net, models, clients)  # the merged head is never used
    return world.outcome(net, {"base": net.base}, [{"head": h} for h in heads], [Split(net.base, h) for h in heads])


def pfedme(world: World, net: Split, lam: float, p_lr: float, beta: float) -> Outcome:
    thetas = world.copies(net)
    for number, clients in world.cohorts(ROUNDS):
        sent = []
        for client in clients:
            w, theta = world.received(net, client), world.received(net, client)
            optimiser = torch.optim.SGD(theta.parameters(), lr=p_lr, weight_decay=0.001)
            for x, y in world.batches(client, number):
                for _ in range(5):
                    sgd(F.cross_entropy(theta(x), y) + lam / 2 * plain.squared_distance(theta, w), optimiser)
                plain.copy_parameters(plain.mix_parameters(w, theta, LR * lam), w)
            copy_statistics(theta, w)  # w itself is never run
            thetas[client] = theta
            sent.append(w)
        mean = copy.deepcopy(net)
        world.merge(mean, sent, clients)
        plain.copy_parameters(plain.mix_parameters(net, mean, beta), net)
        copy_statistics(mean, net)
    return world.outcome(net, parts_of(net), [{"personal": theta} for theta in thetas], thetas)


def fedphp(world: World, net: Split, mu: float, lam: float, variant: str) -> Outcome:
    personal = world.copies(net)
    for number, clients in world.cohorts(ROUNDS):
        momentum = mu * number / ROUNDS
        models = []
        for client in clients:
            mixed = plain.mix_parameters(net, personal[client], momentum)
            model = world.received(mixed if variant == "mix" else net, client)
            teacher = copy.deepcopy(model).eval()  # the statistics of the round's start, which it leaves alone
            plain.copy_parameters(net if variant == "mix" else personal[client], teacher)
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in world.batches(client, number):
                f = model.base(x)
                loss = (1 - lam) * F.cross_entropy(model.head(f), y) + lam * plain.mmd(f, teacher.base(x).detach())
                sgd(loss, optimiser)
            models.append(model)
            personal[client] = model if variant == "mix" else plain.mix_parameters(model, personal[client], momentum)
        world.merge(net, models, clients)
    used = [plain.mix_parameters(net, model, mu) for model in personal] if variant == "mix" else personal
    return world.outcome(net, parts_of(net), [{"personal": model} for model in personal], used)


def fedproto(world: World, net: Split, lam: float, prototypes: str) -> Outcome:
    """No weights are shared, so statistics are local under either setting."""
    models = [model.train() for model in world.copies(net)]
    known: dict[int, Tensor] = {}
    for number, clients in world.cohorts(ROUNDS):
        sent: dict[int, list[Tensor]] = {}
        for client in clients:
            model = models[client]
            sums = plain.Prototypes(torch.zeros(CLASSES, 8), torch.zeros(CLASSES))
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in world.batches(client, number):
                f = model.base(x)
                if prototypes == "running":
                    sums.add(f, y)
                targets = torch.stack([known.get(int(u), f[k].detach()) for k, u in enumerate(y)])
                sgd(F.cross_entropy(model.head(f), y) + lam * F.mse_loss(f, targets), optimiser)
            if prototypes == "after":
                model.eval()
                for x, y in world.batches(client, number, epochs=1):
                    sums.add(model.base(x), y)
                model.train()
            for u in sums.count.nonzero().flatten().tolist():
                sent.setdefault(u, []).append(sums.total[u] / sums.count[u])
        known |= {u: torch.stack(means).mean(0) for u, means in sent.items()}
    mean = torch.stack([known[u] for u in range(CLASSES)])

    def prototype_logits(model: Split) -> Callable[[Tensor], Tensor]:
        model.eval()
        return lambda x: -((model.base(x)[:, None] - mean) ** 2).mean(-1)

    shared: State = {"prototypes.mean": mean, "prototypes.seen": torch.ones(CLASSES)}
    return Outcome(shared, [{**parts_of(m), **named(m)} for m in models], [prototype_logits(m) for m in models])


# The comparison.


PLAIN = {"fedavg": fedavg, "fedper": fedper, "pfedme": pfedme, "fedphp": fedphp, "fedproto": fedproto}

CASES: dict[str, tuple[str, dict]] = {
    "fedavg": ("fedavg", {}),
    "fedper": ("fedper", {}),
    "pfedme": ("pfedme", {"lam": 3.0, "p_lr": 0.03, "beta": 0.8}),
    "fedphp-mix": ("fedphp", {"mu": 0.9, "lam": 0.2, "variant": "mix"}),
    "fedphp-inherit": ("fedphp", {"mu": 0.9, "lam": 0.2, "variant": "inherit"}),
    "fedproto-running": ("fedproto", {"lam": 2.0, "prototypes": "running"}),
    "fedproto-after": ("fedproto", {"lam": 2.0, "prototypes": "after"}),
}
"""A method and its options, which the library and the plain computation both take."""


def both(case: str, engine: str, batch_norm: str, plain_batch_norm: str) -> tuple[LibraryRun, Outcome]:
    """Return the library's run, and the plain one with statistics treated as `plain_batch_norm`."""
    name, options = CASES[case]
    ours = LibraryRun(METHODS[name](**options), engine, federation=even_federation(), module=new_net(), batch_norm=batch_norm)
    net = split_net()
    return ours, PLAIN[name](World(ours.world, net, plain_batch_norm), net, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_norm", ["local", "average"])
@pytest.mark.parametrize("case", CASES)
def test_weights_and_running_statistics_agree_with_the_plain_computation(case: str, batch_norm: str, engine: str) -> None:
    ours, theirs = both(case, engine, batch_norm, batch_norm)
    assert state_gap(ours, theirs) < LIMIT
    for client, (correct, loss) in enumerate(evaluate(ours.world, theirs)):
        assert ours.evaluation.correct[client] == correct
        assert ours.evaluation.loss_sum[client] == pytest.approx(loss, abs=10 * LIMIT)


@pytest.mark.parametrize("case", ["fedavg", "fedper", "pfedme", "fedphp-mix", "fedphp-inherit"])
def test_local_and_averaged_statistics_give_different_losses(case: str) -> None:
    ours, theirs = both(case, "loop", "local", "average")
    losses = [loss for _, loss in evaluate(ours.world, theirs)]
    assert np.abs(ours.evaluation.loss_sum - losses).min() > 1e-2


def test_federation_has_full_batches_and_absent_clients() -> None:
    world = plain.World(even_federation(), SCHEDULE)
    assert tuple(world.n_samples) == SIZES
    assert all(size % SCHEDULE.batch_size == 0 for size in SIZES)
    assert {len(clients) for _, clients in world.cohorts(ROUNDS)} == {3}
