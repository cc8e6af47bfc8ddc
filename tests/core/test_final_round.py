"""The final phases of one client."""

from __future__ import annotations

import pytest
import torch
from engine.test_final_phases import PairFT, request_of, spec_of

from gpfl.core import tree
from gpfl.core.local_round import FinalRound, run_final_phases
from gpfl.core.method import Method
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES
from gpfl.engine.base import Engine
from gpfl.methods.ditto import Ditto
from gpfl.methods.fedavg_ft import FedAvgFT

ROUND = 2


def run_alone(runner: Engine, client: int) -> Tree:
    shared, private = runner.method.init(0)
    info = runner.client_info([client], ROUND).select(0)
    samples, table = runner.federation.shards[client].train, runner.federation.table
    return run_final_phases(runner.method, shared, private, table, samples, runner.schedule, ROUND, client, info)


@pytest.mark.parametrize("method", [FedAvgFT(), PairFT()], ids=["fedavg-ft", "pair-ft"])
def test_one_client_alone_has_the_state_that_the_engine_gives_it(method: Method) -> None:
    runner = ENGINES["loop"](spec_of(method))
    (states,) = runner.run_final_phases([request_of(runner, [0, 1, 2, 3], ROUND)])
    for client in range(4):  # the last has too few samples for PairFT
        alone = tree.flatten(run_alone(runner, client))
        expected = tree.flatten(tree.take(states, client))
        assert alone.keys() == expected.keys()
        assert all(torch.equal(alone[path], expected[path]) for path in alone)


def test_method_without_final_phases_keeps_its_private_state() -> None:
    runner = ENGINES["loop"](spec_of(Ditto()))
    alone, private = tree.flatten(run_alone(runner, 0)), tree.flatten(runner.method.init(0)[1])
    assert alone.keys() == private.keys()
    assert all(torch.equal(alone[path], private[path]) for path in alone)


def test_final_round_sends_nothing_and_has_the_values_of_its_method() -> None:
    final = FinalRound.of(spec_of(FedAvgFT(ft_lr=0.02)).method)
    assert (final.name, final.shared_parts) == ("fedavg-ft", ())
    changed = final.replace(ft_lr=0.3, lr=0.7)
    assert (changed.values()["ft_lr"], changed.values()["lr"], changed.lr) == (0.3, 0.7, 0.7)
    assert final.values()["ft_lr"] == 0.02
