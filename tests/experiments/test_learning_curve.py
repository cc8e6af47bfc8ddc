"""Learning curves: exact power laws are found, and the number of samples that makes an answer clear is recovered."""

from __future__ import annotations

import numpy as np
import pytest

from gpfl.experiments.learning_curve import MAX_FACTOR, SampleEstimate, estimate_samples, fit_power_law, resample_means
from gpfl.experiments.statistics import correlated_t_posterior

SIZES = np.array([25.0, 50.0, 75.0, 100.0])
RATIO = 1 / 3


def repeats(values: list[float], std: float, n: int = 20, seed: int = 0) -> np.ndarray:
    """Return values of n repeats with this mean and standard deviation exactly, (repeats, values)."""
    noise = np.random.default_rng(seed).normal(size=(n, len(values)))
    noise = (noise - noise.mean(0)) / noise.std(0, ddof=1)
    return np.array(values) + std * noise


def estimate(alone: list[float], joined: list[float], std: float, rope: float = 0.01) -> SampleEstimate | None:
    scores = repeats([*alone, *joined], 1e-4)
    gains = repeats([joined[-1] - alone[-1]], std, seed=1)[:, 0]
    return estimate_samples(SIZES, scores[:, :4], scores[:, 4:], gains, rope=rope, clear=0.95, test_train_ratio=RATIO)


def test_power_law_is_recovered_and_extrapolated() -> None:
    curve = 0.9 - 1.5 * SIZES**-0.5
    law = fit_power_law(SIZES, np.stack([curve, 0.8 - 2.0 * SIZES**-1.0]))
    assert law.exponent == pytest.approx([0.5, 1.0])
    assert law.limit == pytest.approx([0.9, 0.8])
    assert law.at(np.array([400.0]))[:, 0] == pytest.approx([0.9 - 1.5 / 20, 0.8 - 2 / 400])
    assert fit_power_law(SIZES, curve[None]).at(np.array([1e6]), best=0.88)[0, 0] == 0.88


def test_falling_scores_are_fitted_by_their_mean() -> None:
    law = fit_power_law(SIZES, np.array([[0.9, 0.8, 0.8, 0.7]]))
    assert law.at(np.array([10.0, 1000.0]))[0] == pytest.approx([0.8, 0.8])


def test_resampled_means_have_the_standard_error_of_the_correlated_t_test() -> None:
    values = repeats([0.3], 0.1)
    means = resample_means(values, RATIO, seed=0, n_resamples=20000)
    assert means.mean() == pytest.approx(0.3, abs=2e-3)
    assert means.std() == pytest.approx(correlated_t_posterior(values[:, 0], RATIO).scale, rel=0.03)


def test_a_steady_gain_becomes_clear_when_its_standard_error_has_shrunk_enough() -> None:
    flat, std, gain = [0.7] * 4, 0.03, 0.03
    found = estimate(flat, [0.7 + gain] * 4, std)
    assert found is not None
    # P(gain > rope) = 0.95 where (gain − rope) = t · scale / √factor, with t = 1.729 for 19 degrees of freedom.
    expected = (1.729 * std * (1 / 20 + RATIO) ** 0.5 / (gain - 0.01)) ** 2
    assert 1 < expected < MAX_FACTOR
    assert found.factor == pytest.approx(expected, rel=0.03)
    assert found.low < found.factor < found.high


def test_a_gain_that_grows_with_more_samples_is_clear_earlier_than_one_that_stays() -> None:
    grows = (0.83 + 2.0 * (0.1 - SIZES**-0.5)).tolist()  # 0.83 at the last point, like the steady one
    growing, steady = estimate([0.8] * 4, grows, 0.03), estimate([0.8] * 4, [0.83] * 4, 0.03)
    assert growing is not None
    assert steady is not None
    assert growing.factor < 0.8 * steady.factor


def test_a_gain_at_the_edge_of_practical_equivalence_cannot_be_told() -> None:
    assert estimate([0.7] * 4, [0.71] * 4, 0.03) is None
    assert estimate([0.7] * 4, [0.715] * 4, 0.03) is None  # more than a quarter of the resamples are too close to it


def test_estimate_is_the_same_for_the_same_seed() -> None:
    assert estimate([0.7] * 4, [0.73] * 4, 0.03) == estimate([0.7] * 4, [0.73] * 4, 0.03)
