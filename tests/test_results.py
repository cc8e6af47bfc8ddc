"""The recorded tables are what their commands make of the recorded runs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from conftest import Command

from gpfl.privacy import columns

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TABLES = sorted(path for path in RESULTS.glob("*/table.md") if "gpfl reproduce" in path.read_text(encoding="utf-8"))


def test_tables_are_recorded() -> None:
    assert TABLES


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_recorded_table_follows_from_recorded_runs(table: Path, command: Command) -> None:
    kept = table.read_text(encoding="utf-8")
    said = re.search(r"^Made by `gpfl ([^`]*--only-tables[^`]*--out docs/results)`", kept, re.M)
    assert said
    here = Path("docs/results")  # of the empty folder in which commands of tests run
    shutil.copytree(RESULTS / "runs", here / "runs")
    assert command(*shlex.split(said[1])).code == 0
    made = (here / table.parent.name / "table.md").read_text(encoding="utf-8")
    assert rows(made) == rows(kept)


def test_recorded_columns_follow_from_recorded_numbers() -> None:
    kept = (RESULTS / "privacy" / "table.md").read_text(encoding="utf-8")
    held = columns.read(RESULTS / "privacy" / "results.json")
    *_, made = kept.splitlines()
    assert columns.page(held, "proper", made) == kept
    assert re.fullmatch(r"Made by `gpfl privacy columns [^`/]*`; commit [0-9a-f]{7,}; device .*\.", made)
    asked = {(case.kind, case.round, case.steps, case.batch) for _, case in held.done}
    assert asked == {*itertools.product(("geiping", "dlg"), ("0", "best"), ("one", "epoch"), (1, 4))}
    assert len(held.done) == len(columns.COLUMNS) * len(asked)
    assert all(len(kept.records) == 20 for kept in held.done.values())


def test_runs_on_one_split_have_one_division() -> None:
    """Else what is no part of it got into its digest, and tables leave their tests out."""
    divisions: dict[str, set[str]] = {}
    for path in RESULTS.glob("runs/*/seed-*/federation.toml"):
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
        divisions.setdefault(json.dumps([facts["table"], facts["split"]]), set()).add(facts["client"]["sha256"])
    assert divisions
    assert all(len(digests) == 1 for digests in divisions.values())


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]
