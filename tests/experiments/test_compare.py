"""Trials and comparisons through the command, cut off and gone on with."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command, CommandResult, ToyDataset, make_fedper_diverge, metrics_without_time, read_files
from PIL import Image

import gpfl
from gpfl.data import DATASETS
from gpfl.engine.base import EvalRequest, TrainRequest
from gpfl.errors import DivergenceError
from gpfl.experiments import compare as studies
from gpfl.experiments.trials import raise_divergence, run_trials
from gpfl.methods import METHODS
from gpfl.training.callbacks import Callback
from gpfl.training.round_loop import RoundLoop, RunOutcome
from gpfl.training.run_dir import RunDir

TOY = ("--data", "toy", "--rounds", 1)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the runs that are begun or gone on with, in their order."""
    told: list[str] = []

    def steps(simulation: RoundLoop) -> Generator[TrainRequest | EvalRequest, Any, RunOutcome]:
        assert simulation.run_dir is not None
        told.append(str(simulation.run_dir.path))
        return real(simulation)

    real = RoundLoop.steps
    monkeypatch.setattr(RoundLoop, "steps", steps)
    return told


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets Ctrl-C come as the run with this number, counted from 0, has written its first line."""

    def arm(runs: int) -> None:
        real, seen = RunDir.append_metrics, set()

        def append(folder: RunDir, line: dict[str, object]) -> None:
            real(folder, line)
            seen.add(folder.path)
            if len(seen) > runs:
                monkeypatch.setattr(RunDir, "append_metrics", real)
                raise KeyboardInterrupt

        monkeypatch.setattr(RunDir, "append_metrics", append)

    return arm


def refused(said: CommandResult, *words: str) -> None:
    assert said.code == 2
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def picture_size(path: str) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def labels(folder: str) -> list[str]:
    return [entry["method"] for entry in json.loads(Path(folder, "table.json").read_text())]


# Comparisons.


def test_comparison_is_sorted_and_kept_as_three_tables_and_a_picture(command: Command) -> None:
    said = command("compare", "--data", "toy", "--methods", "local,gpfl,fedavg", "--seeds", "0,1", "--out", "all")
    assert said.code == 0, said.err
    records = json.loads(Path("all/table.json").read_text())
    reported = [record["selected_accuracy"] for record in records]
    assert reported == sorted(reported, reverse=True)
    assert sorted(labels("all")) == ["fedavg", "gpfl", "local"]
    assert {record["trials"] for record in records} == {2}
    for record in records:
        summaries = [RunDir(Path("all", record["method"], f"seed-{seed}")).read_summary() for seed in (0, 1)]
        assert record["selected_accuracy"] == pytest.approx(sum(float(str(s["last_accuracy"])) for s in summaries) / 2)
    with Path("all/table.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == labels("all")
    rows = Path("all/table.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[4:7]] == labels("all")
    assert rows[-1] == "Accuracy, std and CoV over clients: last round."
    assert picture_size("all/curves.png") == (1200, 570)
    title = "toy, 4 clients (pathological), 2 rounds; mean ± std over seeds"
    assert title in said.out
    assert rows[0] == f"# {title}"
    assert "all/table.md, all/table.csv, all/table.json. Curves: all/curves.png" in said.out


def test_comparison_knows_its_trials_where_the_data_fill_in_an_option_of_the_net(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.random.default_rng(0).integers(0, 30, (120, 6))
    table = lambda: gpfl.Table(words, np.arange(120) % 3, name="words", kind="tokens")  # noqa: E731
    monkeypatch.setitem(DATASETS, "words", ToyDataset(make=table, name="words"))
    given = ("compare", "--data", "words", "--net", "fasttext", "--methods", "local,fedavg", "--seeds", "0", "--out", "all")
    for _ in range(2):
        assert command(*given).code == 0
        assert sorted(labels("all")) == ["fedavg", "local"]


def test_comparison_again_runs_only_what_is_new(command: Command, begun: list[str]) -> None:
    given = ("compare", *TOY, "--out", "all")
    assert command(*given, "--methods", "local,fedavg", "--seeds", "0").code == 0
    assert begun == ["all/local/seed-0", "all/fedavg/seed-0"]
    runs = read_files(Path("all/local/seed-0"))
    assert command(*given, "--methods", "local,fedavg", "--seeds", "0").code == 0
    assert len(begun) == 2
    assert command(*given, "--methods", "local,fedper", "--seeds", "0,3").code == 0
    assert begun[2:] == ["all/local/seed-3", "all/fedper/seed-0", "all/fedper/seed-3"]
    assert read_files(Path("all/local/seed-0")) == runs
    assert json.loads(Path("all/local/trials.json").read_text())["seeds"] == [0, 3]
    assert json.loads(Path("all/fedavg/trials.json").read_text())["seeds"] == [0]
    assert sorted(labels("all")) == ["fedavg", "fedper", "local"]  # all that the folder holds
    trials = {record["method"]: record["seeds"] for record in json.loads(Path("all/table.json").read_text())}
    assert trials == {"fedavg": "0", "fedper": "0 3", "local": "0 3"}
    assert command(*given, "--methods", "local", "--seeds", "5").code == 0
    assert json.loads(Path("all/local/trials.json").read_text())["seeds"] == [0, 3, 5]
    [local] = [record for record in json.loads(Path("all/table.json").read_text()) if record["method"] == "local"]
    assert local["seeds"] == "0 3 5"


@pytest.mark.parametrize(("seeds", "left"), [("0,1", {"fedavg": 2, "fedper": 1, "local": 2}), ("1", {"fedavg": 1, "local": 1})])
def test_method_that_diverges_does_not_stop_a_comparison(
    command: Command, monkeypatch: pytest.MonkeyPatch, seeds: str, left: dict[str, int]
) -> None:
    make_fedper_diverge(monkeypatch, 1)
    said = command("compare", *TOY, "--rounds", 2, "--methods", "fedavg,fedper,local", "--seeds", seeds, "--out", "all")
    assert said.code == 1
    assert said.err.count("\n") == 1
    assert said.err.endswith("checkpoint.safetensors; other settings need another --out\n")
    assert "fedper: seed 1: round 1: the loss of client 0 is nan (term 'ce'): lower train.lr" in said.err
    assert {record["method"]: record["trials"] for record in json.loads(Path("all/table.json").read_text())} == left
    page = Path("all/table.md").read_text()
    missing = "fedper: of seeds 0, 1, only 0 finished." if seeds == "0,1" else "fedper: of seed 1, none finished."
    assert missing in page
    assert missing in said.out
    assert "| trials |" in page
    said = command("compare", *TOY, "--rounds", 2, "--methods", "fedper", "--seeds", "1", "--out", "none")
    assert said.code == 1
    assert "fedper: seed 1" in said.err
    assert not Path("none/table.md").exists(), "there is nothing to show"


def test_comparison_refuses_settings_of_methods_before_own_files_are_read(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the file is read")

    monkeypatch.setattr("gpfl.data.files.dataset.read_once", read)
    Path("rows.csv").write_text("a,label\n1,x\n2,y\n")
    said = command("compare", "--data", "rows.csv", "--methods", "fedavg,gpfl", "--set", "gpfl.lam=-1")
    refused(said, "gpfl: method.lam is -1")


def test_comparison_says_that_it_leaves_the_method_of_a_config_aside(command: Command) -> None:
    Path("config.toml").write_text('[data]\nname = "toy"\n[method]\nname = "fedprox"\nmu = 0.5\n')
    said = command("compare", "config.toml", "--methods", "fedprox", "--seeds", "0", "--out", "all")
    assert said.code == 0, said.err
    assert "Section [method] of config.toml is ignored" in said.out


def test_comparison_refuses_a_folder_of_another_config_and_names_the_key(command: Command) -> None:
    given = ("compare", "--data", "toy", "--methods", "local", "--seeds", "0", "--out", "all")
    assert command(*given).code == 0
    before = read_files(Path("all"))
    refused(command(*given, "--rounds", 3), "all/local holds trials with train.rounds (--rounds) = 2, now it is 3", "--out")
    refused(command(*given, "--partition-seed", 4), "partition.seed (--partition-seed) = 1, now it is 4")
    assert read_files(Path("all")) == before
    Path("all/local/config.toml").write_text("[run")
    refused(command(*given), "all/local/config.toml is not a TOML file", "replace it with a good copy")


def test_comparison_refuses_a_folder_of_another_federation(command: Command) -> None:
    for seed in (1, 2):
        assert command("run", *TOY, "--partition-seed", seed, "--out", f"run{seed}").code == 0
    given = ("compare", *TOY, "--methods", "local", "--seeds", "0", "--out", "all", "--federation")
    assert command(*given, "run1/federation.toml").code == 0
    assert command(*given, "run1/federation.toml").code == 0
    refused(command(*given, "run2/federation.toml"), "all/local holds trials on another federation")
    refused(command(*given, "run1/federation.toml", "--clients", 3), "leave out --clients")


def test_settings_of_one_method_reach_that_method_alone(command: Command) -> None:
    given = ("--methods", "fedprox,ditto", "--seeds", "0", "--out", "all", "--set", "fedprox.mu=0.25", "--set", "train.lr=0.2")
    said = command("compare", *TOY, *given)
    assert said.code == 0, said.err
    prox, ditto = (Path("all", name, "config.toml").read_text() for name in ("fedprox", "ditto"))
    assert "mu = 0.25" in prox
    assert "0.25" not in ditto.split("[method]")[1]
    assert "\nlr = 0.2\n" in prox
    assert "\nlr = 0.2\n" in ditto


def test_ablations_are_gpfl_and_its_five(command: Command) -> None:
    said = command("compare", *TOY, "--methods", "ablations", "--seeds", "0", "--out", "all")
    assert said.code == 0, said.err
    parts = [["pci"], ["cov"], ["mlg"], ["gce"], ["cov", "gce"]]
    assert sorted(labels("all")) == sorted(["gpfl", *(f"gpfl without {'+'.join(part)}" for part in parts)])
    for part in parts:
        text = Path("all", f"gpfl-without-{'-'.join(part)}", "config.toml").read_text()
        assert f"without = {json.dumps(part)}" in text


def test_all_methods_are_all_and_none_twice() -> None:
    assert [variant.label for variant in studies.parse_methods("all")] == list(METHODS)
    assert [variant.label for variant in studies.parse_methods("gpfl,ablations, gpfl,local")].count("gpfl") == 1
    assert studies.parse_methods("local,all")[0].label == "local"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--methods gpfll", "unknown method 'gpfll'; did you mean 'gpfl'?"),
        ("--methods local,", "unknown method ''"),
        ("--methods local,fedprox --set fedprox.mu=0", "fedprox: method.mu is 0: "),
        ("--methods local,gpfl --set gpfl.lam=-1", "gpfl: gpfl: method.lam is -1; it must be at least 0"),
        ("--methods local,gpfl --set gpfl.lamb=1", "unknown key 'method.lamb'; did you mean 'lam'?"),
        ("--methods local --set gpfl.lam=1", "is for a method that is not run: add gpfl to --methods"),
        ("--methods gpfl --set method.lam=1", "does not name the method: use --set gpfl.lam="),
        ("--methods gpfl --set run.seed=1", "--set run.seed is not available here: use --seeds"),
        ("--methods gpfl --seeds 0,0", "give each only once"),
        ("--methods gpfl --rounds 0", "train.rounds (--rounds) is 0; it must be at least 1"),
        ("--methods gpfl --device meta", "run.device (--device) is 'meta'"),
        ("--methods gpfl --lam 1", "No such option '--lam'"),
        ("--methods gpfl --out=", "--out is empty; name a folder"),
    ],
)
def test_mistake_in_a_comparison_is_one_line_and_nothing_is_written(command: Command, given: str, words: str) -> None:
    refused(command("compare", "--data", "toy", *given.split()), words)
    assert read_files(Path()) == {}


def test_value_that_switches_a_method_off_is_compared_where_it_is_meant(command: Command) -> None:
    given = ("compare", *TOY, "--methods", "fedprox", "--seeds", "0", "--set", "fedprox.mu=0", "--out", "all")
    refused(command(*given), "--allow-noop")
    assert command(*given, "--allow-noop").code == 0


@pytest.mark.parametrize("runs", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_comparison_that_was_stopped_ends_as_one_that_was_not(
    command: Command, begun: list[str], stop_after: Callable[[int], None], runs: int
) -> None:
    given = ("compare", "--data", "toy", "--methods", "local,gpfl", "--seeds", "0,1")
    assert command(*given, "--out", "whole").code == 0
    del begun[:]
    stop_after(runs)
    said = command(*given)
    assert said.code == 130
    way = "compare --data toy --methods local,gpfl --seeds 0,1 --out runs/toy-comparison"
    assert said.err == f"gpfl: stopped; resume with: gpfl {way}\n"
    assert len(begun) == 2 * (runs // 2 + 1), "both seeds of a method run at once"
    assert command(*way.split()).code == 0
    assert len(begun) == 4 + 2
    for path in sorted(Path("whole").glob("*/seed-*")):
        assert metrics_without_time(path) == metrics_without_time(Path("runs/toy-comparison") / path.relative_to("whole"))
    untimed = [
        [{key: value for key, value in record.items() if "seconds" not in key} for record in json.loads(path.read_text())]
        for path in (Path("whole/table.json"), Path("runs/toy-comparison/table.json"))
    ]
    assert untimed[0] == untimed[1]


def test_trials_that_lost_their_curve_are_refused_in_the_figure(command: Command) -> None:
    given = ("compare", *TOY, "--methods", "local", "--seeds", "0", "--out", "all")
    assert command(*given).code == 0
    Path("all/local/seed-0/metrics.jsonl").write_text("")
    refused(command(*given), "all/local/seed-0/metrics.jsonl is damaged (it does not reach round 1)", "gpfl resume")
    Path("all/local/seed-0/summary.json").unlink()
    Path("all/local/seed-0/checkpoint.safetensors").unlink()
    assert command(*given).code == 0


# Trials.


def test_trials_that_were_stopped_name_their_folder_and_go_on(
    command: Command, begun: list[str], stop_after: Callable[[int], None]
) -> None:
    stop_after(1)
    said = command("run", *TOY, "--method", "local", "--seeds", "0,1,2")
    assert said.code == 130
    assert said.err == "gpfl: stopped; resume with: gpfl resume runs/toy-local-trials\n"
    assert command("resume", "runs/toy-local-trials").code == 0
    assert [Path(folder).name for folder in begun] == ["seed-0", "seed-1", "seed-2"] * 2


@pytest.mark.parametrize("method", ["gpfl", "perfedavg", pytest.param("ditto", marks=pytest.mark.slow)])
def test_trials_at_once_are_those_that_run_one_after_the_other(tmp_path: Path, method: str) -> None:
    train = {"rounds": 6, "patience": 2, "client_fraction": [0.5, 1.0], "lr": 0.1}
    given: dict[str, dict[str, object]] = {
        "data": {"name": "digits"},
        "partition": {"clients": 6, "classes_per_client": 3},
        "net": {"name": "mlp", "hidden": [16]},
        "method": {"name": method},
        "train": {**train, "batch_size": 100},
        "run": {"engine": "vmap"},
    }
    seeds = [0, 1, 2]
    together = run_trials(given, seeds, tmp_path / "together", lambda label: Callback())
    for seed in seeds:
        alone = run_trials(given, [seed], tmp_path / f"alone-{seed}", lambda label: Callback())
        lines = [metrics_without_time(folder) for folder in (together.runs[seed].path, alone.runs[0].path)]
        assert [line["round"] for line in lines[0]] == [line["round"] for line in lines[1]]
        for first, second in zip(*lines, strict=True):
            assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
            assert first["client_accuracies"] == pytest.approx(second["client_accuracies"], abs=1e-5)


def test_trials_at_once_end_when_their_own_patience_does(tmp_path: Path) -> None:
    given: dict[str, dict[str, object]] = {
        "data": {"name": "digits"},
        "partition": {"clients": 5, "classes_per_client": 2},
        "method": {"name": "local"},
        "train": {"rounds": 30, "patience": 1, "lr": 0.3},
        "run": {"engine": "vmap"},
    }
    together = run_trials(given, [0, 1, 2, 3, 4], tmp_path / "together", lambda label: Callback())
    assert len(set(together.values("rounds"))) > 1
    alone = run_trials(given, [3], tmp_path / "alone", lambda label: Callback())
    curves = [[line["loss"] for line in metrics_without_time(folder)] for folder in (together.runs[3].path, alone.runs[0].path)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def test_trials_that_diverged_are_refused_by_their_seeds() -> None:
    ends = {seed: DivergenceError(f"round {seed}: the loss is nan", "lower it") for seed in (4, 6, 7)}
    with pytest.raises(
        DivergenceError, match=r"^seed 4: round 4: the loss is nan, and seeds 6, 7 diverged as well: lower it$"
    ) as told:
        raise_divergence(ends)
    assert str(copy.copy(told.value)) == str(told.value)
    with pytest.raises(DivergenceError, match=r"^seed 6: round 6: the loss is nan: lower it$"):
        raise_divergence({6: ends[6]})
    raise_divergence({})


def test_trials_without_a_seed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match="there are no seeds: give at least one"):
        run_trials({}, [], tmp_path / "trials", lambda label: pytest.fail(label))
    assert not (tmp_path / "trials").exists()
