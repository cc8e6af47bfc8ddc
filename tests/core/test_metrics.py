from __future__ import annotations

import math

import numpy as np
import pytest

from gpfl.core.metrics import Evaluation, best_index, mean_of_last


@pytest.fixture
def evaluation() -> Evaluation:
    return Evaluation(correct=np.array([9.0, 1.0]), loss_sum=np.array([4.0, 8.0]), n_samples=np.array([10.0, 2.0]))


def test_accuracy_weighs_clients_by_their_samples(evaluation: Evaluation) -> None:
    assert evaluation.accuracy == pytest.approx(10 / 12)
    assert evaluation.mean == pytest.approx((0.9 + 0.5) / 2)
    assert evaluation.client_accuracies.tolist() == [0.9, 0.5]


def test_loss_is_the_mean_over_all_samples(evaluation: Evaluation) -> None:
    assert evaluation.loss == pytest.approx(1.0)


def test_std_is_that_of_the_population_of_clients(evaluation: Evaluation) -> None:
    assert evaluation.std == pytest.approx(0.2)
    assert evaluation.std != pytest.approx(np.std([0.9, 0.5], ddof=1))


def test_the_coefficient_of_variation_is_std_over_weighted_accuracy(evaluation: Evaluation) -> None:
    assert evaluation.cov == pytest.approx(0.2 / (10 / 12))
    assert evaluation.cov != pytest.approx(0.2 / evaluation.mean)


def test_coefficient_of_variation_is_zero_if_no_prediction_is_correct() -> None:
    assert Evaluation(np.zeros(2), np.ones(2), np.ones(2)).cov == 0.0


def test_the_first_of_equal_rounds_is_the_best() -> None:
    assert best_index([0.1, 0.7, 0.3, 0.7]) == 1


def test_mean_of_last_takes_all_rounds_if_there_are_fewer() -> None:
    assert mean_of_last([0.0, 1.0, 3.0], 2) == 2.0
    assert math.isclose(mean_of_last([0.25, 0.75]), 0.5)
