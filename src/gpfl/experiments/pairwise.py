"""Methods against each other over repeated splits: means, ranks, and the differences of all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from gpfl.core.metrics import METRICS
from gpfl.experiments.repeats import RepeatedResults
from gpfl.experiments.statistics import CorrectedTTest, Floats, corrected_t_test, holm_correction, rank_scores, round_values


@dataclass(frozen=True)
class MethodScore:
    """A metric of one method over repeats."""

    method: str  # label of the method
    values: Floats  # the metric of all predictions together in each repeat
    mean_rank: float  # mean rank among the methods, 1 for the best
    best_in: int  # repeats in which no method is better


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a metric between two methods, one minus other, over repeats."""

    one: str  # the first method
    other: str  # the second method
    test: CorrectedTTest  # mean, interval and p-value by the corrected resampled t-test
    corrected_p: float | None  # the p-value, corrected for the number of pairs by Holm's method
    wins: int  # repeats in which the first is better
    losses: int  # repeats in which the second is better
    client_wins: float  # clients for which the first is better, mean over repeats
    client_losses: float  # clients for which the second is better, mean over repeats


@dataclass(frozen=True)
class ClientScore:
    """A metric of one method on one client: its mean over repeats, and the repeats in which no method is better."""

    mean: float
    best_in: int


def score_methods(results: RepeatedResults, metric: str) -> list[MethodScore]:
    """Return the scores of the methods, the best mean first."""
    values = np.stack([results.values(name, metric) for name in results.methods])  # (methods, repeats)
    ranks, best = _ranks(values, metric), _is_best(values, metric)
    scores = [
        MethodScore(name, values[k], float(ranks[k].mean()), int(best[k].sum())) for k, name in enumerate(results.methods)
    ]
    return sorted(scores, key=lambda score: -METRICS[metric].sign * float(score.values.mean()))


def compare_pairs(results: RepeatedResults, metric: str, methods: Sequence[str]) -> list[PairedDifference]:
    """Return the differences of all pairs of methods, each minus those after it."""
    return _compare(results, metric, list(combinations(methods, 2)))


def compare_with(results: RepeatedResults, metric: str, reference: str, methods: Sequence[str]) -> list[PairedDifference]:
    """Return the differences of one method minus each of the others; p-values are corrected for these pairs alone."""
    return _compare(results, metric, [(reference, other) for other in methods if other != reference])


def _compare(results: RepeatedResults, metric: str, pairs: Sequence[tuple[str, str]]) -> list[PairedDifference]:
    ratio, sign = results.test_train_ratio(), METRICS[metric].sign
    values = {name: results.values(name, metric) for name in dict.fromkeys(name for pair in pairs for name in pair)}
    tests = [corrected_t_test(values[one] - values[other], ratio) for one, other in pairs]
    corrected = holm_correction([test.p for test in tests])
    differences = []
    for (one, other), test, p in zip(pairs, tests, corrected, strict=True):
        better = sign * round_values(values[one] - values[other])
        by_client = [sign * round_values(each) for each in _client_differences(results, metric, one, other)]
        client_wins, client_losses = (float(np.mean([(side * each > 0).sum() for each in by_client])) for side in (1, -1))
        wins, losses = int((better > 0).sum()), int((better < 0).sum())
        differences.append(PairedDifference(one, other, test, p, wins, losses, client_wins, client_losses))
    return differences


def score_clients(results: RepeatedResults, metric: str) -> dict[str, dict[str, ClientScore]]:
    """Return the score of each method on each client, by client and method; empty if clients differ between repeats."""
    scores = {}
    for client in results.clients:
        values = np.stack([results.values(name, metric, client=client) for name in results.methods])
        best = _is_best(values, metric)
        scores[client] = {
            name: ClientScore(float(np.nanmean(row)) if not np.isnan(row).all() else float("nan"), int(best[k].sum()))
            for k, (name, row) in enumerate(zip(results.methods, values, strict=True))
        }
    return scores


def _ranks(values: Floats, metric: str) -> Floats:
    """Return the ranks of methods in each repeat, (methods, repeats)."""
    return np.stack([rank_scores(column, lowest_is_best=METRICS[metric].lower_is_better) for column in values.T], axis=1)


def _is_best(values: Floats, metric: str) -> npt.NDArray[np.bool_]:
    """Return where no method is better, (methods, repeats)."""
    rounded = METRICS[metric].sign * round_values(values)
    best: npt.NDArray[np.bool_] = rounded == np.fmax.reduce(rounded, axis=0)
    return best


def _client_differences(results: RepeatedResults, metric: str, one: str, other: str) -> list[Floats]:
    """Return the differences of the clients in each repeat."""
    pairs = [(results.records[one][repeat], results.records[other][repeat]) for repeat in results.repeats]
    return [
        np.array([a.value(metric, client=client) - b.value(metric, client=client) for client in a.n_samples]) for a, b in pairs
    ]
