"""What `gpfl reproduce` does with a folder of which something is damaged, lost, doubled, or another run's."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command, metrics_without_time, read_files
from toy_tables import SHORT, read_table

from gpfl.experiments import grid_runner

pytestmark = pytest.mark.usefixtures("toy_tables")

ALL = ("reproduce", "toys", "fair", "--cells", "toy/whole,toy/again", *SHORT, "--no-figures")


def states(name: str = "toys") -> dict[str, str]:
    return {method: f"{row['state']} {row['trials']}" for (_, method), row in read_table(name).items()}


def without_last_words(table: str) -> list[str]:
    """The lines of a table without seconds, which differ."""
    rows = list(csv.reader(table.splitlines()))
    kept = [place for place, name in enumerate(rows[0]) if "seconds" not in name]
    return [",".join(row[place] for place in kept) for row in rows]


def without_line(start: str) -> Callable[[str], str]:
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if not line.startswith(start))


CONFIGS: dict[str, tuple[Callable[[str], str], str]] = {
    "half-written": (lambda text: text[: text.index("[partition]") + 5], "Expected ']' at the end of a table declaration"),
    "no TOML": (lambda text: "\0not } this", "Invalid statement"),
    "empty": (lambda text: "", "it lacks [run]"),
    "cut between sections": (lambda text: text[: text.index("[method]")], "it lacks [method]"),
    "without a name": (without_line('name = "gpfl"'), "it lacks method.name"),
    "without a key of all": (without_line("batch_size"), "it lacks train.batch_size"),
    "without a key of the method": (without_line("lam"), "it lacks method.lam"),
    "without sections": (lambda text: "data = 1\n", ": 'data' stands outside a section"),
}


@pytest.fixture
def table(command: Command) -> tuple[Path, str]:
    """The folder of a cell of a grid that was run, and the table of all."""
    assert command(*ALL).code == 0
    [cell] = Path("results").glob("runs/*-gpfl-*")
    return cell, Path("results/toys/table.csv").read_text()


def test_cell_with_a_damaged_config_is_named_and_stops_no_other(command: Command, table: tuple[Path, str]) -> None:
    cell, before = table
    path, trials = cell / "config.toml", read_files(cell / "seed-0")
    good = path.read_text()
    for name, (damage, words) in CONFIGS.items():
        path.write_text(damage(good))
        said = command(*ALL, "--only-tables")
        assert said.code == 0, name
        assert said.err.startswith(f"gpfl: a stored run is ignored: {path}"), name
        assert words in said.err, name
        assert said.err.endswith(f", remove {cell} to run it again\n") or f", or remove {cell} to run" in said.err, name
        assert said.err.count("\n") == 1, name
        assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "not run 0"}, name
        assert states("fair") == {"fedavg": "run 2", "gpfl": "not run 0"}, name
        assert path.read_text() == damage(good), name
    said = command(*ALL, "--seeds", "0,1,2")
    assert said.code == 1
    assert f"toy/whole, toy/again gpfl: {path}" in said.err
    assert states() == {"fedavg": "run 3", "fedper": "run 3", "gpfl": "failed 0"}
    assert read_files(cell / "seed-0") == trials, "no trial is run over"
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


def test_run_of_another_config_is_none_of_the_cell_whatever_its_folder_is_called(
    command: Command, table: tuple[Path, str]
) -> None:
    cell, before = table
    [other] = Path("results").glob("runs/*-fedavg-*")
    shutil.rmtree(other)
    shutil.copytree(cell, other)
    for more in ((), ("--only-tables",)):
        said = command(*ALL, *more)
        assert states()["fedavg"] == ("not run 0" if more else "failed 0")
        assert states()["gpfl"] == "run 2"
    shutil.rmtree(other)
    said = command(*ALL)
    assert said.code == 0
    assert without_last_words(Path("results/toys/table.csv").read_text()) == without_last_words(before)
    for path in (cell / "config.toml", cell / "seed-0/config.toml", cell / "seed-1/config.toml"):
        path.write_text(path.read_text().replace("lam = 0.01", "lam = 0.5"))
    said = command(*ALL)
    assert said.code == 1
    words = f"toy/whole, toy/again gpfl: {cell / 'config.toml'} has method.lam = 0.5, not 0.01, so it belongs to another run: "
    assert f"{words}move {cell} away" in said.err
    assert states()["gpfl"] == "failed 0"


def test_trial_of_another_seed_or_config_does_not_count(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    shutil.rmtree(cell / "seed-1")
    shutil.copytree(cell / "seed-0", cell / "seed-1")
    said = command(*ALL, "--only-tables")
    assert f"{cell / 'seed-1/config.toml'} has run.seed = 0, so it belongs to another run" in said.err
    assert states()["gpfl"] == "run 1"
    path = cell / "seed-0/config.toml"
    path.write_text(path.read_text().replace("lam = 0.01", "lam = 0.5"))
    said = command(*ALL)
    assert said.code == 1
    assert f"{path} has method.lam = 0.5, not 0.01" in said.err


def test_run_is_found_by_its_content_under_another_name_and_beside_a_copy(command: Command, table: tuple[Path, str]) -> None:
    cell, before = table
    cell.rename(cell.with_name("renamed"))
    for more in ((), ("--only-tables",)):
        said = command(*ALL, *more)
        assert (said.code, said.err) == (0, "")
        assert more or "Already finished: 3 of 3 cells." in said.out
        assert Path("results/toys/table.csv").read_text() == before
    shutil.copytree(cell.with_name("renamed"), cell)
    assert command(*ALL, "--only-tables").err == ""
    assert Path("results/toys/table.csv").read_text() == before


def test_runs_on_other_data_beside_each_other_are_named(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    shutil.copytree(cell, cell.with_name("other"))
    path = cell.with_name("other") / "federation.toml"
    path.write_text(re.sub('sha256 = ".*"', 'sha256 = "0"', path.read_text()))
    words = f"toy/whole gpfl: several runs differ only in their data: remove all but one of other, {cell.name}"
    only = ("--only-tables", "--no-figures", *SHORT)
    said = command("reproduce", "toys", "--cells", "toy/whole", "--methods", "gpfl", *only)
    assert said.code == 2
    assert words in said.err
    assert words in command("reproduce", "toys", "--cells", "toy/whole", "--methods", "fedavg", *only).err


def test_cell_that_another_process_is_at_is_no_failure(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    shutil.rmtree(cell)
    with grid_runner.lock_folder(cell):
        said = command(*ALL)
    assert (said.code, said.err) == (0, "")
    assert "toy/whole gpfl: another process is running it" in said.out
    assert "Skipped: toy/whole gpfl. Another process is running it." in said.out
    assert states()["gpfl"] == "not run 0"


def test_cell_that_lost_its_config_is_named_too(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    (cell / "config.toml").unlink()
    said = command(*ALL, "--only-tables")
    assert said.err.startswith(f"gpfl: a stored run is ignored: cannot read {cell / 'config.toml'}: No such file")


def test_other_cells_are_run_beside_one_with_a_damaged_config(command: Command, table: tuple[Path, str]) -> None:
    cell, _ = table
    (cell / "config.toml").write_text("half = ")
    said = command("reproduce", "toys", "--methods", "local", "--cells", "toy/whole", *SHORT, "--no-figures")
    assert said.code == 0, said.err
    assert said.err.startswith(f"gpfl: a stored run is ignored: {cell / 'config.toml'} is not a TOML file (")
    assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "not run 0", "local": "run 2"}


def test_where_nothing_but_a_damaged_cell_is_there_it_is_named_before_the_refusal(
    command: Command, table: tuple[Path, str]
) -> None:
    cell, _ = table
    for other in Path("results/runs").iterdir():
        (other / "config.toml").write_text("half = ")
    said = command(*ALL, "--only-tables")
    assert said.code == 2
    *damaged, refusal = said.err.splitlines()
    assert len(damaged) == 3
    assert any(f"remove {cell} to run" in line for line in damaged)
    assert "holds no finished run" in refusal


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
    said = command(*ALL, "--only-tables")
    assert said.code == 0, said.err
    assert said.err.startswith(f"gpfl: a stored run is ignored: {path} is damaged ({words}")
    assert said.err.endswith(f"): restore the file, or remove {cell / 'seed-0'} to run it again\n")
    assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "run 1"}
    assert states("fair") == {"fedavg": "run 2", "gpfl": "run 1"}
    planned = command(*ALL, "--dry-run")
    assert planned.code == 1
    assert planned.err.startswith(f"gpfl: cannot be run: toy/whole, toy/again gpfl: {path} is damaged ({words}")
    assert "0 cells to run, 2 done" in planned.out, "no time is planned for what is refused"
    assert re.search(r"toy/whole +gpfl +1/2 +damaged", planned.out)
    said = command(*ALL)
    assert said.code == 1
    assert f"toy/whole, toy/again gpfl: {path} is damaged ({words}" in said.err
    shutil.rmtree(cell / "seed-0")
    assert command(*ALL).code == 0
    assert states()["gpfl"] == "run 2"
    assert metrics_without_time(cell / "seed-0") == lines
    assert read_files(cell / "seed-1") == other


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("trials.json", ("", "{")),
        ("made-0.json", ("{", "[1]", '{"commits": 1}', '{"commits": [{}]}', '{"data": 2, "steps": "3"}')),
        ("seed-0/config.toml", ("", "half = ")),
        ("seed-0/federation.toml", ("", "half = ", "table = 1", "\udcff")),
        ("seed-0/metrics.jsonl", ("", '{"round": 0}\n')),
    ],
)
def test_files_that_tables_can_do_without_do_not_stop_them(
    command: Command, table: tuple[Path, str], name: str, texts: tuple[str, ...]
) -> None:
    cell, _ = table
    for text in texts:
        (cell / name).write_bytes(text.encode(errors="surrogateescape"))
        said = command(*ALL, "--only-tables")
        assert (said.code, said.err) == (0, ""), text
        assert states() == {"fedavg": "run 2", "fedper": "run 2", "gpfl": "run 2"}, text
