"""Methods against each other over repeated splits, worked out by hand."""

from __future__ import annotations

import pytest
from synthetic_repeats import repeated_results

from gpfl.experiments.repeats import compare_pairs, score_clients, score_methods
from gpfl.experiments.statistics import corrected_t_test, holm_correction

SCORES = {
    "local": {"a": [0.7, 0.8, 0.9], "b": [0.5, 0.6, 0.7]},  # 0.6, 0.7, 0.8
    "gpfl": {"a": [0.7, 0.9, 0.7], "b": [0.7, 0.7, 0.7]},  # 0.7, 0.8, 0.7
    "fedavg": {"a": [0.1, 0.2, 0.1], "b": [0.1, 0.2, 0.1]},
}


def test_methods_are_ordered_by_mean_with_ranks_and_the_repeats_in_which_none_is_better() -> None:
    scores = score_methods(repeated_results(SCORES), "accuracy")
    assert [(score.method, score.best_in) for score in scores] == [("gpfl", 2), ("local", 1), ("fedavg", 0)]
    assert [score.mean_rank for score in scores] == pytest.approx([4 / 3, 5 / 3, 3])
    assert scores[0].values.tolist() == pytest.approx([0.7, 0.8, 0.7])


def test_differences_are_paired_by_repeat_and_tested_with_the_ratio_of_test_to_other_samples() -> None:
    pairs = compare_pairs(repeated_results(SCORES), "accuracy", ["gpfl", "local", "fedavg"])
    assert [(pair.one, pair.other) for pair in pairs] == [("gpfl", "local"), ("gpfl", "fedavg"), ("local", "fedavg")]
    first = pairs[0]
    expected = corrected_t_test([0.1, 0.1, -0.1], 20 / 60)
    assert (first.test.mean, first.test.low, first.test.high, first.test.p) == pytest.approx(
        (expected.mean, expected.low, expected.high, expected.p)
    )
    assert [pair.corrected_p for pair in pairs] == pytest.approx(holm_correction([pair.test.p for pair in pairs]))


def test_wins_count_repeats_and_clients_without_ties() -> None:
    pair = compare_pairs(repeated_results(SCORES), "accuracy", ["gpfl", "local"])[0]
    assert (pair.wins, pair.losses) == (2, 1)
    assert (pair.client_wins, pair.client_losses) == pytest.approx((3 / 3, 1 / 3))  # a: 0, 1, -1; b: 1, 1, 0


def test_lower_losses_win() -> None:
    results = repeated_results(SCORES, "log_loss")
    assert [score.method for score in score_methods(results, "log_loss")] == ["fedavg", "local", "gpfl"]
    pair = compare_pairs(results, "log_loss", ["gpfl", "local"])[0]
    assert (pair.wins, pair.losses, pair.test.mean > 0) == (1, 2, True)


def test_client_scores_count_ties_for_all_and_leave_out_undefined_repeats() -> None:
    test = {
        "local": {"a": [0.5, None, 0.7], "b": [0.1, 0.1, 0.1]},
        "gpfl": {"a": [0.5, None, 0.6], "b": [0.1, 0.1, 0.1]},
    }
    scores = score_clients(repeated_results(test, "auroc"), "auroc")
    assert scores["a"]["local"].mean == pytest.approx(0.6)
    assert (scores["a"]["local"].best_in, scores["a"]["gpfl"].best_in) == (2, 1)


def test_clients_of_a_synthetic_partition_differ_between_repeats() -> None:
    assert score_clients(repeated_results(SCORES, partition="dirichlet"), "accuracy") == {}
