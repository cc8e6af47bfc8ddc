"""Estimates of methods that were not timed: as much longer than a timed one as the operations of their steps say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import Toy, toy_table

import gpfl
from gpfl import api
from gpfl import config as configs
from gpfl.data import DATA
from gpfl.engine import Setting
from gpfl.errors import GpflError
from gpfl.federation import Federation, Shard
from gpfl.method import Batch, Client, Method, Terms
from gpfl.methods import METHODS
from gpfl.study import estimate as estimates
from gpfl.study import machine, work
from gpfl.study.compare import Entrant
from gpfl.study.estimate import Speed, Task, estimate
from gpfl.study.experiments import Cell, Column, Experiment
from gpfl.study.grid import Grounds, Job, Plan, lay_out
from gpfl.tree import Tree

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOYS = Column("toy/whole", "whole", "toys", {"data": {"name": "toy"}})


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA, "toy", Toy())
    monkeypatch.setattr(estimates, "COUNTED", {})


def setting(
    method: str, federation: Federation | None = None, net: dict[str, object] | None = None, **options: object
) -> Setting:
    given = {
        "data": {"name": "toy"},
        "net": net or {"name": "mlp"},
        "method": {"name": method, **options},
        "run": {"device": "cpu"},
    }
    config = configs.resolve(given)
    return api.prepare(config, federation or config.federation(), None, None)[1]


def seconds(which: Setting, device: torch.device = CPU, clients: int = 4, **rows: float) -> float:
    sample = dataclasses.replace(work.sample_of(which), **{"trained": 1000.0, "judged": 1.0, **rows})
    found = work.round_of(which, clients, device)
    assert found is not None
    return found.of_step(sample)


def alone(which: Setting, phase: int = 0) -> float:
    """What a step of one phase takes for each client, nothing besides."""
    graph = work.step_graph(which, which.method.phases()[phase], 4)
    return work.seconds(graph, work.MACHINES["cpu"]) / 4


def job(out: Path, method: str, **options: object) -> tuple[Job, Plan]:
    how = Plan(out=out, seeds=(0, 1), rounds=10, patience=0)
    rows = (Entrant(method, {"name": method, **options}),)
    [found], wrong = lay_out([Cell(Experiment("t", "T", "T.", "accuracy", rows, (TOYS,), {}), TOYS, rows[0])], how, Grounds())
    assert wrong == {}
    return found, how


def timed(method: str, step: float = 0.5, **changes: object) -> Speed:
    return Speed(Task("toy", "mlp", method), 4, step, None, "benchmarks", **changes)  # type: ignore[arg-type]


# The work of a step.


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """A newcomer's method, which says nothing of its work."""

    name: ClassVar[str] = "twice"

    def step(self, shared: Tree, work: Tree, batch: Batch, client: Client) -> tuple[Tree, Terms]:
        """Gives the state after two steps on one batch."""
        work, _ = super().step(shared, work, batch, client)
        return super().step(shared, work, batch, client)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_two_gradients_in_a_step_are_counted_though_the_method_says_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "twice", Twice)
    assert 1.6 < seconds(setting("twice"), device) / seconds(setting("fedavg"), device) < 2.4


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_inner_steps_are_counted_by_their_option(device: torch.device) -> None:
    few, many = (seconds(setting("pfedme", steps=steps), device) for steps in (2, 8))
    assert 3 < many / few < 4.2


def test_phases_count_in_the_mean_as_often_as_they_run() -> None:
    head, base = (alone(setting("fedrep"), phase) for phase in (0, 1))
    assert head < base
    assert seconds(setting("fedrep"), trained=1e6) == pytest.approx((head + base) / 2, rel=0.01)
    assert seconds(setting("fedrep", head_epochs=3), trained=1e6) == pytest.approx((3 * head + base) / 4, rel=0.01)


def test_what_a_round_takes_besides_its_steps_is_shared_by_them() -> None:
    which = setting("fedavg")
    few, many = (seconds(which, trained=rows) for rows in (10.0, 100.0))
    step = alone(which)
    assert few - step == pytest.approx(10 * (many - step))
    assert seconds(which, judged=1e6) > 2 * seconds(which)


def words() -> Federation:
    """A client with texts of five words."""
    table = gpfl.Table(np.ones((40, 5), np.int64), np.arange(40) % 2, classes=2, name="toy", kind="tokens", vocabulary=100)
    return gpfl.Federation(table, [Shard("a", np.arange(30), np.arange(0), np.arange(30, 40))])


def test_embeddings_cost_the_rows_that_move_all_of_them_under_a_pull() -> None:
    few, many = ({"name": "fasttext", "vocabulary": vocabulary} for vocabulary in (1_000, 200_000))
    assert alone(setting("fedavg", words(), many)) == pytest.approx(alone(setting("fedavg", words(), few)))
    assert alone(setting("fedprox", words(), many)) > 20 * alone(setting("fedprox", words(), few))


def test_convolutions_of_stacked_clients_take_as_many_operations_as_those_of_one() -> None:
    shape = (1, 28, 28)
    table = gpfl.Table(np.zeros((40, *shape), np.float32), np.arange(40) % 2, classes=2, name="toy")
    federation = gpfl.Federation(table, [Shard("a", np.arange(30), np.arange(0), np.arange(30, 40))])
    which = setting("fedavg", federation, {"name": "cnn4"})
    [phase] = which.method.phases()

    def operations(width: int | None) -> int:
        graph = work.step_graph(which, phase, width)
        return sum(work.operations(node) for node in graph.nodes if node.op == "call_function")

    assert operations(3) == 3 * operations(None) > 0


def test_step_that_cannot_be_traced_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Looks(Method):
        """A method that looks at values."""

        name: ClassVar[str] = "looks"

        def step(self, shared: Tree, work: Tree, batch: Batch, client: Client) -> tuple[Tree, Terms]:
            """Gives a step for a batch that is not blank."""
            return super().step(shared, work, batch, client) if batch.x.sum().item() else (work, {})

    monkeypatch.setitem(METHODS, "looks", Looks)
    looks = setting("looks")
    assert work.round_of(looks, 4, CPU) is None
    assert estimate(*job(tmp_path, "looks"), [], CPU).words == "unknown"


# The machine.


def test_machine_is_measured_by_products_and_copies() -> None:
    found = machine.limits(CPU)
    assert 1e8 < found.operations < 1e15
    assert 1e8 < found.bytes < 1e14


def test_machine_at_hand_is_as_much_faster_than_the_benchmarks_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, known = work.PEAKS["cuda"], work.MACHINES["cuda"]
    monkeypatch.setattr(work, "limits_at_hand", lambda device: machine.Limits(2 * peak.operations, peak.bytes / 4))
    assert work.machine_at_hand(GPU) == known._replace(
        operations=2 * known.operations, bytes=known.bytes / 4, scattered=known.scattered / 4
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_machine_without_memory_to_measure_it_is_taken_for_that_of_the_benchmarks(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: torch.device) -> machine.Limits:
        raise error

    machine.limits_at_hand.cache_clear()
    monkeypatch.setattr(machine, "limits", refuse)
    assert work.machine_at_hand(GPU) == work.MACHINES["cuda"]
    machine.limits_at_hand.cache_clear()


# Estimates.


def test_where_nothing_like_it_was_timed_operations_are_counted_on_the_machine_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = work.PEAKS["cpu"]
    monkeypatch.setattr(work, "limits_at_hand", lambda device: peak)
    waiting, how = job(tmp_path, "gpfl")
    about = estimate(waiting, how, [timed("gpfl", precision="tf32"), Speed(Task("toy", "cnn4", "gpfl"), 4, 9.0, None, "")], CPU)
    assert waiting.sample is not None
    step = seconds(setting("gpfl"), clients=8, trained=waiting.sample.trained, judged=waiting.sample.judged)
    assert about.seconds == pytest.approx(10 * waiting.steps * step * 2)
    assert about.words.endswith(" (counted)")
    monkeypatch.setattr(work, "limits_at_hand", lambda device: machine.Limits(peak.operations / 100, peak.bytes / 100))
    slow = estimate(waiting, how, [], CPU).seconds
    assert slow is not None
    assert 1.2 * about.seconds < slow < 100 * about.seconds, "calls take as long as before"
    assert estimate(waiting, how, []).words == "unknown", "nothing is counted before a run"
    alone = dataclasses.replace(how, run={"engine": "loop"})
    assert estimate(waiting, alone, [], CPU).words == "unknown", "clients one by one are another matter"


def test_method_that_was_not_timed_takes_as_much_longer_as_its_operations_say(tmp_path: Path) -> None:
    waiting, how = job(tmp_path, "pfedme")
    about = estimate(waiting, how, [timed("fedavg")], CPU)
    assert waiting.sample is not None
    rows = {"trained": waiting.sample.trained, "judged": waiting.sample.judged}
    times = seconds(setting("pfedme"), clients=8, **rows) / seconds(setting("fedavg"), clients=8, **rows)
    assert times > 2
    assert about.seconds == pytest.approx(10 * waiting.steps * 0.5 * times * 2)
    assert about.words.endswith(" (scaled)")
    assert about.source == "benchmarks of other methods, scaled by the operations of a round"


def test_of_several_timed_methods_the_one_most_like_it_is_taken(tmp_path: Path) -> None:
    waiting, how = job(tmp_path, "fedper")
    about = estimate(waiting, how, [timed("pfedme", 9.0), timed("fedavg"), timed("gpfl", 7.0)], CPU)
    assert about.seconds == pytest.approx(10 * waiting.steps * 0.5 * 2, rel=0.01)


def test_own_method_with_other_options_is_scaled_and_gives_way_to_the_same_options(tmp_path: Path) -> None:
    waiting, how = job(tmp_path, "pfedme", steps=10)
    about = estimate(waiting, how, [timed("pfedme")], CPU)
    plain = 10 * waiting.steps * 0.5 * 2
    assert about.seconds is not None
    assert 1.3 * plain < about.seconds < 2.1 * plain
    assert about.source == "benchmarks, scaled by the operations of a round"
    same = timed("pfedme", 1.0, given={"method": waiting.complete["method"]})
    assert estimate(waiting, how, [timed("pfedme"), same], CPU).seconds == pytest.approx(2 * plain)


def test_nothing_is_traced_for_a_step_that_was_timed_nor_for_cells_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> work.Round:
        raise AssertionError("a step was counted")

    monkeypatch.setattr(estimates, "round_of", refuse)
    waiting, how = job(tmp_path, "pfedme")
    assert not estimate(waiting, how, [timed("pfedme"), timed("fedavg")], CPU).way
    monkeypatch.setattr(Job, "finished", lambda self, seeds: list(seeds))
    assert estimate(waiting, how, [timed("fedavg")], CPU).seconds == 0


def test_time_of_another_method_stands_where_steps_cannot_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> work.Round:
        raise GpflError("it cannot be")

    monkeypatch.setattr(estimates, "round_of", refuse)
    waiting, how = job(tmp_path, "pfedme")
    about = estimate(waiting, how, [timed("fedavg")], CPU)
    assert about.seconds == pytest.approx(10 * waiting.steps * 0.5 * 2)
    assert (about.way, about.source) == ("", "benchmarks of other methods")


def test_sample_is_few_rows_and_knows_how_many_there_are(tmp_path: Path) -> None:
    sample = job(tmp_path, "perfedavg")[0].sample
    assert sample is not None
    assert len(sample.federation) == 1
    assert len(sample.federation.table) < len(toy_table()) / 3
    whole = setting("perfedavg").federation
    assert (sample.trained, sample.judged) == (whole.rows("train").mean(), whole.rows("test").mean())
