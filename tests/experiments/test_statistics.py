"""Statistics: tests and ranks worked out by hand, on run folders made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from synthetic_runs import run_folder, trials_of

import gpfl
from gpfl.experiments import statistics
from gpfl.experiments.statistics import (
    MIN_PAIRS,
    compare_paired,
    corrected_t_test,
    correlated_t_posterior,
    holm_correction,
    rank_scores,
    signed_rank,
)
from gpfl.experiments.stored_runs import StoredRun

NAN = float("nan")


def test_client_accuracies_are_paired_by_seed_and_client_at_each_trials_best_round(tmp_path: Path) -> None:
    one = trials_of(tmp_path, "gpfl", {0: [[0.1, 0.2], [0.9, 0.8]], 1: [[0.7, 0.9], [0.1, 0.1]]})  # rounds 1 and 0 are best
    other = trials_of(tmp_path, "fedavg", {0: [[0.5, 0.6], [0.0, 0.0]], 1: [[0.6, 0.6], [0.0, 0.0]]})
    compared = compare_paired(one, other)
    assert compared.clients.n == 2
    assert compared.clients.difference == pytest.approx(0.25)
    assert compared.seeds.n == 2
    assert compared.seeds.difference == pytest.approx(0.25)


def test_too_few_seeds_are_not_tested(tmp_path: Path) -> None:
    accuracies = {seed: [[0.5 + 0.01 * k for k in range(8)]] for seed in range(3)}
    better = {seed: [[value + 0.02 * (k + 1) for k, value in enumerate(rounds[0])]] for seed, rounds in accuracies.items()}
    compared = compare_paired(trials_of(tmp_path, "gpfl", better), trials_of(tmp_path, "fedavg", accuracies))
    assert compared.clients.p == pytest.approx(2 / 2**8)  # all signs alike, of 2⁸
    assert compared.seeds.p is None


def test_seeds_that_both_have_are_compared(tmp_path: Path) -> None:
    one = trials_of(tmp_path, "gpfl", {0: [[0.1]], 1: [[0.9]], 7: [[0.5]]})
    other = trials_of(tmp_path, "fedavg", {7: [[0.2]], 1: [[0.3]], 3: [[0.0]]})
    assert compare_paired(one, other).seeds.n == 2
    assert compare_paired(one, other).seeds.difference == pytest.approx((0.6 + 0.3) / 2)


def test_spread_is_compared_by_how_far_clients_lie_from_their_mean(tmp_path: Path) -> None:
    one = trials_of(tmp_path, "gpfl", {0: [[0.5, 0.6, 0.7]], 1: [[0.4, 0.6, 0.8]]})
    other = trials_of(tmp_path, "fedavg", {0: [[0.2, 0.5, 0.8]], 1: [[0.2, 0.5, 0.8]]})
    compared = compare_paired(one, other, spread=True)
    assert compared.clients.difference == pytest.approx(np.mean([-0.15, 0.0, -0.15]))
    assert compared.seeds.difference == pytest.approx(np.sqrt(2 / 3) * np.mean([0.1 - 0.3, 0.2 - 0.3]))


def test_pairs_that_are_none_are_refused(tmp_path: Path) -> None:
    one = trials_of(tmp_path, "gpfl", {0: [[0.5, 0.5]]})
    elsewhere = trials_of(tmp_path, "fedavg", {0: [[0.5, 0.5]]}, rows=(1, 0))
    later = trials_of(tmp_path, "ditto", {1: [[0.5, 0.5]]})
    with pytest.raises(gpfl.GpflError, match=r"gpfl and fedavg were run on different federations .*: their clients"):
        compare_paired(one, elsewhere)
    with pytest.raises(gpfl.GpflError, match="gpfl and ditto have no seed in common: run both with the same --seeds"):
        compare_paired(one, later)


def test_manifests_that_differ_in_their_words_alone_are_the_same_federation(tmp_path: Path) -> None:
    one, other = (trials_of(tmp_path, name, {0: [[0.5, 0.25]]}) for name in ("gpfl", "fedavg"))
    path = other.runs[0].path / "federation.toml"
    path.write_text(path.read_text() + '\n[source]\nread = "elsewhere"\n')
    assert compare_paired(one, other).clients.n == 2


@pytest.mark.parametrize("text", [b"", b"half = ", b"\xff", b"table = 1"])
def test_manifest_that_is_damaged_is_named(tmp_path: Path, text: bytes) -> None:
    one, other = (trials_of(tmp_path, name, {0: [[0.5, 0.25]]}) for name in ("gpfl", "fedavg"))
    path = other.runs[0].path / "federation.toml"
    path.write_bytes(text)
    with pytest.raises(gpfl.GpflError, match=rf"{path} cannot be read: replace it with a good copy, or"):
        compare_paired(one, other)


def test_metrics_without_client_accuracies_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", 0, [[0.5]])
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"client_accuracies"', '"customers"'))
    with pytest.raises(gpfl.GpflError, match=r"a holds no accuracies of single clients in round 0: remove it"):
        statistics.client_accuracies(StoredRun(folder))


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 2, 3, 4, 5, 6], 2 / 64),  # one of 64 signs, and its mirror
        ([-1, 2, 3, 4, 5, 6], 4 / 64),  # ranks against: 1, or none
        ([1, 2, 3, 4, 5, 6, 0, 0], 2 / 64),  # equal pairs say nothing
        ([0, 0, 0, 0, 0, 0], 1.0),
        ([1, 2, 3, 4, 5], None),
    ],
)
def test_chances_are_those_of_all_signs(differences: Sequence[float], p: float | None) -> None:
    test = signed_rank([value / 100 for value in differences])
    assert test.n == len(differences)
    assert test.p == (pytest.approx(p) if p is not None else None)
    assert (test.p is None) == (len(differences) < MIN_PAIRS)


def test_order_of_the_two_turns_the_difference_and_not_the_chance() -> None:
    values = [0.01, -0.02, 0.035, 0.04, 0.05, 0.06, -0.01]
    one, other = signed_rank(values), signed_rank([-value for value in values])
    assert one.difference == -other.difference
    assert one.p == other.p


def test_several_tests_are_read_together_by_holm() -> None:
    assert holm_correction([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm_correction([0.9, 0.8]) == [1.0, 1.0]
    assert holm_correction([]) == []


def test_equal_scores_share_a_rank_and_a_method_that_was_not_run_has_none() -> None:
    for scores, ranks in (
        ([90, 80, 80, 10], [1, 2.5, 2.5, 4]),
        ([50, 50, 70, NAN], [2.5, 2.5, 1, NAN]),
        ([1.0, NAN, NAN, NAN], [1, NAN, NAN, NAN]),
    ):
        assert np.array_equal(rank_scores(scores), ranks, equal_nan=True)


def test_numbers_that_differ_by_the_order_of_adding_share_a_place() -> None:
    seeds = [2385, 2376, 2381], [2384, 2375, 2383]  # right rows of 2584, as many in all
    means = [100 * np.mean([right / 2584 for right in each]) for each in seeds]
    assert means[0] != means[1]
    assert rank_scores([means[0], means[1], 99.0, 1.0]).tolist() == [2.5, 2.5, 1, 4]
    assert rank_scores([92.13, 92.13 + 1e-6]).tolist() == [2, 1]


def test_lowest_score_may_be_best() -> None:
    assert np.array_equal(rank_scores([3.0, 1.0, NAN], lowest_is_best=True), [2, 1, NAN], equal_nan=True)


def test_corrected_t_test_equals_a_plain_computation() -> None:
    differences = np.random.default_rng(3).normal(0.02, 0.05, 15)
    found = statistics.corrected_t_test(differences, 0.25 / 0.75)
    variance = sum((value - differences.mean()) ** 2 for value in differences) / 14
    t = differences.mean() / np.sqrt((1 / 15 + 1 / 3) * variance)
    draws = np.random.default_rng(0).standard_t(14, 400_000)
    assert found.mean == pytest.approx(differences.mean())
    assert found.p == pytest.approx(float((np.abs(draws) > abs(t)).mean()), abs=0.003)
    assert found.low is not None
    assert found.high is not None
    assert found.mean - found.low == pytest.approx(2.1447866879 * differences.mean() / t), "97.5 % quantile with 14 degrees"
    assert found.high - found.mean == pytest.approx(found.mean - found.low)


def test_variance_of_repeats_is_multiplied_by_the_corrected_factor() -> None:
    values = [0.0, 1.0, 2.0, 3.0]
    plain, corrected = statistics.corrected_t_test(values, 0.0), statistics.corrected_t_test(values, 0.5)
    widths = [test.high - test.low for test in (plain, corrected) if test.high is not None and test.low is not None]
    assert (widths[1] / widths[0]) ** 2 == pytest.approx((1 / 4 + 0.5) / (1 / 4))


def test_undefined_and_constant_values_are_handled() -> None:
    assert statistics.corrected_t_test([0.1, NAN, 0.3], 0.3).n == 2
    assert statistics.corrected_t_test([0.1, NAN], 0.3).p is None
    assert statistics.corrected_t_test([], 0.3).n == 0
    assert statistics.corrected_t_test([0.0, 0.0], 0.3).p == 1.0
    constant = statistics.corrected_t_test([0.2, 0.2, 0.2], 0.3)
    assert (constant.low, constant.high, constant.p) == (pytest.approx(0.2), pytest.approx(0.2), 0.0)


def test_correlated_t_posterior_is_students_t_with_the_scale_worked_out_by_hand() -> None:
    differences = [0.02, 0.05, -0.01, 0.04]
    posterior = correlated_t_posterior(differences, 1 / 3)
    std = (sum((d - 0.025) ** 2 for d in differences) / 3) ** 0.5
    assert posterior.mean == pytest.approx(0.025)
    assert posterior.scale == pytest.approx(std * (1 / 4 + 1 / 3) ** 0.5)
    expected = scipy.stats.t(3, posterior.mean, posterior.scale)
    assert posterior.probability_above(0.01) == pytest.approx(expected.sf(0.01))
    assert posterior.interval() == pytest.approx(expected.interval(0.95))


def test_interval_of_the_correlated_t_test_is_that_of_the_corrected_resampled_t_test() -> None:
    values = np.random.default_rng(0).normal(0.02, 0.03, 20)
    test, posterior = corrected_t_test(values, 0.4), correlated_t_posterior(values, 0.4)
    assert posterior.interval() == pytest.approx((test.low, test.high))
    assert 2 * (1 - posterior.probability_above(0)) == pytest.approx(test.p)


def test_overlap_of_training_sets_widens_the_posterior() -> None:
    values = np.random.default_rng(0).normal(0.02, 0.03, 20)
    scales = [correlated_t_posterior(values, ratio).scale for ratio in (0.0, 1 / 3, 1.0)]
    assert scales[0] == pytest.approx(values.std(ddof=1) / 20**0.5, rel=1e-6)
    assert scales == sorted(scales)


def test_equal_scores_in_all_splits_are_certain_only_without_a_lowest_standard_deviation() -> None:
    certain, cautious = (correlated_t_posterior(np.zeros(10), 1 / 3, min_std=std) for std in (0.0, 0.05))
    assert (certain.probability_above(0.0), certain.probability_above(-0.01)) == (0.0, 1.0)
    assert cautious.interval().high == pytest.approx(scipy.stats.t(9).isf(0.025) * 0.05 * (0.1 + 1 / 3) ** 0.5)
    assert cautious.probability_above(0.0) == pytest.approx(0.5)
