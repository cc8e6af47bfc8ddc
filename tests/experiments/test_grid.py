"""The grid: a content is run once, what is there is skipped, what was cut off goes on, and one failure is one failure."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyDataset, metrics_without_time, read_files, toy_table

import gpfl
from gpfl.data import DATASETS, PUBLISHED
from gpfl.engine.base import EvalRequest, TrainRequest
from gpfl.experiments import grid, grid_runner, trials
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, PaperValue, TableColumn
from gpfl.experiments.grid import GridPlan, Job, collect_results, find_jobs
from gpfl.federation import MANIFEST
from gpfl.methods import METHODS
from gpfl.training.callbacks import Callback
from gpfl.training.round_loop import RoundLoop, RunOutcome
from gpfl.training.run_dir import RunDir

FACTS = {"command": "gpfl reproduce toys", "commit": "abc1234"}
HALF = TableColumn("toy/half", "half", "toys", {"data": {"name": "toy"}, "train": {"client_fraction": 0.5}})
WHOLE = TableColumn("toy/whole", "whole", "toys", {"data": {"name": "toy"}}, note="a note")


def rows(*names: str) -> tuple[MethodVariant, ...]:
    return tuple(MethodVariant(name, {"name": name}) for name in names)


TABLE = Experiment(
    "toys", "Toys", "Toys.", "accuracy", rows("fedavg", "gpfl"), (WHOLE, HALF), {("toy/whole", "gpfl"): PaperValue(50)}
)
OTHER = Experiment("others", "Others", "Others.", "fairness", rows("gpfl"), (TableColumn("x/y", "y", "x", WHOLE.settings),), {})


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "toy", ToyDataset())


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that are begun or gone on with, in their order."""
    told: list[str] = []

    def steps(simulation: RoundLoop) -> Generator[TrainRequest | EvalRequest, Any, RunOutcome]:
        assert simulation.run_dir is not None
        path = simulation.run_dir.path
        told.append(f"{path.parent.name.rsplit('-', 1)[0].removeprefix('toy-pathological-4-mlp-')} {path.name}")
        return real(simulation)

    real = RoundLoop.steps
    monkeypatch.setattr(RoundLoop, "steps", steps)
    return told


def plan(out: Path, **changes: Any) -> GridPlan:
    return GridPlan(**{"out": out, "seeds": (0, 1), "rounds": 2, "patience": 0, **changes})


def cells(*experiments: Experiment) -> list[Cell]:
    return [Cell(one, column, row) for one in experiments for column in one.columns for row in one.rows]


def jobs(which: Iterable[Cell], how: GridPlan) -> list[Job]:
    found, wrong = grid.make_jobs(which, how)
    assert wrong == {}
    return found


def run(which: Iterable[Cell], how: GridPlan) -> dict[Path, str]:
    return grid_runner.run_all(jobs(which, how), how, lambda label: Callback(), FACTS)


def name(how: GridPlan, method: str = "gpfl", column: TableColumn = WHOLE) -> str:
    return jobs([Cell(TABLE, column, MethodVariant(method, {"name": method}))], how)[0].folder.name


# What a content is.


def test_cells_of_two_tables_with_one_content_are_one_job(tmp_path: Path) -> None:
    found = jobs(cells(TABLE, OTHER), plan(tmp_path))
    assert [len(job.cells) for job in found] == [1, 2, 1, 1]
    assert [cell.experiment.name for cell in found[1].cells] == ["toys", "others"]
    assert found[1].folder.name.startswith("toy-pathological-4-mlp-gpfl-")
    assert len(found[1].folder.name.rsplit("-", 1)[1]) == 8


def test_content_is_what_changes_numbers_and_nothing_else(tmp_path: Path) -> None:
    usual = name(plan(tmp_path))
    for same in (
        {"seeds": (5,)},
        {"weights": True},
        {"run": {"engine": "loop", "device": "cpu", "compile": "off", "checkpoint_every": 3}},
        {"overrides": {"gpfl": {"lam": 0.01}, "fedavg": {}}},  # the default
        {"common": {"train": {"lr": 0.1}}},  # the data's own
    ):
        assert name(plan(tmp_path, **same)) == usual, same
    for other in (
        {"rounds": 3},
        {"patience": 1},
        {"validation": 0.2},
        {"protocol": "paper"},
        {"run": {"eval_every": 2}},
        {"run": {"precision": "tf32"}},
        {"overrides": {"gpfl": {"lam": 0.02}}},
        {"common": {"train": {"lr": 0.2}}},
    ):
        assert name(plan(tmp_path, **other)) != usual, other


def test_data_of_the_same_name_and_other_rows_are_another_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = name(plan(tmp_path))
    monkeypatch.setitem(DATASETS, "toy", ToyDataset(make=lambda: toy_table(120, seed=1)))
    assert name(plan(tmp_path)) != usual


def test_protocols_that_do_not_differ_for_a_method_share_its_runs(tmp_path: Path) -> None:
    for method, alike in {"fedavg": True, "gpfl": False, "ditto": True}.items():
        names = {name(plan(tmp_path, protocol=protocol), method) for protocol in ("corrected", "paper")}
        assert (len(names) == 1) == alike, method
    assert name(plan(tmp_path, protocol="reference"), "fedavg") != name(plan(tmp_path), "fedavg")


def test_settings_that_no_run_can_have_are_refused_with_their_cell(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match=r"toy/whole gpfl: unknown key 'method.lamb'; did you mean 'lam'?"):
        grid.check_cells(cells(TABLE), plan(tmp_path, overrides={"gpfl": {"lamb": 1}}))


def test_cell_that_cannot_be_laid_out_leaves_the_others(tmp_path: Path) -> None:
    crowded = TableColumn("toy/crowded", "crowded", "toys", {"data": {"name": "toy"}, "partition": {"clients": 500}})
    found, wrong = grid.make_jobs([Cell(TABLE, column, TABLE.rows[0]) for column in (crowded, WHOLE)], plan(tmp_path))
    assert [job.cells[0].column.key for job in found] == ["toy/whole"]
    assert "lower --clients" in wrong["toy/crowded", "fedavg"]


# Skipping and going on.


def test_what_is_there_is_skipped_and_new_seeds_are_added(tmp_path: Path, begun: list[str]) -> None:
    assert run(cells(TABLE), plan(tmp_path)) == {}
    assert len(begun) == 8
    before = read_files(tmp_path)
    del begun[:]
    assert run(cells(TABLE, OTHER), plan(tmp_path)) == {}
    assert begun == []
    assert read_files(tmp_path) == before
    assert run(cells(OTHER), plan(tmp_path, seeds=(1, 2))) == {}
    assert begun == ["gpfl seed-2"]
    [job] = jobs(cells(OTHER), plan(tmp_path))
    trials = job.trials("mine", (1, 2))
    assert trials is not None
    assert trials.method == "mine"
    assert trials.values("seed") == [1, 2]
    assert job.trials("mine", (7,)) is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid that was not cut off."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "toy", ToyDataset())
        assert run(cells(TABLE), plan(folder)) == {}
    return folder


@pytest.mark.parametrize("lines", [1, pytest.param(8, marks=pytest.mark.slow), 14])
def test_grid_that_was_cut_off_ends_elsewhere_as_one_that_was_not(
    tmp_path: Path, whole: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    real, seen = RunDir.append_metrics, [0]

    def append(folder: RunDir, line: dict[str, object]) -> None:
        real(folder, line)
        seen[0] += 1
        if seen[0] == lines:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "append_metrics", append)
        with pytest.raises(KeyboardInterrupt):
            run(cells(TABLE), plan(tmp_path / "here", run={"checkpoint_every": 1}))
    there = shutil.move(tmp_path / "here", tmp_path / "there")  # as if to another machine
    ended = {path.parent for path in there.glob("runs/*/*/summary.json")}
    del begun[:]
    assert run(cells(TABLE), plan(there)) == {}
    assert len(begun) == 8 - len(ended)
    folders = sorted(whole.glob("runs/*/seed-*"))
    assert len(folders) == 8
    for folder in folders:
        assert metrics_without_time(folder) == metrics_without_time(there / folder.relative_to(whole))


def test_more_rounds_are_another_run_and_the_shorter_one_stays(tmp_path: Path, begun: list[str]) -> None:
    assert run(cells(OTHER), plan(tmp_path)) == {}
    assert run(cells(OTHER), plan(tmp_path, rounds=3)) == {}
    assert len(begun) == 4
    assert len(list(tmp_path.glob("runs/*/trials.json"))) == 2


def test_unreadable_file_fails_its_cell_and_is_kept(tmp_path: Path, begun: list[str]) -> None:
    how = plan(tmp_path)
    assert run(cells(OTHER), how) == {}
    [job] = jobs(cells(OTHER), how)
    del begun[:]
    for name in ("seed-1/summary.json", "config.toml"):
        path = job.folder / name
        good = path.read_text()
        path.write_text("half")
        assert str(path) in run(cells(OTHER), plan(tmp_path, seeds=(0, 1, 2)))[job.folder]
        assert path.read_text() == "half"
        path.write_text(good)
    assert begun == []


# Failures.


def test_cell_that_fails_is_named_and_the_others_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    real = grid_runner.run_trials

    def run_trials(given: dict[str, dict[str, object]], *rest: Any, **more: Any) -> object:
        if given["method"]["name"] == "fedavg":
            raise (
                RuntimeError("the device\nis on fire")
                if "train" in given and "client_fraction" in given["train"]
                else gpfl.GpflError("no")
            )
        return real(given, *rest, **more)

    monkeypatch.setattr(grid_runner, "run_trials", run_trials)
    how = plan(tmp_path)
    found = jobs(cells(TABLE), how)
    problems = grid_runner.run_all(
        found, how, lambda label: Callback(), FACTS, lambda job, words: told.append((job.label, words))
    )
    assert [bool(words) for _, words in told] == [True, False, True, False]
    assert problems[found[0].folder] == "no"
    kept = tmp_path / "problems" / f"{found[2].folder.name}.txt"
    assert problems[found[2].folder] == f"RuntimeError: the device; traceback: {kept}"
    assert "is on fire" in kept.read_text()
    assert [len(job.finished(how.seeds)) for job in found] == [0, 2, 0, 2]


def test_seeds_that_do_not_fit_at_once_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    large: list[weakref.ref[torch.Tensor]] = []
    held: list[object] = []
    real = trials.execute_trials

    def execute(runs: list[Any]) -> list[Any]:
        asked.append(len(runs))
        if len(runs) > 1:
            weights = torch.zeros(3)
            large.append(weakref.ref(weights))
            raise torch.OutOfMemoryError("too much")
        held.append(large[0]())
        return real(runs)

    monkeypatch.setattr(trials, "execute_trials", execute)
    assert run(cells(OTHER), plan(tmp_path, seeds=(0, 1, 2))) == {}
    assert asked == [3, 1, 1, 1]
    assert held == [None, None, None], "what did not fit is let go of before the next attempt"
    assert len(jobs(cells(OTHER), plan(tmp_path))[0].finished((0, 1, 2))) == 3


def test_job_that_another_process_is_at_is_left_to_it(tmp_path: Path, begun: list[str]) -> None:
    how = plan(tmp_path)
    [job] = jobs(cells(OTHER), how)
    with grid_runner.lock_folder(job.folder) as mine:
        assert mine
        [words] = run(cells(OTHER), how).values()
        assert words == grid_runner.LOCKED
        assert begun == []
    assert run(cells(OTHER), how) == {}
    assert list((tmp_path / "runs").glob(".*")) == []


def test_job_that_another_process_has_ended_meanwhile_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(job: Job, how: GridPlan, *rest: Any) -> bool:
        begin(job, how, *rest)
        return False

    begin = grid_runner.run
    monkeypatch.setattr(grid_runner, "run", elsewhere)
    assert run(cells(OTHER), plan(tmp_path)) == {}


# Weights, notes and results.


def test_weights_go_unless_they_are_wanted_or_a_figure_needs_them(tmp_path: Path) -> None:
    drawn = TableColumn("toy/drawn", "drawn", "toys", {**WHOLE.settings, "run": {"select": "test"}}, weights=True)
    for how, column, kept in (
        (plan(tmp_path / "gone"), WHOLE, False),
        (plan(tmp_path / "kept", weights=True), WHOLE, True),
        (plan(tmp_path / "drawn"), drawn, True),
    ):
        assert run([Cell(TABLE, column, TABLE.rows[1])], how) == {}
        [seed] = how.out.glob("runs/*/seed-0")
        assert (seed / "models").is_dir() == kept
        assert (seed / "checkpoint.safetensors").exists() == kept
        assert RunDir(seed).read_complete_metrics()
    assert next((tmp_path / "drawn").glob("runs/*/seed-0/selected.safetensors"))


def test_results_hold_all_cells_that_are_asked_for_or_were_run(tmp_path: Path) -> None:
    how = plan(tmp_path)
    assert run([Cell(TABLE, WHOLE, TABLE.rows[1])], how) == {}
    found = collect_results(
        TABLE, jobs(cells(TABLE), how), how, extra_rows=rows("local"), problems={("toy/whole", "fedavg"): "no"}
    )
    assert [column.key for column in found.columns] == ["toy/whole"]
    assert [row.label for row in found.rows] == ["fedavg", "gpfl", "local"]
    assert found.trials.keys() == {("toy/whole", label) for label in ("fedavg", "gpfl", "local")}
    assert [bool(trials) for trials in found.trials.values()] == [False, True, False]
    assert found.problems == {("toy/whole", "fedavg"): "no"}
    assert found.commits == {("toy/whole", "gpfl"): ("abc1234",)}
    assert [c.key for c in collect_results(TABLE, [], how, columns=["toy/half"]).columns] == ["toy/half"]
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/made-*.json")]
    assert [note["command"] for note in notes] == ["gpfl reproduce toys"] * 2


def test_every_commit_that_had_a_part_in_a_run_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(folder: RunDir, line: dict[str, object]) -> None:
        raise KeyboardInterrupt

    how = plan(tmp_path, seeds=(0,))
    [job] = jobs(cells(OTHER), how)
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "append_metrics", cut)
        with pytest.raises(KeyboardInterrupt):
            run(cells(OTHER), how)
    assert grid_runner.run_all([job], how, lambda label: Callback(), {**FACTS, "commit": "def5678"}) == {}
    assert collect_results(OTHER, [job], how).commits == {("x/y", "gpfl"): ("abc1234", "def5678")}
    (job.folder / "made-0.json").write_text("{")
    assert collect_results(OTHER, [job], how).commits == {("x/y", "gpfl"): ("unknown",)}


def test_heavy_states_are_written_more_rarely_unless_someone_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def every(**changes: Any) -> list[object]:
        found = jobs([Cell(TABLE, WHOLE, row) for row in rows("fedavg", "ditto")], plan(tmp_path, **changes))
        return [job.settings["run"]["checkpoint_every"] for job in found]

    assert every() == [10, 10]
    [shared, private] = jobs([Cell(TABLE, WHOLE, row) for row in rows("fedavg", "ditto")], plan(tmp_path))
    assert private.memory > shared.memory, "each client of Ditto has a model of its own"
    monkeypatch.setattr(grid, "CHECKPOINT_BYTES", 3000)
    often, rarely = every()
    assert 10 <= int(str(often)) < int(str(rarely))
    assert every(run={"checkpoint_every": 7}) == [7, 7]


# Several places.


def test_runs_made_in_two_places_are_one_table_once_they_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, merged = (tmp_path / name for name in ("here", "there", "merged"))
    assert run(cells(TABLE), plan(here, seeds=(0,))) == {}
    assert run([Cell(TABLE, WHOLE, TABLE.rows[1])], plan(there, seeds=(1, 2))) == {}
    for place in (here, there):
        shutil.copytree(place, merged, dirs_exist_ok=True)
    how = plan(merged, seeds=(0, 1, 2))
    monkeypatch.delitem(DATASETS, "toy")  # a machine that has no data reads tables all the same
    monkeypatch.setitem(DATASETS, "toy", ToyDataset(make=lambda: pytest.fail("the data are not asked for")))
    found, wrong = find_jobs(cells(TABLE, OTHER), how)
    assert wrong == {}
    gathered = collect_results(TABLE, found, how)
    assert {place: len(trials.runs) for place, trials in gathered.trials.items() if trials} == {
        ("toy/whole", "fedavg"): 1,
        ("toy/whole", "gpfl"): 3,
        ("toy/half", "fedavg"): 1,
        ("toy/half", "gpfl"): 1,
    }
    assert [len(job.cells) for job in found] == [1, 2, 1, 1]


def test_runs_are_found_without_data_by_all_that_changes_numbers(tmp_path: Path) -> None:
    methods = [Cell(TABLE, WHOLE, row) for row in rows(*METHODS)]
    how = plan(tmp_path, seeds=(0,), rounds=1)
    assert run(methods, how) == {}
    found, _ = find_jobs(methods, how)
    assert [job.folder for job in found] == [job.folder for job in jobs(methods, how)]
    for other in (
        {"rounds": 2},
        {"patience": 1},
        {"validation": 0.2},
        {"run": {"precision": "tf32"}},
        {"common": {"train": {"lr": 0.2}}},
        {"common": {"defence": {"clip": 1.0}}},
    ):
        assert find_jobs(methods, plan(tmp_path, **{"seeds": (0,), "rounds": 1, **other})) == ([], {}), other
    assert find_jobs(methods[:1], plan(tmp_path, rounds=1, overrides={"gpfl": {"lam": 0.02}})) == ([], {})
    copy = found[0].folder.with_name("gpfl-of-other-data")
    shutil.copytree(found[0].folder, copy)
    manifest = copy / MANIFEST
    manifest.write_text(re.sub('sha256 = ".*"', 'sha256 = "0"', manifest.read_text()))
    assert "remove all but one of gpfl-of-other-data, toy" in find_jobs(methods, how)[1]["toy/whole", "gpfl"]


def test_data_are_here_where_they_are_parsed_or_lie_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    assert grid.has_data("toy")
    assert grid.has_data("digits")
    assert not grid.has_data("har")
    (tmp_path / PUBLISHED["har"].files[0].name).write_text("")
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    assert grid.has_data("har")
