"""Metrics of an evaluation over all clients, and the metrics that a round can be selected by."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Metric(NamedTuple):
    """A metric of predictions: its name in text and which values are better."""

    label: str
    lower_is_better: bool = False
    is_percentage: bool = False

    @property
    def sign(self) -> int:
        """1, or −1 for a metric that is better if it is lower."""
        return -1 if self.lower_is_better else 1


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", is_percentage=True),
    "balanced_accuracy": Metric("balanced accuracy", is_percentage=True),
    "macro_f1": Metric("macro F1"),
    "auroc": Metric("AUROC"),
    "average_precision": Metric("average precision"),
    "log_loss": Metric("log loss", lower_is_better=True),
    "brier": Metric("Brier score", lower_is_better=True),
    "ece": Metric("expected calibration error", lower_is_better=True),
}


@dataclass(frozen=True)
class Evaluation:
    """Correct predictions, summed loss and number of samples of every client, or of the `clients` that were evaluated."""

    correct: Floats
    loss_sum: Floats
    n_samples: Floats
    clients: tuple[int, ...] | None = None

    @property
    def client_accuracies(self) -> Floats:
        """The accuracy of each client."""
        return self.correct / self.n_samples

    @property
    def accuracy(self) -> float:
        """The accuracy over all samples, so that clients weigh by their number of samples."""
        return float(self.correct.sum() / self.n_samples.sum())

    @property
    def loss(self) -> float:
        """The mean cross-entropy over all samples."""
        return float(self.loss_sum.sum() / self.n_samples.sum())

    @property
    def mean(self) -> float:
        """The unweighted mean of client accuracies."""
        return float(self.client_accuracies.mean())

    @property
    def std(self) -> float:
        """The population standard deviation of client accuracies."""
        return float(self.client_accuracies.std())

    @property
    def cov(self) -> float:
        """The coefficient of variation: std over accuracy; 0 if the accuracy is 0."""
        return self.std / self.accuracy if self.accuracy else 0.0


def best_index(scores: Sequence[float], lower_is_better: bool = False) -> int:
    """Return the index of the best score, the first in a tie."""
    sign = -1 if lower_is_better else 1
    return max(range(len(scores)), key=lambda k: (sign * scores[k], -k))


def mean_of_last(scores: Sequence[float], count: int = 10) -> float:
    """Return the mean of the last scores."""
    return math.fsum(scores[-count:]) / len(scores[-count:])
