"""Runs: when they evaluate, when they stop, what they count, and that a killed run goes on as if it had not been."""

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
from conftest import toy_federation, toy_table
from torch import Tensor

import gpfl
from gpfl.cli import main as cli
from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method
from gpfl.core.metrics import Evaluation
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.engine import RunSpec
from gpfl.engine.base import EvalRequest
from gpfl.engine.loop import Loop
from gpfl.io import files
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


class KilledError(Exception):
    """Stands for the end of the process."""


class KillAt(Callback):
    """Ends the process right after a round is evaluated."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_evaluate(self, record: MetricsRecord) -> None:
        if record["round"] == self.round:
            raise KilledError


class Notes(Callback):
    """Records the evaluated rounds."""

    def __init__(self) -> None:
        self.rounds: list[object] = []

    def on_evaluate(self, record: MetricsRecord) -> None:
        self.rounds.append(record["round"])


def metrics(folder: Path) -> str:
    """The text of metrics.jsonl with every time taken out."""
    return re.sub(r'"seconds": [0-9.e-]+', '"seconds": _', (folder / "metrics.jsonl").read_text())


def facts(folder: Path) -> dict[str, object]:
    """The summary without its time."""
    return {key: value for key, value in RunDir(folder).read_summary().items() if key != "seconds"}


def assert_same_weights(one: Path, other: Path) -> None:
    """Two files hold the same tensors, bit for bit, and the same facts; the order of facts in a file is not fixed."""
    (tensors, about), (wanted, said) = read_tensors(one), read_tensors(other)
    for said_of in (about, said):
        said_of.pop("files", None)  # the hash of a config, which runs of other lengths do not share
    assert about == said
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    assert facts(one) == facts(other)
    names = sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    assert sorted(path.relative_to(one) for path in one.rglob("*.safetensors")) == names
    for name in names:
        assert_same_weights(one / name, other / name)


def validated_federation() -> gpfl.Federation:
    """Clients with validation rows on blobs so close that the best validation round is not the last one."""
    table = toy_table(160, classes=4, seed=3)
    return gpfl.federate(table, clients=4, classes_per_client=3, balanced=True, validation_fraction=0.3)


CASES: dict[str, tuple[Callable[[], gpfl.Federation], dict[str, object]]] = {
    "full": (toy_federation, {}),
    "partial": (toy_federation, {"client_fraction": 0.5}),
    "range": (toy_federation, {"client_fraction": (0.25, 1.0)}),
    "validation": (validated_federation, {"client_fraction": 0.5}),
    "sparse": (toy_federation, {"client_fraction": 0.5, "eval_every": 2, "select": "test"}),
}


@pytest.mark.parametrize("case", CASES)
def test_run_killed_after_any_evaluation_goes_on_as_if_it_had_not_been(tmp_path: Path, case: str) -> None:
    make, settings = CASES[case]
    federation = make()
    settings = {**FAST, "rounds": 5, "checkpoint_every": 2, **settings}
    gpfl.fit("gpfl", federation, out=tmp_path / "whole", **settings)
    for number in [line["round"] for line in RunDir(tmp_path / "whole").read_metrics()]:
        cut = tmp_path / f"cut-{number}"
        with pytest.raises(KilledError):
            gpfl.fit("gpfl", federation, out=cut, callbacks=[KillAt(number)], **settings)
        assert not (cut / "summary.json").exists()
        gpfl.resume(cut, federation=federation)
        assert_same_run(cut, tmp_path / "whole")


@pytest.mark.parametrize("protocol", ["corrected", "reference"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_exactly_with_some_clients_absent_and_a_round_selected(
    tmp_path: Path, method: str, protocol: str
) -> None:
    federation = validated_federation()
    settings = {**FAST, "rounds": 2, "checkpoint_every": 1, "client_fraction": 0.5, "protocol": protocol}
    gpfl.fit(method, federation, out=tmp_path / "whole", **settings)
    with pytest.raises(KilledError):
        gpfl.fit(method, federation, out=tmp_path / "cut", callbacks=[KillAt(2)], **settings)
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_stacked_run_goes_on_exactly(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "engine": "vmap", "rounds": 3, "checkpoint_every": 2, "client_fraction": 0.5}
    gpfl.fit("gpfl", federation, out=tmp_path / "whole", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(3)], **settings)
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_run_killed_at_any_write_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    federation = validated_federation()
    settings = {**FAST, "rounds": 4, "checkpoint_every": 2, "client_fraction": 0.5}
    write, count = files.write_bytes, 0
    last = -1

    def deadly(path: Path, content: bytes) -> None:
        nonlocal count
        count += 1
        if written or count != last:
            write(path, content)
        if count == last:
            raise KilledError

    monkeypatch.setattr(files, "write_bytes", deadly)
    gpfl.fit("gpfl", federation, out=tmp_path / "whole", **settings)
    total = count
    assert total > 10
    begun = 2 if written else 3  # before config.toml there is no run to go on with
    for last in range(begun, total + 1):
        cut, count = tmp_path / f"cut-{last}", 0
        with pytest.raises(KilledError):
            gpfl.fit("gpfl", federation, out=cut, **settings)
        count = total + 1
        gpfl.resume(cut, federation=federation)
        assert_same_run(cut, tmp_path / "whole")


def test_run_killed_again_and_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "rounds": 8, "checkpoint_every": 2, "client_fraction": 0.5}
    gpfl.fit("gpfl", federation, out=tmp_path / "whole", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(1)], **settings)
    for number in (3, 3, 5, 8):
        with pytest.raises(KilledError):
            gpfl.resume(tmp_path / "cut", federation=federation, callbacks=[KillAt(number)])
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_torn_line_of_metrics_is_written_anew(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "rounds": 5, "checkpoint_every": 2}
    gpfl.fit("fedavg", federation, out=tmp_path / "whole", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("fedavg", federation, out=tmp_path / "cut", callbacks=[KillAt(3)], **settings)
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_resumed_run_tells_its_watch_only_of_rounds_it_runs(tmp_path: Path) -> None:
    federation = toy_federation()
    with pytest.raises(KilledError):
        gpfl.fit("local", federation, out=tmp_path / "cut", callbacks=[KillAt(5)], rounds=6, checkpoint_every=4, **FAST)
    notes = Notes()
    gpfl.resume(tmp_path / "cut", federation=federation, callbacks=[notes])
    assert notes.rounds == [5, 6]


def test_metrics_that_lost_rounds_before_the_checkpoint_are_refused_and_kept(tmp_path: Path) -> None:
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


def test_damaged_checkpoint_stops_resumption_and_touches_nothing(tmp_path: Path) -> None:
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
def test_run_whose_saved_state_was_removed_starts_over_and_ends_the_same(tmp_path: Path, lost: str) -> None:
    federation = validated_federation()
    settings = {**FAST, "rounds": 5, "checkpoint_every": 2}
    gpfl.fit("gpfl", federation, out=tmp_path / "whole", **settings)
    with pytest.raises(KilledError):
        gpfl.fit("gpfl", federation, out=tmp_path / "cut", callbacks=[KillAt(4)], **settings)
    (tmp_path / "cut" / lost).unlink()
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_finished_run_without_its_checkpoint_is_not_opened_and_keeps_its_metrics(tmp_path: Path) -> None:
    federation = toy_federation()
    gpfl.fit("gpfl", federation, out=tmp_path, rounds=2, **FAST)
    (tmp_path / "checkpoint.safetensors").unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(gpfl.GpflError, match="has finished, but its checkpoint is gone"):
        gpfl.load(tmp_path, federation=federation)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_command_killed_by_the_system_and_resumed_gives_the_bytes_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--clients=4", "--rounds=60", "--hidden=8", "--client-fraction=0.5", "--batch-size=200", "--checkpoint-every=3"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    command = [sys.executable, "-m", "gpfl", "run", *given, "--out", str(cut)]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics_path = cut / "metrics.jsonl"
    while not metrics_path.exists() or metrics_path.read_bytes().count(b"\n") < 5:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
            break  # it ended before it could be killed, which the next lines find
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()
    assert not (cut / "summary.json").exists()
    for arguments in (["resume", str(cut)], ["run", *given, "--out", str(whole)]):
        monkeypatch.setattr(sys, "argv", ["gpfl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
    assert_same_run(cut, whole)
    assert (cut / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()


# When a run evaluates and when it stops.


@pytest.mark.parametrize(
    ("rounds", "every", "wanted"),
    [(3, 1, [0, 1, 2, 3]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (2, 10, [0, 2]), (1, 1, [0, 1])],
)
def test_evaluation_is_at_the_start_of_rounds_and_after_the_last(rounds: int, every: int, wanted: list[int]) -> None:
    notes = Notes()
    result = gpfl.fit("fedavg", toy_federation(), rounds=rounds, eval_every=every, callbacks=[notes], **FAST)
    assert [line["round"] for line in result.history] == wanted
    assert notes.rounds == wanted


def test_round_zero_judges_the_untrained_net_and_says_nothing_of_training() -> None:
    federation = toy_federation()
    result = gpfl.fit("fedavg", federation, rounds=1, **FAST)
    method = result.engine.method
    shared, _ = method.init(0)
    first, second = result.history
    for place, shard in enumerate(federation.shards):
        batch = federation.table.batch(torch.from_numpy(shard.test))
        right = (method.logits(Model(method.net, shared), batch.x).argmax(1) == batch.y).double().mean()
        assert first["client_accuracies"][place] == float(right)  # type: ignore[index]
    assert "train" not in first
    assert "participants" not in first
    assert second["participants"] == 4
    assert second["train"]["ce"] > 0  # type: ignore[index]


def test_evaluating_less_often_does_not_change_the_numbers() -> None:
    often = gpfl.fit("gpfl", toy_federation(), rounds=6, client_fraction=0.5, **FAST).history
    seldom = gpfl.fit("gpfl", toy_federation(), rounds=6, client_fraction=0.5, eval_every=3, **FAST).history
    by_round = {line["round"]: {**line, "seconds": 0} for line in often}
    assert [{**line, "seconds": 0} for line in seldom] == [by_round[0], by_round[3], by_round[6]]


def test_line_counts_every_test_row_once() -> None:
    federation = toy_federation()
    line = gpfl.fit("local", federation, rounds=2, **FAST).history[-1]
    rows = federation.n_samples("test")
    accuracies = np.array(line["client_accuracies"])
    assert line["accuracy"] == pytest.approx(float((accuracies * rows).sum() / rows.sum()), abs=1e-12)
    assert line["mean"] == pytest.approx(accuracies.mean(), abs=1e-12)
    assert line["std"] == pytest.approx(np.sqrt(((accuracies - accuracies.mean()) ** 2).mean()), abs=1e-12)
    assert line["cov"] == pytest.approx(line["std"] / line["accuracy"], abs=1e-12)


class Scripted(Loop):
    """An engine that trains as ever and reads its scores off a curve: right decisions of each client out of ten."""

    def __init__(self, setting: RunSpec, test: list[list[int]], validation: list[list[int]] | None = None) -> None:
        super().__init__(setting)
        self.curves = {"test": test, "validation": validation or []}

    def evaluate_clients(self, asked: EvalRequest) -> Evaluation:
        correct = np.array(self.curves[asked.split][asked.round], dtype=np.float64)
        return Evaluation(correct, np.ones_like(correct), np.full_like(correct, 10.0))


def simulate_curve(
    test: list[list[int]], validation: list[list[int]] | None = None, *, patience: int = 0, **run: object
) -> RoundLoop:
    """A run on two clients whose scores are hand-made."""
    table = toy_table(40)
    federation = gpfl.federate(
        table, clients=2, classes_per_client=3, balanced=True, validation_fraction=0.2 if validation else 0.0
    )
    given = {"train": {"rounds": len(test) - 1}, "net": {"name": "mlp", "hidden": [2]}, "method": {"name": "fedavg"}}
    _, setting = prepare(configs.resolve_config(given, federation=federation), federation, None, None)
    return RoundLoop(setting, Scripted(setting, test, validation), RunOptions(**run), patience)  # type: ignore[arg-type]


def test_best_round_is_the_first_of_the_highest_and_brings_its_spread() -> None:
    simulation = simulate_curve([[1, 1], [6, 8], [8, 6], [2, 4]])
    summary = simulation.run().summary
    assert (summary["best_round"], summary["best_accuracy"]) == (1, 0.7)
    assert summary["std"] == pytest.approx(0.1)
    assert summary["cov"] == pytest.approx(0.1 / 0.7)
    assert summary["last_accuracy"] == pytest.approx(0.3)
    assert (summary["selected_by"], summary["selected_round"]) == ("last", 3)
    assert summary["selected_accuracy"] == pytest.approx(0.3)
    assert summary["rounds"] == 3
    assert "validation_best_round" not in summary


def test_last_ten_are_the_last_ten_evaluations() -> None:
    curve = [[10, 10]] * 3 + [[k, k] for k in range(10)]
    assert simulate_curve(curve).run().summary["last_ten_accuracy"] == pytest.approx(0.45)
    fewer = [[2, 2], [4, 4], [6, 6]]  # the first is that of the untrained net
    assert simulate_curve(fewer).run().summary["last_ten_accuracy"] == pytest.approx(0.5)


def test_validation_best_is_reported_beside_the_test_best_and_selects_the_models() -> None:
    test = [[1, 1], [4, 4], [9, 9], [5, 5]]
    validation = [[1, 1], [7, 9], [2, 2], [8, 8]]
    outcome = simulate_curve(test, validation).run()
    assert (outcome.summary["best_round"], outcome.summary["best_accuracy"]) == (2, 0.9)
    assert (outcome.summary["validation_best_round"], outcome.summary["validation_best_accuracy"]) == (1, 0.4)
    assert (outcome.summary["selected_by"], outcome.summary["selected_round"]) == ("validation", 1)
    assert outcome.summary["selected_accuracy"] == 0.4
    assert outcome.selected.round == 1
    assert outcome.last.round == 3


@pytest.mark.parametrize(("select", "round"), [("last", 3), ("test", 2), ("validation", 1), ("auto", 1)])
def test_selected_state_is_the_state_of_the_selected_round(select: str, round: int) -> None:
    test = [[1, 1], [4, 4], [9, 9], [5, 5]]
    validation = [[1, 1], [7, 9], [2, 2], [8, 8]]
    outcome = simulate_curve(test, validation, select=select).run()
    shorter = simulate_curve(test[: round + 1], validation[: round + 1], select="last").run()
    selected, wanted = tree.flatten(outcome.selected.shared), tree.flatten(shorter.last.shared)
    assert outcome.selected.round == round
    assert all(torch.equal(selected[key], wanted[key]) for key in wanted)


def test_selected_private_state_does_not_change_under_later_rounds_of_others() -> None:
    federation = validated_federation()
    kept = gpfl.fit("local", federation, rounds=8, client_fraction=0.5, select="test", **FAST)
    best = int(str(kept.summary["best_round"]))
    assert 0 < best < 8
    short = gpfl.fit("local", federation, rounds=best, client_fraction=0.5, select="last", **FAST)
    for model, wanted in zip(kept.clients, short.clients, strict=True):
        was, now = tree.flatten(wanted.weights), tree.flatten(model.weights)
        assert all(torch.equal(was[key], now[key]) for key in was)


def test_patience_stops_after_so_many_rounds_without_a_better_accuracy() -> None:
    curve = [[1, 1], [5, 5], [4, 4], [5, 5], [3, 3], [9, 9]]
    assert simulate_curve(curve, patience=3).run().summary["rounds"] == 4
    assert simulate_curve(curve, patience=4).run().summary["rounds"] == 5
    assert simulate_curve(curve, patience=0).run().summary["rounds"] == 5


def test_patience_looks_at_validation_rows_where_there_are_some() -> None:
    rising = [[k, k] for k in range(6)]
    falling = rising[::-1]
    assert simulate_curve(rising, falling, patience=2).run().summary["rounds"] == 2
    assert simulate_curve(falling, rising, patience=2).run().summary["rounds"] == 5


def test_run_that_lost_patience_ends_the_same_when_killed(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**FAST, "rounds": 40, "patience": 3, "checkpoint_every": 4}
    whole = gpfl.fit("local", federation, out=tmp_path / "whole", **settings)
    ended = int(str(whole.summary["rounds"]))
    assert ended < 40
    assert ended == int(str(whole.summary["best_round"])) + 3
    with pytest.raises(KilledError):
        gpfl.fit("local", federation, out=tmp_path / "cut", callbacks=[KillAt(ended)], **settings)
    gpfl.resume(tmp_path / "cut", federation=federation)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


# What a run counts.

INPUTS, WIDTH, CLASSES = 6, 5, 3
BASE, HEAD = INPUTS * WIDTH + WIDTH, WIDTH * CLASSES + CLASSES
VALVE, EMBEDDINGS = 2 * (WIDTH * WIDTH + 3 * WIDTH), CLASSES * WIDTH
SENT = {"fedavg": 4 * (BASE + HEAD), "gpfl": 4 * (BASE + VALVE + EMBEDDINGS), "local": 0}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(("client_fraction", "cohort"), [(1.0, 4), (0.5, 2), (0.1, 1)])
@pytest.mark.parametrize("method", SENT)
def test_bytes_are_those_of_the_shared_parts_for_each_member_of_each_cohort(
    method: str, client_fraction: float, cohort: int, engine: str
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES))
    result = gpfl.fit(method, toy_federation(), net=net, rounds=3, client_fraction=client_fraction, engine=engine)
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == SENT[method] * cohort * 3
    assert [line["bytes_up"] for line in result.history] == [SENT[method] * cohort * k for k in range(4)]


def test_bytes_under_a_range_of_shares_follow_the_cohorts_that_were_drawn() -> None:
    result = gpfl.fit("fedavg", toy_federation(), rounds=8, client_fraction=(0.25, 1.0), **FAST)
    joined = [int(str(line["participants"])) for line in result.history[1:]]
    one = tree.count_bytes(result.outcome.last.shared)
    assert len(set(joined)) > 1
    assert result.summary["bytes_up"] == one * sum(joined)


def test_clients_outside_the_cohort_keep_their_private_state() -> None:
    result = gpfl.fit("local", toy_federation(), rounds=1, client_fraction=0.5, **FAST)
    cohort = result.engine.schedule.sample_clients(0, 4)
    start = tree.flatten(result.engine.method.init(0)[1])
    for client in range(4):
        own = tree.flatten(tree.take(result.outcome.last.private, client))
        same = all(torch.equal(own[key], start[key]) for key in start)
        assert same == (client not in cohort)


# Losses that are not numbers.


@dataclass(frozen=True, kw_only=True)
class Exploding(Method):
    """FedAvg whose loss is NaN on the client with 33 rows in round 3."""

    name: ClassVar[str] = "fedavg"

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        terms = super().loss(model, shared, batch, client)
        sick = (client.round == 3) & (client.n_samples == int(0.75 * 33))
        return {"ce": torch.where(sick, torch.tensor(float("nan")), terms["ce"])}


@dataclass(frozen=True, kw_only=True)
class Poisoned(Method):
    """FedAvg that sends NaN in round 3, although its losses were numbers."""

    name: ClassVar[str] = "fedavg"

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        sent, kept = super().upload(shared, local_state, private, client)

        def spoil(t: Tensor) -> Tensor:
            return torch.where(client.round == 3, torch.full_like(t, float("nan")), t)

        return tree.map_leaves(spoil, sent), kept


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_nan_loss_stops_the_run_names_round_and_client_and_keeps_the_last_checkpoint(tmp_path: Path, engine: str) -> None:
    federation = toy_federation()
    settings = {"net": "mlp", "lr": 0.1, "engine": engine, "rounds": 6, "checkpoint_every": 2}
    out = tmp_path / "run"
    with pytest.raises(gpfl.GpflError, match=r"^round 3: the loss of client 2 is nan \(term 'ce'\): lower train.lr") as told:
        gpfl.fit(Exploding(), federation, out=out, **settings)
    assert f"the last good checkpoint is kept in {out / 'checkpoint.safetensors'}" in str(told.value)
    gpfl.fit("fedavg", federation, out=tmp_path / "good", **{**settings, "rounds": 2})
    assert_same_weights(out / "checkpoint.safetensors", tmp_path / "good" / "checkpoint.safetensors")
    assert [line["round"] for line in RunDir(out).read_metrics()] == [0, 1, 2, 3]
    assert not (out / "summary.json").exists()


def test_state_that_is_nan_is_never_kept_as_a_checkpoint(tmp_path: Path) -> None:
    settings = {**FAST, "rounds": 9, "checkpoint_every": 1, "eval_every": 9}
    with pytest.raises(gpfl.GpflError, match=r"^round 4: the loss of client 0 is nan"):
        gpfl.fit(Poisoned(), toy_federation(), out=tmp_path / "run", **settings)
    gpfl.fit("fedavg", toy_federation(), out=tmp_path / "good", **{**settings, "rounds": 3})
    assert_same_weights(tmp_path / "run" / "checkpoint.safetensors", tmp_path / "good" / "checkpoint.safetensors")


def test_model_that_is_nan_is_found_at_evaluation() -> None:
    with pytest.raises(gpfl.GpflError, match=r"^round 4: the model of client 0 has loss nan on its test samples"):
        gpfl.fit(Poisoned(), toy_federation(), rounds=9, **FAST)


@pytest.mark.parametrize("method", ["gpfl", "fedavg", "local"])
def test_huge_learning_rate_ends_in_a_users_error(tmp_path: Path, method: str) -> None:
    with pytest.raises(gpfl.GpflError, match=r"^round \d+: .* client \d .*: lower train.lr \(.*, now 1e\+30\)"):
        gpfl.fit(method, toy_federation(), out=tmp_path, rounds=5, **{**FAST, "lr": 1e30})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["round"] == 0
    assert RunDir(tmp_path).diverged_round in range(6)
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_selection_by_validation_rows_that_nobody_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match="no client has validation samples: set --validation-fraction"):
        gpfl.fit("gpfl", toy_federation(), out=tmp_path / "run", select="validation", **FAST)
    assert not (tmp_path / "run").exists()
