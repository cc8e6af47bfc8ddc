"""What `gpfl reproduce` does with a folder of which something is damaged, lost, or another run's."""

from __future__ import annotations

import re
import shutil
import sys
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


@pytest.mark.parametrize("name", ["config.toml", "seed-0/summary.json"])
def test_unreadable_file_is_an_error_and_the_runs_are_repeated_where_it_is_deleted(
    command: Command, table: tuple[Path, str], name: str
) -> None:
    cell, _ = table
    path = cell / name
    other, lines = read_files(cell / "seed-1"), metrics_without_time(cell / "seed-0")
    path.write_text("half = ")
    for flags in (("--only-tables",), *(((), ("--dry-run",)) if "summary" in name else ())):
        result = command(*ALL, *flags)
        assert result.code == 2
        assert str(path) in result.err
        assert "delete " in result.err
    path.unlink()
    if name == "config.toml":
        shutil.rmtree(cell)
    assert command(*ALL).code == 0
    assert states()["gpfl"] == "run 2"
    assert metrics_without_time(cell / "seed-0") == lines
    assert name == "config.toml" or read_files(cell / "seed-1") == other


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
