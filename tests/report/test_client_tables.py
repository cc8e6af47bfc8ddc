"""Tables of clients name each of a few clients, and the worst, the best and quantiles of many."""

from __future__ import annotations

import numpy as np

from gpfl.inference.metrics import MetricsReport, evaluate_predictions
from gpfl.report.client_tables import client_table


def report(correct: list[int], n: int = 10) -> MetricsReport:
    """Clients with these numbers of correct predictions of `n`; the labels alternate between two classes."""
    y = np.arange(n) % 2
    sure = np.array([[0.9, 0.1], [0.1, 0.9]])
    p = {str(k): np.concatenate([sure[y[:count]], sure[1 - y[count:]]]) for k, count in enumerate(correct)}
    return evaluate_predictions(dict.fromkeys(p, y), p, ["no", "yes"], n_resamples=50)


def test_few_clients_are_listed_in_order_with_means_below() -> None:
    cells = client_table(report([8, 10, 6])).cells()
    assert [row[0] for row in cells] == ["0", "1", "2", "mean over clients", "worst tenth", "all samples"]
    assert [row[3] for row in cells] == ["80.00", "100.00", "60.00", "80.00", "60.00", "80.00"]
    assert [row[1] for row in cells] == ["10", "10", "10", "–", "–", "30"]
    assert cells[0][2] != "–"


def test_an_interval_without_width_is_not_shown_as_certainty() -> None:
    table = client_table(report([8, 10, 6]))
    assert table.cells()[1][2] == "–"
    note = "No interval where all resamples have the same value, as without any error: few samples do not prove that."
    assert table.notes == [note]
    assert client_table(report([10])).notes == [note]
    assert client_table(report([8, 7, 6])).notes == []


def test_interval_is_that_of_the_metric_of_the_ranking() -> None:
    made = report([8, 7])
    table = client_table(made, "auroc")
    assert table.columns[2].header == "95 % interval\nof AUROC"
    interval = made.clients["0"].intervals["auroc"]
    assert interval is not None
    assert table.cells()[0][2] == f"{interval.low:.3f} to {interval.high:.3f}"


def test_of_many_clients_the_worst_quantiles_and_the_best_are_shown() -> None:
    correct = [5 + k % 6 for k in range(24)]
    cells = client_table(report(correct)).cells()
    names = [row[0] for row in cells]
    assert len(cells) == 14
    assert [correct[int(name)] for name in names[:3]] == [5, 5, 5]
    assert [correct[int(name)] for name in names[8:11]] == [10, 10, 10]
    assert cells[5][0] == "median"
    assert cells[5][3] == f"{10 * np.median(correct):.2f}"


def test_worst_clients_have_the_highest_loss() -> None:
    correct = [1, *[10] * 12]
    cells = client_table(report(correct), "log_loss").cells()
    assert cells[0][0] == "0"


def test_metric_of_the_ranking_has_a_column_and_undefined_ones_a_note() -> None:
    y = {"a": np.array([0, 1, 1]), "b": np.array([1, 1, 1])}
    p = {name: np.array([[0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]) for name in y}
    table = client_table(evaluate_predictions(y, p, ["no", "yes"], n_resamples=20), "brier")
    assert table.columns[-1].header == "Brier\nscore"
    assert [row[5] for row in table.cells()[:2]] == ["1.0000", "–"]
    assert table.notes == ["AUROC is defined for 1 of 2 clients; means leave out the others."]
