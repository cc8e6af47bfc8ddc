"""Gains of methods over a reference, such as training alone, as a sentence and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpfl.core.metrics import METRICS
from gpfl.experiments.pairwise import PairedDifference
from gpfl.experiments.repeats import RepeatedResults
from gpfl.report.plotting import annotate, figure_style, method_styles, new_figure, save_figure, use_name_ticks
from gpfl.report.repeat_tables import SIGNIFICANT
from gpfl.report.tables import MetricUnit, enumerate_names, format_value


def describe_gains(pairs: Sequence[PairedDifference], metric: str, name: str) -> str:
    """Return a sentence that says which methods are better or worse than a reference, and which do not clearly differ.

    `pairs` are differences of the reference minus each method, the best method first; `name` describes the reference, such as
    "training alone". A difference counts if its p-value, corrected for the number of pairs, is below `SIGNIFICANT`.
    """
    sign, unit = METRICS[metric].sign, MetricUnit(metric)
    clear = [pair for pair in pairs if pair.corrected_p is not None and pair.corrected_p < SIGNIFICANT]
    groups = {
        "better": [pair for pair in clear if sign * pair.test.mean < 0],
        "worse": [pair for pair in reversed(clear) if sign * pair.test.mean > 0],
    }
    of_metric = f"points of {METRICS[metric].label}" if METRICS[metric].is_percentage else f"in {METRICS[metric].label}"
    clauses = []
    for word, group in groups.items():
        texts: list[str] = []
        for pair in group:
            low, size, high = (format_value(unit.scale * value, unit.spec) for value in sorted(map(abs, _interval(pair))))
            first = f"{pair.other} is {word} than {name} by {size} {of_metric} (95 % interval {low} to {high})"
            texts.append(f"{pair.other} by {size} ({low} to {high})" if texts else first)
        if texts:
            clauses.append(enumerate_names(texts, len(texts)))
    if unclear := [pair for pair in pairs if pair not in clear]:
        texts = []
        for pair in unclear:
            start, mean, end = _interval(pair)
            texts.append(f"{pair.other} ({unit.difference(mean)}, 95 % interval {unit.interval(start, end)})")
        clauses.append(f"there is no clear difference from {name} for {enumerate_names(texts, len(texts))}")
    return f"On these data {'; '.join(clauses)}."


@figure_style()
def draw_gains(results: RepeatedResults, pairs: Sequence[PairedDifference], path: Path, title: str, axis: str) -> None:
    """Draw the difference of each method from a reference: its mean with the 95 % interval, and a dot for each repeat."""
    metric = results.config.run.metric
    scale = MetricUnit(metric).scale
    figure = new_figure(8, 0.42 * len(pairs) + 1.5)
    axes = figure.add_subplot()
    axes.axvline(0, color="#888888", linewidth=1)
    styles = method_styles([pair.other for pair in pairs])
    for row, pair in enumerate(pairs):
        differences = results.values(pair.other, metric) - results.values(pair.one, metric)
        axes.scatter(scale * differences, np.full(len(differences), row + 0.22), s=9, color="#888888", linewidth=0)
        low, mean, high = (scale * value for value in _interval(pair))
        axes.plot([low, high], [row, row], color=styles[pair.other]["color"], linewidth=2)
        axes.plot(mean, row, color=styles[pair.other]["color"], marker="o", markersize=7)
    use_name_ticks(axes.yaxis, [pair.other for pair in pairs])
    axes.set(ylim=(len(pairs) - 0.5, -0.5), xlabel=axis)
    note = f"Small dots: {len(results.repeats)} repeated splits. Lines: 95 % intervals of the corrected resampled t-test."
    annotate(figure, title, [note])
    save_figure(figure, path)


def _interval(pair: PairedDifference) -> tuple[float, float, float]:
    """Return the lower end, the mean and the upper end of the method minus the reference; NaN where there is no interval."""
    low, high = (float("nan") if end is None else -end for end in (pair.test.high, pair.test.low))
    return low, -pair.test.mean, high
