"""Estimates: times of finished cells and benchmarks, and of what was not timed as the operations of its rounds say."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import ToyDataset, toy_table

import gpfl
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method
from gpfl.core.tree import Tree
from gpfl.data import DATASETS
from gpfl.engine import RunSpec
from gpfl.errors import GpflError
from gpfl.experiments import estimate as estimates
from gpfl.experiments import machine, work
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.experiments.estimate import Speed, Task, estimate
from gpfl.experiments.grid import FederationCache, GridPlan, Job, make_jobs, run_all
from gpfl.federation.federation import Federation, Shard
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.prepare import prepare

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOYS = TableColumn("toy/whole", "whole", "toys", {"data": {"name": "toy"}})
HALF = TableColumn("toy/half", "half", "toys", {"data": {"name": "toy"}, "train": {"client_fraction": 0.5}})


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "toy", ToyDataset())
    monkeypatch.setattr(estimates, "COUNTED", {})


def setting(
    method: str, federation: Federation | None = None, net: dict[str, object] | None = None, **options: object
) -> RunSpec:
    given = {
        "data": {"name": "toy"},
        "net": net or {"name": "mlp"},
        "method": {"name": method, **options},
        "run": {"device": "cpu"},
    }
    config = configs.resolve_config(given)
    return prepare(config, federation or config.federation(), None, None)[1]


def seconds(which: RunSpec, device: torch.device = CPU, clients: int = 4, **rows: float) -> float:
    sample = dataclasses.replace(work.sample_of(which), **{"trained": 1000.0, "judged": 1.0, **rows})
    found = work.round_of(which, clients, device)
    assert found is not None
    return found.of_step(sample)


def test_sample_is_made_of_rows_that_stay_together_too() -> None:
    table = toy_table(120)
    order = np.random.default_rng(0).permutation(120)  # not as the rows of a sample are numbered
    whole = gpfl.Table(table.x, table.y, name="toy", client_ids=order % 4, group_ids=order // 8 * 4 + order % 4)
    federation = gpfl.federate(whole, partition="natural")
    sample = work.sample_of(setting("fedavg", federation)).federation
    largest = max(federation.shards, key=lambda shard: len(shard.train))
    (shard,) = sample.shards
    assert torch.equal(sample.table.x[shard.test], whole.x[largest.test[:1]])


def alone(which: RunSpec, phase: int = 0) -> float:
    """What a step of one phase takes for each client, nothing besides."""
    graph = work.step_graph(which, which.method.phases()[phase], 4)
    return work.seconds(graph, work.MACHINES["cpu"]) / 4


def plan(out: Path, **changes: Any) -> GridPlan:
    return GridPlan(**{"out": out, "seeds": (0, 1), "rounds": 10, "patience": 0, **changes})


def job(
    out: Path, method: str, column: TableColumn = TOYS, protocol: str = "corrected", **options: object
) -> tuple[Job, GridPlan]:
    how, rows = plan(out, protocol=protocol), (MethodVariant(method, {"name": method, **options}),)
    [found], wrong = make_jobs(
        [Cell(Experiment("t", "T", "T.", "accuracy", rows, (column,), {}), column, rows[0])], how, FederationCache()
    )
    assert wrong == {}
    return found, how


def timed(method: str, step: float = 0.5, **changes: Any) -> Speed:
    return Speed(
        **{"task": Task("toy", "mlp", method), "clients": 4, "step": step, "rounds": None, "source": "benchmarks", **changes}
    )


# The work of a step.


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """A newcomer's method, which says nothing of its work."""

    name: ClassVar[str] = "twice"

    def step(self, shared: Tree, work: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
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

        def step(self, shared: Tree, work: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
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


@pytest.mark.parametrize(("kind", "name"), [("cpu", "cpu-2-cores"), ("cuda", "h200")])
def test_peaks_are_those_of_the_recorded_benchmarks(kind: str, name: str) -> None:
    facts = json.loads((estimates.benchmarks() / f"{name}.json").read_text())["machine"]
    assert work.PEAKS[kind] == pytest.approx((facts["operations_per_s"], facts["bytes_per_s"]), rel=0.01)


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


def test_time_is_estimated_from_finished_cells_by_rounds_batches_and_seeds(tmp_path: Path) -> None:
    whole, how = job(tmp_path, "gpfl")
    assert run_all([whole], how, lambda label: Callback(), {"command": "gpfl reproduce t", "commit": "abc1234"}) == {}
    assert [speed.rounds for speed in estimates.measured(tmp_path, CPU)] == [10, 10]
    half, _ = job(tmp_path, "gpfl", HALF)
    assert half.steps == whole.steps / 2
    speed = timed("gpfl", rounds=10)
    about = estimate(half, how, [speed])
    assert about.seconds == pytest.approx(10 * half.steps * 0.5 * 2)
    assert not about.most
    assert estimate(whole, how, [speed]).seconds == 0, "both seeds are there"
    patient = plan(tmp_path, rounds=100, patience=10)
    assert estimate(half, patient, [timed("gpfl")]).seconds == pytest.approx(100 * half.steps)
    assert estimate(half, patient, [timed("gpfl")]).words.startswith("up to ")
    assert estimate(half, patient, [timed("gpfl", 0.1), speed]).seconds == pytest.approx(10 * half.steps), (
        "a cell's, and its end"
    )


def test_own_benchmark_stands_before_another_methods_and_other_precisions_tell_nothing(tmp_path: Path) -> None:
    waiting, how = job(tmp_path, "fedavg")
    own = timed("fedavg", 0.1, clients=500, source="its own")
    assert estimate(waiting, how, [timed("gpfl")]).source == f"benchmarks of other methods{estimates.SCALED}"
    assert estimate(waiting, how, [timed("gpfl"), own]).source == "its own"
    assert estimate(waiting, plan(tmp_path, run={"precision": "bf16"}), [timed("gpfl"), own]).words == "unknown"


def test_run_that_was_given_few_rounds_does_not_tell_when_others_end(tmp_path: Path) -> None:
    waiting, _ = job(tmp_path, "gpfl")
    ended = {planned: timed("gpfl", rounds=2, planned=planned) for planned in (2, 50)}
    patient = plan(tmp_path, rounds=100, patience=10)
    assert estimate(waiting, patient, [ended[2]]).rounds == 100, "a first try of two rounds"
    assert estimate(waiting, patient, [ended[2], ended[50]]).rounds == 2, "ended by patience"
    assert estimate(waiting, plan(tmp_path, rounds=2, patience=1), [ended[2]]).rounds == 2


def test_estimate_goes_by_as_many_trials_at_once_as_are_missing(tmp_path: Path) -> None:
    waiting, _ = job(tmp_path, "gpfl")
    one, three = (timed("gpfl", step, trials=trials) for step, trials in ((0.5, 1), (0.3, 3)))
    for seeds, step in (((0, 1, 2), 0.3), ((0,), 0.5)):
        about = estimate(waiting, plan(tmp_path, seeds=seeds), [one, three])
        assert about.seconds == pytest.approx(10 * waiting.steps * step * len(seeds))


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
    about = estimate(waiting, how, [timed("fedavg")])
    assert waiting.sample is not None
    rows = {"trained": waiting.sample.trained, "judged": waiting.sample.judged}
    times = seconds(setting("pfedme"), clients=8, **rows) / seconds(setting("fedavg"), clients=8, **rows)
    assert times > 2
    assert about.seconds == pytest.approx(10 * waiting.steps * 0.5 * times * 2)
    assert about.words.endswith(" (scaled)")
    assert about.source == "benchmarks of other methods, scaled by the operations of a round"


def test_of_several_timed_methods_the_one_most_like_it_is_taken(tmp_path: Path) -> None:
    waiting, how = job(tmp_path, "fedper")
    about = estimate(waiting, how, [timed("pfedme", 9.0), timed("fedavg"), timed("gpfl", 7.0)])
    assert about.seconds == pytest.approx(10 * waiting.steps * 0.5 * 2, rel=0.01)


def test_own_method_with_other_options_is_scaled_and_gives_way_to_the_same_options(tmp_path: Path) -> None:
    waiting, how = job(tmp_path, "pfedme", steps=10)
    about = estimate(waiting, how, [timed("pfedme")])
    plain = 10 * waiting.steps * 0.5 * 2
    assert about.seconds is not None
    assert 1.3 * plain < about.seconds < 2.1 * plain
    assert about.source == "benchmarks, scaled by the operations of a round"
    same = timed("pfedme", 1.0, given={"method": waiting.complete["method"]})
    assert estimate(waiting, how, [timed("pfedme"), same]).seconds == pytest.approx(2 * plain)


def test_cells_that_were_run_stand_before_benchmarks_under_another_protocol_too(tmp_path: Path) -> None:
    """Benchmarks are of the usual protocol, under which GPFL's steps are others."""
    ran = timed("gpfl", 1.0, rounds=10, source="cells", given={"method": job(tmp_path, "gpfl")[0].complete["method"]})
    for protocol, source in (("corrected", "cells"), ("paper", f"cells{estimates.SCALED}")):
        waiting, how = job(tmp_path, "gpfl", protocol=protocol)
        assert estimate(waiting, how, [timed("gpfl"), ran]).source == source
        assert estimate(waiting, how, [timed("gpfl")]).source == source.replace("cells", "benchmarks")
    waiting, how = job(tmp_path, "fedavg", protocol="paper")
    assert estimate(waiting, how, [timed("fedavg")]).source == "benchmarks", "which changes GPFL alone"


def test_work_is_that_of_all_trials_and_none_where_it_cannot_be_counted(tmp_path: Path) -> None:
    waiting, _ = job(tmp_path, "gpfl")
    counted = estimates.work_of(waiting, 2)
    assert waiting.sample is not None
    step = seconds(setting("gpfl"), clients=8, trained=waiting.sample.trained, judged=waiting.sample.judged)
    assert counted == pytest.approx(waiting.steps * step * 2)
    assert estimates.work_of(waiting, 0) is None
    assert estimates.work_of(dataclasses.replace(waiting, sample=None), 1) is None
    alone = dataclasses.replace(waiting, given={**waiting.given, "run": {**waiting.given["run"], "engine": "loop"}})
    assert estimates.work_of(alone, 1) is None


def test_nothing_is_traced_for_a_step_that_was_timed_nor_for_cells_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> work.Round:
        raise AssertionError("a step was counted")

    monkeypatch.setattr(estimates, "round_of", refuse)
    waiting, how = job(tmp_path, "pfedme")
    assert not estimate(waiting, how, [timed("pfedme"), timed("fedavg")]).way
    monkeypatch.setattr(Job, "finished", lambda self, seeds: list(seeds))
    assert estimate(waiting, how, [timed("fedavg")]).seconds == 0


def test_time_of_another_method_stands_where_steps_cannot_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> work.Round:
        raise GpflError("it cannot be")

    monkeypatch.setattr(estimates, "round_of", refuse)
    waiting, how = job(tmp_path, "pfedme")
    about = estimate(waiting, how, [timed("fedavg")])
    assert about.seconds == pytest.approx(10 * waiting.steps * 0.5 * 2)
    assert (about.way, about.source) == ("", "benchmarks of other methods")


def test_sample_is_few_rows_and_knows_how_many_there_are(tmp_path: Path) -> None:
    sample = job(tmp_path, "perfedavg")[0].sample
    assert sample is not None
    assert len(sample.federation) == 1
    assert len(sample.federation.table) < len(toy_table()) / 3
    whole = setting("perfedavg").federation
    assert (sample.trained, sample.judged) == (whole.n_samples("train").mean(), whole.n_samples("test").mean())


# Benchmarks.


def test_recorded_benchmarks_count_on_the_device_they_were_made_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"round_s": 3.0, "client_steps": 600}
    cases = {
        "tiny-resnet18/gpfl/20": case,
        "cifar100/gpfl/50:x3,tf32": {**case, "trials": 3, "precision": "tf32"},
        "cifar100/gpfl/50:b50": {**case, "batch_size": 50},
    }
    for place, device in enumerate(("AMD, 2 threads", "NVIDIA H200")):
        facts = {"device": device, "operations_per_s": 4e11, "bytes_per_s": 1e11}
        (tmp_path / f"{place}.json").write_text(json.dumps({"machine": facts, "cases": cases}))
    (tmp_path / "broken.json").write_text("{")
    first, second = estimates.recorded(tmp_path, CPU)
    assert first.task == ("tiny", "resnet18", "gpfl")
    assert first.step == pytest.approx(0.005)
    assert first.source == "benchmarks on AMD, 2 threads"
    assert second.task == ("cifar100", "cnn4", "gpfl")
    assert (second.clients, second.trials, second.precision) == (50, 3, "tf32")
    assert second.step == pytest.approx(0.005 / 3)
    monkeypatch.setattr(estimates, "limits_at_hand", lambda device: machine.Limits(1e11, 1e11))
    assert first.slower_here == pytest.approx(2), "this machine multiplies a quarter as fast, and copies as fast"
    monkeypatch.setattr(estimates, "limits_at_hand", lambda device: None)
    assert first.slower_here == 1
    monkeypatch.setattr(estimates, "device_name", lambda device: "NVIDIA H200")
    assert {speed.slower_here for speed in estimates.recorded(tmp_path, GPU)} == {1}, "a GPU stands for itself"


@pytest.mark.parametrize("path", sorted(estimates.benchmarks().glob("*.json")), ids=lambda path: path.stem)
def test_every_benchmark_of_the_checkout_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(path.read_text())
    monkeypatch.setattr(estimates, "device_name", lambda device: content["machine"]["device"])
    found = list(estimates.recorded(path.parent, GPU))
    assert len(found) == sum(case["batch_size"] == 10 for case in content["cases"].values())


@pytest.mark.parametrize(("seconds", "words"), [(5, "5 s"), (600, "10 min"), (7200, "2.0 h"), (4 * 86400, "4.0 days")])
def test_durations_have_a_unit_that_suits_them(seconds: float, words: str) -> None:
    assert estimates.duration(seconds) == words
