"""The figures of an experiment, chosen by what it measures: accuracy by setting, fairness, learning curves, features."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpfl.errors import GpflError
from gpfl.experiments import features
from gpfl.experiments.definitions import TableColumn, display_name
from gpfl.experiments.features import PERPLEXITY, FeatureProjection
from gpfl.experiments.grid import TableResults
from gpfl.experiments.statistics import client_accuracies
from gpfl.experiments.stored_runs import Trials
from gpfl.io import files
from gpfl.report import figures
from gpfl.report.comparison import Entry, column_entries
from gpfl.report.figures import ClassCounts
from gpfl.report.paper_tables import format_ours, format_published
from gpfl.report.plotting import annotate, figure_style, method_styles, new_figure, png_and_pdf, printable, save_png_and_pdf
from gpfl.report.tables import MeanStd, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES: Mapping[str, str] = {"scalability": "clients N; 10|50: ten of the fifty", "stability": "share ρ of clients in a round"}
"""Experiments on accuracy whose columns are values of one setting, and the label of its axis."""


def draw(results: TableResults, out: Path) -> list[Path]:
    """Draw the figures of an experiment into a folder and return the files: as PNG and PDF, without cells that were not run."""
    kinds = {"accuracy": _draw_settings, "fairness": draw_fairness, "curves": _draw_curves, "features": _draw_features}
    return kinds[results.experiment.measure](results, out) if any(results.trials.values()) else []


def figure_title(results: TableResults, column: TableColumn | None = None) -> str:
    """Return the title of a figure: experiment, column and protocol, and whether data or values are not the usual ones."""
    title = f"{results.experiment.title}, {column.heading}" if column else results.experiment.title
    columns = results.columns if column is None else [column]
    part = ", part of the data" if all(results.is_partial(each.key) for each in columns) else ""
    values = ", values set by hand" * bool(results.settings) + ", tuned values" * bool(results.tuned)
    return f"{title} ({results.protocol} protocol{part}{values})"


def _entries_run(results: TableResults, column: TableColumn) -> list[Entry]:
    return [entry for entry in column_entries(results, column) if entry.trials and entry.trials.runs]


def _trials_run(results: TableResults, column: TableColumn) -> list[Trials]:
    return [entry.trials for entry in _entries_run(results, column) if entry.trials]


def _stem(results: TableResults, out: Path, column: TableColumn | None = None) -> Path:
    name = results.experiment.name
    return out / (f"{name}-{column.key.replace('/', '-')}" if column and len(results.columns) > 1 else name)


def _data_name(results: TableResults, column: TableColumn, *more: str) -> str:
    return ", ".join([column.heading, *more]) + (" (part of the data)" if results.is_partial(column.key) else "")


# Accuracy against a setting.


def _draw_settings(results: TableResults, out: Path) -> list[Path]:
    if results.experiment.name not in AXES:
        return []
    columns = [column for column in results.columns if _entries_run(results, column)]
    if len(columns) < 2:
        raise GpflError(f"{columns[0].key} is the only column that was run, and a line needs two")
    return draw_settings(results, columns, AXES[results.experiment.name], _stem(results, out))


@figure_style()
def draw_settings(results: TableResults, columns: Sequence[TableColumn], axis_label: str, stem: Path) -> list[Path]:
    """Draw accuracy by column, ours next to the paper's, the best methods first; lines join columns of one group."""
    by_column = [column_entries(results, column) for column in columns]
    methods = [entries for entries in zip(*by_column, strict=True) if any(entry.trials for entry in entries)]
    methods.sort(key=lambda entries: -np.nanmax([entry.score for entry in entries]))
    styles = method_styles([display_name(first.label) for first, *_ in methods])
    figure = new_figure(9, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for index, (entries, (name, style)) in enumerate(zip(methods, styles.items(), strict=True)):
        shift = 0.2 * (index / max(1, len(methods) - 1) - 0.5)  # keeps error bars apart
        line = {**style, "linewidth": 1.2, "elinewidth": 0.8, "capsize": 1.5, "label": name}
        ours = [entry.ours for entry in entries]
        papers = [MeanStd(entry.paper.mean, entry.paper.std or 0.0) if entry.paper else None for entry in entries]
        for axes, numbers in zip(panels, (ours, papers), strict=True):
            for group in dict.fromkeys(column.group for column in columns):
                inside = [(x, each) for x, each in enumerate(numbers) if each and columns[x].group == group]
                points = [(x + shift, each.mean, each.std) for x, each in inside]
                if points:
                    axes.errorbar(*zip(*points, strict=True), **line)
    for axes, title in zip(panels, ("ours", "the paper"), strict=True):
        axes.set(title=title, xlabel=axis_label)
        axes.set_xticks(range(len(columns)), [column.heading.removeprefix("N = ") for column in columns])
    panels[0].set_ylabel("best test accuracy, %")
    annotate(figure, figure_title(results), ["Bars: ± std over trials."], panels)
    return save_png_and_pdf(figure, stem)


# Fairness.


@figure_style()
def draw_fairness(results: TableResults, out: Path) -> list[Path]:
    """Draw the accuracies of clients, a panel for each column and a row for each method, the fairest at the top."""
    panels = {column: entries for column in results.columns if (entries := _entries_run(results, column))}
    heights = [0.9 + 0.25 * len(entries) for entries in panels.values()]
    figure = new_figure(8, sum(heights) + 0.8)
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (column, entries) in zip(rows, panels.items(), strict=True):
        _draw_clients(axes, sorted(entries, key=lambda entry: -entry.score))
        axes.set_title(printable(_data_name(results, column, column.group), 60), loc="left")
    rows[-1].set_xlabel("accuracy of a client, %")
    footnote = [
        "Marks: a client in one trial, at its best round. Bars: quartiles; lines: medians; triangles: all samples.",
        "Right: std [CoV] over clients, mean over trials; CoV = std / accuracy, in hundredths; less is fairer.",
    ]
    annotate(figure, figure_title(results), footnote)
    return save_png_and_pdf(figure, _stem(results, out))


def _draw_clients(axes: Axes, entries: Sequence[Entry]) -> None:
    axes.use_sticky_edges = False  # else bars up to 100 % end the axis
    styles = method_styles([display_name(entry.label) for entry in entries])
    for row, (entry, style) in enumerate(zip(entries, styles.values(), strict=True)):
        runs = [client_accuracies(run) for run in (entry.trials.runs if entry.trials else ())]
        clients = 100 * np.array([accuracies for accuracies, _ in runs])  # (trials, clients)
        low, median, high = np.percentile(clients, [25, 50, 75])
        axes.barh(row, high - low, left=low, height=0.7, color="#e4e4e4")
        axes.plot(median, row, "|", color="black", markersize=11, markeredgewidth=1.5)
        axes.plot(100 * np.mean([overall for _, overall in runs]), row - 0.36, "^", color="black", markersize=3.5)
        trials, count = clients.shape
        heights = row + np.linspace(-0.2, 0.2, trials + 2)[1:-1, None] + 0.05 * np.sin(2.4 * np.arange(count))
        marks = {"marker": style["marker"], "color": style["color"], "alpha": 0.55, "linewidth": 0}
        axes.scatter(clients, heights, s=8, zorder=3, **marks)
    axes.set_yticks(range(len(entries)), list(styles))
    axes.set_ylim(-0.7, len(entries) - 0.4)
    axes.grid(visible=False, axis="y")
    numbers = axes.secondary_yaxis("right")
    texts = [format_ours(entry) for entry in entries]
    if any(entry.paper for entry in entries):
        papers = [format_value(format_published(entry.paper)) for entry in entries]
        texts = [f"{ours}   paper {paper}" for ours, paper in zip(texts, papers, strict=True)]
    numbers.set_yticks(range(len(entries)), texts)
    numbers.tick_params(length=0)
    numbers.spines["right"].set_visible(False)


# Learning curves and features.


def _draw_curves(results: TableResults, out: Path) -> list[Path]:
    paths: list[Path] = []
    for column in results.columns:
        if methods := _trials_run(results, column):
            drawn = png_and_pdf(_stem(results, out, column))
            figures.draw_learning_curves(methods, drawn, figure_title(results, column), losses=True)
            paths += drawn
    return paths


def _draw_features(results: TableResults, out: Path) -> list[Path]:
    """Draw t-SNE of the features that are stored next to the runs, and the classes of clients."""
    paths: list[Path] = []
    for column in results.columns:
        methods = _trials_run(results, column)
        stored = [projection for trials in methods if (projection := features.first_projection(trials)) is not None]
        if methods and not stored:
            raise GpflError(f"{column.key} has no features to draw")
        if stored:
            paths += _draw_column_features(stored, _stem(results, out, column), results, column)
    return paths


def _draw_column_features(
    methods: Sequence[FeatureProjection], stem: Path, results: TableResults, column: TableColumn
) -> list[Path]:
    paths = figures.draw_features(methods, stem, figure_title(results, column))
    record = stem.with_name(f"{stem.name}.json")
    files.write_text(record, json.dumps([_to_record(method) for method in methods], indent=2) + "\n")
    paths.append(record)
    first = methods[0]
    if first.class_counts is not None:
        classes = png_and_pdf(stem.with_name(f"{stem.name}-classes"))
        counts = ClassCounts(_data_name(results, column), first.clients, first.classes, first.class_counts)
        figures.draw_class_counts(counts, *classes)
        paths += classes
    return paths


def _to_record(method: FeatureProjection) -> dict[str, object]:
    names = ("method", "run", "round", "selected_by", "width")
    tsne = {"perplexity": min(PERPLEXITY, (method.metrics.rows - 1) / 3), "seed": features.SEED}
    return {**{name: getattr(method, name) for name in names}, **vars(method.metrics), "tsne": tsne}
