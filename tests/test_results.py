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

from gpfl.experiments import leaks
from gpfl.experiments import privacy_table as columns

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TABLES = sorted(path for path in RESULTS.glob("*/table.md") if "gpfl reproduce" in path.read_text(encoding="utf-8"))

DEFENCES = ("noise", "example_noise", "top_k", "bits")


def test_tables_are_recorded() -> None:
    assert TABLES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recorded runs, so that no test can change them."""
    return Path(shutil.copytree(RESULTS / "runs", tmp_path_factory.mktemp("results") / "runs"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_recorded_table_follows_from_recorded_runs(table: Path, command: Command, runs: Path) -> None:
    kept = table.read_text(encoding="utf-8")
    said = re.search(r"^Made by `gpfl ([^`]*--only-tables[^`]*--out docs/results)`", kept, re.M)
    assert said
    here = Path("docs/results")  # of the empty folder in which commands of tests run
    here.mkdir(parents=True)
    (here / "runs").symlink_to(runs)
    assert command(*shlex.split(said[1])).code == 0
    made = (here / table.parent.name / "table.md").read_text(encoding="utf-8")
    assert rows(made) == rows(kept)
    for name in ("table.csv", "table.tex"):
        before, after = ((place / table.parent.name / name).read_text(encoding="utf-8") for place in (RESULTS, here))
        assert before == after, f"{name} is made as before"


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


def test_recorded_leaks_follow_from_recorded_numbers() -> None:
    kept = (RESULTS / "leaks" / "table.md").read_text(encoding="utf-8")
    found = [leaks.from_plain(held) for held in json.loads((RESULTS / "leaks" / "results.json").read_text(encoding="utf-8"))]
    *_, made = kept.splitlines()
    assert leaks.markdown(found, made) == kept
    assert re.match(r"Made by `gpfl privacy leaks [^`/]*`; commit [0-9a-f]{7,}; device ", made)
    assert all({findings.clients, len(findings.members)} == {20} for findings in found)


def test_recorded_defences_follow_from_recorded_runs() -> None:
    """Each point's accuracy is that of a recorded run under this defence, and the page has the points' numbers."""
    points = json.loads((RESULTS / "defences" / "points.json").read_text(encoding="utf-8"))
    reached: dict[tuple[object, ...], set[float]] = {}
    for path in RESULTS.glob("runs/cifar100-dirichlet-20-cnn4-*/config.toml"):
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        if config["train"]["rounds"] == 50:
            defence, method = config.get("defence", {}), config["method"]
            key = method["name"], method.get("mu"), method.get("mlg_norm"), *(defence.get(name, 0) for name in DEFENCES)
            summary = json.loads((path.parent / "seed-0" / "summary.json").read_text(encoding="utf-8"))
            reached.setdefault(key, set()).add(summary["best_accuracy"])
    off = {"noise": 0.0, "example_noise": 0.0, "top_k": 1.0, "bits": 32}
    for point in points:
        gpfl = point["method"] == "gpfl"
        mu = (0.0 if "--mu 0" in point["variant"] else 0.1) if gpfl else None
        norm = ("sample_mean" if "sample_mean" in point["variant"] else "batch") if gpfl else None
        settings = {**off, point["family"]: point["value"]} if point["family"] else dict.fromkeys(off, 0)
        assert point["accuracy"] in reached[point["method"], mu, norm, *(settings[name] for name in DEFENCES)]
    page = (RESULTS / "defences" / "table.md").read_text(encoding="utf-8")
    assert [float(row.split("|")[7]) for row in rows(page)[2:]] == [round(100 * point["accuracy"], 2) for point in points]
    assert {(point["method"], point["family"]) for point in points} == {*itertools.product(("gpfl", "fedavg"), ("", *DEFENCES))}


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
