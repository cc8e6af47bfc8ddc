"""Two experiments on toy data, and helpers of their tests."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import CommandResult

from gpfl.experiments import definitions as experiments

TOYS = """
title = "Toys"
caption = "The accuracy (%) on toys."
measure = "accuracy"
aliases = ["table9"]
rows = ["fedavg", "fedper", "gpfl"]

[[columns]]
key = "toy/whole"
heading = "Whole"
group = "toys"
data = { name = "toy" }

[columns.paper]
fedavg = [40.0, 0.5]
gpfl = [60.0, 0.5]

[[columns]]
key = "toy/some"
heading = "N = 3|4"
group = "toys"
data = { name = "toy" }
partition = { clients = 3, total_clients = 4 }

[[columns]]
key = "har/real"
heading = "HAR"
group = "people"
data = { name = "har" }

[[columns]]
key = "toy/extra"
heading = "Extra"
group = "toys"
extra = true
data = { name = "toy" }
train = { lr = 0.2 }
"""
FAIR = """
title = "Fair toys"
caption = "Deviation over clients."
measure = "fairness"
aliases = ["table10"]
rows = ["fedavg", "gpfl"]

[[columns]]
key = "toy/again"
heading = "Whole"
group = "toys"
data = { name = "toy" }

[columns.paper]
fedavg = [3.0, 20.0]
gpfl = [2.0, 10.0]
"""


@contextmanager
def replace_experiments(folder: Path, **tables: str) -> Iterator[None]:
    """Replace the paper's experiments by these, written into a folder."""
    for name, text in tables.items():
        (folder / f"{name}.toml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        shutil.copytree(experiments.config_dir() / "attacks", folder / "attacks")
        patch.setattr(experiments, "config_dir", lambda: folder)
        experiments.load_experiments.cache_clear()
        yield
    experiments.load_experiments.cache_clear()


SHORT = ("--rounds", 2, "--seeds", "0,1")
"""Options of a short run."""


def read_table(name: str = "toys", out: str = "results") -> dict[tuple[str, str], dict[str, str]]:
    with Path(out, name, "table.csv").open(newline="") as file:
        return {(row["column"], row["method"]): row for row in csv.DictReader(file)}


def finished_runs(out: str = "results") -> list[str]:
    return sorted(str(path.parent.relative_to(out)) for path in Path(out).glob("runs/*/*/summary.json"))


def assert_rejected(said: CommandResult, *words: str) -> None:
    assert said.code == 2, said.out
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err
