"""The command `gpfl resume`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command, assert_error, metrics_without_time, read_files


def interrupt_run(folder: Path) -> None:
    """Leave a run of two rounds as if it had been killed in the first round."""
    (folder / "summary.json").unlink()
    (folder / "checkpoint.safetensors").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(lines[0] + lines[1][:20])


def test_resume_continues_a_run_and_opens_a_finished_one(command: Command) -> None:
    assert command("run", "--data", "toy", "--out", "run").code == 0
    expected = metrics_without_time(Path("run"))
    interrupt_run(Path("run"))
    result = command("resume", "run")
    assert result.code == 0, result.err
    assert metrics_without_time(Path("run")) == expected
    before = read_files(Path("run"))
    again = command("resume", "run")
    assert again.code == 0
    assert "The run in run was already finished." in again.out
    assert read_files(Path("run")) == before


@pytest.mark.parametrize("before_config", [False, True], ids=["in a round", "before the config"])
def test_resume_continues_interrupted_trials(command: Command, before_config: bool) -> None:
    assert command("run", "--data", "toy", "--seeds", "0,1", "--out", "trials").code == 0
    folders = [Path("trials/seed-0"), Path("trials/seed-1")]
    expected = [metrics_without_time(folder) for folder in folders]
    first = read_files(folders[0])
    if before_config:
        for path in sorted(folders[1].rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            elif path.name != "federation.toml":
                path.unlink()
    else:
        interrupt_run(folders[1])
    result = command("resume", "trials")
    assert result.code == 0, result.err
    assert "2 trials" in result.out
    assert [metrics_without_time(folder) for folder in folders] == expected
    assert read_files(folders[0]) == first


@pytest.mark.parametrize("name", ["a[bold]b", "a[/b]", "a:smile:b"])
def test_folder_names_are_printed_without_markup(command: Command, name: str) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--out", name).code == 0
    interrupt_run(Path(name))
    result = command("resume", name)
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].startswith(f"{name}: round 0/2, ")
    assert f"Run: {name}. " in result.out
    assert_error(command("resume", f"{name}!"), f"{name}! holds no run")


def test_a_folder_without_a_run_is_an_error(command: Command) -> None:
    assert_error(command("resume", "nowhere"), "nowhere holds no run", "start one with gpfl run --out nowhere")
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    without_run = command("resume", "notes")
    assert_error(without_run, "notes holds no run (no config.toml); give the folder of a run")
    assert "gpfl run" not in without_run.err
    assert_error(command("resume", "notes/mine.txt"), "notes/mine.txt is a file; give the folder of a run")
    assert_error(command("resume"), "Missing argument 'DIR'")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("checkpoint.safetensors", lambda b: b[:-5], "checkpoint.safetensors is damaged"),
        ("checkpoint.safetensors", lambda b: b[:-5] + b"wrong", "checkpoint.safetensors is damaged (its checksum"),
        ("checkpoint.safetensors", lambda b: b"", "checkpoint.safetensors is damaged"),
        ("config.toml", lambda b: b"[run", "config.toml has changed since the run wrote it: restore it"),
        ("config.toml", lambda b: b"[run", "config.toml is not a TOML file"),
        ("config.toml", lambda b: b.replace(b"rounds = 2", b"rounds = 3"), "config.toml has changed since checkpoint"),
        ("config.toml", lambda b: b.replace(b"lr = 0.1", b"lr = 0.2"), "restore it, or start a new run in another folder"),
        ("config.toml", lambda b: b + b"\n", "config.toml has changed since"),
        ("federation.toml", lambda b: b"", "federation.toml has changed since the run wrote it: restore it"),
        ("config.toml", lambda b: b.replace(b"rounds", b"runds"), "unknown key 'train.runds'; did you mean 'rounds'?"),
        ("federation.toml", lambda b: b[:100], "federation.toml is not a"),
        ("federation.toml", lambda b: b.replace(b'sha256 = "', b'sha256 = "0'), "divides a table with sha256 0"),
        ("metrics.jsonl", lambda b: b[: len(b) // 2], "metrics.jsonl is damaged (it lacks round"),
    ],
)
def test_a_damaged_run_is_an_error_and_stays_unchanged(
    command: Command, name: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--rounds", 2, "--out", "run").code == 0
    Path("run/summary.json").unlink()
    path = Path("run") / name
    path.write_bytes(damage(path.read_bytes()))
    before = read_files(Path("run"))
    assert_error(command("resume", "run"), message)
    assert read_files(Path("run")) == before


def test_a_damaged_list_of_trials_is_an_error(command: Command) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--seeds", "0,1", "--out", "trials").code == 0
    path = Path("trials/trials.json")
    for text in ('{"method": "gpfl", "seeds": []}', '{"seeds": [0]}'):
        path.write_text(text)
        assert_error(command("resume", "trials"), "trials.json cannot be read", '"seeds": [0, 1, 2]')
    path.write_text("[]")
    assert_error(command("resume", "trials"), "trials.json is damaged (it holds no JSON object)")
    path.unlink()
    assert_error(command("resume", "trials"), "cannot read trials/trials.json (No such file or directory)")
    path.mkdir()
    assert_error(command("resume", "trials"), "cannot read trials/trials.json (Is a directory)")


@pytest.mark.parametrize("folder", ["run", "trials"])
def test_the_fix_of_a_damaged_summary_works(command: Command, folder: str) -> None:
    seeds = ("--seeds", "0,1") if folder == "trials" else ()
    assert command("run", "--data", "toy", "--rounds", 1, "--method", "local", *seeds, "--out", folder).code == 0
    path = Path(folder, "seed-1" if seeds else "", "summary.json")
    good = path.read_text()
    path.write_text(good[:20])
    assert_error(command("resume", folder), "summary.json is damaged", f": delete it, then run gpfl resume {path.parent}")
    path.unlink()
    assert command("resume", folder).code == 0
    assert path.read_text() == good


@pytest.mark.parametrize("line", ['{"round": 1', "\x00"])
def test_damaged_metrics_of_a_finished_run_are_an_error(command: Command, line: str) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--out", "run").code == 0
    path = Path("run/metrics.jsonl")
    path.write_text(path.read_text().splitlines(keepends=True)[0] + line + "\n")
    result = command("resume", "run")
    assert_error(result, "metrics.jsonl is damaged (it lacks round 1): remove summary.json and checkpoint.safetensors")
    path.unlink()
    path.mkdir()
    assert_error(command("resume", "run"), "cannot read run/metrics.jsonl: Is a directory")
