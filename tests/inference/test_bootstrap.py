"""Bootstrap intervals: metrics of resamples are those of the samples drawn, and intervals cover the truth."""

from __future__ import annotations

import time

import numpy as np
import pytest

from gpfl.core.metrics import METRICS
from gpfl.inference import bootstrap
from gpfl.inference.bootstrap import Predictions, ResampledMetrics, bootstrap_intervals, draw_weights, overall_resamples
from gpfl.inference.metrics import Labels, Probabilities, UndefinedMetricError, compute_metric, softmax


def predictions(n: int, classes: int, seed: int = 0, decimals: int = 8) -> tuple[Labels, Probabilities]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return y, softmax((rng.normal(size=(n, classes)) + 1.2 * np.eye(classes)[y]).round(decimals))


def decided(n: int, classes: int, seed: int = 0) -> Predictions:
    y, p = predictions(n, classes, seed)
    return Predictions(y, p, p.argmax(1))


@pytest.mark.parametrize(("n", "classes", "decimals"), [(40, 2, 8), (40, 2, 0), (50, 5, 8), (50, 5, 0), (6, 4, 1)])
def test_metrics_of_weights_are_those_of_the_repeated_samples(n: int, classes: int, decimals: int) -> None:
    y, p = predictions(n, classes, decimals=decimals)
    weights = np.concatenate([np.ones((n, 1)), draw_weights(np.random.default_rng(1), n, 20)], axis=1)
    found = ResampledMetrics(y, p, p.argmax(1)).values(weights)
    assert found.keys() == METRICS.keys()
    for resample, column in enumerate(weights.T.astype(int)):
        drawn = np.repeat(np.arange(n), column)
        for metric, values in found.items():
            try:
                assert values[resample] == pytest.approx(compute_metric(metric, y[drawn], p[drawn]), abs=1e-12), metric
            except UndefinedMetricError:
                assert np.isnan(values[resample])


def test_every_resample_has_as_many_samples_as_there_are() -> None:
    weights = draw_weights(np.random.default_rng(0), 30, 500)
    assert weights.shape == (30, 500)
    assert set(weights.sum(0)) == {30.0}
    assert weights.mean() == pytest.approx(1)
    assert weights.var() == pytest.approx(1 - 1 / 30, rel=0.05)  # of a multinomial


def test_95_percent_intervals_cover_the_value_of_a_large_sample() -> None:
    large = predictions(100_000, 3, seed=7)
    truth = {metric: compute_metric(metric, *large) for metric in METRICS}
    covered = dict.fromkeys(METRICS, 0)
    for seed in range(100):
        for metric, interval in bootstrap_intervals([decided(200, 3, seed)], n_resamples=300, seed=seed).overall.items():
            assert interval is not None
            covered[metric] += interval.low <= truth[metric] <= interval.high
    # The calibration error of few samples is too high, and that of their resamples even more.
    assert covered.pop("ece") < 88
    assert all(88 <= count <= 99 for count in covered.values()), covered


def test_seed_repeats_the_intervals_and_chunks_do_not_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [decided(20, 3, seed) for seed in range(3)]
    first = bootstrap_intervals(clients, 200, seed=4)
    assert bootstrap_intervals(clients, 200, seed=4) == first
    assert bootstrap_intervals(clients, 200, seed=5) != first
    monkeypatch.setattr(bootstrap, "CHUNK", 60 * 70)  # 70 resamples at a time
    chunked = bootstrap_intervals(clients, 200, seed=4)
    pairs = zip((*first.clients, first.overall, first.mean), (*chunked.clients, chunked.overall, chunked.mean), strict=True)
    for own, other in pairs:
        for metric in METRICS:
            assert own[metric] == pytest.approx(other[metric], abs=1e-12)


def test_clients_are_resampled_each_for_itself() -> None:
    """The mean and the stacked accuracy of clients that are all right or all wrong do not vary."""
    zeros = np.zeros(30, dtype=np.int64)
    right = Predictions(zeros[:10], np.tile([0.9, 0.1], (10, 1)), zeros[:10])
    wrong = Predictions(zeros + 1, np.tile([0.9, 0.1], (30, 1)), zeros)
    intervals = bootstrap_intervals([right, wrong], 100)
    assert intervals.mean["accuracy"] == (0.5, 0.5)
    assert intervals.overall["accuracy"] == (0.25, 0.25)


def test_metric_that_most_resamples_lack_has_no_interval() -> None:
    some, no_label = decided(20, 3), np.zeros(0, dtype=np.int64)
    one, none = some._replace(y=np.zeros(20, dtype=np.int64)), Predictions(no_label, np.zeros((0, 3)), no_label)
    intervals = bootstrap_intervals([one, none, some], 100)
    assert intervals.clients[0]["auroc"] is None
    assert intervals.clients[0]["accuracy"] is not None
    assert set(intervals.clients[1].values()) == {None}
    assert intervals.mean["auroc"] == intervals.clients[2]["auroc"]


def test_many_stacked_predictions_get_fewer_resamples() -> None:
    assert overall_resamples(1000 * 10) == 1000
    assert overall_resamples(500_000) == 200
    assert overall_resamples(100_000_000) == bootstrap.MIN_RESAMPLES
    assert overall_resamples(10, 50) == 50


def test_a_thousand_resamples_of_a_small_client_take_less_than_a_second() -> None:
    own = decided(50, 10)
    start = time.process_time()
    ResampledMetrics(*own).values(draw_weights(np.random.default_rng(0), 50, 1000))
    assert time.process_time() - start < 1
