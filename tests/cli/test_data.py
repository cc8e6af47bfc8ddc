"""The command `gpfl data`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, CommandResult, assert_error
from publisher import CONTENT, numbers_dataset
from user_files import lines, make_csv, write

from gpfl.data import DATASETS, PUBLISHED, Table
from gpfl.data.published import cache
from gpfl.report import figures


@pytest.fixture(autouse=True)
def tables_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of parsed tables: empty, and nothing can be downloaded."""
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "tables"


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a published dataset of twenty samples to the real ones."""
    monkeypatch.setitem(PUBLISHED, "numbers", dataclasses.replace(numbers_dataset(), n_samples=20))
    monkeypatch.setitem(DATASETS, "numbers", PUBLISHED["numbers"])


# list


def listed(command: Command, name: str) -> str:
    """Return the row of a dataset in `gpfl data list` as one line."""
    output = command("data", "list").out.splitlines()
    (first,) = (index for index, line in enumerate(output) if line.startswith(f"│ {name} "))
    rows = [output[first]]
    for line in output[first + 1 :]:
        if not line.startswith("│  "):
            break
        rows.append(line)
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    return " | ".join(" ".join(text for text in column if text) for column in zip(*cells, strict=True))


def test_a_dataset_without_a_local_copy_is_listed_with_its_download(command: Command) -> None:
    assert "| no | 168.5 MB from www.cs.toronto.edu |" in listed(command, "cifar100")
    assert "| no | 8 files, 13.1 MB from raw.githubusercontent.com |" in listed(command, "amazon")


@pytest.mark.usefixtures("numbers")
def test_a_dataset_is_listed_with_the_samples_of_its_local_copy_and_their_verification(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "| no | 49 bytes from 127.0.0.1 |" in listed(command, "numbers")
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    assert "| files, not parsed yet |" in listed(command, "numbers")
    assert command("data", "get", "numbers").code == 0
    assert "| parsed, 20 samples, verified |" in listed(command, "numbers")
    (tmp_path / "numbers.txt").write_bytes(b"1 2 3 4 5 6 7 8")
    assert command("data", "get", "numbers", "--again", "--unverified").code == 0
    assert "| parsed, 8 of 20 samples, unverified |" in listed(command, "numbers")


def test_a_truncated_table_is_listed_as_damaged(command: Command, tables_dir: Path) -> None:
    cache.save(Table(np.zeros((9, 9, 1, 128)), np.zeros(9), classes=6, name="har", metadata={"verified": True}))
    assert "| parsed, 9 of 10,299 samples, verified |" in listed(command, "har")
    path = tables_dir / "har" / "x.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert "| damaged: gpfl data get har |" in listed(command, "har")


def test_every_dataset_is_listed_with_its_licence(command: Command) -> None:
    result = command("data", "list")
    assert result.code == 0
    for name in DATASETS:
        assert name in result.out
    assert "CC BY 4.0" in result.out


# get


def expect_numbers(result: CommandResult, samples: int, folder: Path, warning: str = "") -> None:
    assert result.code == 0, result.err
    assert result.out == f"numbers: {samples} samples of shape (1,), 2 classes, in {folder}\n{warning}"


@pytest.mark.usefixtures("numbers")
def test_get_warns_of_unverified_and_missing_samples(command: Command, tmp_path: Path, tables_dir: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    expect_numbers(command("data", "get", "numbers", "--from", tmp_path), 20, tables_dir / "numbers")
    (tmp_path / "numbers.txt").write_bytes(b"1 2 3 4 5 6 7 8")
    result = command("data", "get", "numbers", "--from", tmp_path, "--unverified")
    expect_numbers(result, 8, tables_dir / "numbers", WARNING)


WARNING = "numbers has 8 of the 20 published rows and comes from files whose checksum is not the published one.\n"


@pytest.mark.usefixtures("numbers")
def test_get_and_run_report_an_unreachable_publisher_alike(command: Command) -> None:
    result = command("data", "get", "numbers")
    assert_error(
        result,
        "gpfl: cannot download http://127.0.0.1:9/numbers.txt (49 bytes): ",
        "; try again, or copy the file here and run: gpfl data get numbers --from numbers.txt",
    )
    assert command("run", "--data", "numbers", "--partition", "natural", "--rounds", 1) == result


def test_a_dataset_inside_a_package_needs_no_download(command: Command) -> None:
    assert "nothing to download" in command("data", "get", "digits").out


# show


def test_show_prints_sizes_and_draws_the_figure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    result = command("data", "show", "--data", "digits", "--clients", 5, "--classes-per-client", 3, "--out", "bubbles.png")
    assert result.code == 0, result.err
    assert "Federation of 5 clients on 'digits'" in result.out
    assert Path("bubbles.png").read_bytes().startswith(b"\x89PNG")
    paths: list[Path] = []
    monkeypatch.setattr(figures, "draw_class_counts", lambda counts, path: paths.append(path))
    assert command("data", "show", "--data", "toy", "--out", "deep/er.svg").out.endswith("Figure: deep/er.svg\n")
    assert paths == [Path("deep/er.svg")]


VISITS = ("--data", "visits.csv", "--client", "site", "--label", "kind")


def test_show_takes_the_data_as_an_argument_or_by_its_flag(command: Command) -> None:
    shown = command("data", "show", "toy")
    assert shown.code == 0
    assert shown.out == command("data", "show", "--data", "toy").out
    assert_error(command("data", "show", "toy", "--data", "digits"), "both toy and --data digits name the data: leave one out")


def test_show_prints_the_profile_of_columns_before_anything_else(command: Command) -> None:
    write(Path("visits.csv"), make_csv())
    result = command("data", "show", *VISITS)
    assert result.code == 0, result.err
    titles = ("Columns", "Columns by client", "Clients", "visits.csv: 48 rows; 3 clients", "Federation of 3 clients")
    places = [result.out.index(f"\n{title}") if title != "Columns" else result.out.index(title) for title in titles]
    assert places == sorted(places)
    assert places[0] == 0
    assert result.out.endswith("Figure: federation.png\n")


def test_show_prints_the_profile_even_if_the_rows_cannot_be_divided(command: Command) -> None:
    rows = [(k % 5, "big" if k else "small", k % 2) for k in range(13)]
    write(Path("visits.csv"), lines(("a", "client", "label"), *rows))
    result = command("data", "show", "--data", "visits.csv")
    assert result.code == 2
    assert result.out.startswith("Columns\n")
    assert "client small has no training samples" in result.err


def test_show_prints_the_profile_even_if_missing_values_are_an_error(command: Command) -> None:
    ages = ["", ">90", *(k % 9 for k in range(22))]
    write(Path("visits.csv"), lines(("age", "client", "label"), *((age, "ns"[k % 2], k % 3) for k, age in enumerate(ages))))
    result = command("data", "show", "--data", "visits.csv")
    assert result.code == 2
    assert result.out.startswith("Columns\n")
    (row,) = [line.split() for line in result.out.splitlines() if line.split()[:2] == ["age", "numbers"]]
    assert row[:7] == ["age", "numbers", "0", "to", "8", "8", "%"], "2 of 24"
    assert "visits.csv: 24 rows" not in result.out
    assert "has cells that are not numbers in 1 of 24 rows" in result.err
    assert command("data", "show", "--data", "visits.csv", "--json").out == ""
    assert command("data", "show", "--data", "nothing.csv").out == ""


def test_show_prints_the_profile_of_a_synthetic_partition(command: Command) -> None:
    write(Path("visits.csv"), make_csv())
    flags = ("--label", "kind", "--partition", "dirichlet", "--clients", 2, "--beta", 9)
    result = command("data", "show", "--data", "visits.csv", *flags)
    assert result.code == 0, result.err
    assert result.out.startswith("visits.csv: 48 rows; no client column; ")
    assert result.out.index("Columns by client") < result.out.index("Federation of 2 clients")


def test_show_prints_json_alone(command: Command) -> None:
    write(Path("visits.csv"), make_csv())
    result = command("data", "show", *VISITS, "--json")
    assert result.code == 0, result.err
    content = json.loads(result.out)
    assert content["clients"] == ["s0", "s1", "s2"]
    assert [column["name"] for column in content["columns"]] == ["a", "b"]
    assert content["columns"][0]["by_client"]["s1"]["rows"] == 16
    assert sum(content["label"]["all"]["counts"].values()) == 48
    assert content["splits"]["s0"] == {"train": 12, "validation": 0, "test": 4}
    assert content["description"][0].startswith("visits.csv: 48 rows; ")
    assert not Path("federation.png").exists()
    assert json.loads(command("data", "show", "--data", "toy", "--json").out)["columns"] == []


@pytest.mark.usefixtures("numbers")
def test_show_begins_with_the_warnings_of_the_dataset(command: Command, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(b"1 2 3 4 5 6 7 8")
    assert command("data", "get", "numbers", "--from", tmp_path, "--unverified").code == 0
    result = command("data", "show", "--data", "numbers", "--partition", "dirichlet", "--clients", 2, "--beta", 5)
    assert result.code == 0, result.err
    assert result.out.startswith(f"{WARNING}Federation of 2 clients on 'numbers'")


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--partition", "dirichlet"), "--partition"),
        (("--clients", 3), "--clients"),
        (("--partition-seed", 3), "--partition-seed"),
        (("--beta", 3), "--beta"),
        (("--balanced",), "--balanced"),
    ],
)
def test_show_and_run_reject_partition_options_next_to_a_manifest(
    command: Command, arguments: tuple[object, ...], flag: str
) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    manifest = ("--data", "toy", "--federation", "run/federation.toml")
    result = command("data", "show", *manifest, *arguments)
    assert_error(result, f"--federation run/federation.toml already assigns the samples to clients: leave out {flag}\n")
    assert command("run", *manifest, *arguments, "--out", "two") == result
    assert command("data", "show", *manifest).code == 0
    assert Path("federation.png").is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("get cifar10", "did you mean 'cifar100'"),
        ("get har --from nowhere", "--from nowhere does not exist"),
        ("get har --from .", "does not hold the files of 'har'"),
        ("show --data digits --partition natural", "use --partition dirichlet"),
        ("show --data har --out x.txt", "; it must end in .png, .pdf or .svg"),
        ("show --data har --out x", "; it must end in .png, .pdf or .svg"),
        ("show --data har --out x.gif", "; it must end in .png, .pdf or .svg"),
    ],
)
def test_a_mistake_is_one_line(command: Command, line: str, message: str) -> None:
    assert_error(command("data", *line.split()), message)
