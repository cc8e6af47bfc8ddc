"""Tables of what was measured of features."""

from __future__ import annotations

import pytest
from toy_results import COLUMNS, RUN, toy_results

from gpfl.experiments.features import FeatureMetrics
from gpfl.report import feature_tables
from gpfl.report.feature_tables import metrics_table


def measures(silhouette: float, across: float | None) -> FeatureMetrics:
    return FeatureMetrics(40, 10, silhouette, 0.5, 0.25, 0.75, 0.1, across)


ROWS = {"fedper": [measures(-0.25, None)], "gpfl": [measures(0.5, 0.5), measures(0.25, None)], "fedproto": []}


def test_measures_are_means_over_the_trials_that_have_them() -> None:
    table = metrics_table(COLUMNS[0], ROWS)
    assert table.cells() == [
        ["FedPer", "−0.250", "0.500", "0.250", "0.750", "–", "1"],
        ["GPFL", "0.375 ± 0.125", "0.500 ± 0.000", "0.250 ± 0.000", "0.750 ± 0.000", "0.500", "2"],
        ["FedProto", "–", "–", "–", "–", "–", "0"],
    ]
    assert (
        "a sample's 10 nearest samples, or nearest samples of other clients, with its class (0.10 by chance)" in table.notes[0]
    )
    assert "Not measured" in metrics_table(COLUMNS[0], {"gpfl": []}).notes[0]


def test_measures_are_printed_for_each_method_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_tables, "read_metrics", lambda results, column: ROWS)
    assert feature_tables.describe_metrics(toy_results(RUN))[:2] == [
        "toy/whole FedPer: silhouette by class −0.250, purity 0.750 (1 trial)",
        "toy/whole GPFL: silhouette by class 0.375 ± 0.125, purity 0.750 ± 0.000 (2 trials)",
    ]


def test_experiments_on_accuracy_have_no_features() -> None:
    results = toy_results(RUN)
    assert (feature_tables.tables(results), feature_tables.to_records(results)) == ([], {})
