"""Tables of clients: the main metrics of each, as `gpfl run` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpfl.core.metrics import METRICS
from gpfl.inference.metrics import ClientMetrics, MetricsReport
from gpfl.report.tables import Cell, MetricUnit, ResultColumn, ResultTable

MAX_CLIENTS = 12  # clients that a table lists one by one; of more it shows the worst, the best and quantiles

N_EXTREMES = 3  # clients at either end of such a table

SHOWN = ("accuracy", "balanced_accuracy", "auroc", "log_loss")
QUANTILES = {"10 % of clients": 0.1, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "90 %": 0.9}


def client_table(report: MetricsReport, metric: str = "accuracy") -> ResultTable:
    """Return the table of clients, in which the worst clients by `metric` stand first if there are many."""
    shown = SHOWN if metric in SHOWN else (*SHOWN, metric)
    names = list(report.clients)
    quantiles: list[list[Cell]] = []
    best: list[str] = []
    if len(names) > MAX_CLIENTS:
        order = _worst_first(report, metric)
        names, best = order[:N_EXTREMES], order[-N_EXTREMES:]
        quantiles = [[label, None, None, *_quantile_cells(report, shown, q)] for label, q in QUANTILES.items()]
    if len(names) == 1:
        row = _client_row(names[0], report.overall, shown, metric)
        return ResultTable(_columns("client", shown, metric), [row], notes=_interval_notes([report.overall], metric))
    rows: list[list[Cell]] = [
        *(_client_row(name, report.clients[name], shown, metric) for name in names),
        *quantiles,
        *(_client_row(name, report.clients[name], shown, metric) for name in best),
        ["mean over clients", None, None, *(_scaled(name, report.over_clients[name].mean) for name in shown)],
        ["worst tenth", None, None, *(_scaled(name, report.over_clients[name].worst_tenth) for name in shown)],
        _client_row("all samples", report.overall, shown, metric),
    ]
    shown_metrics = [*(report.clients[name] for name in (*names, *best)), report.overall]
    notes = [*_notes(report, shown), *_interval_notes(shown_metrics, metric)]
    return ResultTable(_columns("client", shown, metric), rows, notes=notes)


def model_table(reports: Mapping[str, MetricsReport]) -> ResultTable:
    """Return the table of several models on the same samples."""
    rows = [_client_row(name, report.overall, SHOWN, "accuracy") for name, report in reports.items()]
    notes = _interval_notes([report.overall for report in reports.values()], "accuracy")
    return ResultTable(_columns("model", SHOWN, "accuracy"), rows, notes=notes)


def _columns(first: str, shown: Sequence[str], metric: str) -> list[ResultColumn]:
    unit = ", %" if METRICS[metric].is_percentage else ""
    interval = ResultColumn(f"95 % interval\nof {METRICS[metric].label}{unit}", hide=1)
    return [ResultColumn(first), ResultColumn("test\nsamples", "d", hide=2), interval, *map(_column, shown)]


def _column(name: str) -> ResultColumn:
    metric = METRICS[name]
    label = metric.label.replace(" ", "\n")
    return ResultColumn(f"{label}, %", ".2f") if metric.is_percentage else ResultColumn(label, ".4f")


def _client_row(name: str, metrics: ClientMetrics, shown: Sequence[str], metric: str) -> list[Cell]:
    interval = metrics.intervals.get(metric)
    text = None
    if interval and not _has_no_width(metrics, metric):
        digits = 1 if METRICS[metric].is_percentage else 3
        text = " to ".join(f"{_scaled(metric, end):.{digits}f}" for end in interval)
    return [name, metrics.n_samples, text, *(_scaled(key, metrics.values[key]) for key in shown)]


def _has_no_width(metrics: ClientMetrics, metric: str) -> bool:
    interval = metrics.intervals.get(metric)
    return interval is not None and interval.high - interval.low < 1e-12


def _interval_notes(shown: Sequence[ClientMetrics], metric: str) -> list[str]:
    if not any(_has_no_width(metrics, metric) for metrics in shown):
        return []
    return ["No interval where all resamples have the same value, as without any error: few samples do not prove that."]


def _quantile_cells(report: MetricsReport, shown: Sequence[str], quantile: float) -> list[Cell]:
    values = {name: [client.values[name] for client in report.clients.values()] for name in shown}
    defined = {name: [value for value in numbers if value is not None] for name, numbers in values.items()}
    return [_scaled(name, float(np.quantile(numbers, quantile)) if numbers else None) for name, numbers in defined.items()]


def _scaled(name: str, value: float | None) -> float | None:
    return None if value is None else value * MetricUnit(name).scale


def _worst_first(report: MetricsReport, metric: str) -> list[str]:
    """Return the clients for which the metric is defined, the worst first."""
    values = {name: client.values[metric] for name, client in report.clients.items()}
    defined = {name: value for name, value in values.items() if value is not None}
    return sorted(defined, key=lambda name: defined[name], reverse=METRICS[metric].lower_is_better)


def _notes(report: MetricsReport, shown: Sequence[str]) -> list[str]:
    total = len(report.clients)
    counts = {METRICS[name].label: report.over_clients[name].clients for name in shown}
    return [
        f"{label} is defined for {count} of {total} clients; means leave out the others."
        for label, count in counts.items()
        if count < total
    ]
