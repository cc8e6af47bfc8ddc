"""Learning curves: scores at fractions of the training samples, and how many additional samples would make an answer clear."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.core.randomness import generator
from gpfl.experiments.statistics import overlap_factor

Floats = npt.NDArray[np.float64]

MAX_FACTOR = 10.0  # times as many samples as there are, beyond which curves are not extrapolated

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
    """How many times the present samples would make an answer clear, and the middle half of the resamples."""

    factor: float
    low: float
    high: float


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


def resample_means(values: Floats, test_train_ratio: float, seed: int, n_resamples: int = N_RESAMPLES) -> Floats:
    """Return bootstrap means over repeats of values (repeats, …), (resamples, …).

    Repeats overlap, so a plain bootstrap would be too narrow: deviations from the mean are widened to the standard error of
    the correlated t-test.
    """
    n = len(values)
    draws = generator(seed, "bootstrap").integers(n, size=(n_resamples, n))
    mean = values.mean(0)
    widening = overlap_factor(n, test_train_ratio) * n / np.sqrt(n - 1)  # a bootstrap mean has std s √(n − 1) / n
    means: Floats = mean + widening * (values[draws].mean(1) - mean)
    return means


def estimate_samples(
    sizes: Floats,  # training samples at each point of the curves; the last point is all of them
    alone: Floats,  # scores of staying alone, (repeats, sizes)
    joined: Floats,
    gains: Floats,  # in each repeat
    *,
    rope: float,
    clear: float,
    test_train_ratio: float,  # test samples divided by those that a model is made from
    min_std: float = 0.0,  # lowest standard deviation of gains
    best: float = np.inf,  # best possible score
    seed: int = 0,
) -> SampleEstimate | None:
    """Return how many times the present samples would make it clear whether joining is better than staying alone.

    A power law is fitted to each of the two learning curves. Their difference says how the gain changes with the number of
    samples; the standard deviation of gains between splits falls with its root. The answer is clear at the first number of
    samples at which the probability of a gain above `rope` is expected to be at least `clear`, or at most 1 − `clear`.

    This is done for the mean scores and for resampled ones. An unclear answer often means that the gain may be next to `rope`,
    where no number of samples helps: the result is None if the mean scores, or more than a quarter of the resamples, need more
    than `MAX_FACTOR` times the samples.
    """
    from scipy import special

    stacked = np.concatenate([alone, joined, gains[:, None]], axis=1)
    means = np.concatenate([stacked.mean(0, keepdims=True), resample_means(stacked, test_train_ratio, seed)])
    points, n = len(sizes), len(gains)
    future = sizes[-1] * FACTORS
    curves = [fit_power_law(sizes, means[:, start : start + points]).at(future, best) for start in (0, points)]
    change = curves[1] - curves[0]
    gain = means[:, -1:] + change - change[:, :1]  # (1 + resamples, factors)
    scale = max(float(gains.std(ddof=1)), min_std, 1e-12) * overlap_factor(n, test_train_ratio) / np.sqrt(FACTORS)
    better = special.stdtr(n - 1, (gain - rope) / scale)
    answered = (better >= clear) | (better <= 1 - clear)
    first = np.where(answered.any(1), FACTORS[answered.argmax(1)], np.inf)
    low, high = np.quantile(first[1:], [0.25, 0.75], method="nearest")
    return SampleEstimate(float(first[0]), float(low), float(high)) if np.isfinite([first[0], high]).all() else None
