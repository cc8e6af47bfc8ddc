"""Final phases on every engine: too few samples, several trials, several processes, and methods that cannot be vmapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, RunSpec, make_engine
from gpfl.engine.base import Engine, EvalRequest, FinalRequest
from gpfl.engine.distributed import ProcessGroup
from gpfl.engine.sharded import Sharded
from gpfl.engine.vmap import Vmap
from gpfl.errors import GpflError
from gpfl.methods.fedavg_ft import FedAvgFT
from gpfl.models.custom import net_from_module

SIZES = (41, 27, 33, 9)  # 30, 20, 24 and 6 training samples
engines = pytest.mark.parametrize("engine", ENGINES)


@dataclass(frozen=True, kw_only=True)
class PairFT(FedAvgFT):
    """Fine-tuning whose steps take two batches, from twice the global head, with a counter of steps."""

    name = "pair-ft"

    def final_phases(self) -> tuple[Phase, ...]:
        return (Phase(self.count, 1), Phase(self.finetuning_step, 2, batches=2))

    def start_final_phases(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        head = tree.map_leaves(lambda t: 2 * t, tree.branch(shared, "head"))
        return {**shared, **private, "head": head, "count": {"steps": torch.zeros_like(client.round)}}

    def count(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        steps = tree.leaf(tree.branch(local_state, "count"), "steps") + 1
        return {**local_state, "count": {"steps": steps}}, {"steps": steps}


@dataclass(frozen=True, kw_only=True)
class BranchingFT(FedAvgFT):
    """Fine-tuning that branches on a value."""

    name = "branching-ft"

    def finetuning_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        if float(batch.x.sum()) > 1e9:
            return local_state, {}
        return super().finetuning_step(shared, local_state, batch, client)


def build_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def spec_of(method: Method, **schedule: object) -> RunSpec:
    federation = toy_federation(SIZES)
    bound = method.bind(net_from_module(build_net, federation.table.inputs(torch.arange(2)), 3), lr=0.05, epochs=1)
    return RunSpec(bound, federation, Schedule(**{"seed": 3, "rounds": 3, **schedule}))  # type: ignore[arg-type]


def state_of(engine: Engine) -> tuple[Tree, Tree]:
    shared, private = engine.method.init(0)
    return shared, tree.repeat(private, len(engine.federation))


def request_of(engine: Engine, clients: list[int], round: int = 2) -> FinalRequest:
    shared, private = state_of(engine)
    return FinalRequest(shared, tree.take(private, torch.tensor(clients)), clients, round, engine.schedule, engine.method)


def assert_close(a: Tree, b: Tree, limit: float = 1e-5) -> None:
    first, second = tree.flatten(a), tree.flatten(b)
    assert first.keys() == second.keys()
    for path, value in first.items():
        assert float((value - second[path]).abs().max()) <= limit, path


@engines
def test_clients_with_too_few_samples_keep_the_state_in_which_final_phases_start(engine: str) -> None:
    runner = ENGINES[engine](spec_of(PairFT()))
    loop = ENGINES["loop"](spec_of(PairFT()))
    (states,) = runner.run_final_phases([request_of(runner, [0, 1, 2, 3])])
    (expected,) = loop.run_final_phases([request_of(loop, [0, 1, 2, 3])])
    assert_close(states, expected)
    assert states["count"]["steps"].tolist() == [3, 2, 2, 0]
    assert runner.can_train(3)
    shared, _ = state_of(runner)
    start = tree.take(states, 3)
    assert torch.equal(start["head"]["weight"], 2 * shared["head"]["weight"])
    assert torch.equal(start["base"]["0.weight"], shared["base"]["0.weight"])
    assert not torch.equal(states["base"]["0.weight"][0], shared["base"]["0.weight"])
    (alone,) = runner.run_final_phases([request_of(runner, [3])])
    assert_close(tree.take(alone, 0), start, 0.0)


@engines
def test_final_phases_of_a_part_of_the_clients_are_those_of_all(engine: str) -> None:
    runner = ENGINES[engine](spec_of(FedAvgFT()))
    (states,) = runner.run_final_phases([request_of(runner, [0, 1, 2, 3])])
    for part in ([1, 3], [2]):
        (own,) = runner.run_final_phases([request_of(runner, part)])
        assert_close(own, tree.take(states, torch.tensor(part)))


@engines
def test_trials_with_other_seeds_and_rates_match_each_alone(engine: str) -> None:
    runner, loop = (ENGINES[name](spec_of(FedAvgFT(ft_lr=0.05))) for name in (engine, "loop"))
    requests = [
        request_of(runner, clients)._replace(
            schedule=dataclasses.replace(runner.schedule, seed=seed), method=runner.method.replace(ft_lr=rate)
        )
        for seed, rate, clients in ((3, 0.05, [0, 1, 2, 3]), (4, 0.01, [0, 2, 3]), (5, 0.1, [1]))
    ]
    if engine != "vmap":  # which alone runs trials concurrently
        requests = [request._replace(method=runner.method) for request in requests]
    else:
        loop = None
    for found, request in zip(runner.run_final_phases(requests), requests, strict=True):
        alone = loop or ENGINES["loop"](dataclasses.replace(spec_of(FedAvgFT()), method=request.method))
        (expected,) = alone.run_final_phases([request])
        assert_close(found, expected)


@engines
def test_method_without_final_phases_keeps_its_state(engine: str) -> None:
    runner = ENGINES[engine](spec_of(FedAvgFT(ft_epochs=0)))
    request = request_of(runner, [0, 2])
    assert runner.run_final_phases([request])[0] is request.private


def test_processes_run_the_final_phases_of_their_own_clients() -> None:
    spec = spec_of(FedAvgFT())
    (expected,) = ENGINES["loop"](spec).run_final_phases([request_of(ENGINES["loop"](spec), [0, 1, 2, 3])])
    seen = []
    for rank in (0, 1):
        sharded = Sharded(spec, ENGINES["vmap"](spec), ProcessGroup(rank, 2))
        own = list(sharded.local_clients)
        assert_close(sharded.run_final_phases([request_of(sharded, own)])[0], tree.take(expected, torch.tensor(own)))
        empty = request_of(sharded, own)._replace(clients=[], private={"head": {"weight": torch.zeros(0, 3, 8)}})
        assert sharded.run_final_phases([empty])[0] is empty.private
        seen += own
    assert sorted(seen) == [0, 1, 2, 3]


def test_final_phases_that_cannot_be_vmapped_are_found_before_the_run() -> None:
    assert type(make_engine("auto", spec_of(BranchingFT()))) is not Vmap
    assert isinstance(make_engine("auto", spec_of(PairFT())), Vmap)
    with pytest.raises(GpflError, match="engine 'vmap' cannot run branching-ft"):
        make_engine("vmap", spec_of(BranchingFT()))


def test_one_fine_tuning_serves_all_splits_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    loop = ENGINES["loop"]
    run_final_phases, evaluate_clients = loop.run_final_phases, loop.evaluate_clients

    def run_and_count(self: Engine, requests: list[FinalRequest], engines: Sequence[Engine] = ()) -> list[Tree]:
        calls.append("final")
        return run_final_phases(self, requests, engines)

    def evaluate_and_count(self: Engine, request: EvalRequest) -> object:
        calls.append(request.split)
        return evaluate_clients(self, request)

    monkeypatch.setattr(loop, "run_final_phases", run_and_count)
    monkeypatch.setattr(loop, "evaluate_clients", evaluate_and_count)
    federation = gpfl.federate("digits", clients=4, classes_per_client=3, validation_fraction=0.1)
    result = gpfl.fit("fedavg-ft", federation, net="mlp", rounds=4, eval_every=2, engine="loop", ft_epochs=1)
    assert calls == ["final", "test", "validation"] * 3
    assert len(result.clients) == 4
    assert calls[9:] == ["final"]


def test_samples_that_make_a_batch_of_one_in_final_phases_are_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WholeBatches(FedAvgFT):
        name = "whole-batches"

        def phases(self) -> tuple[Phase, ...]:
            return (Phase(self.step, self.epochs, batches=2),)

    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = np.zeros((22, 6), dtype=np.float32)
    federation = gpfl.federate([(x[:21], np.arange(21) % 3, x[:3], np.arange(3))])
    with pytest.raises(GpflError, match="makes a batch of 1"):
        gpfl.fit(WholeBatches(), federation, net=net, rounds=1, drop_last=False)
