"""The round loop: evaluation, early stopping, counters, divergence, and exact resumption of a killed run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import KillAt, KilledError, toy_federation, toy_table
from torch import Tensor

import gpfl
from gpfl.cli import main as cli
from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method
from gpfl.core.metrics import Evaluation
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.engine import RunSpec
from gpfl.engine.base import EvalRequest, Loop
from gpfl.io import files
from gpfl.io.legacy import list_client_accuracies
from gpfl.io.tensors import read_tensors
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import RunOptions
from gpfl.training.prepare import prepare
from gpfl.training.round_loop import RoundLoop
from gpfl.training.run_dir import MetricsRecord, RunDir

SRC = Path(gpfl.__file__).parents[1]
FAST = {"net": "mlp", "lr": 0.1, "engine": "loop"}


class EvaluatedRounds(Callback):
    """Record the evaluated rounds."""

    def __init__(self) -> None:
        self.rounds: list[object] = []

    def on_evaluate(self, record: MetricsRecord) -> None:
        self.rounds.append(record["round"])


def metrics(folder: Path) -> str:
    """Return the text of metrics.jsonl without times."""
    return re.sub(r'"seconds": [0-9.e-]+', '"seconds": _', (folder / "metrics.jsonl").read_text())


def summary_without_time(folder: Path) -> dict[str, object]:
    """Return the summary without its time."""
    return {key: value for key, value in RunDir(folder).read_summary().items() if key != "seconds"}


def assert_same_weights(first: Path, second: Path) -> None:
    """Check that two files hold the same tensors, bit for bit, and the same metadata."""
    (tensors, metadata), (expected, expected_metadata) = read_tensors(first), read_tensors(second)
    for each in (metadata, expected_metadata):
        each.pop("files", None)  # digests of the configs, which differ between runs of different lengths
    assert metadata == expected_metadata
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    assert summary_without_time(one) == summary_without_time(other)
    names = sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    assert sorted(path.relative_to(one) for path in one.rglob("*.safetensors")) == names
    for name in names:
        assert_same_weights(one / name, other / name)


def validated_federation() -> gpfl.Federation:
    """Return clients whose best validation round is not the last one."""
    table = toy_table(160, classes=4, seed=3)
    return gpfl.federate(table, clients=4, classes_per_client=3, balanced=True, validation_fraction=0.3)


CASES: dict[str, tuple[Callable[[], gpfl.Federation], dict[str, object]]] = {
    "full": (toy_federation, {}),
    "partial": (toy_federation, {"client_fraction": 0.5}),
    "range": (toy_federation, {"client_fraction": (0.25, 1.0)}),
    "validation": (validated_federation, {"client_fraction": 0.5}),
    "sparse": (toy_federation, {"client_fraction": 0.5, "eval_every": 2, "select": "test"}),
}


SLOW_CASES = ("full", "range")  # the others sample clients too


@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW_CASES else n for n in CASES])
def test_run_killed_after_any_evaluation_resumes_exactly(tmp_path: Path, case: str) -> None:
    make, settings = CASES[case]
    federation = make()
    settings = {**FAST, "rounds": 5, "checkpoint_every": 2, **settings}
    gpfl.fit("gpfl", federation, out=tmp_path / "full", **settings)
    for number in [line["round"] for line in RunDir(tmp_path / "full").read_metrics()]:
        cut = tmp_path / f"cut-{number}"
        with pytest.raises(KilledError):
            gpfl.fit("gpfl", federation, out=cut, callbacks=[KillAt(number)], **settings)
        assert not (cut / "summary.json").exists()
        gpfl.resume(cut, federation=federation)
        assert_same_run(cut, tmp_path / "full")


@pytest.mark.parametrize("protocol", ["corrected", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_resumes_exactly_with_sampled_clients_and_a_selected_round(
    tmp_path: Path, method: str, protocol: str
) -> None:
    federation = validated_federation()
    settings = {**FAST, "rounds": 2, "checkpoint_every": 1, "client_fraction": 0.5, "protocol": protocol}
    gpfl.fit(method, federation, out=tmp_path / "full", **settings)
    with pytest.raises(KilledError):
        gpfl.fit(method, federation, out=tmp_path / "cut", callbacks=[KillAt(2)], **settings)
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "full")


def test_vmapped_run_resumes_exactly(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "engine": "vmap", "rounds": 3, "checkpoint_every": 2, "client_fraction": 0.5}
    gpfl.fit("gpfl", federation, out=tmp_path / "full", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(3)], **settings)
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "full")


@pytest.mark.parametrize("written", [pytest.param(False, marks=pytest.mark.slow), True], ids=["before", "after"])
def test_run_killed_at_any_write_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool) -> None:
    federation = validated_federation()
    settings = {**FAST, "rounds": 4, "checkpoint_every": 2, "client_fraction": 0.5}
    write, count = files.write_bytes, 0
    last = -1

    def write_and_die(path: Path, content: bytes) -> None:
        nonlocal count
        count += 1
        if written or count != last:
            write(path, content)
        if count == last:
            raise KilledError

    monkeypatch.setattr(files, "write_bytes", write_and_die)
    gpfl.fit("gpfl", federation, out=tmp_path / "full", **settings)
    total = count
    assert total > 10
    first = 2 if written else 3  # before config.toml there is no run to resume
    for last in range(first, total + 1):
        cut, count = tmp_path / f"cut-{last}", 0
        with pytest.raises(KilledError):
            gpfl.fit("gpfl", federation, out=cut, **settings)
        count = total + 1
        gpfl.resume(cut, federation=federation)
        assert_same_run(cut, tmp_path / "full")


def test_run_killed_several_times_resumes_exactly(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "rounds": 8, "checkpoint_every": 2, "client_fraction": 0.5}
    gpfl.fit("gpfl", federation, out=tmp_path / "full", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(1)], **settings)
    for number in (3, 3, 5, 8):
        with pytest.raises(KilledError):
            gpfl.resume(tmp_path / "cut", federation=federation, callbacks=[KillAt(number)])
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "full")


def test_incomplete_line_of_metrics_is_written_again(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "rounds": 5, "checkpoint_every": 2}
    gpfl.fit("fedavg", federation, out=tmp_path / "full", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("fedavg", federation, out=tmp_path / "cut", callbacks=[KillAt(3)], **settings)
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "full")


def test_callbacks_of_a_resumed_run_get_only_the_rounds_it_runs(tmp_path: Path) -> None:
    federation = toy_federation()
    with pytest.raises(KilledError):
        gpfl.fit("local", federation, out=tmp_path / "cut", callbacks=[KillAt(5)], rounds=6, checkpoint_every=4, **FAST)
    seen = EvaluatedRounds()
    gpfl.resume(tmp_path / "cut", federation=federation, callbacks=[seen])
    assert seen.rounds == [5, 6]


def test_missing_rounds_in_metrics_are_an_error_and_the_file_is_kept(tmp_path: Path) -> None:
    federation = toy_federation()
    with pytest.raises(KilledError):
        gpfl.fit("local", federation, out=tmp_path / "cut", callbacks=[KillAt(5)], rounds=6, checkpoint_every=4, **FAST)
    path = tmp_path / "cut" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    damaged = path.read_bytes()
    with pytest.raises(gpfl.GpflError, match=r"metrics.jsonl is damaged \(it lacks round 2\)"):
        gpfl.resume(tmp_path / "cut", federation=federation)
    assert path.read_bytes() == damaged


def test_damaged_checkpoint_is_an_error_and_no_file_changes(tmp_path: Path) -> None:
    federation = toy_federation()
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(3)], rounds=4, checkpoint_every=2, **FAST)
    path = tmp_path / "cut" / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(content)
    before = {p.name: p.read_bytes() for p in (tmp_path / "cut").iterdir()}
    with pytest.raises(gpfl.GpflError, match=r"checkpoint.safetensors is damaged \(its checksum does not match\)"):
        gpfl.resume(tmp_path / "cut", federation=federation)
    assert {p.name: p.read_bytes() for p in (tmp_path / "cut").iterdir()} == before


@pytest.mark.parametrize("lost", ["checkpoint.safetensors", "selected.safetensors"])
def test_run_without_a_saved_state_starts_over_and_ends_the_same(tmp_path: Path, lost: str) -> None:
    federation = validated_federation()
    settings = {**FAST, "rounds": 5, "checkpoint_every": 2}
    gpfl.fit("gpfl", federation, out=tmp_path / "full", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(4)], **settings)
    (tmp_path / "cut" / lost).unlink()
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "full")


def test_finished_run_without_checkpoint_is_an_error_and_keeps_its_metrics(tmp_path: Path) -> None:
    federation = toy_federation()
    gpfl.fit("gpfl", federation, out=tmp_path, rounds=2, **FAST)
    (tmp_path / "checkpoint.safetensors").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(gpfl.GpflError, match="has finished, but its checkpoint is gone"):
        gpfl.load(tmp_path, federation=federation)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_command_killed_by_the_system_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--clients=4", "--rounds=60", "--hidden=8", "--client-fraction=0.5", "--batch-size=200", "--checkpoint-every=3"]
    cut, full = tmp_path / "cut", tmp_path / "full"
    command = [sys.executable, "-m", "gpfl", "run", *given, "--out", str(cut)]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics_path = cut / "metrics.jsonl"
    while not metrics_path.exists() or metrics_path.read_bytes().count(b"\n") < 5:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
            break  # it ended before it could be killed, which the next lines find
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    assert not (cut / "summary.json").exists()
    for arguments in (["resume", str(cut)], ["run", *given, "--out", str(full)]):
        monkeypatch.setattr(sys, "argv", ["gpfl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
    assert_same_run(cut, full)
    assert (cut / "config.toml").read_bytes() == (full / "config.toml").read_bytes()


@pytest.mark.parametrize("engine", ["vmap", "workers"])
def test_steps_are_traced_or_not_whoever_is_drawn_first(tmp_path: Path, engine: str) -> None:
    settings: dict[str, object] = {"net": "mlp", "hidden": [8], "rounds": 60, "batch_size": 200, "client_fraction": 0.5}
    settings |= {"checkpoint_every": 3, "engine": engine, "eval_every": 2}  # with other clients, 60 or 120 steps
    gpfl.fit("gpfl", gpfl.federate("digits", clients=4), out=tmp_path / "full", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", gpfl.federate("digits", clients=4), out=tmp_path / "cut", callbacks=[KillAt(8)], **settings)
    gpfl.resume(tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "full")


# Evaluation and early stopping.


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [(3, 1, [0, 1, 2, 3]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (2, 10, [0, 2]), (1, 1, [0, 1])],
)
def test_rounds_are_evaluated_before_training_and_after_the_last(rounds: int, every: int, expected: list[int]) -> None:
    seen = EvaluatedRounds()
    result = gpfl.fit("fedavg", toy_federation(), rounds=rounds, eval_every=every, callbacks=[seen], **FAST)
    assert [line["round"] for line in result.history] == expected
    assert seen.rounds == expected


def test_round_zero_evaluates_the_untrained_net() -> None:
    federation = toy_federation()
    result = gpfl.fit("fedavg", federation, rounds=1, **FAST)
    method = result.engine.method
    shared, _ = method.init(0)
    first, second = result.history
    for shard in federation.shards:
        batch = federation.table.batch(torch.from_numpy(shard.test))
        right = (method.logits(Model(method.net, shared), batch.x).argmax(1) == batch.y).double().mean()
        assert first["client_accuracies"][shard.name] == float(right)  # type: ignore[index]
    assert "train" not in first
    assert "participants" not in first
    assert second["participants"] == 4
    assert second["train"]["ce"] > 0  # type: ignore[index]


def test_evaluating_less_often_does_not_change_metrics() -> None:
    often = gpfl.fit("gpfl", toy_federation(), rounds=6, client_fraction=0.5, **FAST).history
    seldom = gpfl.fit("gpfl", toy_federation(), rounds=6, client_fraction=0.5, eval_every=3, **FAST).history
    by_round = {line["round"]: {**line, "seconds": 0} for line in often}
    assert [{**line, "seconds": 0} for line in seldom] == [by_round[0], by_round[3], by_round[6]]


def test_accuracy_weights_every_test_sample_equally() -> None:
    federation = toy_federation()
    line = gpfl.fit("local", federation, rounds=2, **FAST).history[-1]
    rows = federation.n_samples("test")
    accuracies = np.array(list_client_accuracies(line))
    assert line["accuracy"] == pytest.approx(float((accuracies * rows).sum() / rows.sum()), abs=1e-12)
    assert line["mean"] == pytest.approx(accuracies.mean(), abs=1e-12)
    assert line["std"] == pytest.approx(np.sqrt(((accuracies - accuracies.mean()) ** 2).mean()), abs=1e-12)
    assert line["cov"] == pytest.approx(line["std"] / line["accuracy"], abs=1e-12)


class Scripted(Loop):
    """An engine that trains, and takes the correct predictions of each client, out of ten, from a list."""

    def __init__(self, spec: RunSpec, test: list[list[int]], validation: list[list[int]] | None = None) -> None:
        super().__init__(spec)
        self.curves = {"test": test, "validation": validation or []}

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        correct = np.array(self.curves[request.split][request.round], dtype=np.float64)
        return Evaluation(correct, np.ones_like(correct), np.full_like(correct, 10.0))


def scripted_loop(
    test: list[list[int]], validation: list[list[int]] | None = None, *, patience: int = 0, **run: object
) -> RoundLoop:
    """Return a run of two clients with given scores."""
    table = toy_table(40)
    federation = gpfl.federate(
        table, clients=2, classes_per_client=3, balanced=True, validation_fraction=0.2 if validation else 0.0
    )
    config = {"train": {"rounds": len(test) - 1}, "net": {"name": "mlp", "hidden": [2]}, "method": {"name": "fedavg"}}
    _, spec = prepare(configs.resolve_config(config, federation=federation), federation)
    return RoundLoop(spec, Scripted(spec, test, validation), RunOptions(**run), patience)  # type: ignore[arg-type]


def test_best_round_is_the_first_with_the_highest_accuracy() -> None:
    loop = scripted_loop([[1, 1], [6, 8], [8, 6], [2, 4]])
    summary = loop.run().summary
    assert (summary["best_round"], summary["best_accuracy"]) == (1, 0.7)
    assert summary["std"] == pytest.approx(0.1)
    assert summary["cov"] == pytest.approx(0.1 / 0.7)
    assert summary["last_accuracy"] == pytest.approx(0.3)
    assert (summary["selected_by"], summary["selected_round"]) == ("last", 3)
    assert summary["selected_accuracy"] == pytest.approx(0.3)
    assert summary["rounds"] == 3
    assert "validation_best_round" not in summary


def test_last_ten_accuracy_is_the_mean_of_the_last_ten_evaluations() -> None:
    curve = [[10, 10]] * 3 + [[k, k] for k in range(10)]
    assert scripted_loop(curve).run().summary["last_ten_accuracy"] == pytest.approx(0.45)
    fewer = [[2, 2], [4, 4], [6, 6]]  # the first is that of the untrained net
    assert scripted_loop(fewer).run().summary["last_ten_accuracy"] == pytest.approx(0.5)


def test_round_with_the_best_validation_accuracy_is_reported_and_selected() -> None:
    test = [[1, 1], [4, 4], [9, 9], [5, 5]]
    validation = [[1, 1], [7, 9], [2, 2], [8, 8]]
    outcome = scripted_loop(test, validation).run()
    assert (outcome.summary["best_round"], outcome.summary["best_accuracy"]) == (2, 0.9)
    assert (outcome.summary["validation_best_round"], outcome.summary["validation_best_accuracy"]) == (1, 0.4)
    assert (outcome.summary["selected_by"], outcome.summary["selected_round"]) == ("validation", 1)
    assert outcome.summary["selected_accuracy"] == 0.4
    assert outcome.selected.round == 1
    assert outcome.last.round == 3


@pytest.mark.parametrize(("select", "round"), [("last", 3), ("test", 2), ("validation", 1), ("auto", 1)])
def test_selected_state_is_that_of_the_selected_round(select: str, round: int) -> None:
    test = [[1, 1], [4, 4], [9, 9], [5, 5]]
    validation = [[1, 1], [7, 9], [2, 2], [8, 8]]
    outcome = scripted_loop(test, validation, select=select).run()
    shorter = scripted_loop(test[: round + 1], validation[: round + 1], select="last").run()
    selected, expected = tree.flatten(outcome.selected.shared), tree.flatten(shorter.last.shared)
    assert outcome.selected.round == round
    assert all(torch.equal(selected[key], expected[key]) for key in expected)


def test_later_rounds_do_not_change_the_selected_private_state() -> None:
    federation = validated_federation()
    kept = gpfl.fit("local", federation, rounds=8, client_fraction=0.5, select="test", **FAST)
    best = int(str(kept.summary["best_round"]))
    assert 0 < best < 8
    short = gpfl.fit("local", federation, rounds=best, client_fraction=0.5, select="last", **FAST)
    for model, expected in zip(kept.clients, short.clients, strict=True):
        was, now = tree.flatten(expected.weights), tree.flatten(model.weights)
        assert all(torch.equal(was[key], now[key]) for key in was)


def test_run_stops_after_patience_rounds_without_improvement() -> None:
    curve = [[1, 1], [5, 5], [4, 4], [5, 5], [3, 3], [9, 9]]
    assert scripted_loop(curve, patience=3).run().summary["rounds"] == 4
    assert scripted_loop(curve, patience=4).run().summary["rounds"] == 5
    assert scripted_loop(curve, patience=0).run().summary["rounds"] == 5


def test_patience_uses_validation_samples_if_there_are_any() -> None:
    rising = [[k, k] for k in range(6)]
    falling = rising[::-1]
    assert scripted_loop(rising, falling, patience=2).run().summary["rounds"] == 2
    assert scripted_loop(falling, rising, patience=2).run().summary["rounds"] == 5


def test_run_stopped_early_resumes_exactly(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "rounds": 40, "patience": 3, "checkpoint_every": 4}
    full = gpfl.fit("local", federation, out=tmp_path / "full", **settings)
    ended = int(str(full.summary["rounds"]))
    assert ended < 40
    assert ended == int(str(full.summary["best_round"])) + 3
    with pytest.raises(KilledError):
        gpfl.fit("local", federation, out=tmp_path / "cut", callbacks=[KillAt(ended)], **settings)
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "full")


# Counters.

INPUTS, WIDTH, CLASSES = 6, 5, 3
BASE, HEAD = INPUTS * WIDTH + WIDTH, WIDTH * CLASSES + CLASSES
VALVE, EMBEDDINGS = 2 * (WIDTH * WIDTH + 3 * WIDTH), CLASSES * WIDTH
SENT = {"fedavg": 4 * (BASE + HEAD), "gpfl": 4 * (BASE + VALVE + EMBEDDINGS), "local": 0}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(("client_fraction", "cohort"), [(1.0, 4), (0.5, 2), (0.1, 1)])
@pytest.mark.parametrize("method", SENT)
def test_bytes_are_those_of_the_shared_parts_of_every_sampled_client(
    method: str, client_fraction: float, cohort: int, engine: str
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES))
    result = gpfl.fit(method, toy_federation(), net=net, rounds=3, client_fraction=client_fraction, engine=engine)
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == SENT[method] * cohort * 3
    assert [line["bytes_up"] for line in result.history] == [SENT[method] * cohort * k for k in range(4)]


def test_bytes_follow_the_number_of_sampled_clients() -> None:
    result = gpfl.fit("fedavg", toy_federation(), rounds=8, client_fraction=(0.25, 1.0), **FAST)
    joined = [int(str(line["participants"])) for line in result.history[1:]]
    one = tree.count_bytes(result.outcome.last.shared)
    assert len(set(joined)) > 1
    assert result.summary["bytes_up"] == one * sum(joined)


def test_clients_that_are_not_sampled_keep_their_private_state() -> None:
    result = gpfl.fit("local", toy_federation(), rounds=1, client_fraction=0.5, **FAST)
    cohort = result.engine.schedule.sample_clients(0, 4)
    start = tree.flatten(result.engine.method.init(0)[1])
    for client in range(4):
        own = tree.flatten(tree.take(result.outcome.last.private, client))
        same = all(torch.equal(own[key], start[key]) for key in start)
        assert same == (client not in cohort)


# Divergence.


@dataclass(frozen=True, kw_only=True)
class NanLoss(Method):
    """FedAvg whose loss is NaN on the client with 33 rows in round 3."""

    name: ClassVar[str] = "fedavg"

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        terms = super().loss(model, shared, batch, client)
        bad = (client.round == 3) & (client.n_samples == int(0.75 * 33))
        return {"ce": torch.where(bad, torch.tensor(float("nan")), terms["ce"])}


@dataclass(frozen=True, kw_only=True)
class NanUpload(Method):
    """FedAvg in which a client, by default all, uploads NaN in round 3, with finite losses."""

    name: ClassVar[str] = "fedavg"
    client: int = gpfl.option(-1, "client whose uploads are NaN; -1 = all")

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        sent, private = super().upload(shared, local_state, private, client)

        def corrupt(t: Tensor) -> Tensor:
            chosen = (client.index == self.client) | (self.client < 0)
            return torch.where((client.round == 3) & chosen, torch.full_like(t, float("nan")), t)

        return tree.map_leaves(corrupt, sent), private


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_nan_loss_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path, engine: str) -> None:
    federation = toy_federation()
    settings = {"net": "mlp", "lr": 0.1, "engine": engine, "rounds": 6, "checkpoint_every": 2}
    out = tmp_path / "run"
    with pytest.raises(gpfl.GpflError, match=r"^round 3: the loss of client 2 is nan \(term 'ce'\): lower train.lr") as error:
        gpfl.fit(NanLoss(), federation, out=out, **settings)
    assert f"the last good checkpoint is kept in {out / 'checkpoint.safetensors'}" in str(error.value)
    gpfl.fit("fedavg", federation, out=tmp_path / "good", **{**settings, "rounds": 2})
    assert_same_weights(out / "checkpoint.safetensors", tmp_path / "good" / "checkpoint.safetensors")
    assert [line["round"] for line in RunDir(out).read_metrics()] == [0, 1, 2, 3]
    assert not (out / "summary.json").exists()


def test_nan_state_is_never_saved_as_a_checkpoint(tmp_path: Path) -> None:
    settings = {**FAST, "rounds": 9, "checkpoint_every": 1, "eval_every": 9}
    with pytest.raises(gpfl.GpflError, match=r"^round 3: the upload of client 0 is faulty"):
        gpfl.fit(NanUpload(), toy_federation(), out=tmp_path / "run", **settings)
    gpfl.fit("fedavg", toy_federation(), out=tmp_path / "good", **{**settings, "rounds": 3})
    assert_same_weights(tmp_path / "run" / "checkpoint.safetensors", tmp_path / "good" / "checkpoint.safetensors")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_nan_upload_stops_the_run_and_names_its_client(engine: str) -> None:
    with pytest.raises(gpfl.GpflError, match=r"^round 3: the upload of client 2 is faulty: 'base/fc1.0.weight' has NaN"):
        gpfl.fit(NanUpload(client=2), toy_federation(), rounds=9, **{**FAST, "engine": engine})


@pytest.mark.parametrize("method", ["gpfl", "fedavg", "local"])
def test_huge_learning_rate_is_reported_as_divergence(tmp_path: Path, method: str) -> None:
    with pytest.raises(gpfl.GpflError, match=r"^round \d+: .* client \d .*: lower train.lr \(.*, now 1e\+30\)"):
        gpfl.fit(method, toy_federation(), out=tmp_path, rounds=5, **{**FAST, "lr": 1e30})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["round"] == 0
    assert RunDir(tmp_path).diverged_round in range(6)
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_selection_without_validation_samples_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match="no client has validation samples: set --validation-fraction"):
        gpfl.fit("gpfl", toy_federation(), out=tmp_path / "run", select="validation", **FAST)
    assert not (tmp_path / "run").exists()
