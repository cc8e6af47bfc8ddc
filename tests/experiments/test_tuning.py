"""The search spaces that methods document, and the proposals of Optuna."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpfl.core import options
from gpfl.core.options import SearchRange
from gpfl.errors import GpflError
from gpfl.experiments.tuning import Space, Values, ask_defaults, open_study, propose, search_space
from gpfl.methods import METHODS
from gpfl.training.config import TrainOptions

DOCS = Path(__file__).parents[2] / "docs"


def documented_ranges() -> dict[str, SearchRange | tuple[int, ...]]:
    records: dict[str, type] = {**METHODS, "train": TrainOptions}
    return {
        f"{name}.{key}": option.search
        for name, record in records.items()
        for key, option in options.options_of(record).items()
        if option.search is not None
    }


@pytest.mark.parametrize("key", documented_ranges())
def test_range_is_within_the_limits_of_its_option_and_contains_the_default(key: str) -> None:
    name, _, field = key.partition(".")
    record = METHODS.get(name, TrainOptions)
    option, space = options.options_of(record)[field], documented_ranges()[key]
    default = next(f.default for f in dataclasses.fields(record) if f.name == field)
    values = (space.low, space.high) if isinstance(space, SearchRange) else space
    assert all(option.allows(value) for value in values)
    assert option.disabled_by is None or option.disabled_by[0] not in values
    if isinstance(space, SearchRange):
        assert 0 < space.low < space.high
        assert math.isnan(default) or default in space
    else:
        assert default in space


def test_page_lists_every_range_and_no_other() -> None:
    page = (DOCS / "tune.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+\.\w+)` \| ([^|]+) \|", page.split("## Search space")[1].split("\n## ")[0], re.M)
    expected = {
        key: str(space) if isinstance(space, SearchRange) else ", ".join(map(str, space))
        for key, space in documented_ranges().items()
    }
    assert dict(rows) == expected


def test_every_numeric_option_of_a_method_is_searched_unless_listed_here() -> None:
    fixed = {"perfedavg.passes", "pfedme.theta_decay"}  # as the authors' code has them
    fixed |= {"gpfl.alpha_levels", "gpfl.alpha_noise"}  # for what uploads tell, not for accuracy
    for name, method in METHODS.items():
        for key, option in options.options_of(method).items():
            numeric = next(f.type for f in dataclasses.fields(method) if f.name == key) in (float, int)
            assert (option.search is not None) == (numeric and f"{name}.{key}" not in fixed), f"{name}.{key}"


def test_options_that_are_set_are_not_searched_and_the_learning_rate_only_on_request() -> None:
    assert list(search_space("ditto", {"method": {"name": "ditto"}}, False)) == ["method.lam", "method.personal_epochs"]
    assert list(search_space("ditto", {"method": {"personal_epochs": 1}}, True)) == ["method.lam", "train.lr"]
    assert search_space("fedavg", {}, False) == {}


# Proposals.

SPACE: dict[str, SearchRange | tuple[int, ...]] = {"method.a": SearchRange(0.001, 1.0), "method.b": (1, 2)}

optuna = pytest.importorskip("optuna")


def accept(values: Values) -> str:
    return ""


def trained(tried: list[Values], scores: list[float], space: Space) -> Any:
    """Return a study of finished trials."""
    study = optuna.create_study(direction="maximize")
    for values, score in zip(tried, scores, strict=True):
        study.tell(ask_defaults(study, space, values), score)
    return study


def proposed(count: int, seed: int, find_error: Callable[[Values], str] = accept) -> list[Values]:
    return [values for _, values in propose(optuna.create_study(), SPACE, [], count, seed, find_error)]


def test_proposals_are_new_values_in_the_space_and_a_function_of_candidates_and_seed() -> None:
    proposals = proposed(4, 0)
    assert proposals == proposed(4, 0)
    assert proposals != proposed(4, 1)
    assert len({json.dumps(values) for values in proposals}) == 4
    assert all(0.001 <= values["method.a"] <= 1 and values["method.b"] in (1, 2) for values in proposals)
    assert all(float(f"{values['method.a']:.3g}") == values["method.a"] for values in proposals)


def test_proposals_are_near_the_best_candidates() -> None:
    # One float: next to an integer without influence, single proposals of the multivariate sampler scatter.
    space: Space = {"method.a": SearchRange(0.001, 1.0)}
    rng = np.random.default_rng(0)
    values: list[Values] = [{"method.a": float(10 ** rng.uniform(-3, 0))} for _ in range(30)]

    def mean_distance(scores: list[float]) -> float:
        """Return the mean distance of proposals from 0.1 in powers of ten."""
        proposals = [propose(trained(values, scores, space), space, values, 1, seed, accept)[0][1] for seed in range(8)]
        return float(np.mean([abs(math.log10(each["method.a"]) + 1) for each in proposals]))

    closeness = [-abs(math.log10(each["method.a"]) + 1) for each in values]
    assert mean_distance(closeness) < 0.4
    assert mean_distance([-score for score in closeness]) > 0.8


def test_values_that_the_method_rejects_are_drawn_again_and_an_error_says_if_none_are_left() -> None:
    small = proposed(4, 0, lambda values: "too large" if values["method.a"] > 0.01 else "")
    assert len(small) == 4
    assert max(values["method.a"] for values in small) <= 0.01
    with pytest.raises(GpflError, match="none of 200 proposed candidates can be trained: too small"):
        proposed(1, 0, lambda values: "too small")


def test_defaults_outside_the_range_count_as_the_nearest_values_in_it() -> None:
    study = trained([{"method.a": 0.0, "method.b": 3}], [1.0], SPACE)
    assert study.trials[0].params == {"method.a": 0.001, "method.b": 2}


def test_unreadable_storage_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    folder = tmp_path / "fedprox"
    folder.mkdir()
    (folder / "optuna.log").write_text("{}\n")
    with pytest.raises(GpflError, match=r"optuna\.log cannot be read: .*; delete .*fedprox to search it again"):
        open_study(folder)
