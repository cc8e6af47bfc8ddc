"""What `gpfl reproduce` does with a folder of which something is damaged, lost, or another run's."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command, ToyDataset, metrics_without_time, read_files
from toy_tables import FAIR, SHORT, TOYS, read_table, replace_experiments

from gpfl.cli.main import command as gpfl_command
from gpfl.data import DATASETS
from gpfl.experiments import grid_runner

pytestmark = pytest.mark.usefixtures("toy_tables")

ALL = ("reproduce", "toys", "fair", "--cells", "toy/whole,toy/again", *SHORT, "--no-figures")


@pytest.fixture(scope="module")
def finished_grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with finished runs and their tables."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = [*map(str, ALL), "--out", str(folder / "results")]
    with pytest.MonkeyPatch.context() as patch, replace_experiments(folder, toys=TOYS, fair=FAIR):
        patch.setitem(DATASETS, "toy", ToyDataset())
        patch.setattr(sys, "argv", ["gpfl", *arguments])
        gpfl_command.main(arguments, standalone_mode=False)
    return folder / "results"


@pytest.fixture
def table(finished_grid: Path, command: Command) -> tuple[Path, str]:
    """The folder of a cell in a copy of the finished grid, and the table of all."""
    shutil.copytree(finished_grid, "results")
    [cell] = Path("results").glob("runs/*-gpfl-*")
    return cell, Path("results/toys/table.csv").read_text()


def states(name: str = "toys") -> dict[str, str]:
    return {method: f"{row['state']} {row['trials']}" for (_, method), row in read_table(name).items()}


CONFIGS: dict[str, tuple[Callable[[str], str], str]] = {
    "half-written": (lambda text: text[: text.index("[partition]") + 5], "Expected ']' at the end of a table declaration"),
    "without sections": (lambda text: "data = 1\n", ": 'data' stands outside a section"),
}


def test_cell_with_a_damaged_config_is_named_and_stops_no_other(command: Command, table: tuple[Path, str]) -> None:
    cell, before = table
    path, trials = cell / "config.toml", read_files(cell / "seed-0")
    good = path.read_text()
    for name, (damage, phrase) in CONFIGS.items():
        path.write_text(damage(good))
        result = command(*ALL, "--only-tables")
        assert result.code == 0, name
        assert result.err.startswith(f"gpfl: a stored run is ignored: {path}"), name
        assert phrase in result.err, name
        assert result.err.endswith(f", or remove {cell} to run it again\n"), name
        assert result.err.count("\n") == 1, name
        assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "not run 0"}, name
        assert states("fair") == {"fedavg": "run 2", "gpfl": "not run 0"}, name
    result = command(*ALL, "--seeds", "0,1,2")
    assert result.code == 1
    assert f"toy/whole, toy/again gpfl: {path}" in result.err
    assert states() == {"fedavg": "run 3", "fedper": "run 3", "gpfl": "failed 0"}
    assert read_files(cell / "seed-0") == trials, "no trial is run again"
    path.write_text(good)
    assert command(*ALL, "--only-tables").err == ""
    assert Path("results/toys/table.csv").read_text() == before


def test_table_says_whose_curve_is_damaged_where_a_test_needs_it(command: Command, table: tuple[Path, str]) -> None:
    cell, before = table
    [other] = Path("results").glob("runs/*-fedavg-*")
    for damaged, untested in ((other, "No p for FedAvg: "), (cell, "No p for FedAvg, FedPer: ")):
        path = damaged / "seed-0" / "metrics.jsonl"
        good = path.read_text()
        path.write_text("")
        assert command(*ALL, "--only-tables").code == 0
        text = Path("results/toys/table.md").read_text()
        assert text.count(f"{untested}{path}") == 1
        assert len(re.findall("No p for", text)) == 1
        path.write_text(good)
    assert command(*ALL, "--only-tables").code == 0
    assert "No p for" not in Path("results/toys/table.md").read_text()
    assert Path("results/toys/table.csv").read_text() == before


def test_run_of_another_config_does_not_count_whatever_its_folder_is_called(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    [other] = Path("results").glob("runs/*-fedavg-*")
    shutil.rmtree(other)
    shutil.copytree(cell, other)
    command(*ALL, "--only-tables")
    assert (states()["fedavg"], states()["gpfl"]) == ("not run 0", "run 2")
    for path in (cell / "config.toml", cell / "seed-0/config.toml", cell / "seed-1/config.toml"):
        path.write_text(path.read_text().replace("lam = 0.01", "lam = 0.5"))
    result = command(*ALL)
    assert result.code == 1
    message = f"toy/whole, toy/again gpfl: {cell / 'config.toml'} has method.lam = 0.5, not 0.01, so it belongs to another run"
    assert f"{message}: move {cell} away" in result.err
    assert (states()["fedavg"], states()["gpfl"]) == ("failed 0", "failed 0")


def test_trial_of_another_seed_or_config_does_not_count(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    shutil.rmtree(cell / "seed-1")
    shutil.copytree(cell / "seed-0", cell / "seed-1")
    result = command(*ALL, "--only-tables")
    assert f"{cell / 'seed-1/config.toml'} has run.seed = 0, so it belongs to another run" in result.err
    assert states()["gpfl"] == "run 1"
    path = cell / "seed-0/config.toml"
    path.write_text(path.read_text().replace("lam = 0.01", "lam = 0.5"))
    result = command(*ALL)
    assert result.code == 1
    assert f"{path} has method.lam = 0.5, not 0.01" in result.err


def test_runs_on_other_data_beside_each_other_are_named(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    shutil.copytree(cell, cell.with_name("other"))
    path = cell.with_name("other") / "federation.toml"
    path.write_text(re.sub('sha256 = ".*"', 'sha256 = "0"', path.read_text()))
    words = f"toy/whole gpfl: several runs differ only in their data: remove all but one of other, {cell.name}"
    only = ("--only-tables", "--no-figures", *SHORT)
    result = command("reproduce", "toys", "--cells", "toy/whole", "--methods", "gpfl", *only)
    assert result.code == 2
    assert words in result.err
    assert words in command("reproduce", "toys", "--cells", "toy/whole", "--methods", "fedavg", *only).err


def test_cell_that_another_process_is_at_is_no_failure(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    shutil.rmtree(cell)
    with grid_runner.lock_folder(cell):
        result = command(*ALL)
    assert (result.code, result.err) == (0, "")
    assert "toy/whole gpfl: another process is running it" in result.out
    assert "Skipped: toy/whole gpfl. Another process is running it." in result.out
    assert states()["gpfl"] == "not run 0"


def test_damaged_folder_is_named_before_the_error_if_no_other_is_there(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    for other in Path("results/runs").iterdir():
        (other / "config.toml").unlink()
    result = command(*ALL, "--only-tables")
    assert result.code == 2
    *damaged, error = result.err.splitlines()
    assert len(damaged) == 3
    message = f"gpfl: a stored run is ignored: cannot read {cell / 'config.toml'}: No such file"
    assert any(line.startswith(message) and f"remove {cell} to run" in line for line in damaged)
    assert "holds no finished run" in error


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: text.index(":") + 1], "Expecting"),
        (lambda text: text.replace('"best_round"', '"round"'), "it lacks 'best_round'"),
    ],
)
def test_trial_with_a_damaged_summary_is_named_and_run_again_where_it_is_removed(
    command: Command, table: tuple[Path, str], damage: Callable[[str], str], words: str
) -> None:
    cell, _ = table
    path, other = cell / "seed-0" / "summary.json", read_files(cell / "seed-1")
    lines = metrics_without_time(cell / "seed-0")
    path.write_text(damage(path.read_text()))
    result = command(*ALL, "--only-tables")
    assert result.code == 0, result.err
    assert result.err.startswith(f"gpfl: a stored run is ignored: {path} is damaged ({words}")
    assert result.err.endswith(f"): restore the file, or remove {cell / 'seed-0'} to run it again\n")
    assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "run 1"}
    assert states("fair") == {"fedavg": "run 2", "gpfl": "run 1"}
    planned = command(*ALL, "--dry-run")
    assert planned.code == 1
    assert planned.err.startswith(f"gpfl: cannot be run: toy/whole, toy/again gpfl: {path} is damaged ({words}")
    assert "0 cells to run, 2 done" in planned.out, "no time is planned for what is refused"
    assert re.search(r"toy/whole +gpfl +1/2 +damaged", planned.out)
    result = command(*ALL)
    assert result.code == 1
    assert f"toy/whole, toy/again gpfl: {path} is damaged ({words}" in result.err
    shutil.rmtree(cell / "seed-0")
    assert command(*ALL).code == 0
    assert states()["gpfl"] == "run 2"
    assert metrics_without_time(cell / "seed-0") == lines
    assert read_files(cell / "seed-1") == other


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("trials.json", ("{",)),
        ("made-0.json", ("{", "[1]")),
        ("seed-0/config.toml", ("half = ",)),
        ("seed-0/federation.toml", ("half = ", "table = 1", "\udcff")),
        ("seed-0/metrics.jsonl", ('{"round": 0}\n',)),
    ],
)
def test_files_that_tables_can_do_without_do_not_stop_them(
    command: Command, table: tuple[Path, str], name: str, texts: tuple[str, ...]
) -> None:
    cell, _ = table
    for text in texts:
        (cell / name).write_bytes(text.encode(errors="surrogateescape"))
        result = command(*ALL, "--only-tables")
        assert (result.code, result.err) == (0, ""), text
        assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "run 2"}, text
