"""Statistical tests of the difference between two methods, and ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.inference.bootstrap import LEVEL, Interval

Floats = npt.NDArray[np.float64]

MIN_PAIRS = 6  # pairs that a signed-rank test needs: with 5, even 5 wins give a two-sided p above 0.05
DECIMALS = 9  # decimals that are compared. Smaller differences come from the order of summation.


class SignedRank(NamedTuple):
    """A two-sided Wilcoxon signed-rank test of paired differences."""

    n: int
    difference: float  # mean, as a fraction of samples
    p: float | None  # None with fewer than MIN_PAIRS pairs


class Comparison(NamedTuple):
    """Two methods on the same federations and seeds, tested in two ways.

    - `clients`: one pair per client, the mean over seeds. Tests whether the difference holds across clients of this
      federation. It ignores that all were trained in the same runs.
    - `seeds`: one pair per seed, the accuracy on all samples. Seeds are independent, so only this test says something about
      the next training. Three seeds are too few for it.
    """

    clients: SignedRank
    seeds: SignedRank


def compare_paired(one: Trials, other: Trials, *, spread: bool = False) -> Comparison:
    """Compare the best rounds of two methods over the seeds that both have. Raise if their federations differ.

    With `spread`, compare how far accuracies are from their mean over clients, and per seed their standard deviation.
    """
    one_runs, other_runs = ({run.seed: run for run in trials.runs} for trials in (one, other))
    seeds = [seed for seed in one_runs if seed in other_runs]
    if not seeds:
        raise GpflError(f"{one.method} and {other.method} have no seed in common: run both with the same --seeds")
    for seed in seeds:
        first, second = one_runs[seed], other_runs[seed]
        if first.partition_hash() != second.partition_hash():
            raise GpflError(
                f"{one.method} and {other.method} were run on different federations ({first.path}, {second.path}): their "
                "clients are not paired; run both on the same federation"
            )
    values = client_deviations if spread else client_accuracies
    pairs = [(values(one_runs[seed]), values(other_runs[seed])) for seed in seeds]
    by_client, by_seed = ([np.subtract(a[k], b[k]) for a, b in pairs] for k in (0, 1))
    return Comparison(signed_rank(np.mean(by_client, axis=0)), signed_rank(by_seed))


def signed_rank(differences: npt.ArrayLike) -> SignedRank:
    """Return the test of differences. Zeros count as pairs but do not affect p."""
    from scipy import stats  # takes half a second, which commands without a table need not wait

    values = round_values(differences)
    nonzero = values[values != 0]
    p: float | None = None
    if len(values) >= MIN_PAIRS:
        p = float(stats.wilcoxon(nonzero).pvalue) if len(nonzero) else 1.0
    return SignedRank(len(values), float(values.mean()), p)


@dataclass(frozen=True)
class CorrectedTTest:
    """A mean over repeated splits with its interval, and the two-sided p-value of the hypothesis that it is 0.

    The training sets of repeats overlap, so their values are correlated, and the usual variance of a mean is too small. The
    corrected resampled t-test multiplies the variance of a value by 1/J + n_test/n_train in place of 1/J, for J repeats
    (Nadeau and Bengio, Inference for the Generalization Error, 2003).
    """

    n: int  # repeats in which the value is defined
    mean: float
    low: float | None  # ends of the interval; None with fewer than 2 repeats
    high: float | None
    p: float | None

    def __neg__(self) -> "CorrectedTTest":
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return replace(self, mean=-self.mean, low=low, high=high)


def corrected_t_test(values: Sequence[float] | Floats, test_train_ratio: float, level: float = 0.95) -> CorrectedTTest:
    """Return the corrected resampled t-test of values over repeats, such as differences between two methods; NaN is left out.

    `test_train_ratio` is the number of test samples divided by that of the samples that a model is made from.
    """
    from scipy import stats

    numbers = np.asarray(values, dtype=np.float64)
    defined = numbers[~np.isnan(numbers)]
    n = len(defined)
    mean = float(defined.mean()) if n else float("nan")
    if n < 2:
        return CorrectedTTest(n, mean, None, None, None)
    error = float(defined.std(ddof=1)) * overlap_factor(n, test_train_ratio)
    if np.ptp(round_values(defined)) == 0:
        return CorrectedTTest(n, mean, mean, mean, 1.0 if round_values(mean) == 0 else 0.0)
    half = error * float(stats.t.ppf((1 + level) / 2, n - 1))
    return CorrectedTTest(n, mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, n - 1)))


@dataclass(frozen=True)
class StudentPosterior:
    """The posterior of a mean difference: Student's t with a location, a scale and degrees of freedom."""

    mean: float
    scale: float
    dof: int

    def probability_above(self, value: float) -> float:
        """Return the probability that the mean difference is larger than a value."""
        if self.scale == 0:
            return float(self.mean > value)
        from scipy import special

        return float(special.stdtr(self.dof, (self.mean - value) / self.scale))

    def interval(self, level: float = LEVEL) -> Interval:
        """Return the central credible interval."""
        from scipy import special

        half = self.scale * float(special.stdtrit(self.dof, (1 + level) / 2))
        return Interval(self.mean - half, self.mean + half)


def correlated_t_posterior(
    differences: Sequence[float] | Floats, test_train_ratio: float, *, min_std: float = 0.0
) -> StudentPosterior:
    """Return the posterior of the mean difference of paired scores from repeated random splits.

    This is the Bayesian correlated t-test of Corani and Benavoli (2015). Training sets of different splits overlap, so their
    n differences are correlated; the correlation is taken to be ρ, the fraction of samples in a test set. With a flat prior the
    posterior is Student's t with n − 1 degrees of freedom, located at the mean, with scale² = (1/n + ρ/(1 − ρ)) s². As
    ρ/(1 − ρ) = n_test/n_train, its central interval is that of the corrected resampled t-test.

    `min_std` is the lowest value for s. Without it, equal scores in all splits would mean certainty, also if they come from a
    few samples.
    """
    values = round_values(differences)
    n = len(values)
    std = max(float(values.std(ddof=1)), min_std)
    return StudentPosterior(float(values.mean()), std * overlap_factor(n, test_train_ratio), n - 1)


def overlap_factor(n: int, test_train_ratio: float) -> float:
    """Return the standard error of a mean over n overlapping splits as a multiple of their standard deviation."""
    return math.sqrt(1 / n + test_train_ratio)


def holm_correction(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for the number of tests (Holm's step-down method); None stays None."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    lower_bound = 0.0
    for n_smaller, (p, index) in enumerate(order):
        lower_bound = max(lower_bound, min(1.0, p * (len(order) - n_smaller)))
        corrected[index] = lower_bound
    return corrected


def rank_scores(scores: npt.ArrayLike, *, lowest_is_best: bool = False) -> Floats:
    """Return ranks from 1 for the best. Equal scores share their mean rank; NaN has none and stays NaN."""
    from scipy import stats

    values = round_values(scores)
    ranks: Floats = stats.rankdata(values if lowest_is_best else -values, nan_policy="omit")
    return ranks


def round_values(values: npt.ArrayLike) -> Floats:
    """Return numbers rounded so that equal fractions are equal, however they were summed."""
    numbers: Floats = np.asarray(values, dtype=np.float64)
    return numbers.round(DECIMALS)


def client_accuracies(run: StoredRun) -> tuple[Floats, float]:
    """Return the accuracy of each client and that over all samples, in the best round."""
    clients, accuracy = run.accuracies(run.summary.get("best_round"))
    return np.array(clients, dtype=np.float64), accuracy


def client_deviations(run: StoredRun) -> tuple[Floats, float]:
    """Return how far each client's accuracy is from their mean, and the standard deviation over clients."""
    clients, _ = client_accuracies(run)
    return np.abs(clients - clients.mean()), float(clients.std())
