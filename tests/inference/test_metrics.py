"""Metrics are those of scikit-learn on the stacked predictions, and undefined ones are None with a reason."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from sklearn import metrics as scikit

from gpfl.core.metrics import METRICS
from gpfl.inference.metrics import (
    Labels,
    Probabilities,
    UndefinedMetricError,
    compute_metric,
    evaluate_predictions,
    softmax,
    summarize_clients,
)

SCIKIT: dict[str, Callable[[Labels, Probabilities], float]] = {
    "accuracy": lambda y, p: scikit.accuracy_score(y, p.argmax(1)),
    "balanced_accuracy": lambda y, p: scikit.balanced_accuracy_score(y, p.argmax(1)),
    "macro_f1": lambda y, p: scikit.f1_score(y, p.argmax(1), average="macro"),
    "auroc": lambda y, p: scikit.roc_auc_score(y, p[:, 1] if p.shape[1] == 2 else p, multi_class="ovr"),
    "average_precision": lambda y, p: scikit.average_precision_score(y, p[:, 1] if p.shape[1] == 2 else p),
    "log_loss": lambda y, p: scikit.log_loss(y, p, labels=range(p.shape[1])),
    "brier": lambda y, p: scikit.brier_score_loss(y, p[:, 1] if p.shape[1] == 2 else p, labels=range(p.shape[1])),
}


def predictions(n: int, classes: int, seed: int = 0, decimals: int = 8) -> tuple[Labels, Probabilities]:
    """Labels of every class and probabilities that know something of them; few decimals make ties."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
    return y, softmax((rng.normal(size=(n, classes)) + 1.2 * np.eye(classes)[y]).round(decimals))


@pytest.mark.parametrize("metric", SCIKIT)
@pytest.mark.parametrize(("classes", "decimals"), [(2, 8), (2, 0), (3, 8), (10, 8), (10, 0)])
def test_metric_is_that_of_scikit_learn(metric: str, classes: int, decimals: int) -> None:
    y, p = predictions(80, classes, decimals=decimals)
    assert compute_metric(metric, y, p) == pytest.approx(SCIKIT[metric](y, p), abs=1e-12)


@pytest.mark.parametrize("metric", SCIKIT)
def test_overall_metric_is_that_of_the_stacked_predictions(metric: str) -> None:
    clients = {f"client {seed}": predictions(20 + 10 * seed, 4, seed) for seed in range(3)}
    report = evaluate_predictions(*({name: pair[i] for name, pair in clients.items()} for i in (0, 1)), list("abcd"))
    y, p = (np.concatenate([pair[i] for pair in clients.values()]) for i in (0, 1))
    assert report.overall.values[metric] == pytest.approx(SCIKIT[metric](y, p), abs=1e-12)
    assert report.overall.n_samples == len(y)
    for name, pair in clients.items():
        assert report.clients[name].values[metric] == pytest.approx(SCIKIT[metric](*pair), abs=1e-12)
    over_clients = report.over_clients[metric]
    assert over_clients.mean == pytest.approx(np.mean([SCIKIT[metric](*pair) for pair in clients.values()]))


def test_one_versus_rest_is_over_the_classes_of_the_labels() -> None:
    y, p = predictions(60, 5)
    y[y > 2] = 0
    present = [0, 1, 2]
    expected = np.mean([scikit.roc_auc_score(y == label, p[:, label]) for label in present])
    assert compute_metric("auroc", y, p) == pytest.approx(expected)
    expected = np.mean([scikit.average_precision_score(y == label, p[:, label]) for label in present])
    assert compute_metric("average_precision", y, p) == pytest.approx(expected)


def test_metrics_of_a_case_computed_by_hand() -> None:
    y = np.array([0, 0, 1, 1])
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]])
    values = {metric: compute_metric(metric, y, p) for metric in METRICS}
    assert values == {
        "accuracy": 0.5,
        "balanced_accuracy": 0.5,
        "macro_f1": 0.5,
        "auroc": pytest.approx(3 / 4),  # of four pairs, only (0.3, 0.6) is in the wrong order
        "average_precision": pytest.approx((1 + 2 / 3) / 2),  # by falling score: hit, miss, hit, miss
        "log_loss": pytest.approx(-np.log([0.9, 0.4, 0.8, 0.3]).mean()),
        "brier": pytest.approx((0.01 + 0.36 + 0.04 + 0.49) / 4),
        "ece": pytest.approx((0.1 + 0.6 + 0.2 + 0.7) / 4),  # a bin each
    }


def test_calibration_error_is_within_bins_of_a_fifteenth() -> None:
    # 0.70 and 0.72 share the bin (10/15, 11/15], so their errors cancel in part; 0.95 is in another.
    p = np.array([[0.70, 0.30], [0.72, 0.28], [0.95, 0.05]])
    assert compute_metric("ece", np.array([0, 1, 0]), p) == pytest.approx((abs(1 - 0.70 - 0.72) + 0.05) / 3)
    sure = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert compute_metric("ece", np.array([0, 1]), sure) == 0


def test_perfectly_calibrated_predictions_have_no_calibration_error() -> None:
    p = np.tile([0.75, 0.25], (4, 1))
    assert compute_metric("ece", np.array([0, 0, 0, 1]), p) == pytest.approx(0)


def test_undefined_metrics_are_none_with_the_reason_and_left_out_of_means() -> None:
    two, one = predictions(30, 3), (np.full(7, 2), predictions(7, 3)[1])
    empty = np.zeros(0, dtype=np.int64), np.zeros((0, 3))
    clients = {"two": two, "one": one, "empty": empty}
    report = evaluate_predictions(*({name: pair[i] for name, pair in clients.items()} for i in (0, 1)), ["a", "b", "dog"])
    for metric in ("auroc", "average_precision"):
        assert report.clients["one"].values[metric] is None
        assert report.clients["one"].undefined[metric] == "all 7 samples are of class dog"
        assert report.clients["one"].intervals[metric] is None
        summary = report.over_clients[metric]
        assert (summary.clients, summary.worst_client) == (1, "two")
        assert summary.mean == summary.worst == summary.worst_tenth == report.clients["two"].values[metric]
    assert report.clients["one"].values["log_loss"] is not None
    assert set(report.clients["empty"].values.values()) == {None}
    assert set(report.clients["empty"].undefined) == set(METRICS)
    assert report.clients["empty"].undefined["accuracy"] == "no samples"
    assert report.over_clients["accuracy"].clients == 2


def test_metric_that_no_client_has_is_none() -> None:
    y, p = np.zeros(5, dtype=np.int64), predictions(5, 3)[1]
    report = evaluate_predictions({"a": y}, {"a": p}, list("abc"))
    assert report.over_clients["auroc"].to_dict() == {
        "mean": None,
        "clients": 0,
        "interval": None,
        "worst_client": None,
        "worst": None,
        "worst_tenth": None,
    }


def test_data_of_one_class_have_no_log_loss() -> None:
    with pytest.raises(UndefinedMetricError, match=r"^the data have one class$"):
        compute_metric("log_loss", np.zeros(4, dtype=np.int64), np.ones((4, 1)))


@pytest.mark.parametrize(("metric", "worst"), [("accuracy", 0), ("log_loss", 24)])
def test_worst_tenth_is_of_whole_clients_and_at_least_one(metric: str, worst: int) -> None:
    values = {str(i): i / 100 for i in range(25)}
    summary = summarize_clients(metric, values)
    assert (summary.worst_client, summary.worst) == (str(worst), worst / 100)
    assert summary.worst_tenth == pytest.approx(np.mean([worst, abs(worst - 1)]) / 100)
    assert summarize_clients(metric, {"a": 0.5, "b": 0.5, "c": None}).worst_tenth == 0.5


def test_confusion_matrix_counts_labels_by_row() -> None:
    y = np.array([0, 0, 3, 3])
    p = np.eye(5)[[0, 3, 3, 1]]
    matrix = evaluate_predictions({"a": y}, {"a": p}, list("abcde"), n_resamples=0).clients["a"].confusion_matrix
    assert matrix.classes == ["a", "b", "d"]
    assert matrix.counts == [[1, 0, 1], [0, 0, 0], [0, 1, 1]]


def test_softmax_is_exact_for_large_logits_and_keeps_the_order() -> None:
    p = softmax(np.array([[1000.0, 0.0], [-1000.0, -1001.0]], dtype=np.float32))
    assert p.tolist() == [[1.0, 0.0], [pytest.approx(1 / (1 + np.exp(-1))), pytest.approx(1 / (1 + np.e))]]


def test_report_is_json_without_nan_and_no_metric_warns() -> None:
    y, p = predictions(12, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = evaluate_predictions({"a": y[:6], "b": np.zeros(6, dtype=np.int64)}, {"a": p[:6], "b": p[6:]}, list("wxyz"))
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["clients"]["b"]["auroc"] is None
    assert content["clients"]["a"]["confusion_matrix"]["classes"]
    assert list(content) == ["overall", "over_clients", "clients"]
    assert report.summary()["accuracy"]["overall"] == report.overall.values["accuracy"]  # type: ignore[index]
