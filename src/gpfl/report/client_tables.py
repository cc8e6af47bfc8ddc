"""Tables of clients: the main metrics of each, as `gpfl run` prints them."""

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
    names, best, quantiles = list(report.clients), [], {}
    if len(names) == 1:
        return _table("client", [(names[0], report.overall)], shown, metric)
    if len(names) > MAX_CLIENTS:
        order = _worst_first(report, metric)
        names, best, quantiles = order[:N_EXTREMES], order[-N_EXTREMES:], QUANTILES
    rows: list[tuple[str, ClientMetrics | Sequence[float | None]]] = [
        *((name, report.clients[name]) for name in names),
        *((label, [_quantile(report, name, quantile) for name in shown]) for label, quantile in quantiles.items()),
        *((name, report.clients[name]) for name in best),
        ("mean over clients", [report.over_clients[name].mean for name in shown]),
        ("worst tenth", [report.over_clients[name].worst_tenth for name in shown]),
        ("all samples", report.overall),
    ]
    total, counts = len(report.clients), {METRICS[name].label: report.over_clients[name].clients for name in shown}
    notes = [
        f"{label} is defined for {count} of {total} clients; means leave out the others."
        for label, count in counts.items()
        if count < total
    ]
    return _table("client", rows, shown, metric, notes)


def model_table(reports: Mapping[str, MetricsReport]) -> ResultTable:
    """Return the table of several models on the same samples."""
    return _table("model", [(name, report.overall) for name, report in reports.items()], SHOWN, "accuracy")


def _table(
    first: str,
    items: Sequence[tuple[str, ClientMetrics | Sequence[float | None]]],
    shown: Sequence[str],
    metric: str,
    notes: Sequence[str] = (),
) -> ResultTable:
    """Return a table with a row for the metrics of a client or for single values; `metric` is the one with an interval."""
    percentage = METRICS[metric].is_percentage
    header = f"95 % interval\nof {METRICS[metric].label}{', %' if percentage else ''}"
    columns = [ResultColumn(first), ResultColumn("test\nsamples", "d", hide=2), ResultColumn(header, hide=1)]
    for name in shown:
        label = METRICS[name].label.replace(" ", "\n")
        columns.append(ResultColumn(f"{label}, %", ".2f") if METRICS[name].is_percentage else ResultColumn(label, ".4f"))
    rows: list[list[Cell]] = []
    scales, has_width = [MetricUnit(name).scale for name in shown], True
    for label, item in items:
        samples = text = None
        if not isinstance(item, ClientMetrics):
            values = item
        else:
            values, samples = [item.values[name] for name in shown], item.n_samples
            if (interval := item.intervals.get(metric)) and interval.high - interval.low < 1e-12:
                has_width = False
            elif interval:
                text = " to ".join(f"{MetricUnit(metric).scale * end:.{1 if percentage else 3}f}" for end in interval)
        numbers = [None if value is None else value * scale for value, scale in zip(values, scales, strict=True)]
        rows.append([label, samples, text, *numbers])
    certain = "No interval where all resamples have the same value, as without any error: few samples do not prove that."
    return ResultTable(columns, rows, notes=[*notes, *[certain] * (not has_width)])


def _quantile(report: MetricsReport, name: str, quantile: float) -> float | None:
    defined = [value for client in report.clients.values() if (value := client.values[name]) is not None]
    return float(np.quantile(defined, quantile)) if defined else None


def _worst_first(report: MetricsReport, metric: str) -> list[str]:
    """Return the clients for which the metric is defined, the worst first."""
    values = {name: client.values[metric] for name, client in report.clients.items()}
    defined = {name: value for name, value in values.items() if value is not None}
    return sorted(defined, key=lambda name: defined[name], reverse=METRICS[metric].lower_is_better)
