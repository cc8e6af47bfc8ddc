"""The run folder: what is written, and what is said about files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gpfl
from gpfl.core.tree import Tree, flatten
from gpfl.io import files
from gpfl.io.tensors import write_tensors
from gpfl.training import run_dir as runs
from gpfl.training.run_dir import RunDir, RunState

CONFIG = '[run]\nseed = 0\n\n[data]\nname = "toy"\n'


def line(round: int, **more: object) -> runs.MetricsRecord:
    """An evaluated round."""
    return {**dict.fromkeys(runs.METRICS_NUMBERS, 0.5), "round": round, **more}


def example_state(round: int = 3) -> RunState:
    shared: Tree = {"base": {"weight": torch.arange(6.0).reshape(2, 3)}, "head": {"bias": torch.tensor([0.5])}}
    private: Tree = {"own": {"head": torch.linspace(0, 1, 8).reshape(4, 2)}}
    return RunState(round, shared, private, bytes_up=120, bytes_down=240)


def blank() -> RunState:
    """A state of the same shape with other values, as a resumed run has before it reads its checkpoint."""
    return RunState(
        0,
        {"base": {"weight": torch.zeros(2, 3)}, "head": {"bias": torch.zeros(1)}},
        {"own": {"head": torch.zeros(4, 2)}},
    )


@pytest.fixture
def folder(tmp_path: Path, federation: gpfl.Federation) -> RunDir:
    return RunDir.create(tmp_path / "run", CONFIG, federation)


def test_new_folder_holds_the_config_as_given_and_the_manifest(folder: RunDir, federation: gpfl.Federation) -> None:
    assert (folder.path / "config.toml").read_text() == CONFIG
    again = gpfl.Federation.load(folder.path / "federation.toml", federation.table)
    assert again.manifest() == federation.manifest()
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.toml", "federation.toml"]


def test_empty_folder_may_be_used(tmp_path: Path, federation: gpfl.Federation) -> None:
    (tmp_path / "empty").mkdir()
    assert (RunDir.create(tmp_path / "empty", CONFIG, federation).path / "config.toml").is_file()


def test_used_folder_is_refused_and_left_as_it_is(folder: RunDir, federation: gpfl.Federation) -> None:
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(gpfl.GpflError, match="not empty and nothing is overwritten: gpfl resume"):
        RunDir.create(folder.path, "[run]\nseed = 9\n", federation)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_folder_with_other_things_is_refused_without_advice_to_resume(tmp_path: Path, federation: gpfl.Federation) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(gpfl.GpflError, match="nothing is overwritten: choose another --out"):
        RunDir.create(tmp_path, CONFIG, federation)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, federation: gpfl.Federation, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(gpfl.GpflError, match="choose a"):
        RunDir.create(tmp_path / "taken" / below, CONFIG, federation)
    assert (tmp_path / "taken").read_text() == "mine"


def test_folder_that_may_not_be_looked_into_is_refused_in_one_line(
    tmp_path: Path, federation: gpfl.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(gpfl.GpflError, match="Permission denied; choose another --out"):
        RunDir.create(tmp_path / "run", CONFIG, federation)


def test_folder_without_a_name_is_refused(federation: gpfl.Federation) -> None:
    with pytest.raises(gpfl.GpflError, match="out is empty; name a folder"):
        RunDir.create("", CONFIG, federation)


def test_folder_of_several_methods_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "gpfl").mkdir()
    (tmp_path / "gpfl" / "trials.json").write_text("{}")
    with pytest.raises(gpfl.GpflError, match="holds trials of several methods: repeat the command that started them"):
        RunDir.open(tmp_path)


def test_folder_without_a_config_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match=r"holds no run \(no config.toml\)"):
        RunDir.open(tmp_path)


def test_stump_of_a_run_is_cleared_but_a_run_and_foreign_files_are_not(tmp_path: Path, folder: RunDir) -> None:
    before = sorted(folder.path.iterdir())
    runs.remove_partial_start(folder.path)
    assert sorted(folder.path.iterdir()) == before

    stump = tmp_path / "stump"
    stump.mkdir()
    (stump / "federation.toml").write_text("half")
    (stump / ".config.toml.x1y2").write_text("half")
    (stump / "notes.txt").write_text("mine")
    runs.remove_partial_start(stump)
    assert len(list(stump.iterdir())) == 3

    (stump / "notes.txt").unlink()
    runs.remove_partial_start(stump)
    assert list(stump.iterdir()) == []


# Metrics.


def test_divergence_is_told_until_the_run_ends_after_all(folder: RunDir) -> None:
    assert folder.diverged_round is None
    for text in ("", "[]", '{"what": "loss"}'):
        (folder.path / "diverged.json").write_text(text)
        assert folder.diverged_round is None
    folder.write_divergence(0, "the loss is nan")
    assert folder.diverged_round == 0
    folder.write_summary({})
    assert folder.diverged_round is None


def test_lines_come_back_as_they_were_appended(folder: RunDir) -> None:
    lines = [line(k, accuracy=k / 7, client_accuracies=[0.1 * k, 1 / 3]) for k in range(3)]
    for entry in lines:
        folder.append_metrics(entry)
    assert folder.read_metrics() == lines


def test_no_metrics_are_no_lines(folder: RunDir) -> None:
    assert folder.read_metrics() == []


@pytest.mark.parametrize("cut", [1, 10, 25])
def test_torn_last_line_is_left_out(folder: RunDir, cut: int) -> None:
    folder.append_metrics(line(0))
    folder.append_metrics(line(1))
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 1 - cut])
    assert folder.read_metrics() == [line(0)]


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"\x00\x00\x00\x00", b"\xff\xfe{", b"[1, 2]", b"17", b'{"accuracy": 1.0}', b'{"round": 1}'),
        json.dumps(line(1, accuracy="high")).encode(),
        json.dumps(line(1, loss=float("nan"))).encode(),
        json.dumps(line(1, seconds=True)).encode(),
    ],
)
def test_lines_end_where_the_file_is_garbage(folder: RunDir, garbage: bytes) -> None:
    folder.append_metrics(line(0))
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(garbage + b"\n" + json.dumps(line(2)).encode() + b"\n")
    assert folder.read_metrics() == [line(0)]


def test_line_must_hold_what_is_asked_for_besides(folder: RunDir) -> None:
    folder.append_metrics(line(0, validation_accuracy=0.5))
    folder.append_metrics(line(1))
    assert len(folder.read_metrics()) == 2
    assert folder.read_metrics(extra=("validation_accuracy",)) == [line(0, validation_accuracy=0.5)]


def test_cut_back_metrics_have_the_bytes_they_had_when_appended(folder: RunDir) -> None:
    lines = [line(k, accuracy=k / 7, train={"ce": 1e-9}) for k in range(4)]
    for entry in lines[:2]:
        folder.append_metrics(entry)
    wanted = (folder.path / "metrics.jsonl").read_bytes()
    for entry in lines[2:]:
        folder.append_metrics(entry)
    folder.truncate_metrics(folder.read_metrics()[:2])
    assert (folder.path / "metrics.jsonl").read_bytes() == wanted


def test_nan_never_reaches_metrics_or_summary(folder: RunDir) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.append_metrics({"round": 0, "loss": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_summary({"loss": float("inf")})
    assert folder.read_metrics() == []
    assert not folder.finished


def test_metrics_that_cannot_be_written_are_a_users_error(folder: RunDir) -> None:
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(gpfl.GpflError, match=r"cannot write .*metrics.jsonl"):
        folder.append_metrics({"round": 0})


def test_summary_marks_the_run_as_finished(folder: RunDir) -> None:
    assert not folder.finished
    summary = {**dict.fromkeys(runs.SUMMARY_NUMBERS, 1 / 3), **dict.fromkeys(runs.SUMMARY_TEXTS, "text"), "extra": None}
    folder.write_summary(summary)
    assert folder.finished
    assert folder.read_summary() == summary


@pytest.mark.parametrize("key", [*runs.SUMMARY_NUMBERS, *runs.SUMMARY_TEXTS])
def test_summary_without_what_every_summary_holds_is_damaged(folder: RunDir, key: str) -> None:
    summary = {**dict.fromkeys(runs.SUMMARY_NUMBERS, 1), **dict.fromkeys(runs.SUMMARY_TEXTS, "text")}
    for wrong in ({name: value for name, value in summary.items() if name != key}, {**summary, key: None}):
        folder.write_summary(wrong)
        with pytest.raises(gpfl.GpflError, match=rf"summary.json is damaged \(.*'{key}'.*\): remove it and gpfl resume"):
            folder.read_summary()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_damaged_summary_is_named(folder: RunDir, text: str) -> None:
    (folder.path / "summary.json").write_text(text)
    with pytest.raises(gpfl.GpflError, match=r"summary.json"):
        folder.read_summary()


# Checkpoints.


def test_state_comes_back_bit_for_bit_with_its_counters(folder: RunDir) -> None:
    state = example_state()
    folder.save_checkpoint(state)
    again = folder.load_checkpoint(blank())
    assert again is not None
    assert (again.round, again.bytes_up, again.bytes_down) == (3, 120, 240)
    for kind in ("shared", "private"):
        was, now = flatten(getattr(state, kind)), flatten(getattr(again, kind))
        assert was.keys() == now.keys()
        assert all(torch.equal(was[key], now[key]) for key in was)


def test_state_without_shared_or_private_tensors_comes_back(folder: RunDir) -> None:
    alone = RunState(1, {}, {"head": {"weight": torch.ones(2, 2)}})
    folder.save_checkpoint(alone)
    again = folder.load_checkpoint(RunState(0, {}, {"head": {"weight": torch.zeros(2, 2)}}))
    assert again is not None
    assert again.shared == {}
    assert torch.equal(flatten(again.private)["head/weight"], torch.ones(2, 2))


def test_missing_checkpoint_is_none(folder: RunDir) -> None:
    assert folder.load_checkpoint(example_state()) is None


def test_every_flipped_byte_of_a_checkpoint_is_noticed(folder: RunDir) -> None:
    state = example_state()
    folder.save_checkpoint(state)
    path = folder.path / "checkpoint.safetensors"
    good = path.read_bytes()
    for place in range(len(good)):
        if good[place : place + 1] == b" ":  # padding of the header
            continue
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(gpfl.GpflError, match=r"checkpoint.safetensors (is damaged|does not belong|is not a checkpoint)"):
            folder.load_checkpoint(blank())


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_checkpoint_cut_off_is_named_with_the_way_out(folder: RunDir, length: int) -> None:
    folder.save_checkpoint(example_state())
    path = folder.path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(gpfl.GpflError, match=r"checkpoint.safetensors is damaged .*: remove it to start over") as told:
        folder.load_checkpoint(blank())
    assert "\n" not in str(told.value)


def test_checkpoint_of_another_run_is_refused(folder: RunDir) -> None:
    folder.save_checkpoint(example_state())
    other = RunState(0, {"base": {"weight": torch.zeros(3, 3)}, "head": {"bias": torch.zeros(1)}}, {})
    with pytest.raises(gpfl.GpflError, match="does not belong to this run's method, net and clients"):
        folder.load_checkpoint(other)


@pytest.mark.parametrize("name", ["config.toml", "federation.toml"])
def test_checkpoint_under_another_config_or_federation_is_refused(folder: RunDir, name: str) -> None:
    folder.save_checkpoint(example_state())
    path = folder.path / name
    path.write_text(path.read_text() + "# mine\n")
    assert folder.load_checkpoint(blank()) is not None  # what is being run stays what it was
    with pytest.raises(gpfl.GpflError, match=rf"{name} has changed since checkpoint.safetensors was written: restore it"):
        RunDir(folder.path).load_checkpoint(blank())


def test_run_may_go_on_on_another_device(tmp_path: Path, federation: gpfl.Federation) -> None:
    folder = RunDir.create(tmp_path / "run", '[run]\nseed = 0\ndevice = "cuda"\n', federation)
    folder.save_checkpoint(example_state())
    (folder.path / "config.toml").write_text('[run]\nseed = 0\ndevice = "cpu"\n')
    assert RunDir(folder.path).load_checkpoint(blank()) is not None


def test_tensors_that_are_no_checkpoint_are_refused(folder: RunDir) -> None:
    state = example_state()
    flat = flatten({"shared": state.shared, "private": state.private})
    write_tensors(folder.path / "checkpoint.safetensors", flat, {"round": "three"})
    with pytest.raises(gpfl.GpflError, match="is not a checkpoint of gpfl"):
        folder.load_checkpoint(blank())


class KilledError(Exception):
    """Stands for the end of the process."""


def test_checkpoint_before_stays_whole_when_the_next_one_is_cut_off(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.save_checkpoint(example_state(3))

    def killed(handle: int) -> None:
        raise KilledError

    monkeypatch.setattr(files.os, "fsync", killed)
    with pytest.raises(KilledError):
        folder.save_checkpoint(example_state(4))
    again = folder.load_checkpoint(blank())
    assert again is not None
    assert again.round == 3
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


def test_files_of_a_run_are_plain_json_and_safetensors(folder: RunDir) -> None:
    folder.append_metrics({"round": 0})
    folder.save_checkpoint(example_state())
    assert json.loads((folder.path / "metrics.jsonl").read_text()) == {"round": 0}
    header = (folder.path / "checkpoint.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    about = json.loads(header[8 : 8 + length])["__metadata__"]["gpfl"]
    assert json.loads(about)["round"] == 3
