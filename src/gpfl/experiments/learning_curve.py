"""Learning curves: scores at fractions of the training samples, and how many samples more would make an answer clear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.core.randomness import generator
from gpfl.experiments.statistics import overlap_factor
from gpfl.inference.bootstrap import LEVEL

Floats = npt.NDArray[np.float64]

MAX_FACTOR = 10.0
"""Times as many samples as there are, beyond which curves are not extrapolated."""

FACTORS: Floats = np.geomspace(1.0, MAX_FACTOR, 100)
EXPONENTS: Floats = np.linspace(0.1, 2.0, 39)
N_RESAMPLES = 1000


@dataclass(frozen=True)
class PowerLaw:
    """The curves limit − drop · n^(−exponent) of several resamples, each an array (resamples,)."""

    limit: Floats
    drop: Floats
    exponent: Floats

    def at(self, n: Floats, best: float = np.inf) -> Floats:
        """Return the curves at sizes, (resamples, sizes), not above the best possible score."""
        curves: Floats = self.limit[:, None] - self.drop[:, None] * n ** -self.exponent[:, None]
        return np.minimum(curves, best)


@dataclass(frozen=True)
class SampleEstimate:
    """How many times the present samples would make an answer clear: the median of resamples and an interval.

    Ends are None beyond `MAX_FACTOR`; the estimate is unknown if the median is.
    """

    factor: float | None
    low: float | None
    high: float | None


def fit_power_law(n: Floats, scores: Floats) -> PowerLaw:
    """Return the least squares fit of increasing power laws to scores (resamples, sizes) at sizes n.

    For every exponent of a grid the other two parameters have a closed form.
    """
    x = n[None, :] ** -EXPONENTS[:, None]  # (exponents, sizes)
    x = x / x[:, :1]  # 1 at the smallest size, so that exponents are on one scale
    centred = x - x.mean(1, keepdims=True)
    residual = scores - scores.mean(1, keepdims=True)
    drop = np.maximum(-(residual @ centred.T) / (centred**2).sum(1), 0.0)  # (resamples, exponents)
    errors = ((residual[:, None, :] + drop[:, :, None] * centred) ** 2).sum(-1)
    best = errors.argmin(1)
    rows = np.arange(len(scores))
    chosen = drop[rows, best]
    limit = scores.mean(1) + chosen * x.mean(1)[best]
    return PowerLaw(limit, chosen * n[0] ** EXPONENTS[best], EXPONENTS[best])


def resample_means(values: Floats, test_fraction: float, seed: int, n_resamples: int = N_RESAMPLES) -> Floats:
    """Return bootstrap means over repeats of values (repeats, …), (resamples, …).

    Repeats overlap, so a plain bootstrap would be too narrow: deviations from the mean are widened to the standard error of
    the correlated t-test.
    """
    n = len(values)
    draws = generator(seed, "bootstrap").integers(n, size=(n_resamples, n))
    mean = values.mean(0)
    widening = overlap_factor(n, test_fraction) * n / np.sqrt(n - 1)  # a bootstrap mean has standard deviation s √(n − 1) / n
    means: Floats = mean + widening * (values[draws].mean(1) - mean)
    return means


def estimate_samples(
    sizes: Floats,
    alone: Floats,
    joined: Floats,
    gains: Floats,
    *,
    rope: float,
    clear: float,
    test_fraction: float,
    min_std: float = 0.0,
    best: float = np.inf,
    seed: int = 0,
) -> SampleEstimate:
    """Return how many times the present samples would make it clear whether joining is better than staying alone.

    A power law is fitted to each of the two learning curves. Their difference says how the gain changes with the number of
    samples; the standard deviation of gains between splits falls with its root. The answer is clear at the first number of
    samples at which the probability of a gain above `rope` is expected to be at least `clear`, or at most 1 − `clear`.

    Args:
        sizes: Training samples at each point of the curves; the last point is all of them.
        alone: Scores of staying alone, (repeats, sizes).
        joined: Scores of joining, (repeats, sizes).
        gains: Gain in each repeat.
        rope: Gains up to this size make no practical difference.
        clear: Probability from which an answer is clear.
        test_fraction: Fraction of the samples in each test set.
        min_std: Lowest standard deviation of gains.
        best: Best possible score.
        seed: Seed of the resamples.

    """
    from scipy import special

    stacked = np.concatenate([alone, joined, gains[:, None]], axis=1)
    means = resample_means(stacked, test_fraction, seed)
    points = len(sizes)
    future = sizes[-1] * FACTORS
    curves = [fit_power_law(sizes, means[:, start : start + points]).at(future, best) for start in (0, points)]
    change = curves[1] - curves[0]
    gain = means[:, -1:] + change - change[:, :1]  # (resamples, factors)
    n = len(gains)
    scale = max(float(gains.std(ddof=1)), min_std, 1e-12) * overlap_factor(n, test_fraction) / np.sqrt(FACTORS)
    better = special.stdtr(n - 1, (gain - rope) / scale)
    answered = (better >= clear) | (better <= 1 - clear)
    first = np.where(answered.any(1), FACTORS[answered.argmax(1)], np.inf)
    low, median, high = (float(each) for each in np.quantile(first, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], method="nearest"))
    return SampleEstimate(*(value if np.isfinite(value) else None for value in (median, low, high)))
