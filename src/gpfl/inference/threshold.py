"""The decision threshold of a binary model, chosen on validation samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.core.metrics import METRICS
from gpfl.data.files.raw_table import join_names
from gpfl.errors import pluralize
from gpfl.inference.bootstrap import Floats, Labels, Probabilities

THRESHOLD_METRICS = ("balanced_accuracy", "macro_f1", "accuracy")  # metrics that a threshold can be chosen for

MIN_SAMPLES = 5  # validation samples of each class without which no threshold is chosen: fewer would choose it by chance


@dataclass(frozen=True)
class Threshold:
    """The probability at which the second of two classes is predicted."""

    value: float  # the threshold
    metric: str = ""  # metric for which it is best on validation samples; "" if a user set it
    n_samples: int = 0  # number of validation samples
    score: float = math.nan  # the metric on these samples
    score_at_half: float = math.nan  # the metric on these samples at a threshold of 0.5


def describe_thresholds(thresholds: Mapping[str, Threshold | None], class_name: str) -> list[str]:
    """Return lines on the clients' decision thresholds for the class of this name; none if no client has one."""
    first = next((threshold for threshold in thresholds.values() if threshold is not None), None)
    if first is None:
        return []
    subject = f"Decision threshold for '{class_name}':"
    if not first.metric:
        return [f"{subject} {first.value:g} (--threshold)."]
    reason = f"the best for {METRICS[first.metric].label} on validation samples"
    if len(thresholds) == 1:
        scores = f"{first.score:.3f} on {pluralize(first.n_samples, 'sample')}, {first.score_at_half:.3f} at 0.5"
        return [f"{subject} {first.value:.3f}, {reason} ({scores})."]
    chosen = {name: threshold.value for name, threshold in thresholds.items() if threshold is not None}
    line = f"{subject} {join_names([f'{value:.3f} ({name})' for name, value in chosen.items()])}, {reason}."
    if others := [name for name in thresholds if name not in chosen]:
        line += f" It is 0.5 for {join_names(others)}, with fewer than {MIN_SAMPLES} validation samples of a class."
    return [line]


def decide(p: Probabilities, threshold: float | None) -> npt.NDArray[np.int64]:
    """Return the predicted class of probabilities (samples, classes): by a threshold, or the most probable one."""
    decisions = p.argmax(axis=1) if threshold is None else p[:, 1] >= threshold
    return decisions.astype(np.int64)


def choose_threshold(y: Labels, p: Probabilities, metric: str) -> Threshold | None:
    """Return the threshold that is best by a metric on validation samples; None if there are too few of a class.

    Candidates lie halfway between two neighbouring probabilities, and 0.5 is one of them. Of equally good ones the nearest to
    0.5 is chosen.
    """
    if p.shape[1] != 2 or min(np.bincount(y, minlength=2)) < MIN_SAMPLES:
        return None
    scores = np.unique(p[:, 1])
    candidates = np.unique([0.5, *((scores[1:] + scores[:-1]) / 2)])
    values = _metric_at(y, p[:, 1], candidates, metric)
    best = candidates[values >= values.max() - 1e-12]
    value = float(best[np.abs(best - 0.5).argmin()])
    at_half = float(values[np.searchsorted(candidates, 0.5)])
    return Threshold(value, metric, len(y), float(values.max()), at_half)


def _metric_at(y: Labels, scores: Floats, thresholds: Floats, metric: str) -> Floats:
    """Return the metric at each threshold, from the counts of true and false positives."""
    positive, negative = np.sort(scores[y == 1]), np.sort(scores[y == 0])
    true_positive = len(positive) - np.searchsorted(positive, thresholds)
    false_positive = len(negative) - np.searchsorted(negative, thresholds)
    true_negative = len(negative) - false_positive
    if metric == "accuracy":
        values = (true_positive + true_negative) / len(y)
    elif metric == "balanced_accuracy":
        values = (true_positive / len(positive) + true_negative / len(negative)) / 2
    else:
        f1_positive = 2 * true_positive / (len(positive) + true_positive + false_positive)
        f1_negative = 2 * true_negative / (2 * len(negative) - false_positive + len(positive) - true_positive)
        values = (f1_positive + f1_negative) / 2
    return np.asarray(values, dtype=np.float64)
