"""Every published table is rebuilt from the archive of recorded runs, or from the numbers beside it."""

from __future__ import annotations

import itertools
import json
import lzma
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import record_results
import results_page
from conftest import Command

from gpfl.experiments import stored_runs
from gpfl.experiments.defence_study import DefenceStudy
from gpfl.experiments.leaks import parse_findings
from gpfl.experiments.privacy_table import COLUMNS, table_from_records
from gpfl.report import privacy_tables
from gpfl.report.privacy_figures import draw_epsilon, draw_leakage
from gpfl.report.privacy_tables import defence_page, inference_page, privacy_page

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ARCHIVE = RESULTS / stored_runs.ARCHIVE
TABLES = {page.parent.name: command for page in RESULTS.glob("*/table.md") if (command := record_results.table_command(page))}

read_archive = stored_runs.read_archive
DEFENCES = ("noise", "example_noise", "top_k", "bits")


@pytest.fixture(autouse=True)
def read_archive_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_runs, "read_archive", archived_trials)


@cache
def archived_trials(archive: Path) -> list[stored_runs.Content]:
    return list(read_archive(archive))


@pytest.mark.parametrize("name", sorted(TABLES))
def test_table_follows_from_the_archive(name: str, command: Command) -> None:
    here = Path("docs/results")  # below the empty folder in which commands of tests run
    here.mkdir(parents=True)
    (here / ARCHIVE.name).symlink_to(ARCHIVE)
    assert command(*TABLES[name], "--no-figures").code == 0
    for file in ("table.md", "table.csv", "table.tex"):
        published, rebuilt = ((folder / name / file).read_text(encoding="utf-8") for folder in (RESULTS, here))
        assert without_origin(rebuilt) == without_origin(published), file


def without_origin(text: str) -> list[str]:
    """The lines of a table without the command that made it and its figures."""
    return [line for line in text.splitlines() if line and not line.startswith(("Made by", "!["))]


def test_main_experiments_are_published() -> None:
    assert {"effectiveness", "real-world", "scalability", "fairness", "feature-shift"} <= TABLES.keys()


def test_results_page_shows_the_published_tables() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert results_page.update(page) == page
    assert len(results_page.BLOCK.findall(page)) == 9
    assert len(page.splitlines()) <= 250


def test_archive_is_small_and_names_no_folder_of_a_machine() -> None:
    assert ARCHIVE.stat().st_size <= 2_000_000
    provenance = [run["provenance"] for entry in stored_runs.read_archive(ARCHIVE) for run in entry["runs"].values()]
    commands = [note["command"] for note in provenance if note]
    assert commands
    assert not [command for command in commands if re.search(r"--(out|tuned) \S*/", command)]


def test_recorded_privacy_table_follows_from_recorded_numbers() -> None:
    page = (RESULTS / "privacy" / "table.md").read_text(encoding="utf-8")
    table = table_from_records(json.loads(lzma.decompress((RESULTS / "privacy" / "results.json.xz").read_bytes())))
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


def test_defence_study_follows_from_the_archive() -> None:
    """Each point has the accuracy of an archived run under its defence, and the page shows the points' numbers."""
    points = [asdict(point) for point in DefenceStudy.read(RESULTS / "defences" / "points.json").points]
    accuracies: dict[tuple[object, ...], set[float]] = {}
    for entry in stored_runs.read_archive(ARCHIVE):
        config = entry["config"]
        if entry["name"].startswith("cifar100-dirichlet-20-cnn4-") and config["train"]["rounds"] == 50:
            defence, method = config.get("defence", {}), config["method"]
            key = method["name"], method.get("mu"), method.get("mlg_norm"), *(defence.get(name, 0) for name in DEFENCES)
            accuracies.setdefault(key, set()).add(entry["runs"]["0"]["summary"]["best_accuracy"])
    off = {"noise": 0.0, "example_noise": 0.0, "top_k": 1.0, "bits": 32}
    for point in points:
        gpfl = point["method"] == "gpfl"
        mu = (0.0 if "--mu 0" in point["variant"] else 0.1) if gpfl else None
        norm = ("sample_mean" if "sample_mean" in point["variant"] else "batch") if gpfl else None
        settings = {**off, point["family"]: point["value"]} if point["family"] else dict.fromkeys(off, 0)
        assert point["accuracy"] in accuracies[point["method"], mu, norm, *(settings[name] for name in DEFENCES)]
    page = (RESULTS / "defences" / "table.md").read_text(encoding="utf-8")
    shown = [line for line in page.splitlines() if line.startswith("|")]
    assert [float(row.split("|")[7]) for row in shown[2:]] == [round(100 * point["accuracy"], 2) for point in points]
    assert {(point["method"], point["family"]) for point in points} == {*itertools.product(("gpfl", "fedavg"), ("", *DEFENCES))}


def test_archived_runs_with_one_partition_have_one_hash_of_clients() -> None:
    """Otherwise tables leave out their paired tests."""
    hashes: dict[str, set[str]] = {}
    for entry in stored_runs.read_archive(ARCHIVE):
        for run in entry["runs"].values():
            if manifest := run["manifest"]:
                key = json.dumps([manifest["table"], manifest["partition"]], sort_keys=True)
                hashes.setdefault(key, set()).add(manifest["client"]["sha256"])
    assert hashes
    assert all(len(each) == 1 for each in hashes.values())
