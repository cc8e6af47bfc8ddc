"""The command `gpfl compare --repeats`: tables, files, resuming, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Command, assert_error, read_files

from gpfl.experiments.repeats import RepeatStore

COMPARE = ("compare", "--data", "toy", "--methods", "local,fedavg", "--out", "here")


def repeats_without_time(folder: str) -> dict[str, list[dict[str, object]]]:
    """Return the repeats of each method without wall-clock times."""
    return {
        path.parent.name: [{**json.loads(line), "seconds": 0} for line in path.read_text().splitlines()]
        for path in sorted(Path(folder).glob("*/repeats.jsonl"))
    }


def test_repeats_are_printed_and_saved(command: Command) -> None:
    result = command(*COMPARE, "--repeats", 3)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "local: 3/3 repeats" in lines
    assert "toy, 4 clients (pathological), 2 rounds, 3 repeats" in lines
    assert any(line.startswith("Paired differences from ") for line in lines)
    assert lines[-1] == "Table: here/table.md, here/table.csv, here/table.json"
    content = json.loads(Path("here/table.json").read_text())
    assert {method["repeats"] for method in content["methods"]} == {3}


def test_finished_repeats_are_reused_and_more_extend_them(command: Command) -> None:
    assert command(*COMPARE, "--repeats", 2).code == 0
    first = read_files(Path("here"))
    assert "2/2 repeats" not in command(*COMPARE, "--repeats", 2).out
    assert read_files(Path("here")) == first
    assert command(*COMPARE, "--repeats", 3).code == 0
    assert command(*COMPARE[:-1], "there", "--repeats", 3).code == 0
    assert repeats_without_time("here") == repeats_without_time("there")


def test_interrupted_repeats_resume_exactly(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(*COMPARE[:-1], "whole", "--repeats", 3).code == 0
    real, added = RepeatStore.append, []

    def append(store: RepeatStore, record: object) -> None:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(record)
        real(store, record)  # type: ignore[arg-type]

    monkeypatch.setattr(RepeatStore, "append", append)
    result = command(*COMPARE, "--repeats", 3)
    resume = "gpfl compare --data toy --methods local,fedavg --out here --repeats 3"
    assert (result.code, result.err) == (130, f"gpfl: stopped; resume with: {resume}\n")
    monkeypatch.setattr(RepeatStore, "append", real)
    assert len(repeats_without_time("here")["local"]) == 3  # the config and two repeats
    assert command(*resume.split()[1:]).code == 0
    assert repeats_without_time("here") == repeats_without_time("whole")


def test_metric_ranks_the_methods(command: Command) -> None:
    assert command(*COMPARE, "--repeats", 2, "--metric", "log_loss").code == 0
    content = json.loads(Path("here/table.json").read_text())
    assert content["metric"] == "log_loss"
    assert content["methods"][0]["log_loss"] <= content["methods"][1]["log_loss"]
    assert "| method | log loss |" in Path("here/table.md").read_text()


def test_diverged_repeats_are_named(command: Command) -> None:
    result = command(*COMPARE, "--repeats", 2, "--lr", "1e30")
    assert result.code == 1
    assert "fedavg: 2 repeats diverged, first repeat 0: round " in result.err
    assert "lower train.lr" in result.err


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (
            ("--repeats", 3, "--seeds", "0,1"),
            ("--repeats gives every repeat a split and a seed of its own", "leave out --seeds"),
        ),
        (("--repeats", 1), ("1 is not in the range x>=2",)),
        (
            ("--repeats", 3, "--partition-rng", "pfllib"),
            ("repeats are drawn with gpfl's random numbers", "leave out --partition-rng pfllib"),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    command: Command, arguments: tuple[object, ...], phrases: tuple[str, ...]
) -> None:
    assert_error(command(*COMPARE, *arguments), *phrases)
    assert not Path("here").exists()


def test_a_manifest_is_refused(command: Command) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--out", "run").code == 0
    result = command("compare", "--methods", "local", "--federation", "run/federation.toml", "--data", "toy", "--repeats", 2)
    assert_error(result, "a manifest fixes every client's samples", "leave out --federation")


def test_a_folder_holds_one_kind_of_comparison(command: Command) -> None:
    assert command(*COMPARE, "--repeats", 2).code == 0
    assert_error(command(*COMPARE), "--out here holds a comparison with --repeats", "choose another folder")
    assert command(*COMPARE[:-1], "seeds", "--seeds", "0").code == 0
    result = command(*COMPARE[:-1], "seeds", "--repeats", 2)
    assert_error(result, "--out seeds holds a comparison without --repeats", "choose another folder")


def test_a_folder_with_other_settings_is_refused(command: Command) -> None:
    assert command(*COMPARE, "--repeats", 2).code == 0
    assert_error(
        command(*COMPARE, "--repeats", 2, "--rounds", 3),
        "holds repeats with train.rounds (--rounds) = 2, now it is 3: choose another --out",
    )
