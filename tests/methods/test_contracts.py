"""What every method in METHODS must keep to; a new line in the table buys a method this battery."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule, local_round
from gpfl.core.method import ClientInfo, Method
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, RunSpec
from gpfl.engine.base import Engine
from gpfl.methods import METHODS
from gpfl.models.architecture import net_from_architecture
from gpfl.models.cnn4 import CNN4
from gpfl.models.splitting import net_from_module
from gpfl.training import config as configs

ROOT = Path(__file__).parents[2]
CLIENTS = (41, 27, 33, 9)  # 30, 20, 24 and 6 training rows: whole batches, a last partial one, and only a partial one


def trainers(engine: Engine) -> list[int]:
    """The clients that can take part: all, but for methods whose steps take several batches."""
    return [client for client in range(len(engine.federation)) if engine.can_train(client)]


VARIANTS: dict[str, Method] = {name: kind() for name, kind in METHODS.items()} | {
    "gpfl-paper": METHODS["gpfl"](p_scale="mean", mlg_norm="sample_mean", reg="norm"),
    "gpfl-reference": METHODS["gpfl"](cond_source="stale_local"),
    "gpfl-without-pci": METHODS["gpfl"](without=("pci",)),
    "gpfl-without-cov": METHODS["gpfl"](without=("cov",)),
    "gpfl-without-mlg": METHODS["gpfl"](without=("mlg",)),
    "gpfl-without-gce": METHODS["gpfl"](without=("gce",)),
    "gpfl-without-cov-gce": METHODS["gpfl"](without=("cov", "gce")),
    "pfedme-local-w": METHODS["pfedme"](eval_model="local_w", beta=2.0),
    "fedphp-inherit": METHODS["fedphp"](variant="inherit"),
    "fedproto-after": METHODS["fedproto"](prototypes="after"),
    "fedrep-2": METHODS["fedrep"](head_epochs=2),
}
variants = pytest.mark.parametrize("variant", VARIANTS)
engines = pytest.mark.parametrize("engine", ENGINES)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_engine(variant: str, engine: str, net=small_net, sizes=CLIENTS, batch_norm="local", **schedule) -> Engine:
    federation = toy_federation(sizes)
    built = net_from_module(net, federation.table.inputs(torch.arange(2)), 3)
    method = VARIANTS[variant].bind(built, lr=0.05, epochs=schedule.pop("epochs", 1), batch_norm=batch_norm)
    return ENGINES[engine](RunSpec(method, federation, Schedule(seed=3, **{"rounds": 5, **schedule})))


def start(engine: Engine) -> tuple[Tree, Tree]:
    shared, private = engine.method.init(0)
    return shared, tree.repeat(private, len(engine.federation))


def run(engine: Engine, rounds: int) -> tuple[Tree, Tree]:
    shared, private = start(engine)
    everyone = len(engine.federation)
    for number in range(rounds):
        clients = [client for client in engine.schedule.sample_clients(number, everyone) if client in trainers(engine)]
        index = torch.tensor(clients)
        cohort = engine.train(shared, tree.take(private, index), clients, number)
        shared = engine.method.aggregate(shared, cohort.mean)
        private = tree.map_leaves(torch.clone, private)
        tree.index_copy_(private, index, cohort.private)
    return shared, private


def gap(a: Tree, b: Tree) -> float:
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys()
    return max((float((first[key] - second[key]).abs().max()) for key in first), default=0.0)


@variants
@pytest.mark.parametrize("net", [small_net, batch_norm_net])
@pytest.mark.parametrize(
    "schedule",
    [{}, {"client_fraction": 0.5}, {"epochs": 2, "drop_last": False, "shuffle": False}, {"batch_norm": "average"}],
    ids=str,
)
def test_vmap_gives_what_loop_gives(variant: str, net, schedule) -> None:
    loop, vmap = (make_engine(variant, name, net, **schedule) for name in ("loop", "vmap"))
    one_by_one, together = run(loop, 3), run(vmap, 3)
    assert gap(one_by_one[0], together[0]) < 1e-5
    assert gap(one_by_one[1], together[1]) < 1e-5
    for part in ("train", "test"):
        a, b = loop.evaluate(*one_by_one, 3, part), vmap.evaluate(*one_by_one, 3, part)
        assert a.correct.tolist() == b.correct.tolist()
        np.testing.assert_allclose(a.loss_sum, b.loss_sum, rtol=1e-5, atol=1e-5)


@variants
@engines
def test_order_of_clients_changes_nothing(variant: str, engine: str) -> None:
    machine = make_engine(variant, engine)
    shared, private = run(machine, 1)
    clients = torch.tensor(trainers(machine))
    order = torch.tensor([2, 0, 3, 1] if len(clients) == 4 else [2, 0, 1])
    straight = machine.train(shared, tree.take(private, clients), clients.tolist(), 1)
    mixed = machine.train(shared, tree.take(private, clients[order]), clients[order].tolist(), 1)
    assert gap(straight.mean, mixed.mean) < 1e-6
    assert gap(tree.take(straight.private, order), mixed.private) < 1e-6


@variants
@engines
def test_client_outside_the_cohort_keeps_its_private_state(variant: str, engine: str) -> None:
    machine = make_engine(variant, engine, client_fraction=0.5)
    _, before = run(machine, 1)
    _, after = run(machine, 2)
    outside = torch.tensor([c for c in range(4) if c not in machine.schedule.sample_clients(1, 4)])
    assert len(outside) == 2
    for old, new in zip(tree.leaves(before), tree.leaves(after), strict=True):
        assert torch.equal(old[outside], new[outside])


@variants
@engines
def test_inputs_are_not_changed(variant: str, engine: str) -> None:
    machine = make_engine(variant, engine, batch_norm_net)
    shared, private = start(machine)
    kept = copy.deepcopy((shared, private))
    clients = trainers(machine)
    machine.train(shared, tree.take(private, torch.tensor(clients)), clients, 0)
    machine.evaluate(shared, private, 0, "test")
    assert gap(shared, kept[0]) == 0
    assert gap(private, kept[1]) == 0


@variants
def test_nothing_private_is_sent(variant: str) -> None:
    machine = make_engine(variant, "loop", batch_norm_net)
    shared, private = start(machine)
    upload, kept, _ = local_round(
        machine.method,
        shared,
        tree.take(private, 0),
        machine.federation.table,
        machine.plan(0, 0),
        machine.client_info(range(4), 0).select(0),
    )
    assert set(tree.flatten(upload)) <= set(tree.flatten(shared))
    assert not set(upload) & set(kept)
    assert set(tree.flatten(kept)) == set(tree.flatten(private))


@variants
def test_empty_batch_is_a_no_op(variant: str) -> None:
    machine = make_engine(variant, "loop")
    shared, private = start(machine)
    plan = machine.plan(0, 0)
    padded = [np.concatenate([steps[:1], np.full_like(steps[:1], -1), steps[1:]]) for steps in plan]
    facts = machine.client_info(range(4), 0).select(0)
    table, own = machine.federation.table, tree.take(private, 0)
    plain = local_round(machine.method, shared, own, table, plan, facts)
    with_hole = local_round(machine.method, shared, own, table, padded, facts)
    assert gap(plain.upload, with_hole.upload) == 0
    assert gap(plain.private, with_hole.private) == 0


@variants
def test_padded_rows_do_not_count(variant: str) -> None:
    machine = make_engine(variant, "loop")
    shared, private = start(machine)
    facts, own = machine.client_info(range(4), 0).select(3), tree.take(private, 3)
    local_state = machine.method.download(shared, own, facts)
    phase = machine.method.phases()[0]
    rows = torch.from_numpy(machine.federation.shards[3].train[:4])
    halves = rows.reshape(phase.batches, -1)  # each batch of a step is padded by itself
    hole = torch.full((phase.batches, 2), -1)
    batch = machine.federation.table.batch
    expected, _ = phase.step(shared, local_state, batch(rows), facts)
    padded, _ = phase.step(shared, local_state, batch(torch.cat([halves, hole], 1).ravel()), facts)
    counted, _ = phase.step(shared, local_state, batch(torch.cat([halves, hole + 1], 1).ravel()), facts)
    assert gap(expected, padded) < 1e-6
    assert gap(expected, counted) > 1e-6  # the mask is what makes the difference


@variants
def test_single_client_is_averaged_to_itself(variant: str) -> None:
    machine = make_engine(variant, "loop", sizes=(41,))
    shared, private = start(machine)
    update = local_round(
        machine.method,
        shared,
        tree.take(private, 0),
        machine.federation.table,
        machine.plan(0, 0),
        machine.client_info([0], 0).select(0),
    )
    assert gap(machine.train(shared, private, [0], 0).mean, update.upload) == 0


@variants
def test_loss_falls_and_clients_learn(variant: str) -> None:
    machine = make_engine(variant, "vmap", epochs=2, rounds=20)
    before = machine.evaluate(*start(machine), 0, "train")
    after = machine.evaluate(*run(machine, 20), 20, "train")
    assert after.loss < before.loss
    assert after.accuracy > 0.8


@variants
def test_running_statistics_stay_local_or_are_averaged(variant: str) -> None:
    local = make_engine(variant, "vmap", batch_norm_net)
    shared, private = run(local, 2)
    assert not any("running" in name for name in tree.flatten(shared))
    own = [value for name, value in tree.flatten(private).items() if "running_mean" in name]
    assert own
    assert all(float((value[0] - value[1]).abs().max()) > 0 for value in own)
    averaged = make_engine(variant, "vmap", batch_norm_net, batch_norm="average")
    shared, _ = run(averaged, 2)
    assert any("running" in name for name in tree.flatten(shared)) == ("base" in averaged.method.shares)


@variants
def test_weights_that_do_not_travel_are_not_counted_as_traffic(variant: str) -> None:
    machine = make_engine(variant, "loop")
    shared, private = start(machine)
    mean = machine.train(shared, tree.take(private, torch.tensor([0, 1])), [0, 1], 0).mean
    assert tree.count_bytes(mean) <= tree.count_bytes(shared)
    assert (tree.count_bytes(mean) == 0) == (machine.method.shares == ())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("protocol", ["corrected", "paper", "reference"])
def test_config_round_trips(name: str, protocol: str, tmp_path: Path) -> None:
    result = gpfl.fit(name, toy_federation(), rounds=1, protocol=protocol, out=tmp_path / "run")
    read = configs.read_config(tmp_path / "run" / "config.toml")
    resolved = configs.resolve_config(read, federation=result.federation)
    assert resolved.to_toml() == (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_page_exists_and_names_every_option(name: str) -> None:
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert f"--method {name}" in page
    for key in gpfl.core.options.options_of(METHODS[name]):
        assert f"`{key}`" in page


@pytest.mark.parametrize("name", METHODS)
def test_page_tells_the_bytes_that_travel(name: str) -> None:
    page = " ".join((ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8").split())
    net = net_from_architecture(CNN4(), "cnn4", torch.zeros(2, 3, 32, 32), 100)
    method = METHODS[name]().bind(net, lr=0.005, epochs=1)
    shared, private = method.init(0)
    counts = torch.ones(100)
    client = ClientInfo(counts.sum(), counts, torch.zeros(()), torch.ones(()))
    upload, _ = method.upload(shared, method.download(shared, private, client), private, client)
    sent, received = tree.count_bytes(upload), tree.count_bytes(shared)
    assert f"a client sends {sent:,} bytes a round and receives {received:,}" in page
