"""Contract of every method in METHODS."""

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
from gpfl.models.architectures import CNN4, net_from_architecture
from gpfl.models.custom import net_from_module
from gpfl.training import config as configs

ROOT = Path(__file__).parents[2]
CLIENTS = (41, 27, 33, 9)  # 30, 20, 24 and 6 training samples: full batches, a short last one, a single short one


def trainers(engine: Engine) -> list[int]:
    """Return the clients that can train: all, except in methods whose steps take several batches."""
    return [client for client in range(len(engine.federation)) if engine.can_train(client)]


VARIANTS: dict[str, Method] = {name: kind() for name, kind in METHODS.items()} | {
    "gpfl-paper": METHODS["gpfl"](p_scale="mean", mlg_norm="sample_mean", reg="norm"),
    "gpfl-reference": METHODS["gpfl"](cond_source="stale_local"),
    "gpfl-without-pci": METHODS["gpfl"](without=("pci",)),
    "gpfl-without-cov": METHODS["gpfl"](without=("cov",)),
    "gpfl-without-mlg": METHODS["gpfl"](without=("mlg",)),
    "gpfl-without-gce": METHODS["gpfl"](without=("gce",)),
    "gpfl-without-cov-gce": METHODS["gpfl"](without=("cov", "gce")),
    "gpfl-guidance": METHODS["gpfl"](guidance="embeddings"),
    "gpfl-valve-gradient": METHODS["gpfl"](valve_gradient="global"),
    "gpfl-private-valve": METHODS["gpfl"](share_valve=False),
    "gpfl-alpha": METHODS["gpfl"](alpha_levels=2, alpha_noise=0.1),
    "pfedme-local-w": METHODS["pfedme"](eval_model="local_w", beta=2.0),
    "fedphp-inherit": METHODS["fedphp"](variant="inherit"),
    "fedproto-after": METHODS["fedproto"](prototypes="after"),
    "fedrep-2": METHODS["fedrep"](head_epochs=2),
    "fedavg-ft-head": METHODS["fedavg-ft"](ft_parts="head", ft_epochs=2),
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


SAMPLED = {"client_fraction": 0.5}
UNEVEN = {"epochs": 2, "drop_last": False, "shuffle": False}


@variants
@pytest.mark.parametrize(
    ("net", "schedule"),
    [
        (small_net, UNEVEN),
        (batch_norm_net, SAMPLED),
        (batch_norm_net, {"batch_norm": "average"}),
        pytest.param(small_net, {}, marks=pytest.mark.slow),
        pytest.param(small_net, SAMPLED, marks=pytest.mark.slow),
        pytest.param(batch_norm_net, {}, marks=pytest.mark.slow),
        pytest.param(batch_norm_net, UNEVEN, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_vmap_agrees_with_loop(variant: str, net, schedule) -> None:
    loop, vmap = (make_engine(variant, name, net, **schedule) for name in ("loop", "vmap"))
    looped, vmapped = run(loop, 3), run(vmap, 3)
    assert gap(looped[0], vmapped[0]) < 1e-5
    assert gap(looped[1], vmapped[1]) < 1e-5
    for part in ("train", "test"):
        a, b = loop.evaluate(*looped, 3, part), vmap.evaluate(*looped, 3, part)
        assert a.correct.tolist() == b.correct.tolist()
        np.testing.assert_allclose(a.loss_sum, b.loss_sum, rtol=1e-5, atol=1e-5)


@variants
@engines
def test_order_of_clients_does_not_matter(variant: str, engine: str) -> None:
    runner = make_engine(variant, engine)
    shared, private = run(runner, 1)
    clients = torch.tensor(trainers(runner))
    order = torch.tensor([2, 0, 3, 1] if len(clients) == 4 else [2, 0, 1])
    ordered = runner.train(shared, tree.take(private, clients), clients.tolist(), 1)
    mixed = runner.train(shared, tree.take(private, clients[order]), clients[order].tolist(), 1)
    assert gap(ordered.mean, mixed.mean) < 1e-6
    assert gap(tree.take(ordered.private, order), mixed.private) < 1e-6


@variants
@engines
def test_client_outside_the_cohort_keeps_its_private_state(variant: str, engine: str) -> None:
    runner = make_engine(variant, engine, client_fraction=0.5)
    _, before = run(runner, 1)
    _, after = run(runner, 2)
    outside = torch.tensor([c for c in range(4) if c not in runner.schedule.sample_clients(1, 4)])
    assert len(outside) == 2
    for old, new in zip(tree.leaves(before), tree.leaves(after), strict=True):
        assert torch.equal(old[outside], new[outside])


@variants
@engines
def test_inputs_are_not_modified(variant: str, engine: str) -> None:
    runner = make_engine(variant, engine, batch_norm_net)
    shared, private = start(runner)
    kept = copy.deepcopy((shared, private))
    clients = trainers(runner)
    runner.train(shared, tree.take(private, torch.tensor(clients)), clients, 0)
    runner.evaluate(shared, private, 0, "test")
    assert gap(shared, kept[0]) == 0
    assert gap(private, kept[1]) == 0


@variants
def test_private_state_is_not_uploaded(variant: str) -> None:
    runner = make_engine(variant, "loop", batch_norm_net)
    shared, private = start(runner)
    upload, kept, _ = local_round(
        runner.method,
        shared,
        tree.take(private, 0),
        runner.federation.table,
        runner.plan(0, 0),
        runner.client_info(range(4), 0).select(0),
    )
    assert set(tree.flatten(upload)) <= set(tree.flatten(shared))
    assert not set(upload) & set(kept)
    assert set(tree.flatten(kept)) == set(tree.flatten(private))


@variants
def test_empty_batch_is_a_no_op(variant: str) -> None:
    runner = make_engine(variant, "loop")
    shared, private = start(runner)
    plan = runner.plan(0, 0)
    padded = [np.concatenate([steps[:1], np.full_like(steps[:1], -1), steps[1:]]) for steps in plan]
    info = runner.client_info(range(4), 0).select(0)
    table, private_0 = runner.federation.table, tree.take(private, 0)
    plain = local_round(runner.method, shared, private_0, table, plan, info)
    with_padding = local_round(runner.method, shared, private_0, table, padded, info)
    assert gap(plain.upload, with_padding.upload) == 0
    assert gap(plain.private, with_padding.private) == 0


@variants
def test_padding_does_not_count(variant: str) -> None:
    runner = make_engine(variant, "loop")
    shared, private = start(runner)
    info, private_3 = runner.client_info(range(4), 0).select(3), tree.take(private, 3)
    local_state = runner.method.download(shared, private_3, info)
    phase = runner.method.phases()[0]
    indices = torch.from_numpy(runner.federation.shards[3].train[:4])
    halves = indices.reshape(phase.batches, -1)  # each batch of a step has its own padding
    padding = torch.full((phase.batches, 2), -1)
    batch = runner.federation.table.batch
    expected, _ = phase.step(shared, local_state, batch(indices), info)
    padded, _ = phase.step(shared, local_state, batch(torch.cat([halves, padding], 1).ravel()), info)
    counted, _ = phase.step(shared, local_state, batch(torch.cat([halves, padding + 1], 1).ravel()), info)
    assert gap(expected, padded) < 1e-6
    assert gap(expected, counted) > 1e-6  # unmasked padding counts


@variants
def test_mean_of_a_single_client_is_its_upload(variant: str) -> None:
    runner = make_engine(variant, "loop", sizes=(41,))
    shared, private = start(runner)
    update = local_round(
        runner.method,
        shared,
        tree.take(private, 0),
        runner.federation.table,
        runner.plan(0, 0),
        runner.client_info([0], 0).select(0),
    )
    assert gap(runner.train(shared, private, [0], 0).mean, update.upload) == 0


@variants
def test_loss_falls(variant: str) -> None:
    runner = make_engine(variant, "vmap", epochs=2, rounds=10)
    before = runner.evaluate(*start(runner), 0, "train")
    after = runner.evaluate(*run(runner, 10), 10, "train")
    assert after.loss < before.loss
    assert after.accuracy > 0.8


@variants
def test_running_statistics_are_local_or_averaged(variant: str) -> None:
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
def test_private_weights_do_not_count_as_traffic(variant: str) -> None:
    runner = make_engine(variant, "loop")
    shared, private = start(runner)
    mean = runner.train(shared, tree.take(private, torch.tensor([0, 1])), [0, 1], 0).mean
    assert tree.count_bytes(mean) <= tree.count_bytes(shared)
    assert (tree.count_bytes(mean) == 0) == (runner.method.shares == ())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("protocol", ["corrected", "paper", "reference"])
def test_config_round_trips(name: str, protocol: str, tmp_path: Path) -> None:
    result = gpfl.fit(name, toy_federation(), rounds=1, protocol=protocol, out=tmp_path / "run")
    read = configs.read_config(tmp_path / "run" / "config.toml")
    resolved = configs.resolve_config(read, federation=result.federation)
    assert resolved.to_toml() == (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_page_lists_every_option(name: str) -> None:
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert f"--method {name}" in page
    for key in gpfl.core.options.options_of(METHODS[name]):
        assert f"`{key}`" in page


@pytest.mark.parametrize("name", METHODS)
def test_page_states_the_bytes_per_round(name: str) -> None:
    page = " ".join((ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8").split())
    net = net_from_architecture(CNN4(), "cnn4", torch.zeros(2, 3, 32, 32), 100)
    method = METHODS[name]().bind(net, lr=0.005, epochs=1)
    shared, private = method.init(0)
    counts = torch.ones(100)
    client = ClientInfo(counts.sum(), counts, torch.zeros(()), torch.ones(()))
    upload, _ = method.upload(shared, method.download(shared, private, client), private, client)
    sent, received = tree.count_bytes(upload), tree.count_bytes(shared)
    assert f"a client sends {sent:,} bytes a round and receives {received:,}" in page
