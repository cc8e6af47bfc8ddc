"""Tuning: what is searched, by what it is judged, what is kept, and how a search that was cut off goes on."""

from __future__ import annotations

import builtins
import csv
import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command, CommandResult, read_files

from gpfl.core import options
from gpfl.core.options import SearchRange
from gpfl.experiments import tune as study
from gpfl.experiments.proposals import propose, search_space
from gpfl.federation import Federation
from gpfl.methods import METHODS
from gpfl.training.config import Config, TrainOptions
from gpfl.training.execute import PreparedRun, execute_trials
from gpfl.training.run_dir import RunDir

pytest.importorskip("optuna")

TOY = ("--data", "toy", "--rounds", 2)
DOCS = Path(__file__).parents[2] / "docs"


def refused(said: CommandResult, *words: str) -> None:
    assert said.code == 2
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def tried(folder: str) -> list[dict[str, Any]]:
    """The candidates of a method's folder, without their time."""
    lines = [json.loads(line) for line in Path(folder, "candidates.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def chosen(folder: str) -> dict[str, object]:
    return tomllib.loads(Path(folder, "best.toml").read_text())["method"]


# What is searched.


def documented() -> dict[str, SearchRange | tuple[int, ...]]:
    records: dict[str, type] = {**METHODS, "train": TrainOptions}
    return {
        f"{name}.{key}": described.search
        for name, record in records.items()
        for key, described in options.options_of(record).items()
        if described.search is not None
    }


@pytest.mark.parametrize("key", documented())
def test_range_lies_within_the_limits_of_its_option_and_holds_the_default(key: str) -> None:
    name, _, field = key.partition(".")
    record = METHODS.get(name, TrainOptions)
    described, kind = options.options_of(record)[field], documented()[key]
    default = next(f.default for f in dataclasses.fields(record) if f.name == field)
    tries = (kind.low, kind.high) if isinstance(kind, SearchRange) else kind
    assert all(described.allows(value) for value in tries)
    off = described.disabled_by
    assert off is None or off[0] not in tries
    if isinstance(kind, SearchRange):
        assert 0 < kind.low < kind.high
        assert math.isnan(default) or default in kind
    else:
        assert default in kind


def test_page_has_every_range_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([^|]+) \|", (DOCS / "tune.md").read_text().split("## What is kept")[0], re.M)
    words = {
        key: str(kind) if isinstance(kind, SearchRange) else ", ".join(map(str, kind)) for key, kind in documented().items()
    }
    assert dict(rows) == words


def test_every_number_of_a_method_is_searched_or_left_out_on_purpose() -> None:
    left = {"perfedavg.passes", "pfedme.theta_decay"}  # as the authors' code has them
    for name, method in METHODS.items():
        for key, described in options.options_of(method).items():
            numeric = next(f.type for f in dataclasses.fields(method) if f.name == key) in ("float", "int")
            assert (described.search is not None) == (numeric and f"{name}.{key}" not in left), f"{name}.{key}"


def test_value_by_hand_is_not_searched_and_the_rate_only_if_asked() -> None:
    assert list(search_space("ditto", {"method": {"name": "ditto"}}, False)) == ["method.lam", "method.personal_epochs"]
    assert list(search_space("ditto", {"method": {"personal_epochs": 1}}, True)) == ["method.lam", "train.lr"]
    assert search_space("fedavg", {}, False) == {}


# Proposals.

SPACE: dict[str, SearchRange | tuple[int, ...]] = {"method.a": SearchRange(0.001, 1.0), "method.b": (1, 2)}


def fresh(known: list[dict[str, float | int]], scores: list[float], wanted: int = 4, state: str = "s") -> list[Any]:
    return propose(SPACE, known, scores, wanted, state, lambda values: "")


def test_proposals_are_new_within_the_space_and_a_function_of_what_was_tried() -> None:
    first = fresh([], [])
    assert first == fresh([], [])
    assert first != fresh([], [], state="t")
    assert len({json.dumps(values) for values in first}) == 4
    assert all(0.001 <= values["method.a"] <= 1 and values["method.b"] in (1, 2) for values in first)
    assert all(float(f"{values['method.a']:.3g}") == values["method.a"] for values in first)


def test_proposals_go_where_scores_were_high() -> None:
    # Floats alone: beside a whole number that does not matter, single proposals of the joint sampler scatter.
    space: dict[str, SearchRange | tuple[int, ...]] = {"method.a": SearchRange(0.001, 1.0)}
    draw = np.random.default_rng(0)
    known: list[dict[str, float | int]] = [{"method.a": float(10 ** draw.uniform(-3, 0))} for _ in range(30)]

    def distance(scores: list[float]) -> float:
        """How far proposals are from 0.1, in powers of ten."""
        asked = [propose(space, known, scores, 1, str(k), lambda values: "")[0]["method.a"] for k in range(8)]
        return float(np.mean([abs(math.log10(value) + 1) for value in asked]))

    near = [-abs(math.log10(values["method.a"]) + 1) for values in known]
    assert distance(near) < 0.4
    assert distance([-score for score in near]) > 0.8


def test_values_that_a_method_refuses_are_passed_over_and_none_left_is_said() -> None:
    small = propose(SPACE, [], [], 4, "s", lambda values: "too large" if values["method.a"] > 0.01 else "")
    assert len(small) == 4
    assert max(values["method.a"] for values in small) <= 0.01
    with pytest.raises(study.GpflError, match="can be run; one of them: never"):
        propose(SPACE, [], [], 1, "s", lambda values: "never")


def test_space_of_few_values_is_tried_whole_and_no_value_twice(command: Command) -> None:
    said = command("tune", "fedrep", *TOY, "--budget", 9, "--out", "t")
    assert said.code == 0, said.err
    assert "4 candidates, all there are of the budget of 9" in said.out
    values = [line["values"]["method.head_epochs"] for line in tried("t/fedrep")]
    assert values[0] == 1
    assert sorted(values) == [1, 2, 5, 10]


# The command.


def test_search_keeps_its_candidates_the_best_and_tables(command: Command) -> None:
    said = command("tune", "gpfl,fedavg", *TOY, "--budget", 3, "--seeds", "0,1", "--out", "t")
    assert said.code == 0, said.err
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == "A share of 0.2 of each client's training rows is kept for validation (--validation-fraction)."
    assert "method.lam in 0.0001 to 0.1, log; method.mu in 0.0001 to 1, log. 3 candidates, each 2 seeds, 2 rounds" in lines[1]
    assert "fedavg: nothing to search, so it runs once (2 seeds, 2 rounds); --with-lr would search" in said.out
    assert [len(tried(f"t/{name}")) for name in ("gpfl", "fedavg")] == [3, 1]

    found = tried("t/gpfl")
    assert found[0]["values"] == {"method.lam": 0.01, "method.mu": 0.1}, "the defaults come first"
    for line in found:
        for seed, score, place in zip((0, 1), line["scores"], line["rounds"], strict=True):
            folder = RunDir(Path("t/gpfl", f"candidate-{line['number']:03}", f"seed-{seed}"))
            curve = [row["validation_accuracy"] for row in folder.read_complete_metrics()]
            assert score == max(curve) == curve[place]
            written = tomllib.loads((folder.path / "config.toml").read_text())
            assert {f"method.{key}": written["method"][key] for key in ("lam", "mu")} == line["values"]
            assert written["partition"]["validation_fraction"] == 0.2
            assert not list(folder.path.rglob("*.safetensors")), "weights are not kept"
    means = [np.mean(line["scores"]) for line in found]
    top = found[means.index(max(means))]
    assert {f"method.{key}": value for key, value in chosen("t/gpfl").items() if key != "name"} == top["values"]

    with Path("t/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["candidate"]) for row in rows] == [("gpfl", "1"), ("gpfl", "2"), ("gpfl", "3"), ("fedavg", "1")]
    assert [float(row["validation"]) for row in rows[:3]] == pytest.approx(means)
    assert [row["candidate"] for row in rows if row["chosen"] == "1"] == [str(top["number"]), "1"]
    page = Path("t/table.md").read_text()
    note = page.strip().splitlines()[-1]
    for word in ("Command: gpfl tune gpfl,fedavg --data toy", "commit ", "seeds 0, 1", "budget 3 candidates a method", "cpu."):
        assert word in note
    assert f"**{top['number']}**" in page


def test_what_was_chosen_runs_by_the_commands_that_are_named(command: Command) -> None:
    said = command("tune", "gpfl,fedprox", *TOY, "--budget", 2, "--out", "t")
    [line] = [line for line in said.out.splitlines() if line.startswith("Run them: ")]
    words = line.removeprefix("Run them: gpfl ").split()
    assert command(*words, "--seeds", 0, "--out", "c").code == 0
    assert command("run", "t/fedprox/best.toml", "--out", "r").code == 0
    for folder in ("c/fedprox", "r"):
        written = tomllib.loads(Path(folder, "config.toml").read_text())
        assert chosen("t/fedprox").items() <= written["method"].items()
        assert written["partition"]["validation_fraction"] == 0.2
    best = max(tried("t/fedprox"), key=lambda candidate: candidate["scores"])
    curve = [row["validation_accuracy"] for row in RunDir(Path("r")).read_complete_metrics()]
    assert max(curve) == pytest.approx(best["scores"][0])


def test_every_method_has_the_same_budget_where_the_rate_is_searched(command: Command) -> None:
    said = command("tune", "fedavg,fedprox", *TOY, "--budget", 3, "--with-lr", "--out", "t")
    assert said.code == 0, said.err
    assert [len(tried(f"t/{name}")) for name in ("fedavg", "fedprox")] == [3, 3]
    rates = {line["values"]["train.lr"] for line in tried("t/fedavg")}
    assert len(rates) == 3
    assert 0.1 in rates, "the default"
    assert tomllib.loads(Path("t/fedavg/best.toml").read_text())["train"]["lr"] in rates
    assert not Path("t/common.toml").exists()


def spoilt(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Gives every row of a part another label."""
    real = Config.federation

    def federation(config: Config) -> Federation:
        made = real(config)
        y = made.table.y.clone()
        rows = np.concatenate([shard.split(part) for shard in made.shards])
        y[rows] = (y[rows] + 1) % made.table.classes
        return Federation(made.table.with_tensors(made.table.x, y), made.shards, made.partition)

    monkeypatch.setattr(Config, "federation", federation)


def test_test_rows_have_no_part_in_the_choice(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("tune", "gpfl,fedprox", *TOY, "--budget", 3, "--lr", 0.01, "--patience", 1, "--out")
    assert command(*given, "good").code == 0
    with monkeypatch.context() as patch:
        spoilt(patch, "test")
        assert command(*given, "spoilt").code == 0
    with monkeypatch.context() as patch:
        spoilt(patch, "validation")
        assert command(*given, "control").code == 0
    for name in ("gpfl", "fedprox"):
        assert tried(f"good/{name}") == tried(f"spoilt/{name}")
        assert chosen(f"good/{name}") == chosen(f"spoilt/{name}")
        assert [line["scores"] for line in tried(f"good/{name}")] != [line["scores"] for line in tried(f"control/{name}")]
    folder = "gpfl/candidate-001/seed-0"
    tests = [[row["accuracy"] for row in RunDir(Path(out, folder)).read_complete_metrics()] for out in ("good", "spoilt")]
    assert tests[0] != tests[1], "the labels were spoilt"


def test_candidates_at_once_are_those_one_by_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = execute_trials

    def execute(runs: list[PreparedRun]) -> list[Any]:
        sizes.append(len(runs))
        return real(runs)

    monkeypatch.setattr(study, "execute_trials", execute)
    given = ("tune", "ditto", *TOY, "--budget", 4, "--seeds", "0,1")
    assert command(*given, "--at-once", 4, "--out", "many").code == 0
    assert sum(sizes) == 8
    assert max(sizes) > 2, "candidates that differ in floats alone were stacked"
    del sizes[:]
    assert command(*given, "--engine", "loop", "--out", "loop").code == 0
    assert sizes == [2, 2, 2, 2], "an engine that does not stack has one at a time"
    first = [tried(f"{out}/ditto")[0] for out in ("many", "loop")]
    assert first[0]["scores"] == pytest.approx(first[1]["scores"])


def test_candidate_that_diverges_counts_as_nothing_and_the_others_go_on(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fedprox", wild(METHODS["fedprox"]))
    said = command("tune", "fedprox", "--data", "toy", "--rounds", 4, "--budget", 4, "--out", "t")
    assert said.code == 0, said.err
    assert "counts as 0, since training failed: round" in said.out
    failed = [line for line in tried("t/fedprox") if line["trouble"]]
    assert 0 < len(failed) < 4
    assert all("nan" in line["trouble"] or "inf" in line["trouble"] for line in failed)
    assert chosen("t/fedprox")["mu"] == 0.001
    said = command("tune", "fedprox", "--data", "toy", "--rounds", 4, "--budget", 2, "--lr", 1e30, "--out", "u")
    refused(said, "nothing could be chosen, since no run came to its end")
    assert not Path("u/fedprox/best.toml").exists()


def wild(method: type) -> type:
    """Gives a method whose proximal weight is searched where training diverges."""
    fields = {f.name: f for f in dataclasses.fields(method)}
    described = dataclasses.replace(fields["mu"].metadata["option"], search=SearchRange(1e20, 1e30))
    changed = dataclasses.field(default=0.001, metadata={"option": described})
    made = dataclasses.make_dataclass("Wild", [("mu", float, changed)], bases=(method,), frozen=True, kw_only=True)
    made.__module__ = method.__module__
    return made


# Cut off and gone on with.


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets Ctrl-C come as the run with this number, counted from 0, has written its second line."""

    def arm(runs: int) -> None:
        real, seen = RunDir.append_metrics, []

        def append(folder: RunDir, line: dict[str, object]) -> None:
            real(folder, line)
            seen.append(line["round"])
            if seen.count(1) > runs:
                monkeypatch.setattr(RunDir, "append_metrics", real)
                raise KeyboardInterrupt

        monkeypatch.setattr(RunDir, "append_metrics", append)

    return arm


@pytest.mark.parametrize("runs", [1, 3])
def test_search_that_was_stopped_ends_as_one_that_was_not(
    command: Command, stop_after: Callable[[int], None], runs: int
) -> None:
    given = ("tune", "fedprox", *TOY, "--budget", 5, "--at-once", 2, "--out")
    assert command(*given, "whole").code == 0
    stop_after(runs)
    said = command(*given, "cut")
    assert said.code == 130
    way = "gpfl tune fedprox --data toy --rounds 2 --budget 5 --at-once 2 --out cut"
    assert said.err == f"gpfl: stopped; resume with: {way}\n"
    assert len(tried("cut/fedprox")) < 5
    assert command(*given, "cut").code == 0
    assert tried("cut/fedprox") == tried("whole/fedprox")
    assert chosen("cut/fedprox") == chosen("whole/fedprox")


def test_search_again_runs_nothing_and_a_larger_budget_goes_on(command: Command) -> None:
    given = ("tune", "fedprox", *TOY, "--out", "t", "--budget")
    assert command(*given, 2).code == 0
    runs = read_files(Path("t/fedprox/candidate-001"))
    said = command(*given, 2)
    assert "fedprox: 2 candidates of 2 were run before." in said.out
    first = tried("t/fedprox")
    assert command(*given, 4).code == 0
    assert tried("t/fedprox")[:2] == first
    assert len(tried("t/fedprox")) == 4
    assert read_files(Path("t/fedprox/candidate-001")) == runs
    assert command(*given, 1).code == 0
    assert chosen("t/fedprox")["mu"] == 0.001, "of one candidate, that one is chosen"
    assert len(tried("t/fedprox")) == 4


def test_table_has_all_methods_of_the_folder_and_says_where_budgets_differ(command: Command) -> None:
    assert command("tune", "fedprox", *TOY, "--budget", 3, "--set", "fedprox.mu=0.5", "--with-lr", "--out", "t").code == 0
    assert command("tune", "fedavg", *TOY, "--budget", 2, "--with-lr", "--out", "t").code == 0
    page = Path("t/table.md").read_text()
    assert "## fedavg" in page
    assert "## fedprox" in page
    assert "The methods above had unequal budgets (fedavg 2 candidates, fedprox 3 candidates): search fedavg with" in page


def test_table_has_the_command_and_the_budget_of_each_method(command: Command) -> None:
    assert command("tune", "gpfl,fedavg", *TOY, "--budget", 3, "--out", "t").code == 0
    assert command("tune", "ditto", *TOY, "--budget", 1, "--out", "t").code == 0
    notes = [line for line in Path("t/table.md").read_text().splitlines() if line.startswith("- ")]
    first, second = (
        "gpfl tune ditto --data toy --rounds 2 --budget 1",
        "gpfl tune gpfl,fedavg --data toy --rounds 2 --budget 3",
    )
    assert notes[0].startswith(f"- ditto: Command: {first} --out t; commit ")
    assert "budget 1 candidate a method" in notes[0]
    assert notes[1].startswith(f"- fedavg, gpfl: Command: {second} --out t; commit ")
    assert "budget 3 candidates a method" in notes[1]
    assert len(notes) == 2


def test_other_budget_than_the_folder_has_is_said_before_and_after(command: Command) -> None:
    assert command("tune", "gpfl,fedrep", *TOY, "--budget", 6, "--out", "t").code == 0
    assert command("tune", "fedavg", *TOY, "--budget", 1, "--out", "t").out.count("unequal") == 0, "nothing to search"
    assert command("tune", "fedrep", *TOY, "--budget", 5, "--out", "t").out.count("unequal") == 0, "all four were tried"
    said = command("tune", "ditto", *TOY, "--budget", 1, "--out", "t")
    words = "unequal budgets (fedrep 4 candidates, gpfl 6 candidates, ditto 1 candidate): search ditto with --budget 6, "
    lines = said.out.splitlines()
    assert lines[1] == f"t will have {words}or fedrep, gpfl with --budget 1, which runs nothing."
    assert lines[-1].startswith("t has unequal budgets (ditto 1 candidate, ")
    assert command("tune", "ditto", *TOY, "--budget", 6, "--out", "t").out.count("unequal") == 0
    assert "unequal" not in Path("t/table.md").read_text()


def test_search_beside_is_shown_as_its_choice_was_made(command: Command) -> None:
    for budget in (3, 1):
        assert command("tune", "fedprox", *TOY, "--budget", budget, "--out", "t").code == 0
    assert command("tune", "ditto", *TOY, "--budget", 1, "--out", "t").code == 0
    page = Path("t/table.md").read_text()
    assert "| fedprox | `method.mu` 0.001 to 1, log | 1 | mu 0.001 |" in page, "later ones do not count"
    assert "unequal" not in page


def test_larger_budget_that_was_cut_off_leaves_the_choice_as_it_was_made(
    command: Command, stop_after: Callable[[int], None]
) -> None:
    given = ("tune", "fedprox", *TOY, "--at-once", 1, "--out", "t", "--budget")
    assert command(*given, 2).code == 0
    made = tomllib.loads(Path("t/fedprox/study.toml").read_text())["made"]
    assert (made["budget"], made["candidates"], made["searched"]) == (2, 2, True)
    stop_after(1)
    assert command(*given, 4).code == 130
    assert len(tried("t/fedprox")) > 2
    assert tomllib.loads(Path("t/fedprox/study.toml").read_text())["made"] == made


def test_search_that_was_cut_off_has_no_command_in_the_table_and_is_searched_to_its_end(
    command: Command, stop_after: Callable[[int], None]
) -> None:
    stop_after(2)
    given = ("tune", "fedprox", *TOY, "--budget", 4, "--at-once", 1, "--out", "t")
    assert command(*given).code == 130
    assert command("tune", "ditto", *TOY, "--budget", 1, "--at-once", 1, "--out", "t").code == 0
    assert "- fedprox: the command of the search was not recorded, or has not ended." in Path("t/table.md").read_text()
    assert command(*given).code == 0
    Path("t/fedprox/candidates.jsonl").unlink()
    assert command(*given).code == 0, "what is damaged is searched again"


# Mistakes.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gpfll", "unknown method 'gpfll'; did you mean 'gpfl'?"),
        ("gpfl --budget 0", "--budget is 0; it must be at least 1"),
        ("gpfl --at-once 0", "--at-once is 0; it must be at least 1"),
        (
            "gpfl --validation-fraction 0",
            "chosen on validation rows, but no client has any: set --validation-fraction, such as 0.2",
        ),
        ("gpfl --lr 0.1 --with-lr", "train.lr (--lr) is given, and --with-lr searches it"),
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
def test_mistake_is_one_line_and_nothing_is_written(command: Command, given: str, words: str) -> None:
    refused(command("tune", *given.split(), "--data", "toy"), words)
    assert read_files(Path()) == {}


def test_folder_of_another_search_is_refused_and_the_setting_named(command: Command) -> None:
    given = ("tune", "fedprox", *TOY, "--budget", 1, "--out", "t")
    assert command(*given).code == 0
    before = read_files(Path("t"))
    refused(command(*given, "--lr", 0.2), "t/fedprox holds a search with train.lr (--lr) = 0.1, now it is 0.2", "--out")
    refused(command(*given, "--seeds", 1), "holds a search with --seeds = [0], now it is [1]")
    refused(command(*given, "--with-lr"), "holds a search with --with-lr = False, now it is True")
    refused(command(*given, "--set", "fedprox.mu=1"), "holds a search with method.mu = 0.001, now it is 1.0")
    other = ("tune", "ditto", *given[2:])
    refused(command(*other, "--clients", 3), "t/fedprox holds a search with partition.clients (--clients) = 4, now it is 3")
    assert read_files(Path("t")) == before
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    refused(command("tune", "fedprox", *TOY, "--out", "mine"), "--out mine is not empty and holds no search")
    Path("t/fedprox/candidates.jsonl").write_text('{"number": 2}\n')
    refused(command(*given), "t/fedprox/candidates.jsonl is damaged", "to search anew")


def test_manifest_must_have_validation_rows_and_is_kept_with_the_choice(command: Command) -> None:
    for share in (0, 0.2):
        assert command("run", *TOY, "--validation-fraction", share, "--out", f"run{share}").code == 0
    given = ("tune", "fedprox", *TOY, "--budget", 2, "--out", "t", "--federation")
    refused(command(*given, "run0/federation.toml"), "no client has any: make one with --validation-fraction")
    assert command(*given, "run0.2/federation.toml").code == 0
    assert command("run", "t/fedprox/best.toml", "--out", "again").code == 0
    assert Path("again/federation.toml").read_text() == Path("run0.2/federation.toml").read_text()


def test_without_optuna_the_command_says_how_to_install_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def imported(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "optuna":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imported)
    refused(command("tune", "gpfl", *TOY), "gpfl tune needs Optuna, which is not installed: pip install 'gpfl[tune]'")
    assert read_files(Path()) == {}


def test_example_of_the_page_runs_with_a_small_budget(command: Command) -> None:
    [line] = re.findall(r"^gpfl (tune .* --data digits .*)$", (DOCS / "tune.md").read_text(), re.M)
    said = command(*line.split(), "--budget", 2, "--rounds", 1)
    assert said.code == 0, said.err
    assert "Run them: gpfl compare tune/common.toml --methods gpfl,ditto,fedavg --set gpfl.lam=" in said.out
