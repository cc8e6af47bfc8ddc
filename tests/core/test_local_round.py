from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.test_final_phases import PairFT, request_of, spec_of

from gpfl.core import tree
from gpfl.core.local_round import FinalRound, Schedule, run_final_phases
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES
from gpfl.engine.base import Engine
from gpfl.methods.ditto import Ditto
from gpfl.methods.fedavg_ft import FedAvgFT


def schedule(**settings: object) -> Schedule:
    return Schedule(**{"seed": 0, "rounds": 5, "batch_size": 4, **settings})  # type: ignore[arg-type]


def step(shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
    return local_state, {}


SAMPLES = np.arange(100, 110)


@pytest.mark.parametrize(("client_fraction", "size"), [(1.0, 10), (0.5, 5), (0.39, 3), (0.01, 1)])
def test_cohort_size_is_rounded_down_and_at_least_one(client_fraction: float, size: int) -> None:
    cohorts = [schedule(client_fraction=client_fraction).sample_clients(t, 10) for t in range(20)]
    assert {len(cohort) for cohort in cohorts} == {size}
    assert all(cohort == sorted(set(cohort)) and set(cohort) <= set(range(10)) for cohort in cohorts)


def test_range_of_fractions_samples_every_size_in_it() -> None:
    sizes = {len(schedule(client_fraction=(0.25, 0.5)).sample_clients(t, 10)) for t in range(100)}
    assert sizes == {2, 3, 4, 5}


def test_range_below_one_client_samples_at_least_one() -> None:
    assert min(len(schedule(client_fraction=(0.01, 1.0)).sample_clients(t, 5)) for t in range(50)) == 1


@pytest.mark.parametrize("client_fraction", [0.5, (0.2, 0.8)])
def test_cohorts_are_a_function_of_seed_and_round(client_fraction: float | tuple[float, float]) -> None:
    def cohorts(seed: int) -> list[list[int]]:
        return [schedule(seed=seed, client_fraction=client_fraction).sample_clients(t, 12) for t in range(8)]

    assert cohorts(0) == cohorts(0)
    assert cohorts(0) != cohorts(1)
    assert len({tuple(cohort) for cohort in cohorts(0)}) > 4


def test_clients_are_sampled_uniformly() -> None:
    times = np.bincount([c for t in range(400) for c in schedule(client_fraction=0.5).sample_clients(t, 6)], minlength=6)
    assert times.min() > 160
    assert times.max() < 240


def test_short_last_batch_is_dropped() -> None:
    assert schedule().batches(SAMPLES).tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]


def test_short_last_batch_is_padded_without_drop_last() -> None:
    assert schedule(drop_last=False).batches(SAMPLES)[-1].tolist() == [108, 109, -1, -1]


@pytest.mark.parametrize("drop_last", [True, False])
def test_only_batch_is_kept_if_short(drop_last: bool) -> None:
    assert schedule(drop_last=drop_last).batches(SAMPLES[:3]).tolist() == [[100, 101, 102, -1]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("n_samples", "steps"), [(10, 1), (16, 2), (7, 0)])
def test_step_of_several_batches_is_never_short(n_samples: int, steps: int, drop_last: bool) -> None:
    batches = schedule(drop_last=drop_last).batches(np.arange(n_samples), per_step=2)
    assert batches.tolist() == np.arange(8 * steps).reshape(steps, 8).tolist()


def test_order_of_samples_is_a_function_of_seed_round_and_client() -> None:
    def order(seed: int, round: int, client: int) -> list[int]:
        (plan,) = schedule(seed=seed).plan([Phase(step)], np.arange(12), round, client)
        return plan.ravel().tolist()

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert [order(*key) for key in keys] == [order(*key) for key in keys]
    assert len({tuple(order(*key)) for key in keys}) == 4
    assert all(sorted(order(*key)) == list(range(12)) for key in keys)


def test_unshuffled_samples_keep_their_order_in_every_round() -> None:
    for t in range(3):
        (plan,) = schedule(shuffle=False).plan([Phase(step, epochs=2)], SAMPLES[:8], t, 0)
        assert plan.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]] * 2


def test_each_epoch_has_its_own_order() -> None:
    (plan,) = schedule().plan([Phase(step, epochs=2)], np.arange(12), 0, 0)
    first, second = plan[:3].ravel(), plan[3:].ravel()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first.tolist() != second.tolist()


def test_another_phase_does_not_change_the_orders_of_the_first() -> None:
    (alone,) = schedule().plan([Phase(step)], np.arange(12), 0, 0)
    first, second = schedule().plan([Phase(step), Phase(step, epochs=3)], np.arange(12), 0, 0)
    assert np.array_equal(first, alone)
    assert np.array_equal(second[:3], alone)
    assert second.shape == (9, 4)


def test_unshuffled_samples_are_those_in_batches() -> None:
    assert schedule().unshuffled_samples(SAMPLES).tolist() == list(range(100, 108))
    assert schedule(drop_last=False).unshuffled_samples(SAMPLES).tolist() == SAMPLES.tolist()
    assert schedule().unshuffled_samples(SAMPLES[:3]).tolist() == [100, 101, 102]


@pytest.mark.parametrize(("batches", "needed"), [((1,), 1), ((1, 2), 8), ((3,), 12)])
def test_min_samples_is_the_fewest_with_a_step_in_every_phase(batches: tuple[int, ...], needed: int) -> None:
    phases = [Phase(step, batches=count) for count in batches]
    assert schedule().min_samples(phases) == needed
    assert all(len(plan) for plan in schedule().plan(phases, np.arange(needed), 0, 0))
    assert not all(len(plan) for plan in schedule().plan(phases, np.arange(needed - 1), 0, 0))


# The final phases of one client.

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
