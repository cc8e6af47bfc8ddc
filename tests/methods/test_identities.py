"""Identities between methods, and what a step leaves unchanged."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from methods.test_plain import CLASSES, LABELS, SCHEDULE, LibraryRun, new_net, skewed_federation
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule, local_round
from gpfl.core.method import Batch, ClientInfo, Method
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, Engine, RunSpec
from gpfl.methods import METHODS
from gpfl.models.custom import net_from_module
from gpfl.training.config import RunOptions
from gpfl.training.round_loop import RoundLoop

engines = pytest.mark.parametrize("engine", ENGINES)

EVERYONE = [0, 1, 2, 3]


def make_engine(method: Method, engine: str = "loop", net: nn.Module | None = None, schedule: Schedule = SCHEDULE) -> Engine:
    """Return an engine of a method on the skewed federation."""
    federation = skewed_federation()
    built = net_from_module(net or new_net(), federation.table.inputs(torch.arange(2)), CLASSES)
    return ENGINES[engine](RunSpec(method.bind(built, lr=0.05, epochs=1), federation, schedule))


def first_state(runner: Engine) -> tuple[Tree, Tree]:
    shared, private = runner.method.init(0)
    return shared, tree.repeat(private, len(EVERYONE))


def batch_of(runner: Engine, client: int) -> Batch:
    return runner.federation.table.batch(runner.adaptation_indices(client))


def info_of(runner: Engine, client: int, round: int = 0) -> ClientInfo:
    return runner.client_info([client], round).select(0)


def noisy(state: Tree) -> Tree:
    """Return the state with noise on every weight."""
    generator = torch.Generator().manual_seed(1)
    return tree.map_leaves(lambda t: t + torch.randn(t.shape, generator=generator), state)


def gap(a: Tree, b: Tree) -> float:
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys()
    assert first
    return float(torch.stack([(first[path] - second[path]).abs().max() for path in first]).max())


def same(a: Tree, b: Tree) -> bool:
    """Return whether the states are equal to the bit."""
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys()
    assert first
    return all(torch.equal(first[path], second[path]) for path in first)


# Methods that equal another one.


@engines
def test_gpfl_without_valve_and_embeddings_is_fedper(engine: str) -> None:
    gpfl = LibraryRun(METHODS["gpfl"](lam=0.1, mu=0.1, without=("cov", "gce")), engine, epochs=2)
    fedper = LibraryRun(METHODS["fedper"](), engine, epochs=2)
    assert same(gpfl.shared, fedper.shared)
    assert same(gpfl.private, fedper.private)
    assert gpfl.evaluation.loss_sum.tolist() == fedper.evaluation.loss_sum.tolist()


@engines
def test_fedprox_with_mu_zero_is_fedavg(engine: str) -> None:
    fedprox, fedavg = (LibraryRun(method, engine, epochs=2) for method in (METHODS["fedprox"](mu=0.0), METHODS["fedavg"]()))
    assert gap(fedprox.shared, fedavg.shared) < 1e-7
    assert fedprox.evaluation.loss_sum == pytest.approx(fedavg.evaluation.loss_sum, abs=1e-6)


@engines
def test_fedphp_with_mu_and_lambda_zero_is_fedavg(engine: str) -> None:
    fedphp = LibraryRun(METHODS["fedphp"](mu=0.0, lam=0.0, variant="mix"), engine, epochs=2)
    fedavg = LibraryRun(METHODS["fedavg"](), engine, epochs=2)
    assert gap(fedphp.shared, fedavg.shared) < 1e-7
    assert fedphp.evaluation.loss_sum == pytest.approx(fedavg.evaluation.loss_sum, abs=1e-6)


@engines
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_trains_the_global_model_of_fedavg(lam: float, engine: str) -> None:
    ditto = LibraryRun(METHODS["ditto"](lam=lam, personal_epochs=3), engine, epochs=2)
    assert gap(ditto.shared, LibraryRun(METHODS["fedavg"](), engine, epochs=2).shared) < 1e-7


@engines
def test_ditto_with_lambda_zero_trains_personal_models_locally(engine: str) -> None:
    ditto = LibraryRun(METHODS["ditto"](lam=0.0, personal_epochs=2), engine, epochs=1)
    local = LibraryRun(METHODS["local"](), engine, epochs=2)
    assert gap(tree.branch(ditto.private, "personal"), local.private) < 1e-7
    assert ditto.evaluation.loss_sum == pytest.approx(local.evaluation.loss_sum, abs=1e-6)


# What a step leaves unchanged.


@pytest.mark.parametrize(("phase", "trained", "frozen"), [(0, "head", "base"), (1, "base", "head")])
def test_fedrep_trains_the_head_first_and_the_base_second(phase: int, trained: str, frozen: str) -> None:
    runner = make_engine(METHODS["fedrep"]())
    client = info_of(runner, 0)
    shared, private = runner.method.init(0)
    local_state = runner.method.download(shared, private, client)
    after, _ = runner.method.phases()[phase].step(shared, local_state, batch_of(runner, 0), client)
    assert same(tree.branch(after, frozen), tree.branch(local_state, frozen))
    assert gap(tree.branch(after, trained), tree.branch(local_state, trained)) > 1e-3


@engines
def test_fedrod_uploads_do_not_depend_on_the_personal_head(engine: str) -> None:
    runner = make_engine(METHODS["fedrod"](), engine)
    shared, private = first_state(runner)
    first = runner.train(shared, private, EVERYONE, 0)
    other = runner.train(shared, noisy(private), EVERYONE, 0)
    assert same(first.mean, other.mean)
    assert gap(first.private, private) > 1e-3
    assert gap(first.private, other.private) > 0.1


def test_fedrod_with_equal_counts_trains_the_shared_model_of_fedavg() -> None:
    fedrod, fedavg = make_engine(METHODS["fedrod"]()), make_engine(METHODS["fedavg"]())
    batch, client = batch_of(fedrod, 0), info_of(fedrod, 0)
    after = {}
    for counts in ("equal", "actual"):
        info = client._replace(label_counts=torch.full((CLASSES,), 6.0)) if counts == "equal" else client
        shared, private = fedrod.method.init(0)
        local_state = fedrod.method.download(shared, private, info)
        after[counts] = tree.pick(fedrod.method.step(shared, local_state, batch, info)[0], ("base", "head"))
    expected, _ = fedavg.method.step(shared, shared, batch, client)
    assert gap(after["equal"], expected) < 1e-6
    assert gap(after["actual"], expected) > 1e-3


@engines
def test_fedrod_stays_finite_if_clients_lack_classes(engine: str) -> None:
    runner = make_engine(METHODS["fedrod"](), engine)
    shared, private = first_state(runner)
    assert all((info_of(runner, client).label_counts == 0).any() for client in EVERYONE)
    cohort = runner.train(shared, private, EVERYONE, 0)
    assert tree.is_finite(cohort.mean)
    assert tree.is_finite(cohort.private)
    assert all(torch.isfinite(values).all() for values in cohort.terms.values())


def test_pfedme_keeps_another_model_than_it_uploads() -> None:
    runner = make_engine(METHODS["pfedme"]())
    shared, private = runner.method.init(0)
    update = local_round(runner.method, shared, private, runner.federation.table, runner.plan(0, 0), info_of(runner, 0))
    theta, w = tree.branch(update.private, "personal"), update.upload
    assert gap(theta, w) > 1e-3
    for kept, sent in ((tree.branch(private, "personal"), shared), (theta, w), (theta, shared)):
        memory = {t.untyped_storage().data_ptr() for t in tree.leaves(kept)}
        assert memory.isdisjoint(t.untyped_storage().data_ptr() for t in tree.leaves(sent))


def test_pfedme_evaluates_the_personal_model() -> None:
    runner = make_engine(METHODS["pfedme"]())
    shared, private = first_state(runner)
    cohort = runner.train(shared, private, EVERYONE, 0)
    before = runner.evaluate(shared, cohort.private, 1, "test").loss_sum
    assert runner.evaluate(noisy(shared), cohort.private, 1, "test").loss_sum.tolist() == before.tolist()
    assert np.abs(runner.evaluate(shared, noisy(cohort.private), 1, "test").loss_sum - before).min() > 1e-2


@engines
def test_adaptation_of_perfedavg_does_not_change_the_state(engine: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    runner = make_engine(METHODS["perfedavg"](), engine, net)
    shared, private = first_state(runner)
    before = copy.deepcopy((shared, private))
    scores = runner.evaluate(shared, private, 0, "test")
    assert same(shared, before[0])
    assert same(private, before[1])
    assert runner.evaluate(shared, private, 0, "test").loss_sum.tolist() == scores.loss_sum.tolist()
    adapted = runner.method.personal_weights(shared, tree.take(private, 0), batch_of(runner, 0), info_of(runner, 0))
    for part in ("base", "head", "batch_norm_stats"):
        assert gap(tree.branch(adapted, part), tree.branch({**shared, **tree.take(private, 0)}, part)) > 1e-3


# FedPHP's momentum.


@pytest.mark.parametrize(("round", "expected"), [(0, 0.0), (1, 0.2), (3, 0.6), (4, 0.6), (30, 0.6)])
def test_momentum_of_fedphp_grows_to_mu(round: int, expected: float) -> None:
    runner = make_engine(METHODS["fedphp"](mu=0.6))
    assert runner.schedule.rounds == 3
    assert float(runner.method.momentum(info_of(runner, 0, round))) == pytest.approx(expected)


def test_new_client_of_fedphp_keeps_its_personal_model_at_full_momentum() -> None:
    result = gpfl.fit("fedphp", skewed_federation(), net=new_net(), rounds=2, lr=0.1, mu=1.0, variant="inherit")
    assert result.outcome.selected.round == 2  # the momentum has reached mu
    x, y = result.federation.table.x[:30], result.federation.table.y[:30]
    start, late = (result.personalize(x, y, rounds=rounds).logits(x) for rounds in (0, 5))
    assert np.abs(late - start).max() < 1e-5


# FedProto's prototypes.


@engines
def test_fedproto_training_of_a_client_does_not_depend_on_other_models(engine: str) -> None:
    runner = make_engine(METHODS["fedproto"](), engine)
    shared, private = first_state(runner)
    shared = runner.method.aggregate(shared, runner.train(shared, private, EVERYONE, 0).mean)
    index = torch.tensor([1, 2, 3])
    others = tree.clone(private)
    tree.index_copy_(others, index, noisy(tree.take(private, index)))
    first, mixed = (runner.train(shared, state, EVERYONE, 1) for state in (private, others))
    assert same(tree.take(first.private, 0), tree.take(mixed.private, 0))
    assert gap(first.mean, mixed.mean) > 1e-2


@engines
@pytest.mark.parametrize("prototypes", ["running", "after"])
def test_fedproto_predicts_only_classes_that_were_sent(prototypes: str, engine: str) -> None:
    runner = make_engine(METHODS["fedproto"](prototypes=prototypes), engine)
    shared, private = first_state(runner)
    clients = [0, 3]  # classes 0 and 1, 1 and 3
    cohort = runner.train(shared, tree.take(private, torch.tensor(clients)), clients, 0)
    shared = runner.method.aggregate(shared, cohort.mean)
    known = tree.branch(shared, "prototypes")
    sent = sorted({u for client in clients for u in LABELS[client]})
    assert tree.leaf(known, "seen").tolist() == [float(u in sent) for u in range(CLASSES)]
    assert tree.is_finite(shared)
    x = runner.federation.table.inputs(torch.arange(60))
    private_1 = tree.take(private, 1)
    dead = {
        **private_1,
        "base": tree.map_leaves(torch.zeros_like, tree.branch(private_1, "base")),
    }  # nearest to a prototype of zeros
    for weights in (private_1, dead):
        logits = runner.method.logits(Model(runner.method.net, {**shared, **weights}), x)
        assert set(logits.argmax(-1).tolist()) <= set(sent)
        assert torch.isfinite(logits).all()


@engines
def test_fedproto_uses_its_head_until_there_are_prototypes(engine: str) -> None:
    fedproto, local = make_engine(METHODS["fedproto"](), engine), make_engine(METHODS["local"](), engine)
    shared, private = first_state(fedproto)
    by_head = local.evaluate({}, private, 0, "test")
    assert fedproto.evaluate(shared, private, 0, "test").loss_sum == pytest.approx(by_head.loss_sum, abs=1e-5)
    shared = fedproto.method.aggregate(shared, fedproto.train(shared, private, EVERYONE, 0).mean)
    assert np.abs(fedproto.evaluate(shared, private, 1, "test").loss_sum - by_head.loss_sum).min() > 1e-2


# Clients that are not sampled.


PERSONAL = [name for name in METHODS if name not in ("fedavg", "fedprox", "perfedavg", "fedavg-ft")]
"""Methods with private state."""


@engines
@pytest.mark.parametrize("name", PERSONAL)
def test_clients_that_are_not_sampled_keep_their_private_state(name: str, engine: str) -> None:
    schedule = Schedule(seed=5, rounds=1, client_fraction=0.5)
    runner = make_engine(METHODS[name](), engine, schedule=schedule)
    _, before = first_state(runner)
    spec = RunSpec(runner.method, runner.federation, schedule)
    after = RoundLoop(spec, runner, RunOptions()).run().last.private
    sampled = schedule.sample_clients(0, len(EVERYONE))
    assert len(sampled) == 2
    for client in EVERYONE:
        assert same(tree.take(after, client), tree.take(before, client)) == (client not in sampled)
