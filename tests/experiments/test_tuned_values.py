"""Reading the results of searches, those recorded in docs/results too, without Optuna."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpfl.errors import GpflError
from gpfl.experiments.tuned_values import SearchResult, TunedValues, describe_unequal_budgets

RECORDED = Path(__file__).parents[2] / "docs" / "results" / "tuned"

V1_CANDIDATE = (
    '{"number": 1, "values": {"method.mu": 0.1}, "scores": [], "rounds": [], "seconds": 1.0, "trouble": "round 3: nan"}\n'
)
V1_STUDY = """
[tune]
seeds = [0]

[space]
"method.mu" = "0.001 to 1, log"

[made]
budget = 4
candidates = 1
searched = true
note = "Command: gpfl tune fedprox"
"""


@pytest.mark.parametrize("name", ["agnews-practical", "cifar100-practical"])
def test_recorded_search_is_readable_and_its_best_candidate_is_the_one_in_best_toml(name: str) -> None:
    tuned = TunedValues.read(RECORDED / name)
    search = tuned.searches["gpfl"]
    assert len(search.candidates) == search.budget == 8
    assert tuned.values["gpfl"] == {"method": {key.split(".")[1]: value for key, value in search.best.values.items()}}
    assert search.study["partition"]["validation_fraction"] == 0.1
    assert search.study["partition"]["rng"] == "pfllib"
    text = tuned.describe(["gpfl", "fedavg"])
    assert text.startswith("tuned on validation samples (candidates: gpfl 8; seeds 0; ")
    assert f"; 0.1 of the training samples): gpfl.lam = {search.best.values['method.lam']}" in text


def test_search_of_format_version_1_is_readable(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(V1_STUDY)
    (tmp_path / "candidates.jsonl").write_text(V1_CANDIDATE)
    search = SearchResult.read(tmp_path)
    assert (search.budget, search.note, search.best.failure) == (4, "Command: gpfl tune fedprox", "round 3: nan")
    assert search.best.score == 0


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
    assert describe_unequal_budgets(searches) == text
