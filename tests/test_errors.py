from __future__ import annotations

import pytest

from gpfl.errors import DivergenceError, did_you_mean, pluralize


@pytest.mark.parametrize(
    ("name", "hint"),
    [("GPFL", "did you mean 'gpfl'?"), ("Fedavg", "did you mean 'FedAvg'?"), ("xyz", "known: FedAvg, gpfl")],
)
def test_did_you_mean_ignores_case_and_lists_all_names_if_none_is_close(name: str, hint: str) -> None:
    assert did_you_mean(name, ["gpfl", "FedAvg"]) == hint


def test_pluralize_knows_nouns_that_end_in_s() -> None:
    assert [pluralize(1, "class"), pluralize(2, "class"), pluralize(1200, "row")] == ["1 class", "2 classes", "1,200 rows"]


def test_divergence_error_shows_reason_and_remedy() -> None:
    assert str(DivergenceError("round 3: the loss is NaN", "lower train.lr")) == "round 3: the loss is NaN: lower train.lr"
