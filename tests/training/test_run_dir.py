"""The run directory: its files, and errors about damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import KilledError

import gpfl
from gpfl.core.tree import Tree, flatten
from gpfl.io import files
from gpfl.io.tensors import write_tensors
from gpfl.training import run_dir as run_dirs
from gpfl.training.run_dir import RunDir, RunState

CONFIG = '[run]\nseed = 0\n\n[data]\nname = "toy"\n'


def record(round: int, **more: object) -> run_dirs.MetricsRecord:
    """Return a record of metrics.jsonl."""
    return {"accuracy": 0.5, "loss": 0.5, "round": round, **more}


def example_state(round: int = 3) -> RunState:
    shared: Tree = {"base": {"weight": torch.arange(6.0).reshape(2, 3)}, "head": {"bias": torch.tensor([0.5])}}
    private: Tree = {"personal": {"head": torch.linspace(0, 1, 8).reshape(4, 2)}}
    return RunState(round, shared, private, bytes_up=120, bytes_down=240)


def zero_state() -> RunState:
    """Return a state of the same shapes, as a resumed run has before it reads its checkpoint."""
    return RunState(
        0,
        {"base": {"weight": torch.zeros(2, 3)}, "head": {"bias": torch.zeros(1)}},
        {"personal": {"head": torch.zeros(4, 2)}},
    )


@pytest.fixture
def run_dir(tmp_path: Path, federation: gpfl.Federation) -> RunDir:
    return RunDir.create(tmp_path / "run", CONFIG, federation)


def test_new_folder_holds_config_and_manifest(run_dir: RunDir, federation: gpfl.Federation) -> None:
    assert (run_dir.path / "config.toml").read_text() == CONFIG
    again = gpfl.Federation.load(run_dir.path / "federation.toml", federation.table)
    assert again.manifest() == federation.manifest()
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["config.toml", "federation.toml"]


def test_empty_folder_can_be_used(tmp_path: Path, federation: gpfl.Federation) -> None:
    (tmp_path / "empty").mkdir()
    assert (RunDir.create(tmp_path / "empty", CONFIG, federation).path / "config.toml").is_file()


def test_used_folder_is_an_error_and_does_not_change(run_dir: RunDir, federation: gpfl.Federation) -> None:
    before = {path.name: path.read_bytes() for path in run_dir.path.iterdir()}
    with pytest.raises(gpfl.GpflError, match="not empty and nothing is overwritten: gpfl resume"):
        RunDir.create(run_dir.path, "[run]\nseed = 9\n", federation)
    assert {path.name: path.read_bytes() for path in run_dir.path.iterdir()} == before


def test_folder_with_other_files_is_an_error_without_advice_to_resume(tmp_path: Path, federation: gpfl.Federation) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(gpfl.GpflError, match="nothing is overwritten: choose another --out"):
        RunDir.create(tmp_path, CONFIG, federation)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_file_instead_of_a_folder_is_an_error(tmp_path: Path, federation: gpfl.Federation, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(gpfl.GpflError, match="choose a"):
        RunDir.create(tmp_path / "taken" / below, CONFIG, federation)
    assert (tmp_path / "taken").read_text() == "mine"


def test_unreadable_folder_is_an_error_of_one_line(
    tmp_path: Path, federation: gpfl.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(gpfl.GpflError, match="Permission denied; choose another --out"):
        RunDir.create(tmp_path / "run", CONFIG, federation)


def test_empty_name_of_a_folder_is_an_error(federation: gpfl.Federation) -> None:
    with pytest.raises(gpfl.GpflError, match="out is empty; name a folder"):
        RunDir.create("", CONFIG, federation)


def test_folder_of_several_methods_names_the_command_to_repeat(tmp_path: Path) -> None:
    (tmp_path / "gpfl").mkdir()
    (tmp_path / "gpfl" / "trials.json").write_text("{}")
    with pytest.raises(gpfl.GpflError, match="holds trials of several methods: repeat the command that started them"):
        RunDir.open(tmp_path)


def test_folder_without_a_config_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match=r"holds no run \(no config.toml\)"):
        RunDir.open(tmp_path)


def test_only_a_partial_start_is_removed(tmp_path: Path, run_dir: RunDir) -> None:
    before = sorted(run_dir.path.iterdir())
    run_dirs.remove_partial_start(run_dir.path)
    assert sorted(run_dir.path.iterdir()) == before

    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "federation.toml").write_text("half")
    (partial / ".config.toml.x1y2").write_text("half")
    (partial / "notes.txt").write_text("mine")
    run_dirs.remove_partial_start(partial)
    assert len(list(partial.iterdir())) == 3

    (partial / "notes.txt").unlink()
    run_dirs.remove_partial_start(partial)
    assert list(partial.iterdir()) == []


# Metrics.


def test_divergence_is_kept_until_the_run_finishes(run_dir: RunDir) -> None:
    assert run_dir.diverged_round is None
    for text in ("", "[]", '{"what": "loss"}'):
        (run_dir.path / "diverged.json").write_text(text)
        assert run_dir.diverged_round is None
    run_dir.write_divergence(0, "the loss is nan")
    assert run_dir.diverged_round == 0
    run_dir.write_summary({})
    assert run_dir.diverged_round is None


def test_appended_metrics_are_read_back(run_dir: RunDir) -> None:
    lines = [record(k, accuracy=k / 7, client_accuracies=[0.1 * k, 1 / 3]) for k in range(3)]
    for entry in lines:
        run_dir.append_metrics(entry)
    assert run_dir.read_metrics() == lines


def test_run_without_metrics_has_no_records(run_dir: RunDir) -> None:
    assert run_dir.read_metrics() == []


@pytest.mark.parametrize("cut", [1, 10, 25])
def test_incomplete_last_line_is_ignored(run_dir: RunDir, cut: int) -> None:
    run_dir.append_metrics(record(0))
    run_dir.append_metrics(record(1))
    path = run_dir.path / "metrics.jsonl"
    full = path.read_bytes()
    path.write_bytes(full[: len(full) - 1 - cut])
    assert run_dir.read_metrics() == [record(0)]


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00\x00", b"\xff\xfe{"])
def test_records_end_at_a_line_that_is_not_json(run_dir: RunDir, garbage: bytes) -> None:
    run_dir.append_metrics(record(0))
    with (run_dir.path / "metrics.jsonl").open("ab") as file:
        file.write(garbage + b"\n" + json.dumps(record(2)).encode() + b"\n")
    assert run_dir.read_metrics() == [record(0)]


def test_truncated_metrics_have_the_bytes_they_had_when_appended(run_dir: RunDir) -> None:
    lines = [record(k, accuracy=k / 7, train={"ce": 1e-9}) for k in range(4)]
    for entry in lines[:2]:
        run_dir.append_metrics(entry)
    expected = (run_dir.path / "metrics.jsonl").read_bytes()
    for entry in lines[2:]:
        run_dir.append_metrics(entry)
    run_dir.truncate_metrics(run_dir.read_metrics()[:2])
    assert (run_dir.path / "metrics.jsonl").read_bytes() == expected


def test_nan_is_not_written_to_metrics_or_summary(run_dir: RunDir) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_dir.append_metrics({"round": 0, "loss": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_dir.write_summary({"loss": float("inf")})
    assert run_dir.read_metrics() == []
    assert not run_dir.finished


def test_unwritable_metrics_are_an_error(run_dir: RunDir) -> None:
    (run_dir.path / "metrics.jsonl").mkdir()
    with pytest.raises(gpfl.GpflError, match=r"cannot write .*metrics.jsonl"):
        run_dir.append_metrics({"round": 0})


def test_summary_marks_the_run_as_finished(run_dir: RunDir) -> None:
    assert not run_dir.finished
    summary = {"rounds": 3, "best_accuracy": 1 / 3, "method": "gpfl", "extra": None}
    run_dir.write_summary(summary)
    assert run_dir.finished
    assert summary.items() <= run_dir.read_summary().items()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_error_names_a_damaged_summary(run_dir: RunDir, text: str) -> None:
    (run_dir.path / "summary.json").write_text(text)
    with pytest.raises(gpfl.GpflError, match=r"summary.json is damaged .*: delete it, then run gpfl resume"):
        run_dir.read_summary()


# Checkpoints.


def test_checkpoint_restores_state_and_counters(run_dir: RunDir) -> None:
    state = example_state()
    run_dir.save_checkpoint(state)
    again = run_dir.load_checkpoint(zero_state())
    assert again is not None
    assert (again.round, again.bytes_up, again.bytes_down) == (3, 120, 240)
    for kind in ("shared", "private"):
        was, now = flatten(getattr(state, kind)), flatten(getattr(again, kind))
        assert was.keys() == now.keys()
        assert all(torch.equal(was[key], now[key]) for key in was)


def test_checkpoint_restores_a_state_without_shared_tensors(run_dir: RunDir) -> None:
    alone = RunState(1, {}, {"head": {"weight": torch.ones(2, 2)}})
    run_dir.save_checkpoint(alone)
    again = run_dir.load_checkpoint(RunState(0, {}, {"head": {"weight": torch.zeros(2, 2)}}))
    assert again is not None
    assert again.shared == {}
    assert torch.equal(flatten(again.private)["head/weight"], torch.ones(2, 2))


def test_missing_checkpoint_is_none(run_dir: RunDir) -> None:
    assert run_dir.load_checkpoint(example_state()) is None


def test_every_flipped_byte_of_a_checkpoint_is_an_error(run_dir: RunDir) -> None:
    state = example_state()
    run_dir.save_checkpoint(state)
    path = run_dir.path / "checkpoint.safetensors"
    good = path.read_bytes()
    for i in range(len(good)):
        if good[i : i + 1] == b" ":  # padding of the header
            continue
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        with pytest.raises(gpfl.GpflError, match=r"checkpoint.safetensors (is damaged|does not belong|is not a checkpoint)"):
            run_dir.load_checkpoint(zero_state())


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_error_about_a_truncated_checkpoint_names_the_fix(run_dir: RunDir, length: int) -> None:
    run_dir.save_checkpoint(example_state())
    path = run_dir.path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(gpfl.GpflError, match=r"checkpoint.safetensors is damaged .*: remove it to start over") as error:
        run_dir.load_checkpoint(zero_state())
    assert "\n" not in str(error.value)


def test_checkpoint_of_another_run_is_an_error(run_dir: RunDir) -> None:
    run_dir.save_checkpoint(example_state())
    other = RunState(0, {"base": {"weight": torch.zeros(3, 3)}, "head": {"bias": torch.zeros(1)}}, {})
    with pytest.raises(gpfl.GpflError, match="does not belong to this run's method, net and clients"):
        run_dir.load_checkpoint(other)


@pytest.mark.parametrize("name", ["config.toml", "federation.toml"])
def test_checkpoint_with_a_changed_config_or_manifest_is_an_error(run_dir: RunDir, name: str) -> None:
    run_dir.save_checkpoint(example_state())
    path = run_dir.path / name
    path.write_text(path.read_text() + "# mine\n")
    assert run_dir.load_checkpoint(zero_state()) is not None  # a running process keeps the digests it read
    with pytest.raises(gpfl.GpflError, match=rf"{name} has changed since checkpoint.safetensors was written: restore it"):
        RunDir(run_dir.path).load_checkpoint(zero_state())


def test_run_can_resume_on_another_device(tmp_path: Path, federation: gpfl.Federation) -> None:
    run_dir = RunDir.create(tmp_path / "run", '[run]\nseed = 0\ndevice = "cuda"\n', federation)
    run_dir.save_checkpoint(example_state())
    (run_dir.path / "config.toml").write_text('[run]\nseed = 0\ndevice = "cpu"\n')
    assert RunDir(run_dir.path).load_checkpoint(zero_state()) is not None


def test_tensors_that_are_no_checkpoint_are_an_error(run_dir: RunDir) -> None:
    state = example_state()
    flat = flatten({"shared": state.shared, "private": state.private})
    write_tensors(run_dir.path / "checkpoint.safetensors", flat, {"round": "three"})
    with pytest.raises(gpfl.GpflError, match="is not a checkpoint of gpfl"):
        run_dir.load_checkpoint(zero_state())


def test_interrupted_write_keeps_the_previous_checkpoint(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.save_checkpoint(example_state(3))

    def killed(handle: int) -> None:
        raise KilledError

    monkeypatch.setattr(files.os, "fsync", killed)
    with pytest.raises(KilledError):
        run_dir.save_checkpoint(example_state(4))
    again = run_dir.load_checkpoint(zero_state())
    assert again is not None
    assert again.round == 3
    assert not [path for path in run_dir.path.iterdir() if path.name.startswith(".")]


def test_files_of_a_run_are_plain_json_and_safetensors(run_dir: RunDir) -> None:
    run_dir.append_metrics({"round": 0})
    run_dir.save_checkpoint(example_state())
    assert json.loads((run_dir.path / "metrics.jsonl").read_text()) == {"round": 0}
    header = (run_dir.path / "checkpoint.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    metadata = json.loads(header[8 : 8 + length])["__metadata__"]["gpfl"]
    assert json.loads(metadata)["round"] == 3
