"""Bootstrap intervals of metrics.

A resample is a weight for each sample: how often it was drawn. All resamples of a metric are computed at once from weights
(samples, resamples).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpfl.core.metrics import METRICS
from gpfl.core.randomness import generator

Labels = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float64]

ECE_BINS = 15  # bins of equal width between 0 and 1, by the probability of the predicted class

N_RESAMPLES = 1000
LEVEL = 0.95  # share of the resamples between the ends of an interval

MIN_RESAMPLES = 100
MAX_WORK = 100_000_000
"""Samples × classes × resamples of the stacked predictions, above which they get fewer resamples, but `MIN_RESAMPLES`."""

CHUNK = 4_000_000  # weights in memory at once
CACHED = 50_000  # weights that rankings go through at once, which fit a core's cache


class Interval(NamedTuple):
    """The ends of a 95 % interval."""

    low: float
    high: float


class Predictions(NamedTuple):
    """Labels, probabilities and predicted classes of samples."""

    y: Labels
    p: Probabilities
    decisions: Labels


class Intervals(NamedTuple):
    """The intervals of each metric: of each client, of the stacked predictions, and of the mean over clients."""

    clients: list[dict[str, Interval | None]]
    overall: dict[str, Interval | None]
    mean: dict[str, Interval | None]


def bootstrap_intervals(clients: Sequence[Predictions], n_resamples: int = N_RESAMPLES, seed: int = 0) -> Intervals:
    """Return percentile intervals of the metrics of each client's predictions.

    Samples are drawn with replacement within each client. An interval leaves out resamples in which the metric is undefined;
    it is None if more than half of them are.
    """
    stacked = stack_predictions(clients)
    limit = overall_resamples(stacked.p.size, n_resamples)
    generators = [generator(seed, "bootstrap", client) for client in range(len(clients))]
    chunk = max(1, min(n_resamples, CHUNK // max(1, len(stacked.y))))
    predictions, all_predictions = [ResampledMetrics(*pair) for pair in clients], ResampledMetrics(*stacked)
    by_client: list[list[dict[str, Floats]]] = [[] for _ in clients]
    overall: list[dict[str, Floats]] = []
    for start in range(0, n_resamples, chunk):
        size = min(chunk, n_resamples - start)
        weights = [draw_weights(rng, len(client.y), size) for rng, client in zip(generators, clients, strict=True)]
        for values, one, client_weights in zip(by_client, predictions, weights, strict=True):
            values.append(one.values(client_weights))
        if start < limit:
            overall.append(all_predictions.values(np.concatenate(weights)[:, : limit - start]))
    values = [_concatenate(chunks) for chunks in by_client]
    mean = {name: _mean_of_defined(np.stack([client_values[name] for client_values in values])) for name in values[0]}
    return Intervals([_intervals(each) for each in values], _intervals(_concatenate(overall)), _intervals(mean))


def stack_predictions(clients: Sequence[Predictions]) -> Predictions:
    """Return the predictions of all clients together."""
    return Predictions(*(np.concatenate(parts) for parts in zip(*clients, strict=True)))


def overall_resamples(size: int, n_resamples: int = N_RESAMPLES) -> int:
    """Return the number of resamples for stacked probabilities of `size` numbers."""
    return min(n_resamples, max(MIN_RESAMPLES, MAX_WORK // max(1, size)))


def draw_weights(rng: np.random.Generator, n_samples: int, n_resamples: int) -> Floats:
    """Return how often each sample is in each resample, (samples, resamples)."""
    if n_samples == 0:
        return np.zeros((0, n_resamples))
    return rng.multinomial(n_samples, np.full(n_samples, 1 / n_samples), size=n_resamples).T.astype(np.float64)


class ResampledMetrics:
    """The metrics of predictions under weights of their samples.

    scikit-learn has the same metrics, but takes ten times as long for a small client and has no weights of many resamples.
    """

    def __init__(self, y: Labels, p: Probabilities, predicted: Labels) -> None:
        self.y, self.p = y, p
        self.correct = predicted == y
        log_losses = -np.log(np.maximum(p[np.arange(len(y)), y], np.finfo(p.dtype).eps))  # scikit-learn's lower limit
        errors = (p - np.eye(p.shape[1])[y]) ** 2
        brier_scores = errors[:, 1] if p.shape[1] == 2 else errors.sum(axis=1)  # in scikit-learn from version 1.7 on
        self.losses = np.stack([self.correct, log_losses, brier_scores])  # (3, samples)
        classes = np.union1d(y, predicted)[:, None]
        self.is_label, self.is_predicted = (y == classes).astype(np.float64), (predicted == classes).astype(np.float64)
        confidence = p.max(axis=1)
        bins = np.clip(np.ceil(confidence * ECE_BINS).astype(np.int64) - 1, 0, ECE_BINS - 1)  # each with its upper end
        self.gaps = (bins == np.unique(bins)[:, None]) * ((p.argmax(axis=1) == y) - confidence)  # (bins, samples)

    def values(self, weights: Floats, names: Collection[str] = tuple(METRICS)) -> dict[str, Floats]:
        """Return metrics under weights (samples, resamples); NaN where one is undefined."""
        n_samples, n_resamples = weights.shape
        undefined = np.full(n_resamples, np.nan)
        if n_samples == 0:
            return dict.fromkeys(names, undefined)
        accuracy, log_loss, brier = self.losses @ weights / n_samples
        hits = (self.is_label * self.correct) @ weights  # (classes, resamples)
        labels, predicted = self.is_label @ weights, self.is_predicted @ weights
        ranked = not {"auroc", "average_precision"}.isdisjoint(names)
        auroc, average_precision = self._ranking(weights) if ranked else (undefined, undefined)
        values = {
            "accuracy": accuracy,
            "balanced_accuracy": _mean_of_defined(_divide(hits, labels)),
            "macro_f1": _mean_of_defined(_divide(2 * hits, labels + predicted)),
            "auroc": auroc,
            "average_precision": average_precision,
            "log_loss": log_loss if self.p.shape[1] > 1 else undefined,
            "brier": brier,
            "ece": np.abs(self.gaps @ weights).sum(axis=0) / n_samples,
        }
        return {name: values[name] for name in names}

    def _ranking(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return AUROC and average precision, both means over the classes of the labels, or of the second of two classes."""
        width = max(1, CACHED // len(weights))
        blocks = np.split(weights, range(width, weights.shape[1], width), axis=1)
        classes = [1] if self.p.shape[1] == 2 else np.unique(self.y).tolist()
        values = [[self._rank_class(label, np.ascontiguousarray(block)) for label in classes] for block in blocks]
        auroc, average_precision = np.concatenate(values, axis=2).swapaxes(0, 1)  # (classes, resamples) each
        return _mean_of_defined(auroc), _mean_of_defined(average_precision)

    def _rank_class(self, label: int, weights: Floats) -> tuple[Floats, Floats]:
        """Return AUROC and average precision of a class from its samples' steps down the scores, which equal scores share."""
        scores = self.p[:, label]
        order = np.argsort(-scores, kind="stable")
        step = np.cumsum(np.diff(scores[order], prepend=np.inf) != 0) - 1
        starts = np.append(np.flatnonzero(np.diff(step, prepend=-1)), len(order))
        rows = np.flatnonzero(self.y[order] == label)
        steps, first_rows = np.unique(step[rows], return_index=True)  # steps that have samples of the class
        if len(rows) == 0:
            return np.full(weights.shape[1], np.nan), np.full(weights.shape[1], np.nan)
        above = np.zeros((len(order) + 1, weights.shape[1]))  # weight above each sample
        np.cumsum(weights[order], axis=0, out=above[1:])
        positive = np.add.reduceat(weights[order[rows]], first_rows, axis=0)  # (steps, resamples)
        true_positives, selected = positive.cumsum(axis=0), above[starts[steps + 1]]
        negative = selected - above[starts[steps]] - positive
        n_positive = true_positives[-1]
        n_negative = len(order) - n_positive
        # A pair of samples counts if the positive one has the higher score, and half if the scores are equal.
        ranked = (positive * (n_negative - (selected - true_positives) + negative / 2)).sum(axis=0)
        gained = (positive * true_positives / np.maximum(selected, 1)).sum(axis=0)
        defined = n_negative > 0
        auroc = np.where(defined, _divide(ranked, n_positive * n_negative), np.nan)
        return auroc, np.where(defined, _divide(gained, n_positive), np.nan)


def _divide(a: Floats, b: Floats) -> Floats:
    """Return a / b, NaN where b is 0."""
    quotient: Floats = np.divide(a, b, out=np.full(np.broadcast(a, b).shape, np.nan), where=b > 0)
    return quotient


def _mean_of_defined(values: Floats) -> Floats:
    """Return the mean over the first axis without NaN; NaN if there is nothing else."""
    return _divide(np.nansum(values, axis=0), (~np.isnan(values)).sum(axis=0))


def _concatenate(chunks: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _intervals(values: Mapping[str, Floats]) -> dict[str, Interval | None]:
    intervals: dict[str, Interval | None] = {}
    for name, resampled in values.items():
        defined, intervals[name] = resampled[~np.isnan(resampled)], None
        if len(defined) and len(defined) >= len(resampled) / 2:
            intervals[name] = Interval(*np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist())
    return intervals
