"""The command `gpfl reproduce`, on a table of toys."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, ToyDataset, make_fedper_diverge, read_files
from toy_tables import SHORT, assert_rejected, finished_runs, read_table

import gpfl
from gpfl.data import DATASETS, PUBLISHED
from gpfl.experiments import definitions as studies
from gpfl.experiments import grid, grid_runner, trials
from gpfl.experiments.definitions import select_cells
from gpfl.training import config as configs
from gpfl.training.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("toy_tables")


# Tables beside each other.


def test_table_of_other_settings_stands_beside_the_first(command: Command) -> None:
    given = ("reproduce", "toys", "--cells", "toy/whole", *SHORT, "--no-figures")
    assert command(*given).code == 0
    before = read_files(Path("results/toys"))
    said = command(*given, "--protocol", "reference", "--table", "toys-reference")
    assert said.code == 0
    assert "results/toys-reference/table.md" in said.out
    assert read_files(Path("results/toys")) == before
    assert "protocol reference" in Path("results/toys-reference/table.md").read_text()
    assert "--table toys-reference" in Path("results/toys-reference/table.md").read_text()
    assert r"\label{tab:gpfl-toys-reference}" in Path("results/toys-reference/table.tex").read_text()
    assert {row["experiment"] for row in read_table("toys-reference").values()} == {"toys"}
    other = read_files(Path("results/toys-reference"))
    assert command(*given, "--only-tables", "--table", "toys").code == 0
    assert read_table() == {key: row for key, row in read_table().items() if row["protocol"] == "corrected"}
    assert read_files(Path("results/toys-reference")) == other


def test_columns_that_a_setting_makes_the_same_stand_there_once(command: Command) -> None:
    """With the extra column's rate the first is that column, and only it says so itself."""
    given = ("reproduce", "toys", "--set", "train.lr=0.2", *SHORT, "--no-figures")
    for cells, shown in {"toy/some": {"toy/some"}, "toy/whole": {"toy/whole", "toy/some"}}.items():
        assert command(*given, "--cells", cells).code == 0
        assert {column for column, _ in read_table()} == shown
    assert command(*given, "--cells", "toy/some").code == 0
    assert {column for column, _ in read_table()} == {"toy/extra", "toy/some"}


@pytest.mark.parametrize(
    ("asked", "name", "words"),
    [
        (("toys",), "../away", "--table is '../away'; it must be letters, digits, '-', '_' and '.'"),
        (("toys",), "", "--table is ''; it must be letters"),
        (("toys",), ".hidden", "--table is '.hidden'; it must be letters"),
        (("toys",), "Runs", "--table is 'Runs', which is reserved: choose another name, such as toys-2"),
        (("toys",), "fair", "--table is 'fair', which is reserved"),
        (("toys", "fair"), "both", "--table both names one table, but there are 2: choose one of toys, fair"),
    ],
)
def test_name_that_is_no_folder_of_one_table_is_refused(
    command: Command, asked: tuple[str, ...], name: str, words: str
) -> None:
    assert_rejected(command("reproduce", *asked, "--cells", "toy/*", *SHORT, "--table", name), words)
    assert not Path("results").exists()


def test_other_data_are_refused_under_the_names_of_the_papers(command: Command) -> None:
    assert_rejected(
        command("reproduce", "toys", *SHORT, "--set", "data.name=digits"),
        "--set data.name would put other data into the paper's tables: use gpfl compare --data",
    )


def test_cause_that_many_cells_share_is_told_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise gpfl.GpflError("the file is not what it was")

    monkeypatch.setattr(configs.Config, "federation", broken)
    for words in (("--dry-run",), ()):
        said = command("reproduce", "toys", "--cells", "toy/*", *SHORT, *words)
        assert said.code == 1
        assert said.err.count("the file is not what it was") == 1
        assert "toy/whole, toy/some, toy/extra fedavg, fedper, gpfl: the file is not what it was\n" in said.err
        assert Path("results/toys").exists() == (not words)
    assert {row["state"] for row in read_table().values()} == {"failed"}
    assert Path("results/toys/table.md").read_text().count("the file is not what it was") == 1


# Listing.


def test_without_a_name_the_experiments_are_listed(command: Command) -> None:
    said = command("reproduce")
    assert said.code == 0, said.err
    assert "toys (table9): Toys; 3 methods" in said.out
    assert "  toy/some   N = 3|4, toys" in said.out
    assert "HAR, people; data not downloaded: gpfl data get har" in said.out
    assert "Extra, toys; on request: name it in --cells" in said.out
    assert read_files(Path()) == {}


def test_dry_run_lists_cells_with_memory_and_runs_nothing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "provenance_warning", lambda table: f"{table.name} is a part.")
    said = command("reproduce", "all", "--dry-run", *SHORT)
    assert said.out.count("toy is a part.") == 1
    assert said.out.endswith("All but privacy, which is made by attacks: gpfl privacy attacks.\n")
    assert said.code == 0, said.err
    assert "har/real: data not downloaded: gpfl data get har" in said.out
    assert "6 cells to run, 0 done; at most 2 rounds, patience 100." in said.out, "the fair ones are among them"
    assert "fair, toys" in said.out or "toys, fair" in said.out
    assert "0/2" in said.out
    assert "about 7" in said.out, "kilobytes"
    assert read_files(Path()) == {}
    assert command("reproduce", "toys", *SHORT, "--cells", "toy/whole", "--methods", "gpfl").code == 0
    again = command(
        "reproduce", "toys", "--dry-run", "--rounds", 2, "--seeds", "0,1,2", "--cells", "toy/*", "--methods", "gpfl"
    )
    assert "3 cells to run, 0 done" in again.out
    assert "2/3" in again.out


# Running.


def test_a_cell_is_run_and_its_table_shows_ours_beside_the_papers(command: Command) -> None:
    said = command("reproduce", "table9", "--methods", "gpfl,fedavg", "--cells", "toy/whole", *SHORT)
    assert said.code == 0, said.err
    assert "validation, %" not in said.out
    assert len(finished_runs()) == 4
    assert all(word in said.out for word in ("toy/whole gpfl:", "2/2 cells", "Toys: results/toys/table.md"))
    found = read_table()
    assert {column for column, _ in found} == {"toy/whole"}
    one = found["toy/whole", "gpfl"]
    summaries = [json.loads(path.read_text()) for path in Path("results").glob("runs/*-gpfl-*/seed-*/summary.json")]
    assert float(one["accuracy"]) == pytest.approx(50 * sum(s["best_accuracy"] for s in summaries))
    assert float(one["difference"]) == pytest.approx(float(one["accuracy"]) - 60)
    assert found["toy/whole", "fedper"]["state"] == "not run"
    last = Path("results/toys/table.md").read_text().splitlines()[-1]
    assert last.startswith(
        "Made by `gpfl reproduce table9 --methods gpfl,fedavg --cells toy/whole --rounds 2 --seeds 0,1`; commit "
    )
    assert "device cpu; seeds 0, 1" in last
    assert "not run" in Path("results/toys/table.tex").read_text()


def test_tables_grow_by_what_is_run_and_share_runs_of_one_content(command: Command) -> None:
    assert command("reproduce", "toys", "--methods", "gpfl", "--cells", "whole", *SHORT, "--no-figures").code == 0
    assert command("reproduce", "toys", "--methods", "fedavg", "--cells", "some", *SHORT, "--no-figures").code == 0
    found = read_table()
    assert {place for place, row in found.items() if row["state"] == "run"} == {("toy/whole", "gpfl"), ("toy/some", "fedavg")}
    before = finished_runs()
    said = command("reproduce", "fair", "--methods", "gpfl", *SHORT)
    assert said.code == 0, said.err
    assert finished_runs() == before
    assert "Already finished: 1 of 1 cell." in said.out
    assert Path("results/fair/fair.png").stat().st_size > 0
    assert Path("results/fair/table.md").read_text().endswith("\n\n![fair](fair.png)\n")
    one = read_table("fair")["toy/again", "gpfl"]
    assert float(one["client_std"]) - 2.0 == pytest.approx(float(one["difference"]))
    assert float(one["client_cov"]) - 10.0 == pytest.approx(float(one["difference_cov"]))


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        ("toy", {"toy/whole", "toy/some"}),
        ("toy/*", {"toy/whole", "toy/some", "toy/extra"}),
        ("extra", {"toy/extra"}),
        ("toy,toy/extra", {"toy/whole", "toy/some", "toy/extra"}),
    ],
)
def test_extra_columns_are_meant_by_half_of_a_key_that_means_no_other(cells: str, columns: set[str]) -> None:
    asked = select_cells([studies.load_experiments()["toys"]], cells, "all")
    assert {column.key for column in asked.columns["toys"]} == columns


def test_extra_columns_and_rows_are_run_where_they_are_named(command: Command) -> None:
    given = ("reproduce", "toys", "--methods", "local,local", "--cells", "toy/extra", *SHORT, "--no-figures")
    assert command(*given).code == 0
    found = read_table()
    assert Path("results/toys/table.md").read_text().count("| Local |") == 1, "a row that is named twice is one row"
    assert found["toy/extra", "local"]["state"] == "run"
    assert found["toy/extra", "local"]["paper"] == ""
    assert len(finished_runs()) == 2
    assert command("reproduce", "toys", "--methods", "gpfl", "--cells", "toy/whole", *SHORT, "--no-figures").code == 0
    found = read_table()
    assert found["toy/extra", "local"]["state"] == "run", "a row that was run before is shown where it was not asked for"
    assert {method for _, method in found} == {"fedavg", "fedper", "gpfl", "local"}


def test_validation_rows_give_a_second_accuracy(command: Command) -> None:
    given = ("reproduce", "toys", "--methods", "gpfl", "--cells", "toy/whole", *SHORT, "--no-figures")
    said = command(*given, "--validation-fraction", 0.2)
    assert "validation, %" in said.out
    selected = float(read_table()["toy/whole", "gpfl"]["validation_selected"])
    assert f"{selected:.2f} ±" in said.out
    assert rf"\quad by validation & {selected:.2f} $\pm$" in Path("results/toys/table.tex").read_text()
    assert command(*given).code == 0
    assert read_table()["toy/whole", "gpfl"]["validation_selected"] == ""
    assert len(finished_runs()) == 4


def test_tables_are_written_of_what_is_there_and_nothing_is_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("reproduce", "toys", "--cells", "toy/*", *SHORT)
    assert command(*given, "--methods", "gpfl,fedavg", "--no-figures").code == 0
    before, table = finished_runs(), Path("results/toys/table.csv").read_text()
    Path("results/toys/table.csv").unlink()
    monkeypatch.setattr(ToyDataset, "load", lambda source: pytest.fail("the data are not asked for"))
    said = command(*given, "--only-tables")
    assert said.code == 0, said.err
    assert Path("results/toys/table.csv").read_text() == table
    assert finished_runs() == before


def test_folder_that_cannot_be_written_to_is_one_complaint(command: Command) -> None:
    Path("file").write_text("")
    for more in ((), ("--dry-run",), ("--only-tables",)):
        assert_rejected(command("reproduce", "toys", *SHORT, "--out", "file", *more), "--out file is a file; choose a folder")
    assert_rejected(
        command("reproduce", "toys", *SHORT, "--out", "file/in"), "cannot make the folder file/in/runs", "another --out"
    )


def test_protocol_and_settings_reach_the_runs(command: Command) -> None:
    given = ("reproduce", "toys", "--methods", "gpfl,fedavg", "--cells", "toy/whole", *SHORT, "--no-figures")
    assert (
        command(*given, "--protocol", "paper", "--set", "gpfl.lam=0.5", "--set", "train.lr=0.3", "--engine", "loop").code == 0
    )
    [config] = Path("results").glob("runs/*-gpfl-*/config.toml")
    text = config.read_text()
    for line in ('protocol = "paper"', 'p_scale = "mean"', "lam = 0.5", "lr = 0.3", 'engine = "loop"', "patience = 100"):
        assert line in text
    assert read_table()["toy/whole", "gpfl"]["protocol"] == "paper"
    assert "protocol paper" in Path("results/toys/table.md").read_text()


@pytest.mark.parametrize("names", [("TOYS",), ("Table9,fair",), ("toys", "FAIR")])
def test_names_are_taken_in_any_case_and_with_commas(command: Command, names: tuple[str, ...]) -> None:
    said = command("reproduce", *names, "--dry-run", "--methods", "gpfl", *SHORT)
    assert said.code == 0, said.err
    assert ("fair" in said.out) == (names != ("TOYS",))


def test_tuned_values_reach_the_runs_and_are_named_and_kept(command: Command) -> None:
    pytest.importorskip("optuna")
    toy = ("--data", "toy", "--rounds", 2, "--budget", 3)
    assert command("tune", "gpfl,fedavg", *toy, "--out", "search").code == 0
    path = Path("search/gpfl/best.toml")
    path.write_text(re.sub(r"^lam = .*", "lam = 0.02", path.read_text(), flags=re.M))  # toys may be content with the defaults
    best = tomllib.loads(path.read_text())["method"]
    assert best["lam"] == 0.02
    given = ("reproduce", "toys", "--cells", "toy/whole", *SHORT, "--no-figures", "--tuned", "search")
    said = command(*given, "--methods", "gpfl,fedavg")
    assert said.code == 0, said.err
    assert "the search is copied to results/tuned/search" in said.out
    [config] = Path("results").glob("runs/*-gpfl-*/seed-0/config.toml")
    method = tomllib.loads(config.read_text())["method"]
    assert {key: method[key] for key in best} == best
    page = Path("results/toys/table.md").read_text()
    assert "tuned on validation samples (candidates: fedavg 1, gpfl 3; seeds 0; 2 rounds; 0.2 of the training samples)" in page
    assert f"gpfl.lam = {best['lam']!r}" in page
    assert "set by hand" not in page
    kept = Path("results/tuned/search")
    assert {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()} == {
        "table.md",
        "table.csv",
        "common.toml",
        "federation.toml",
        *(f"{name}/{file}" for name in ("gpfl", "fedavg") for file in ("best.toml", "study.toml")),
    }
    again = command(*given[:-1], str(kept), "--methods", "gpfl,fedavg", "--only-tables")
    assert again.code == 0, again.err
    assert sorted(path.name for path in Path("results/tuned").iterdir()) == ["search"]
    assert command(*given[:-2], "--methods", "gpfl").code == 0
    assert read_table()["toy/whole", "gpfl"]["tuned"] == ""
    assert len(list(Path("results").glob("runs/*-gpfl-*"))) == 2, "defaults are another content"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--methods fedper", "--tuned search holds no search of fedper: search it with the same budget, or omit it"),
        ("--methods fedavg --cells toy/extra", "has 0.2: search with gpfl tune --set train.lr=0.2, or choose the columns"),
        (
            "--methods fedavg --cells toy/some",
            "has 3: search with gpfl tune --set partition.clients=3 --set partition.total_clients=4, or",
        ),
        (
            "--methods fedavg --protocol paper --cells toy/whole",
            "run.protocol (--protocol) = corrected, but toy/whole has paper",
        ),
        ("--methods fedavg --tuned nothing", "--tuned nothing holds no finished search"),
    ],
)
def test_tuned_values_of_something_else_are_refused(command: Command, more: str, words: str) -> None:
    pytest.importorskip("optuna")
    assert command("tune", "fedavg", "--data", "toy", "--rounds", 1, "--out", "search").code == 0
    assert_rejected(command("reproduce", "toys", *SHORT, "--tuned", "search", *more.split()), words)
    assert not Path("results").exists()


def test_damaged_search_and_values_that_are_given_twice_are_refused(command: Command) -> None:
    pytest.importorskip("optuna")
    assert command("tune", "fedprox", "--data", "toy", "--rounds", 1, "--budget", 1, "--with-lr", "--out", "search").code == 0
    given = ("reproduce", "toys", *SHORT, "--methods", "fedprox", "--cells", "toy/whole", "--tuned", "search")
    for key in ("fedprox.mu", "train.lr"):
        assert_rejected(command(*given, "--set", f"{key}=0.5"), f"{key} is given by --set and by --tuned search: leave one")
    assert_rejected(command(*given[:-1], ""), "--tuned is empty; name a folder")
    for name, text in (("best.toml", "[data]\n"), ("study.toml", "[train]\nrounds = 1\n")):
        path = Path("search/fedprox", name)
        before = path.read_text()
        path.write_text(text)
        assert_rejected(command(*given), "search/fedprox cannot be read", "search it again")
        path.write_text(before)
    assert command(*given, "--dry-run").code == 0
    assert not Path("results").exists()


def test_data_that_are_not_here_are_named_and_got_only_where_nothing_else_is_asked(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[str] = []

    def get(source: object, *rest: object, **more: object) -> None:
        got.append(source.name)  # type: ignore[attr-defined]
        raise gpfl.GpflError("the publisher cannot be reached")

    monkeypatch.setattr(type(PUBLISHED["har"]), "prepare", get)
    said = command("reproduce", "toys", "--methods", "fedavg", "--cells", "har/*,toy/whole", *SHORT, "--no-figures")
    assert said.code == 0, said.err
    assert "har/real: data not downloaded: gpfl data get har" in said.out
    assert got == []
    assert_rejected(command("reproduce", "toys", "--cells", "har/real", *SHORT), "the publisher cannot be reached")
    assert got == ["har"]
    said = command("reproduce", "toys", "--cells", "har/real", "--dry-run")
    assert said.code == 0
    assert "Left out because their data are missing: har/real." in said.out
    assert "seeds done" not in said.out, "no table without a cell"
    assert got == ["har"]


# Going on, and failing.


def test_stopped_grid_keeps_what_is_done_and_the_same_command_goes_on(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("reproduce", "toys", "--cells", "toy/*", *SHORT)
    real, seen = RunDir.append_metrics, [0]

    def append(folder: RunDir, line: dict[str, object]) -> None:
        real(folder, line)
        seen[0] += 1
        if seen[0] == 9:
            monkeypatch.setattr(RunDir, "append_metrics", real)
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "append_metrics", append)
    said = command(*given)
    assert said.code == 130
    assert "stopped; resume with: gpfl reproduce toys --cells 'toy/*' --rounds 2 --seeds 0,1" in said.err
    kept = len(finished_runs())
    assert 0 < kept < 18
    assert any(row["state"] == "run" for row in read_table().values()), "the table has what is done"
    again = command(*given)
    assert again.code == 0, again.err
    assert len(finished_runs()) == 18
    assert all(row["state"] == "run" for row in read_table().values())


def test_failed_cell_is_named_at_the_end_and_the_code_is_not_0(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = grid_runner.run_trials

    def run_trials(given: dict[str, dict[str, object]], *rest: Any, **more: Any) -> object:
        if given["method"]["name"] == "fedper":
            raise gpfl.GpflError("round 3: the loss of client 2 is nan")
        return real(given, *rest, **more)

    monkeypatch.setattr(grid_runner, "run_trials", run_trials)
    said = command("reproduce", "toys", "--cells", "toy/whole", *SHORT, "--no-figures")
    assert said.code == 1
    assert "1 cell of 3 failed; fix them and repeat the command to continue" in said.err
    assert "toy/whole fedper: round 3: the loss of client 2 is nan" in said.err
    assert {method: row["state"] for (_, method), row in read_table().items()} == {
        "fedavg": "run",
        "fedper": "failed",
        "gpfl": "run",
    }
    assert "toy/whole FedPer failed: round 3: the loss of client 2 is nan" in Path("results/toys/table.md").read_text()
    monkeypatch.setattr(grid_runner, "run_trials", real)
    assert command("reproduce", "toys", "--cells", "toy/whole", *SHORT, "--no-figures").code == 0


@pytest.mark.parametrize("memory", [True, False])
def test_seed_that_diverges_is_named_and_the_others_stand_in_the_table(
    command: Command, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    make_fedper_diverge(monkeypatch, 1)
    real = trials.execute_trials

    def execute(runs: list[Any]) -> list[Any]:
        if len(runs) > 1 and not memory:
            raise torch.OutOfMemoryError("too many")
        return real(runs)

    monkeypatch.setattr(trials, "execute_trials", execute)
    said = command("reproduce", "toys", "--cells", "toy/whole", "--rounds", 2, "--seeds", "0,1,2", "--no-figures")
    assert said.code == 1
    assert "toy/whole fedper: seed 1: round 1: the loss of client 0 is nan (term 'ce'): lower train.lr" in said.err
    assert {method: row["trials"] for (_, method), row in read_table().items()} == {"fedavg": "3", "fedper": "2", "gpfl": "3"}
    assert "FedPer: seed 1: round 1" in Path("results/toys/table.md").read_text()
    ended = [path.parent for path in Path("results").glob("runs/*/seed-*/summary.json")]
    assert len(ended) == 8
    again = command("reproduce", "toys", "--cells", "toy/whole", "--rounds", 2, "--seeds", "0,1,2", "--only-tables")
    assert (again.code, again.err) == (0, "")
    assert "FedPer: seed 1 diverged in round 1" in Path("results/toys/table.md").read_text()
    assert read_table()["toy/whole", "fedper"]["problem"] == "seed 1 diverged in round 1"
    assert not any((path / "models").exists() for path in ended), "their weights are dropped as others' are"


def test_cell_that_cannot_be_divided_fails_alone(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "har", ToyDataset(name="har", make=lambda: gpfl.Table([[0.0], [1.0]], [0, 1], name="har")))
    said = command("reproduce", "toys", "--methods", "fedavg", "--cells", "toy/whole,har/real", *SHORT, "--no-figures")
    assert said.code == 1
    assert "har/real fedavg:" in said.err
    assert read_table()["toy/whole", "fedavg"]["state"] == "run"


# Mistakes.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("toyss", "unknown experiment 'toyss'; did you mean 'toys'?"),
        ("toys --cells toy/hole", "--cells names 'toy/hole', which is not a cell; did you mean 'toy/whole'?"),
        ("toys --cells toy/whole,", "it must be names separated by commas"),
        ("toys --methods gpfll", "--methods names 'gpfll', which is not a method; did you mean 'gpfl'?"),
        ("toys --methods ablations", "toys has no row of --methods ablations; its rows are fedavg, fedper, gpfl"),
        (
            "toys fair --methods fedper --cells toy/again",
            "toys, fair has no row of --methods fedper in the columns of --cells",
        ),
        ("toys --set train.rounds=3", "--set train.rounds would not be named in tables: use --rounds"),
        ("toys --set run.protocol=paper", "use --protocol"),
        ("toys --dry-run --only-tables", "were both given: leave one out"),
        (
            "toys --only-tables --rounds 7",
            "results holds no finished run of these cells with 7 rounds, patience 100",
        ),
        ("toys --seeds 0,0", "give each only once"),
        ("toys --rounds 0", "train.rounds (--rounds) is 0; it must be at least 1"),
        ("toys --patience -1", "train.patience (--patience) is -1; it must be at least 0"),
        ("toys --validation-fraction 2", "partition.validation_fraction (--validation-fraction) is 2"),
        ("toys --protocol papr", "did you mean 'paper'?"),
        ("toys --device meta", "run.device (--device) is 'meta'"),
        ("toys --precision tf32 --device cpu", "run.precision (--precision) is 'tf32', which needs a GPU"),
        ("toys --set gpfl.lamb=1", "unknown key 'method.lamb'; did you mean 'lam'?"),
        ("toys --set ditto.mu=1", "is for a method that is not run: add ditto to --methods"),
        ("toys --set method.lam=1", "does not name the method"),
        ("toys --set run.seed=1", "use --seeds"),
        ("toys --out=", "--out is empty; name a folder"),
        ("toys --lam 1", "No such option '--lam'"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_written(command: Command, given: str, words: str) -> None:
    assert_rejected(command("reproduce", *given.split()), words)
    assert read_files(Path()) == {}
