"""The quickstart: its tables, its figure, the commands it ends with, and that it resumes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from conftest import Command, assert_error, read_files
from PIL import Image

from gpfl.cli import quickstart as quickstart_command
from gpfl.cli.main import command as cli
from gpfl.cli.quickstart import METHODS, SETTING
from gpfl.experiments import repeats
from gpfl.experiments.repeats import read_repeats_file


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.cli.quickstart.REPEATS", 2)
    monkeypatch.setitem(SETTING, "train", {"rounds": 1, "lr": 0.05, "batch_size": 100})
    partition = {"name": "pathological", "clients": 5, "classes_per_client": 5, "test_fraction": 0.4}
    monkeypatch.setitem(SETTING, "partition", partition)


def test_quickstart_prints_differences_from_training_alone_a_sentence_and_three_commands(command: Command) -> None:
    result = command("quickstart", "--out", "quick")
    assert result.code == 0, result.err
    assert result.err == ""
    assert "Paired differences from local" in result.out
    *_, sentence, _, advise, compare, run = result.out.splitlines()
    assert sentence.startswith("On these data ")
    assert sentence in Path("quick/table.md").read_text()
    assert ["gpfl advise" in advise, "gpfl compare" in compare, "gpfl run" in run] == [True] * 3
    with Image.open("quick/gains.png") as figure:
        assert figure.size[0] == 1200
    methods = json.loads(Path("quick/table.json").read_text())["methods"]
    assert sorted(record["method"] for record in methods) == sorted(METHODS)


def test_finished_quickstart_is_not_run_again_and_an_interrupted_one_resumes(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "execute_trials", _stop_at(4, repeats.execute_trials))
        result = command("quickstart")
    assert (result.code, result.err) == (130, "gpfl: stopped; resume with: gpfl quickstart --out runs/quickstart\n")
    before = read_files(Path("runs/quickstart"))
    assert command("quickstart", "--out", "runs/quickstart").code == 0
    after = read_files(Path("runs/quickstart"))
    for name in METHODS[:3]:
        assert before[f"{name}/repeats.jsonl"] == after[f"{name}/repeats.jsonl"]
    for name in METHODS:
        assert sorted(read_repeats_file(Path("runs/quickstart", name, "repeats.jsonl"))[1]) == [0, 1]
    monkeypatch.setattr(repeats, "execute_trials", _stop_at(1, repeats.execute_trials))
    assert command("quickstart", "--out", "runs/quickstart").code == 0


def test_quickstart_rejects_a_folder_of_something_else_or_of_other_settings(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine").mkdir()
    Path("mine/README").write_text("mine")
    assert_error(command("quickstart", "--out", "mine"), "--out mine is not empty and nothing is overwritten")
    assert command("quickstart", "--out", "quick").code == 0
    monkeypatch.setitem(SETTING, "train", {"rounds": 2, "lr": 0.05, "batch_size": 100})
    result = command("quickstart", "--out", "quick")
    assert result.code == 2
    assert "holds repeats with train.rounds = 1, now it is 2" in result.err


@pytest.mark.parametrize("line", quickstart_command.NEXT_COMMANDS.values())
def test_next_command_parses(line: str) -> None:
    words = shlex.split(line)
    name, sub, rest = cli.resolve_command(cli.make_context("gpfl", words, resilient_parsing=True), words)
    assert sub is not None
    assert sub.make_context(name, list(rest)).params["data__name"] == "visits.csv"


@pytest.mark.slow
def test_next_commands_run_on_a_table_with_these_columns(command: Command) -> None:
    lines = [f"{k % 11},{k % 3},{'north' if k % 2 else 'south'},{'ill' if k % 11 > 5 else 'well'}" for k in range(120)]
    Path("visits.csv").write_text("\n".join(["age,ward,hospital,outcome", *lines]))
    for line in quickstart_command.NEXT_COMMANDS.values():
        words = shlex.split(line.replace("--repeats 10", "--repeats 2"))
        more = ("--repeats", "5", "--methods", "ditto") if words[0] == "advise" else ()
        result = command(*words, "--rounds", 1, *more)
        assert result.code == 0, result.err


def _stop_at(call: int, real: object) -> object:
    calls: list[object] = []

    def execute(runs: object) -> object:
        calls.append(runs)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(runs)  # type: ignore[operator]

    return execute
