"""The command `gpfl data`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import Command
from publisher import CONTENT, numbers_dataset

from gpfl.data import DATASETS, PUBLISHED, Table
from gpfl.data.published import cache
from gpfl.report import figures


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of parsed tables; nothing is there, nothing can be downloaded."""
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "tables"


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published data set of twenty rows beside the real ones."""
    monkeypatch.setitem(PUBLISHED, "numbers", dataclasses.replace(numbers_dataset(), n_samples=20))
    monkeypatch.setitem(DATASETS, "numbers", PUBLISHED["numbers"])


def refused(command: Command, *words: object) -> str:
    """What is said of a mistake, in one line."""
    said = command("data", *words)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert said.err.startswith("gpfl: ")
    return said.err[6:-1]


def listed(command: Command, name: str) -> str:
    """The lines of a data set in `data list`, in one."""
    lines = command("data", "list").out.splitlines()
    (first,) = (place for place, line in enumerate(lines) if line.startswith(f"│ {name} "))
    rows = [lines[first]]
    for line in lines[first + 1 :]:
        if not line.startswith("│  "):
            break
        rows.append(line)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in rows]
    return " | ".join(" ".join(part for part in column if part) for column in zip(*cells, strict=True))


# list


def test_a_data_set_that_is_not_here_is_listed_with_what_would_be_downloaded(command: Command) -> None:
    assert "| no | 168.5 MB from www.cs.toronto.edu |" in listed(command, "cifar100")
    assert "| no | 8 files, 13.1 MB from raw.githubusercontent.com |" in listed(command, "amazon")


@pytest.mark.usefixtures("numbers")
def test_a_data_set_is_listed_with_its_rows_and_whether_they_were_checked(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "| no | 49 B from 127.0.0.1 |" in listed(command, "numbers")
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    assert "| files, not parsed yet |" in listed(command, "numbers")
    assert command("data", "get", "numbers").code == 0
    assert "| parsed, 20 rows, verified |" in listed(command, "numbers")
    (tmp_path / "numbers.txt").write_bytes(b"1 2 3 4 5 6 7 8")
    assert command("data", "get", "numbers", "--again", "--unverified").code == 0
    assert "| parsed, 8 of 20 rows, unverified |" in listed(command, "numbers")


def test_a_table_that_was_cut_off_is_listed_as_damaged(command: Command, folder: Path) -> None:
    cache.save(Table(np.zeros((9, 9, 1, 128)), np.zeros(9), classes=6, name="har", metadata={"verified": True}))
    assert "| parsed, 9 of 10,299 rows, verified |" in listed(command, "har")
    path = folder / "har" / "x.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert "| damaged: gpfl data get har |" in listed(command, "har")


# get


@pytest.mark.usefixtures("numbers")
def test_getting_says_what_nobody_vouches_for(command: Command, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    where = f"in {tmp_path / 'cache' / 'tables' / 'numbers'}\n"
    said = command("data", "get", "numbers", "--from", tmp_path)
    assert said.out == f"numbers: 20 rows of shape (1,), 2 classes, {where}"
    (tmp_path / "numbers.txt").write_bytes(b"1 2 3 4 5 6 7 8")
    said = command("data", "get", "numbers", "--from", tmp_path, "--unverified")
    caveat = "numbers has 8 of the 20 published rows and comes from files whose checksum is not the published one.\n"
    assert said.out == f"numbers: 8 rows of shape (1,), 2 classes, {where}{caveat}"


@pytest.mark.usefixtures("numbers")
def test_a_publisher_that_cannot_be_reached_is_said_alike_by_get_and_run(command: Command) -> None:
    words = "; try again, or copy the file here and run: gpfl data get numbers --from numbers.txt"
    said = refused(command, "get", "numbers")
    assert said.startswith("cannot download http://127.0.0.1:9/numbers.txt (49 bytes): ")
    assert said.endswith(words)
    run = command("run", "--data", "numbers", "--partition", "natural", "--rounds", 1)
    assert run.code == 2
    assert run.err == f"gpfl: {said}\n"


# show


@pytest.mark.parametrize("out", ["x.txt", "x", "x.gif"])
def test_picture_of_no_known_format_is_refused_before_data_are_read(command: Command, out: str) -> None:
    said = refused(command, "show", "--data", "har", "--out", out)
    assert said.endswith("; it must end in .png, .pdf or .svg")


@pytest.mark.usefixtures("numbers")
def test_show_begins_with_what_nobody_vouches_for(command: Command, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(b"1 2 3 4 5 6 7 8")
    assert command("data", "get", "numbers", "--from", tmp_path, "--unverified").code == 0
    said = command("data", "show", "--data", "numbers", "--partition", "dirichlet", "--clients", 2, "--beta", 5)
    assert said.code == 0, said.err
    first, second = said.out.splitlines()[:2]
    assert first == "numbers has 8 of the 20 published rows and comes from files whose checksum is not the published one."
    assert second.startswith("Federation of 2 clients on 'numbers'")


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (("--partition", "dirichlet"), "--partition"),
        (("--clients", 3), "--clients"),
        (("--partition-seed", 3), "--partition-seed"),
        (("--beta", 3), "--beta"),
        (("--balanced",), "--balanced"),
    ],
)
def test_show_refuses_what_run_refuses_beside_a_manifest(command: Command, given: tuple[object, ...], flag: str) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    manifest = ("--data", "toy", "--federation", "run/federation.toml")
    said = refused(command, "show", *manifest, *given)
    assert said == f"--federation run/federation.toml already assigns the samples to clients: leave out {flag}"
    assert command("run", *manifest, *given, "--out", "two").err == f"gpfl: {said}\n"
    assert command("data", "show", *manifest).code == 0
    assert Path("federation.png").is_file()


def test_show_draws_where_it_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[Path] = []
    monkeypatch.setattr(figures, "draw_class_counts", lambda counts, path: paths.append(path))
    assert command("data", "show", "--data", "toy", "--out", "deep/er.svg").out.endswith("Picture: deep/er.svg\n")
    assert paths == [Path("deep/er.svg")]


def test_datasets_are_listed_with_their_licence(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    result = command("data", "list")
    assert result.code == 0
    for name in DATASETS:
        assert name in result.out
    assert "CC BY 4.0" in result.out


def test_show_prints_sizes_and_draws_the_picture(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "bubbles.png"
    result = command("data", "show", "--data", "digits", "--clients", "5", "--classes-per-client", "3", "--out", str(picture))
    assert result.code == 0, result.err
    assert "Federation of 5 clients on 'digits'" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("get", "cifar10"), "did you mean 'cifar100'"),
        (("get", "har", "--from", "nowhere"), "--from nowhere does not exist"),
        (("get", "har", "--from", "."), "does not hold the files of 'har'"),
        (("show", "--data", "digits", "--partition", "natural"), "does not tell the group of a row"),
    ],
)
def test_a_mistake_is_one_line(
    command: Command, words: tuple[str, ...], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    result = command("data", *words)
    assert result.code == 2
    assert part in result.err
    assert result.err.count("\n") == 1


def test_a_dataset_inside_a_package_needs_no_download(command: Command) -> None:
    assert "nothing to get" in command("data", "get", "digits").out
