"""The paper's privacy table: runs of five methods, attacked in nine columns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from privacy.blob_runs import train_on_blobs

import gpfl
from gpfl.experiments.privacy_table import COLUMNS, METHODS, attack_methods, paper_psnr, table_from_records, table_records
from gpfl.privacy.attack_runner import PSNR_FORMULAS, AttackPlan, records_to_json
from gpfl.report.privacy_figures import draw_table_grids
from gpfl.report.privacy_tables import privacy_page

ONE_ITERATION = AttackPlan(iterations=1, restarts=1)


@pytest.fixture(scope="module")
def runs() -> dict[str, gpfl.Result]:
    return {name: train_on_blobs(name) for name in METHODS}


def test_the_page_follows_from_the_records_and_compares_with_the_paper(runs: dict[str, gpfl.Result], tmp_path: Path) -> None:
    plan = replace(ONE_ITERATION, images=2, batch=(2,), steps=("one", "epoch"))
    table = attack_methods(runs, tmp_path, plan)
    page = privacy_page(table, "proper", "Made by hand.")
    header = " | ".join(column.label for column in COLUMNS)
    assert f"| setting | {header} | start | mean image |" in page
    assert "| paper, Cifar100 | 7.94 | 7.73 | 6.92 | 7.30 | 6.82 | 7.48 | 6.56 | 6.41 | 6.71 | – | – |" in page
    assert "| round 0, one step, batch 2" in page
    assert "| round 0, one epoch, batch 2" in page
    assert page.endswith("\n\nMade by hand.\n")
    saved = table_from_records(json.loads(records_to_json(table_records(table))))
    assert saved.best_rounds == {name: runs[name].outcome.selected.round for name in METHODS}
    assert privacy_page(saved, "proper", "Made by hand.") == page
    grids = draw_table_grids(table, tmp_path)
    assert len(grids["geiping"]) == 4
    assert all(path.is_file() for path in grids["geiping"])
    assert privacy_page(table, "proper", "", grids).count("![grid geiping round 0 ") == 2


def test_the_page_can_use_the_papers_formula(runs: dict[str, gpfl.Result], tmp_path: Path) -> None:
    table = attack_methods(runs, tmp_path, replace(ONE_ITERATION, kind=("dlg",), images=1))
    pages = [privacy_page(table, formula, "") for formula in PSNR_FORMULAS]
    rows = [next(line for line in page.splitlines() if line.startswith("| round 0")) for page in pages]
    starts = [float(row.split("|")[-3]) for row in rows]
    assert starts[0] - starts[1] == pytest.approx(10 * np.log10(4 / 3), abs=0.011)
    assert "(that of all rows)" in pages[1]


def test_the_papers_values_have_all_columns() -> None:
    assert set(paper_psnr()) == {column.label for column in COLUMNS}
