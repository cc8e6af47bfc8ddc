"""The recorded tables are what their commands make of the recorded runs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import Command

from gpfl.experiments.defence_points import DefenceStudy
from gpfl.experiments.leaks import parse_findings
from gpfl.experiments.privacy_table import COLUMNS, read_table
from gpfl.report import privacy_tables
from gpfl.report.privacy_figures import draw_epsilon, draw_leakage
from gpfl.report.privacy_tables import defence_page, inference_page, privacy_page

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


def test_recorded_privacy_table_follows_from_recorded_numbers() -> None:
    page = (RESULTS / "privacy" / "table.md").read_text(encoding="utf-8")
    table = read_table(RESULTS / "privacy" / "results.json")
    *_, origin = page.splitlines()
    assert privacy_page(table, "proper", origin) == page
    assert re.fullmatch(r"Made by `gpfl privacy columns [^`/]*`; commit [0-9a-f]{7,}; device .*\.", origin)
    settings = {(case.kind, case.round, case.steps, case.batch) for _, case in table.results}
    assert settings == {*itertools.product(("geiping", "dlg"), ("0", "best"), ("one", "epoch"), (1, 4))}
    assert len(table.results) == len(COLUMNS) * len(settings)
    assert all(len(result.records) == 20 for result in table.results.values())


def test_recorded_inference_follows_from_recorded_numbers() -> None:
    page = (RESULTS / "leaks" / "table.md").read_text(encoding="utf-8")
    results = json.loads((RESULTS / "leaks" / "results.json").read_text(encoding="utf-8"))
    findings = [parse_findings(values) for values in results]
    *_, origin = page.splitlines()
    assert inference_page(findings, origin) == page
    assert re.match(r"Made by `gpfl privacy leaks [^`/]*`; commit [0-9a-f]{7,}; device ", origin)
    assert all({each.clients, len(each.members)} == {20} for each in findings)


def test_recorded_defence_study_follows_from_recorded_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (RESULTS / "defences" / "table.md").read_text(encoding="utf-8")
    study = DefenceStudy.read(RESULTS / "defences" / "points.json")
    monkeypatch.setattr(privacy_tables, "accountant_version", lambda: "dp-accounting 0.6.0")
    figures = [*draw_epsilon(study, tmp_path / "epsilon"), *draw_leakage(study, tmp_path / "leak")]
    (origin,) = (line for line in page.splitlines() if line.startswith("Made by"))
    assert defence_page(study, origin, figures) == page


def test_recorded_defences_follow_from_recorded_runs() -> None:
    """Each point's accuracy is that of a recorded run under this defence, and the page has the points' numbers."""
    points = [asdict(point) for point in DefenceStudy.read(RESULTS / "defences" / "points.json").points]
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
