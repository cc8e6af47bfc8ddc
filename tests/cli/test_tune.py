"""The command `gpfl tune`: what it searches, writes and prints, and how it resumes."""

from __future__ import annotations

import builtins
import csv
import dataclasses
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command, assert_error, read_files

from gpfl.core.options import SearchRange
from gpfl.experiments import trials, tuning
from gpfl.federation import Federation
from gpfl.methods import METHODS
from gpfl.training.config import Config
from gpfl.training.execute import PreparedRun, execute_trials
from gpfl.training.run_dir import RunDir

pytest.importorskip("optuna")

TOY = ("--data", "toy", "--rounds", 2)
DOCS = Path(__file__).parents[2] / "docs"


def read_candidates(folder: str) -> list[dict[str, Any]]:
    """Return the candidates of a method's folder without their time."""
    attributes = tuning.open_study(Path(folder)).user_attrs
    return [{key: value for key, value in attributes[name].items() if key != "seconds"} for name in sorted(attributes)]


def read_best(folder: str) -> dict[str, object]:
    return tomllib.loads(Path(folder, "best.toml").read_text())["method"]


def read_result(folder: str) -> dict[str, object]:
    return tomllib.loads(Path(folder, "study.toml").read_text())["result"]


# What is searched.


def test_small_space_is_searched_completely_and_no_value_twice(command: Command) -> None:
    result = command("tune", "fedrep", *TOY, "--budget", 9, "--out", "t")
    assert result.code == 0, result.err
    assert "4 candidates (fewer values than the budget of 9), 1 seed, 2 rounds" in result.out
    values = [line["values"]["method.head_epochs"] for line in read_candidates("t/fedrep")]
    assert values[0] == 1
    assert sorted(values) == [1, 2, 5, 10]


def test_search_writes_candidates_the_best_config_and_tables(command: Command) -> None:
    result = command("tune", "gpfl,fedavg", *TOY, "--budget", 3, "--seeds", "0,1", "--out", "t")
    assert result.code == 0, result.err
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0] == "20% of the training samples are held out for validation (--validation-fraction)."
    assert lines[1].startswith("gpfl: method.lam in 0.0001 to 0.1, log; method.mu in 0.0001 to 1, log. 3 candidates, 2 seeds, ")
    assert "fedavg: nothing to search, so it runs once (2 seeds, 2 rounds); --with-lr searches" in result.out
    assert [len(read_candidates(f"t/{name}")) for name in ("gpfl", "fedavg")] == [3, 1]

    candidates = read_candidates("t/gpfl")
    assert candidates[0]["values"] == {"method.lam": 0.01, "method.mu": 0.1}, "the defaults come first"
    for line in candidates:
        for seed, score, best_round in zip((0, 1), line["scores"], line["rounds"], strict=True):
            run_dir = RunDir(Path("t/gpfl", f"candidate-{line['number']:03}", f"seed-{seed}"))
            curve = [record["validation_accuracy"] for record in run_dir.read_complete_metrics()]
            assert score == max(curve) == curve[best_round]
            config = tomllib.loads((run_dir.path / "config.toml").read_text())
            assert {f"method.{key}": config["method"][key] for key in ("lam", "mu")} == line["values"]
            assert config["partition"]["validation_fraction"] == 0.2
            assert not list(run_dir.path.rglob("*.safetensors")), "weights are deleted"
    means = [np.mean(line["scores"]) for line in candidates]
    best = candidates[means.index(max(means))]
    assert {f"method.{key}": value for key, value in read_best("t/gpfl").items() if key != "name"} == best["values"]
    for path in ("t/gpfl/best.toml", "t/gpfl/study.toml", "t/common.toml"):
        assert tomllib.loads(Path(path).read_text())["format_version"] == 2

    with Path("t/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["candidate"]) for row in rows] == [("gpfl", "1"), ("gpfl", "2"), ("gpfl", "3"), ("fedavg", "1")]
    assert [float(row["validation"]) for row in rows[:3]] == pytest.approx(means)
    assert [row["candidate"] for row in rows if row["chosen"] == "1"] == [str(best["number"]), "1"]
    page = Path("t/table.md").read_text()
    note = page.strip().splitlines()[-1]
    for text in (
        "Command: gpfl tune gpfl,fedavg --data toy",
        "commit ",
        "seeds 0, 1",
        "budget 3 candidates per method",
        "cpu.",
    ):
        assert text in note
    assert f"**{best['number']}**" in page


def test_keep_weights_keeps_models_and_checkpoints(command: Command) -> None:
    assert command("tune", "fedprox", *TOY, "--budget", 1, "--keep-weights", "--out", "t").code == 0
    run_dir = Path("t/fedprox/candidate-001/seed-0")
    assert (run_dir / "checkpoint.safetensors").exists()
    assert list((run_dir / "models").glob("*.safetensors"))


def test_printed_commands_run_the_best_candidates(command: Command) -> None:
    result = command("tune", "gpfl,fedprox", *TOY, "--budget", 2, "--out", "t")
    [line] = [line for line in result.out.splitlines() if line.startswith("Run: ")]
    assert command(*shlex.split(line.removeprefix("Run: gpfl ")), "--seeds", 0, "--out", "c").code == 0
    assert command("run", "t/fedprox/best.toml", "--out", "r").code == 0
    for folder in ("c/fedprox", "r"):
        config = tomllib.loads(Path(folder, "config.toml").read_text())
        assert read_best("t/fedprox").items() <= config["method"].items()
        assert config["partition"]["validation_fraction"] == 0.2
    best = max(read_candidates("t/fedprox"), key=lambda candidate: candidate["scores"])
    curve = [record["validation_accuracy"] for record in RunDir(Path("r")).read_complete_metrics()]
    assert max(curve) == pytest.approx(best["scores"][0])


def test_with_lr_every_method_has_the_same_budget(command: Command) -> None:
    result = command("tune", "fedavg,fedprox", *TOY, "--budget", 3, "--with-lr", "--out", "t")
    assert result.code == 0, result.err
    assert [len(read_candidates(f"t/{name}")) for name in ("fedavg", "fedprox")] == [3, 3]
    rates = {line["values"]["train.lr"] for line in read_candidates("t/fedavg")}
    assert len(rates) == 3
    assert 0.1 in rates, "the default"
    assert tomllib.loads(Path("t/fedavg/best.toml").read_text())["train"]["lr"] in rates
    assert not Path("t/common.toml").exists()


def change_labels(monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    """Give every sample of a split another label."""
    real = Config.federation

    def federation(config: Config) -> Federation:
        made = real(config)
        y = made.table.y.clone()
        samples = np.concatenate([shard.split(split) for shard in made.shards])
        y[samples] = (y[samples] + 1) % made.table.classes
        return Federation(made.table.with_tensors(made.table.x, y), made.shards, made.partition)

    monkeypatch.setattr(Config, "federation", federation)


def test_test_samples_do_not_influence_the_search(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("tune", "gpfl,fedprox", *TOY, "--budget", 3, "--lr", 0.01, "--patience", 1, "--out")
    assert command(*arguments, "original").code == 0
    with monkeypatch.context() as patch:
        change_labels(patch, "test")
        assert command(*arguments, "changed").code == 0
    with monkeypatch.context() as patch:
        change_labels(patch, "validation")
        assert command(*arguments, "control").code == 0
    for name in ("gpfl", "fedprox"):
        assert read_candidates(f"original/{name}") == read_candidates(f"changed/{name}")
        assert read_best(f"original/{name}") == read_best(f"changed/{name}")
        original, control = ([line["scores"] for line in read_candidates(f"{out}/{name}")] for out in ("original", "control"))
        assert original != control
    run = "gpfl/candidate-001/seed-0"
    original, changed = (
        [record["accuracy"] for record in RunDir(Path(out, run)).read_complete_metrics()] for out in ("original", "changed")
    )
    assert original != changed, "the test labels did change"


# Training.


def test_concurrent_candidates_score_as_single_ones(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def execute(runs: list[PreparedRun]) -> list[Any]:
        sizes.append(len(runs))
        return execute_trials(runs)

    monkeypatch.setattr(trials, "execute_trials", execute)
    arguments = ("tune", "ditto", *TOY, "--budget", 4, "--seeds", "0,1")
    assert command(*arguments, "--n-concurrent", 4, "--out", "concurrent").code == 0
    assert sum(sizes) == 8
    assert max(sizes) > 2, "candidates that differ only in floats train at the same time"
    sizes.clear()
    assert command(*arguments, "--engine", "loop", "--out", "loop").code == 0
    assert sizes == [2, 2, 2, 2], "the loop engine trains one candidate at a time"
    concurrent, single = (read_candidates(f"{out}/ditto")[0] for out in ("concurrent", "loop"))
    assert concurrent["scores"] == pytest.approx(single["scores"])


def test_candidates_train_one_by_one_if_memory_is_short(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(runs: list[PreparedRun]) -> list[Any]:
        if len(runs) > 1:
            raise torch.OutOfMemoryError
        return execute_trials(runs)

    arguments = ("tune", "fedprox", *TOY, "--budget", 3, "--seeds", "0,1", "--out")
    assert command(*arguments, "enough").code == 0
    monkeypatch.setattr(trials, "execute_trials", execute)
    assert command(*arguments, "short").code == 0
    assert read_candidates("short/fedprox") == read_candidates("enough/fedprox")


def test_diverged_candidate_scores_zero_and_the_search_continues(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "fedprox", make_diverging(METHODS["fedprox"]))
    result = command("tune", "fedprox", "--data", "toy", "--rounds", 4, "--budget", 4, "--out", "t")
    assert result.code == 0, result.err
    assert "scores 0, since training diverged: round" in result.out
    diverged = [line for line in read_candidates("t/fedprox") if line["failure"]]
    assert 0 < len(diverged) < 4
    assert all("nan" in line["failure"] or "inf" in line["failure"] for line in diverged)
    assert read_best("t/fedprox")["mu"] == 0.001
    result = command("tune", "fedprox", "--data", "toy", "--rounds", 4, "--budget", 2, "--lr", 1e30, "--out", "u")
    assert result.code == 2
    assert result.err == "gpfl: training diverged with all candidates (see u/table.csv): lower --lr\n"
    assert not Path("u/fedprox/best.toml").exists()


def make_diverging(method: type) -> type:
    """Return a method whose proximal weight is searched where training diverges."""
    fields = {f.name: f for f in dataclasses.fields(method)}
    option = dataclasses.replace(fields["mu"].metadata["option"], search=SearchRange(1e20, 1e30))
    field = dataclasses.field(default=0.001, metadata={"option": option})
    made = dataclasses.make_dataclass("Diverging", [("mu", float, field)], bases=(method,), frozen=True, kw_only=True)
    made.__module__ = method.__module__
    return made


# Resuming.


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Press Ctrl-C when the run with this index has written its second record."""

    def arm(runs: int) -> None:
        real, rounds = RunDir.append_metrics, []

        def append_metrics(run_dir: RunDir, record: dict[str, object]) -> None:
            real(run_dir, record)
            rounds.append(record["round"])
            if rounds.count(1) > runs:
                monkeypatch.setattr(RunDir, "append_metrics", real)
                raise KeyboardInterrupt

        monkeypatch.setattr(RunDir, "append_metrics", append_metrics)

    return arm


@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_interrupted_search_resumes_exactly(command: Command, interrupt_after: Callable[[int], None], runs: int) -> None:
    arguments = ("tune", "fedprox", *TOY, "--budget", 5, "--n-concurrent", 2, "--out")
    assert command(*arguments, "complete").code == 0
    interrupt_after(runs)
    result = command(*arguments, "cut")
    assert result.code == 130
    resume = "gpfl tune fedprox --data toy --rounds 2 --budget 5 --n-concurrent 2 --out cut"
    assert result.err == f"gpfl: stopped; resume with: {resume}\n"
    assert len(read_candidates("cut/fedprox")) < 5
    assert command(*arguments, "cut").code == 0
    assert read_candidates("cut/fedprox") == read_candidates("complete/fedprox")
    assert read_best("cut/fedprox") == read_best("complete/fedprox")


def test_finished_search_trains_nothing_and_a_larger_budget_continues_it(command: Command) -> None:
    arguments = ("tune", "fedprox", *TOY, "--out", "t", "--budget")
    assert command(*arguments, 2).code == 0
    runs = read_files(Path("t/fedprox/candidate-001"))
    assert "fedprox: 2 of 2 candidates already trained." in command(*arguments, 2).out
    first = read_candidates("t/fedprox")
    assert command(*arguments, 4).code == 0
    assert read_candidates("t/fedprox")[:2] == first
    assert len(read_candidates("t/fedprox")) == 4
    assert read_files(Path("t/fedprox/candidate-001")) == runs
    assert command(*arguments, 1).code == 0
    assert read_best("t/fedprox")["mu"] == 0.001, "only the first candidate counts"
    assert len(read_candidates("t/fedprox")) == 4


def test_interrupted_larger_budget_leaves_the_result_unchanged(
    command: Command, interrupt_after: Callable[[int], None]
) -> None:
    arguments = ("tune", "fedprox", *TOY, "--n-concurrent", 1, "--out", "t", "--budget")
    assert command(*arguments, 2).code == 0
    result = read_result("t/fedprox")
    assert (result["budget"], result["candidates"]) == (2, 2)
    interrupt_after(1)
    assert command(*arguments, 4).code == 130
    assert len(read_candidates("t/fedprox")) > 2
    assert read_result("t/fedprox") == result


def test_table_omits_a_search_that_was_interrupted(command: Command, interrupt_after: Callable[[int], None]) -> None:
    interrupt_after(2)
    assert command("tune", "fedprox", *TOY, "--budget", 4, "--n-concurrent", 1, "--out", "t").code == 130
    assert command("tune", "ditto", *TOY, "--budget", 1, "--n-concurrent", 1, "--out", "t").code == 0
    assert "fedprox" not in Path("t/table.md").read_text()


# Several searches in one folder.


def test_table_has_all_methods_of_the_folder_and_says_if_budgets_differ(command: Command) -> None:
    assert command("tune", "fedprox", *TOY, "--budget", 3, "--set", "fedprox.mu=0.5", "--with-lr", "--out", "t").code == 0
    assert command("tune", "fedavg", *TOY, "--budget", 2, "--with-lr", "--out", "t").code == 0
    page = Path("t/table.md").read_text()
    assert "## fedavg" in page
    assert "## fedprox" in page
    assert "The methods above had unequal budgets (fedavg 2 candidates, fedprox 3 candidates): search fedavg with" in page


def test_table_has_the_command_and_budget_of_each_method(command: Command) -> None:
    assert command("tune", "gpfl,fedavg", *TOY, "--budget", 3, "--out", "t").code == 0
    assert command("tune", "ditto", *TOY, "--budget", 1, "--out", "t").code == 0
    first, second = [line for line in Path("t/table.md").read_text().splitlines() if line.startswith("- ")]
    assert first.startswith("- ditto: Command: gpfl tune ditto --data toy --rounds 2 --budget 1 --out t; commit ")
    assert "budget 1 candidate per method" in first
    assert second.startswith("- fedavg, gpfl: Command: gpfl tune gpfl,fedavg --data toy --rounds 2 --budget 3 --out t; commit ")
    assert "budget 3 candidates per method" in second


def test_unequal_budgets_are_printed_after_the_search(command: Command) -> None:
    assert command("tune", "gpfl,fedrep", *TOY, "--budget", 6, "--out", "t").code == 0
    assert "unequal" not in command("tune", "fedavg", *TOY, "--budget", 1, "--out", "t").out, "nothing to search"
    assert "unequal" not in command("tune", "fedrep", *TOY, "--budget", 5, "--out", "t").out, "all four values were tried"
    result = command("tune", "ditto", *TOY, "--budget", 1, "--out", "t")
    text = "t has unequal budgets (ditto 1 candidate, fedrep 4 candidates, gpfl 6 candidates): search ditto with --budget 6, "
    assert result.out.splitlines()[-1] == f"{text}or fedrep, gpfl with --budget 1, which trains nothing."
    assert "unequal" not in command("tune", "ditto", *TOY, "--budget", 6, "--out", "t").out
    assert "unequal" not in Path("t/table.md").read_text()


def test_table_shows_other_searches_with_the_budget_of_their_choice(command: Command) -> None:
    for budget in (3, 1):
        assert command("tune", "fedprox", *TOY, "--budget", budget, "--out", "t").code == 0
    assert command("tune", "ditto", *TOY, "--budget", 1, "--out", "t").code == 0
    page = Path("t/table.md").read_text()
    assert "| fedprox | `method.mu` 0.001 to 1, log | 1 | mu 0.001 |" in page
    assert "unequal" not in page


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpfll", "methods is 'gpfll'; did you mean 'gpfl'?"),
        ("gpfl --budget 0", "Invalid value for '--budget': 0 is not in the range x>=1."),
        ("gpfl --n-concurrent 0", "Invalid value for '--n-concurrent': 0 is not in the range x>=1."),
        (
            "gpfl --validation-fraction 0",
            "scored on validation samples, but no client has any: set --validation-fraction, such as 0.2",
        ),
        ("gpfl --lr 0.1 --with-lr", "train.lr (--lr) is set, and --with-lr searches it"),
        ("gpfl --set gpfl.lam=-1", "method.lam is -1; it must be at least 0"),
        ("gpfl,ditto --set ditto.lamb=1", "ditto: unknown key 'method.lamb'; did you mean 'lam'?"),
        ("gpfl --set ditto.lam=1", "is for a method that is not run: add ditto to the methods"),
        ("gpfl --set method.lam=1", "does not name the method: use --set gpfl.lam="),
        ("gpfl --set run.seed=1", "is not available here: use --seeds"),
        ("gpfl --seeds 0,0", "give each only once"),
        ("gpfl --seeds a", "must be integers separated by commas"),
        ("gpfl --rounds 0", "train.rounds (--rounds) is 0"),
        ("gpfl --out=", "--out is empty; name a folder"),
        ("gpfl toy", "is not a config (.toml)"),
    ],
)
def test_error_is_one_line_and_nothing_is_written(command: Command, arguments: str, message: str) -> None:
    assert_error(command("tune", *arguments.split(), "--data", "toy"), message)
    assert read_files(Path()) == {}


def test_folder_of_another_search_is_an_error_that_names_the_setting(command: Command) -> None:
    arguments = ("tune", "fedprox", *TOY, "--budget", 1, "--out", "t")
    assert command(*arguments).code == 0
    before = read_files(Path("t"))
    for flags, message in (
        (("--lr", 0.2), "t/fedprox holds a search with train.lr (--lr) = 0.1, now it is 0.2: choose another --out"),
        (("--seeds", 1), "holds a search with --seeds = [0], now it is [1]"),
        (("--with-lr",), "holds a search with --with-lr = False, now it is True"),
        (("--search-seed", 1), "holds a search with --search-seed = 0, now it is 1"),
        (("--set", "fedprox.mu=1"), "holds a search with method.mu = 0.001, now it is 1.0"),
    ):
        assert_error(command(*arguments, *flags), message)
    other = ("tune", "ditto", *arguments[2:])
    assert_error(
        command(*other, "--clients", 3), "t/fedprox holds a search with partition.clients (--clients) = 4, now it is 3"
    )
    assert read_files(Path("t")) == before
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    assert_error(command("tune", "fedprox", *TOY, "--out", "mine"), "--out mine is not empty and holds no search")


def test_manifest_must_have_validation_samples_and_is_saved_with_the_result(command: Command) -> None:
    for fraction in (0, 0.2):
        assert command("run", *TOY, "--validation-fraction", fraction, "--out", f"run{fraction}").code == 0
    arguments = ("tune", "fedprox", *TOY, "--budget", 2, "--out", "t", "--federation")
    assert_error(command(*arguments, "run0/federation.toml"), "no client has any: save one with --validation-fraction")
    assert command(*arguments, "run0.2/federation.toml").code == 0
    assert command("run", "t/fedprox/best.toml", "--out", "again").code == 0
    assert Path("again/federation.toml").read_text() == Path("run0.2/federation.toml").read_text()


def test_without_optuna_the_error_says_how_to_install_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def import_(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "optuna":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_)
    assert_error(command("tune", "gpfl", *TOY), "gpfl tune needs Optuna, which is not installed: pip install 'gpfl[tune]'")
    assert read_files(Path()) == {}


@pytest.mark.slow
def test_example_of_the_page_runs_with_a_small_budget(command: Command) -> None:
    [line] = re.findall(r"^gpfl (tune .* --data digits .*)$", (DOCS / "tune.md").read_text(encoding="utf-8"), re.M)
    result = command(*line.split(), "--budget", 2, "--rounds", 1)
    assert result.code == 0, result.err
    assert "Run: gpfl compare tune/common.toml --methods gpfl,ditto,fedavg --set gpfl.lam=" in result.out
