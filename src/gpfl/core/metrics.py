"""Evaluation: what a round's per-client scores say about the federation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """Correct decisions, summed loss and rows of every client."""

    correct: Floats
    loss_sum: Floats
    rows: Floats

    @property
    def clients(self) -> Floats:
        """The accuracy of each client."""
        return self.correct / self.rows

    @property
    def accuracy(self) -> float:
        """All correct decisions over all rows: clients weighted by their rows."""
        return float(self.correct.sum() / self.rows.sum())

    @property
    def loss(self) -> float:
        """The mean cross-entropy over all rows."""
        return float(self.loss_sum.sum() / self.rows.sum())

    @property
    def mean(self) -> float:
        """The mean of client accuracies, every client alike."""
        return float(self.clients.mean())

    @property
    def std(self) -> float:
        """The population standard deviation of client accuracies."""
        return float(self.clients.std())

    @property
    def cov(self) -> float:
        """The coefficient of variation: std over the weighted accuracy; 0 where nothing is right."""
        return self.std / self.accuracy if self.accuracy else 0.0


def best(scores: Sequence[float]) -> int:
    """Gives the place of the highest score, the first of equals."""
    return max(range(len(scores)), key=lambda k: (scores[k], -k))


def mean_of_last(scores: Sequence[float], count: int = 10) -> float:
    """Gives the mean of the last scores."""
    return math.fsum(scores[-count:]) / len(scores[-count:])
