"""Metrics of an evaluation over all clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """Correct predictions, summed loss and number of samples of every client."""

    correct: Floats
    loss_sum: Floats
    n_samples: Floats

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


def best_index(scores: Sequence[float]) -> int:
    """Return the index of the highest score, the first of equals."""
    return max(range(len(scores)), key=lambda k: (scores[k], -k))


def mean_of_last(scores: Sequence[float], count: int = 10) -> float:
    """Return the mean of the last scores."""
    return math.fsum(scores[-count:]) / len(scores[-count:])
