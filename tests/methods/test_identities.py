"""What methods have in common: where one turns into another, and which parts a step leaves alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from methods.test_plain import CLASSES, LABELS, SCHEDULE, Ours, new_net, skewed_federation
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule, local_round
from gpfl.core.method import Batch, ClientInfo, Method
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, Engine, RunSpec
from gpfl.methods import METHODS
from gpfl.models.splitting import net_from_module
from gpfl.training.config import RunOptions
from gpfl.training.round_loop import RoundLoop

engines = pytest.mark.parametrize("engine", ENGINES)

EVERYONE = [0, 1, 2, 3]


def machine_of(method: Method, engine: str = "loop", net: nn.Module | None = None, schedule: Schedule = SCHEDULE) -> Engine:
    """The engine of a method on the skewed federation."""
    federation = skewed_federation()
    built = net_from_module(net or new_net(), federation.table.inputs(torch.arange(2)), CLASSES)
    return ENGINES[engine](RunSpec(method.bind(built, lr=0.05, epochs=1), federation, schedule))


def first_state(machine: Engine) -> tuple[Tree, Tree]:
    shared, private = machine.method.init(0)
    return shared, tree.repeat(private, len(EVERYONE))


def batch_of(machine: Engine, client: int) -> Batch:
    return machine.federation.table.batch(machine.adaptation_indices(client))


def facts_of(machine: Engine, client: int, round: int = 0) -> ClientInfo:
    return machine.client_info([client], round).select(0)


def noisy(state: Tree) -> Tree:
    """The state with every weight moved."""
    draw = torch.Generator().manual_seed(1)
    return tree.map_leaves(lambda t: t + torch.randn(t.shape, generator=draw), state)


def gap(a: Tree, b: Tree) -> float:
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys()
    assert first
    return float(torch.stack([(first[path] - second[path]).abs().max() for path in first]).max())


def same(a: Tree, b: Tree) -> bool:
    """Tells whether the states are equal bit for bit."""
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys()
    assert first
    return all(torch.equal(first[path], second[path]) for path in first)


# One method is another.


@engines
def test_gpfl_without_valve_and_embeddings_is_fedper(engine: str) -> None:
    gpfl = Ours(METHODS["gpfl"](lam=0.1, mu=0.1, without=("cov", "gce")), engine, epochs=2)
    fedper = Ours(METHODS["fedper"](), engine, epochs=2)
    assert same(gpfl.shared, fedper.shared)
    assert same(gpfl.private, fedper.private)
    assert gpfl.scores.loss_sum.tolist() == fedper.scores.loss_sum.tolist()


@engines
def test_fedprox_without_its_pull_is_fedavg(engine: str) -> None:
    fedprox, fedavg = (Ours(method, engine, epochs=2) for method in (METHODS["fedprox"](mu=0.0), METHODS["fedavg"]()))
    assert gap(fedprox.shared, fedavg.shared) < 1e-7
    assert fedprox.scores.loss_sum == pytest.approx(fedavg.scores.loss_sum, abs=1e-6)


@engines
def test_fedphp_without_momentum_and_distance_is_fedavg(engine: str) -> None:
    fedphp = Ours(METHODS["fedphp"](mu=0.0, lam=0.0, variant="mix"), engine, epochs=2)
    fedavg = Ours(METHODS["fedavg"](), engine, epochs=2)
    assert gap(fedphp.shared, fedavg.shared) < 1e-7
    assert fedphp.scores.loss_sum == pytest.approx(fedavg.scores.loss_sum, abs=1e-6)


@engines
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_trains_the_global_model_of_fedavg(lam: float, engine: str) -> None:
    ditto = Ours(METHODS["ditto"](lam=lam, personal_epochs=3), engine, epochs=2)
    assert gap(ditto.shared, Ours(METHODS["fedavg"](), engine, epochs=2).shared) < 1e-7


@engines
def test_ditto_without_its_pull_trains_own_models_alone(engine: str) -> None:
    ditto = Ours(METHODS["ditto"](lam=0.0, personal_epochs=2), engine, epochs=1)
    local = Ours(METHODS["local"](), engine, epochs=2)
    assert gap(tree.branch(ditto.private, "personal"), local.private) < 1e-7
    assert ditto.scores.loss_sum == pytest.approx(local.scores.loss_sum, abs=1e-6)


# What a step leaves alone.


@pytest.mark.parametrize(("phase", "moves", "stays"), [(0, "head", "base"), (1, "base", "head")])
def test_fedrep_moves_the_head_first_and_the_base_second(phase: int, moves: str, stays: str) -> None:
    machine = machine_of(METHODS["fedrep"]())
    client = facts_of(machine, 0)
    shared, private = machine.method.init(0)
    local_state = machine.method.download(shared, private, client)
    after, _ = machine.method.phases()[phase].step(shared, local_state, batch_of(machine, 0), client)
    assert same(tree.branch(after, stays), tree.branch(local_state, stays))
    assert gap(tree.branch(after, moves), tree.branch(local_state, moves)) > 1e-3


@engines
def test_fedrod_shares_the_same_whatever_the_own_head_is(engine: str) -> None:
    machine = machine_of(METHODS["fedrod"](), engine)
    shared, private = first_state(machine)
    straight = machine.train(shared, private, EVERYONE, 0)
    other = machine.train(shared, noisy(private), EVERYONE, 0)
    assert same(straight.mean, other.mean)
    assert gap(straight.private, private) > 1e-3
    assert gap(straight.private, other.private) > 0.1


def test_fedrod_with_equal_counts_trains_the_shared_model_of_fedavg() -> None:
    fedrod, fedavg = machine_of(METHODS["fedrod"]()), machine_of(METHODS["fedavg"]())
    batch, client = batch_of(fedrod, 0), facts_of(fedrod, 0)
    after = {}
    for counts in ("equal", "own"):
        told = client._replace(label_counts=torch.full((CLASSES,), 6.0)) if counts == "equal" else client
        shared, private = fedrod.method.init(0)
        local_state = fedrod.method.download(shared, private, told)
        after[counts] = tree.pick(fedrod.method.step(shared, local_state, batch, told)[0], ("base", "head"))
    expected, _ = fedavg.method.step(shared, shared, batch, client)
    assert gap(after["equal"], expected) < 1e-6
    assert gap(after["own"], expected) > 1e-3


@engines
def test_fedrod_stays_finite_where_clients_lack_classes(engine: str) -> None:
    machine = machine_of(METHODS["fedrod"](), engine)
    shared, private = first_state(machine)
    assert all((facts_of(machine, client).label_counts == 0).any() for client in EVERYONE)
    cohort = machine.train(shared, private, EVERYONE, 0)
    assert tree.is_finite(cohort.mean)
    assert tree.is_finite(cohort.private)
    assert all(torch.isfinite(values).all() for values in cohort.terms.values())


def test_pfedme_keeps_another_model_than_it_sends() -> None:
    machine = machine_of(METHODS["pfedme"]())
    shared, private = machine.method.init(0)
    update = local_round(machine.method, shared, private, machine.federation.table, machine.plan(0, 0), facts_of(machine, 0))
    theta, w = tree.branch(update.private, "personal"), update.upload
    assert gap(theta, w) > 1e-3
    for kept, sent in ((tree.branch(private, "personal"), shared), (theta, w), (theta, shared)):
        places = {t.untyped_storage().data_ptr() for t in tree.leaves(kept)}
        assert places.isdisjoint(t.untyped_storage().data_ptr() for t in tree.leaves(sent))


def test_pfedme_judges_the_model_it_keeps_and_not_the_global_one() -> None:
    machine = machine_of(METHODS["pfedme"]())
    shared, private = first_state(machine)
    cohort = machine.train(shared, private, EVERYONE, 0)
    before = machine.evaluate(shared, cohort.private, 1, "test").loss_sum
    assert machine.evaluate(noisy(shared), cohort.private, 1, "test").loss_sum.tolist() == before.tolist()
    assert np.abs(machine.evaluate(shared, noisy(cohort.private), 1, "test").loss_sum - before).min() > 1e-2


@engines
def test_adaptation_of_perfedavg_leaves_weights_and_running_statistics_as_they_were(engine: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    machine = machine_of(METHODS["perfedavg"](), engine, net)
    shared, private = first_state(machine)
    before = copy.deepcopy((shared, private))
    scores = machine.evaluate(shared, private, 0, "test")
    assert same(shared, before[0])
    assert same(private, before[1])
    assert machine.evaluate(shared, private, 0, "test").loss_sum.tolist() == scores.loss_sum.tolist()
    adapted = machine.method.personal_weights(shared, tree.take(private, 0), batch_of(machine, 0), facts_of(machine, 0))
    for part in ("base", "head", "batch_norm_stats"):
        assert gap(tree.branch(adapted, part), tree.branch({**shared, **tree.take(private, 0)}, part)) > 1e-3


# FedPHP's momentum.


@pytest.mark.parametrize(("round", "expected"), [(0, 0.0), (1, 0.2), (3, 0.6), (4, 0.6), (30, 0.6)])
def test_momentum_of_fedphp_grows_to_mu_and_no_further(round: int, expected: float) -> None:
    machine = machine_of(METHODS["fedphp"](mu=0.6))
    assert machine.schedule.rounds == 3
    assert float(machine.method.momentum(facts_of(machine, 0, round))) == pytest.approx(expected)


def test_new_client_of_fedphp_keeps_its_own_model_whole_at_full_momentum_however_late_it_comes() -> None:
    result = gpfl.fit("fedphp", skewed_federation(), net=new_net(), rounds=2, lr=0.1, mu=1.0, variant="inherit")
    assert result.outcome.selected.round == 2  # the momentum has reached mu
    x, y = result.federation.table.x[:30], result.federation.table.y[:30]
    start, late = (result.personalize(x, y, rounds=rounds).logits(x) for rounds in (0, 5))
    assert np.abs(late - start).max() < 1e-5


# FedProto's prototypes.


@engines
def test_fedproto_trains_a_client_the_same_whatever_the_others_models_are(engine: str) -> None:
    machine = machine_of(METHODS["fedproto"](), engine)
    shared, private = first_state(machine)
    shared = machine.method.aggregate(shared, machine.train(shared, private, EVERYONE, 0).mean)
    index = torch.tensor([1, 2, 3])
    others = tree.clone(private)
    tree.index_copy_(others, index, noisy(tree.take(private, index)))
    straight, mixed = (machine.train(shared, state, EVERYONE, 1) for state in (private, others))
    assert same(tree.take(straight.private, 0), tree.take(mixed.private, 0))
    assert gap(straight.mean, mixed.mean) > 1e-2


@engines
@pytest.mark.parametrize("prototypes", ["running", "after"])
def test_fedproto_has_prototypes_of_the_classes_that_were_sent_and_decides_for_no_other(prototypes: str, engine: str) -> None:
    machine = machine_of(METHODS["fedproto"](prototypes=prototypes), engine)
    shared, private = first_state(machine)
    clients = [0, 3]  # classes 0 and 1, 1 and 3
    cohort = machine.train(shared, tree.take(private, torch.tensor(clients)), clients, 0)
    shared = machine.method.aggregate(shared, cohort.mean)
    known = tree.branch(shared, "prototypes")
    sent = sorted({u for client in clients for u in LABELS[client]})
    assert tree.leaf(known, "seen").tolist() == [float(u in sent) for u in range(CLASSES)]
    assert tree.is_finite(shared)
    x = machine.federation.table.inputs(torch.arange(60))
    own = tree.take(private, 1)
    dead = {**own, "base": tree.map_leaves(torch.zeros_like, tree.branch(own, "base"))}  # nearest to a prototype of zeros
    for weights in (own, dead):
        logits = machine.method.logits(Model(machine.method.net, {**shared, **weights}), x)
        assert set(logits.argmax(-1).tolist()) <= set(sent)
        assert torch.isfinite(logits).all()


@engines
def test_fedproto_is_judged_by_its_head_until_there_are_prototypes(engine: str) -> None:
    fedproto, local = machine_of(METHODS["fedproto"](), engine), machine_of(METHODS["local"](), engine)
    shared, private = first_state(fedproto)
    by_head = local.evaluate({}, private, 0, "test")
    assert fedproto.evaluate(shared, private, 0, "test").loss_sum == pytest.approx(by_head.loss_sum, abs=1e-5)
    shared = fedproto.method.aggregate(shared, fedproto.train(shared, private, EVERYONE, 0).mean)
    assert np.abs(fedproto.evaluate(shared, private, 1, "test").loss_sum - by_head.loss_sum).min() > 1e-2


# Clients that do not take part.


PERSONAL = [name for name in METHODS if name not in ("fedavg", "fedprox", "perfedavg")]
"""Methods whose clients keep something."""


@engines
@pytest.mark.parametrize("name", PERSONAL)
def test_run_leaves_private_state_of_absent_clients_alone(name: str, engine: str) -> None:
    schedule = Schedule(seed=5, rounds=1, client_fraction=0.5)
    machine = machine_of(METHODS[name](), engine, schedule=schedule)
    _, before = first_state(machine)
    setting = RunSpec(machine.method, machine.federation, schedule)
    after = RoundLoop(setting, machine, RunOptions()).run().last.private
    joined = schedule.sample_clients(0, len(EVERYONE))
    assert len(joined) == 2
    for client in EVERYONE:
        assert same(tree.take(after, client), tree.take(before, client)) == (client not in joined)
