"""Callbacks: their hooks, in order, in new, resumed, concurrent and diverging runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import toy_federation

import gpfl
from gpfl.training.callbacks import RunInfo
from gpfl.training.run_dir import MetricsRecord, RunDir

FAST = {"net": "mlp", "lr": 0.1, "engine": "loop"}


class Recorder(gpfl.Callback):
    """Records every call; raises right after the evaluation of a round, if one is given."""

    def __init__(self, stop: int | None = None) -> None:
        self.calls: list[tuple[str, object]] = []
        self.info: RunInfo | None = None
        self.losses: dict[int, Mapping[str, float]] = {}
        self.summary: Mapping[str, object] = {}
        self._stop = stop

    def on_run_start(self, run: RunInfo) -> None:
        self.info = run
        self.calls.append(("start", run.start_round))

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        self.losses[round] = losses
        self.calls.append(("round", round))

    def on_evaluate(self, record: MetricsRecord) -> None:
        self.calls.append(("evaluate", record["round"]))
        if record["round"] == self._stop:
            raise KeyboardInterrupt

    def on_checkpoint(self, path: Path) -> None:
        assert path.is_file()
        self.calls.append(("checkpoint", path.name))

    def on_run_end(self, summary: Mapping[str, object]) -> None:
        self.summary = summary
        self.calls.append(("end", summary["rounds"]))


CHECKPOINT = ("checkpoint", "checkpoint.safetensors")


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    result = gpfl.fit(
        *("fedavg", toy_federation()), rounds=3, eval_every=2, checkpoint_every=2, out=tmp_path, callbacks=[recorder], **FAST
    )
    assert recorder.calls == [
        *(("start", 0), ("evaluate", 0), CHECKPOINT),
        *(("round", 1), ("round", 2), ("evaluate", 2), CHECKPOINT),
        *(("round", 3), ("evaluate", 3), CHECKPOINT, ("end", 3)),
    ]
    assert recorder.info == RunInfo("fedavg", 3, 0, tmp_path, ())
    assert recorder.losses[3] == result.history[-1]["train"]
    assert recorder.summary == result.summary
    assert RunDir(tmp_path).finished


def test_run_without_a_folder_has_no_checkpoints() -> None:
    recorder = Recorder()
    gpfl.fit("local", toy_federation(), rounds=1, callbacks=[recorder], **FAST)
    assert recorder.calls == [("start", 0), ("evaluate", 0), ("round", 1), ("evaluate", 1), ("end", 1)]


def test_resumed_run_starts_from_its_checkpoint_and_a_finished_one_calls_no_hook(tmp_path: Path) -> None:
    federation = toy_federation()
    stopped, resumed, finished = Recorder(stop=3), Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        gpfl.fit("fedavg", federation, rounds=4, checkpoint_every=2, out=tmp_path, callbacks=[stopped], **FAST)
    assert stopped.calls[-1] == ("evaluate", 3)
    gpfl.resume(tmp_path, federation=federation, callbacks=[resumed])
    assert resumed.calls[:3] == [("start", 2), CHECKPOINT, ("round", 3)]
    gpfl.resume(tmp_path, federation=federation, callbacks=[finished])
    assert finished.calls == []


def test_all_callbacks_are_called() -> None:
    first, second = Recorder(), Recorder()
    gpfl.fit("local", toy_federation(), rounds=1, callbacks=[first, gpfl.Callback(), second], **FAST)
    assert first.calls == second.calls
    assert len(first.calls) == 5


def test_run_end_is_not_called_for_a_run_that_diverges() -> None:
    recorder = Recorder()
    with pytest.raises(gpfl.GpflError, match=r"lower train\.lr"):
        gpfl.fit("fedavg", toy_federation(), rounds=5, callbacks=[recorder], **{**FAST, "lr": 1e30})
    assert recorder.calls[0] == ("start", 0)
    assert not recorder.summary


def test_notes_state_the_guarantee_of_a_defence() -> None:
    recorder = Recorder()
    gpfl.fit("fedavg", toy_federation(), rounds=1, clip=1.0, noise=4.0, callbacks=[recorder], **FAST)
    assert recorder.info is not None
    assert any("δ" in note for note in recorder.info.notes), recorder.info.notes
