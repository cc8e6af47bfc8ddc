"""Reading the results of searches, those recorded in docs/results too, without Optuna."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpfl.errors import GpflError
from gpfl.experiments.tuned_values import TunedValues, describe_unequal_budgets

RECORDED = Path(__file__).parents[2] / "docs" / "results" / "tuned"


@pytest.mark.parametrize("name", ["agnews-practical", "cifar100-practical"])
def test_recorded_search_is_readable_and_its_best_candidate_is_the_one_in_best_toml(name: str) -> None:
    tuned = TunedValues.read(RECORDED / name)
    with (RECORDED / name / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    [best] = [{key: float(row[f"method.{key}"]) for key in ("lam", "mu")} for row in rows if row["chosen"] == "1"]
    assert tuned.values["gpfl"] == {"method": best}
    study = tuned.studies["gpfl"]
    assert study["result"]["budget"] == study["result"]["candidates"] == len(rows) == 8
    assert study["partition"]["validation_fraction"] == 0.1
    assert study["partition"]["rng"] == "pfllib"
    text = tuned.describe(["gpfl", "fedavg"])
    assert text.startswith("tuned on validation samples (candidates: gpfl 8; seeds 0; ")
    assert f"; 0.1 of the training samples): gpfl.lam = {best['lam']}" in text


def test_reading_searches_does_not_need_optuna() -> None:
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "from pathlib import Path; from gpfl.experiments.tuned_values import TunedValues\n"
        f"print(sorted(TunedValues.read(Path({str(RECORDED / 'agnews-practical')!r})).values))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "['gpfl']\n"


def test_folder_without_a_finished_search_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GpflError, match="holds no finished search"):
        TunedValues.read(tmp_path)


@pytest.mark.parametrize(
    ("searches", "text"),
    [
        ({}, ""),
        ({"gpfl": (4, 4), "ditto": (4, 4)}, ""),
        ({"gpfl": (6, 6), "fedrep": (4, 6)}, ""),  # fedrep has four values
        (
            {"gpfl": (6, 6), "fedrep": (4, 6), "ditto": (2, 2)},
            "unequal budgets (gpfl 6 candidates, fedrep 4 candidates, ditto 2 candidates): "
            "search ditto with --budget 6, or gpfl, fedrep with --budget 2, which trains nothing",
        ),
    ],
)
def test_budgets_are_unequal_if_a_method_had_fewer_candidates_than_its_values_allow(
    searches: dict[str, tuple[int, int]], text: str
) -> None:
    studies: dict[str, Any] = {
        method: {"space": {"method.lam": "0 to 1"}, "result": {"candidates": count, "budget": budget}}
        for method, (count, budget) in searches.items()
    }
    assert describe_unequal_budgets({**studies, "fedavg": {"space": {}, "result": {"candidates": 1, "budget": 1}}}) == text
