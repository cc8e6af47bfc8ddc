"""The figures of an experiment, chosen by what it measures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gpfl.errors import GpflError
from gpfl.experiments import feature_maps
from gpfl.experiments.definitions import PaperValue, TableColumn, display_name
from gpfl.experiments.feature_maps import FeatureMap
from gpfl.experiments.features import PERPLEXITY
from gpfl.experiments.results import TableResults
from gpfl.experiments.statistics import client_accuracies
from gpfl.experiments.stored_runs import Trials
from gpfl.io import files
from gpfl.report import figures
from gpfl.report.figures import ClassCounts, ClientAccuracies, Series
from gpfl.report.paper_tables import format_published
from gpfl.report.plotting import png_and_pdf
from gpfl.report.tables import MeanStd

AXES: Mapping[str, str] = {"scalability": "clients N; 10|50: ten of the fifty", "stability": "share ρ of clients in a round"}
"""Experiments on accuracy whose columns are values of one setting, and the label of its axis."""


def draw(results: TableResults, out: Path) -> list[Path]:
    """Draw the figures of an experiment into a folder and return the files: as PNG and PDF, without cells that were not run."""
    kinds = {"accuracy": _draw_settings, "fairness": _draw_fairness, "curves": _draw_curves, "features": _draw_features}
    return kinds[results.experiment.measure](results, out) if any(results.trials.values()) else []


def figure_title(results: TableResults, column: TableColumn | None = None) -> str:
    """Return the title of a figure: experiment, column and protocol, and whether data or values are not the usual ones."""
    title = f"{results.experiment.title}, {column.heading}" if column else results.experiment.title
    columns = results.columns if column is None else [column]
    part = ", part of the data" if all(results.is_partial(each.key) for each in columns) else ""
    values = ", values set by hand" * bool(results.settings) + ", tuned values" * bool(results.tuned)
    return f"{title} ({results.protocol} protocol{part}{values})"


def _finished(results: TableResults, column: TableColumn) -> list[Trials]:
    cells = (results.trials.get((column.key, row.label)) for row in results.rows)
    return [trials for trials in cells if trials is not None and trials.runs]


def _stem(results: TableResults, out: Path, column: TableColumn | None = None) -> Path:
    name = results.experiment.name
    return out / (f"{name}-{column.key.replace('/', '-')}" if column and len(results.columns) > 1 else name)


def _data_name(results: TableResults, column: TableColumn, *more: str) -> str:
    return ", ".join([column.heading, *more]) + (" (part of the data)" if results.is_partial(column.key) else "")


def _draw_settings(results: TableResults, out: Path) -> list[Path]:
    if results.experiment.name not in AXES:
        return []
    columns = [column for column in results.columns if _finished(results, column)]
    if len(columns) < 2:
        raise GpflError(f"{columns[0].key} is the only column that was run, and a line needs two")
    series = [_series(results, row.label, columns) for row in results.rows]
    settings = [column.heading.removeprefix("N = ") for column in columns]
    groups = [column.group for column in columns]
    axis = AXES[results.experiment.name]
    return figures.draw_settings(series, settings, groups, _stem(results, out), figure_title(results), axis)


def _series(results: TableResults, label: str, columns: Sequence[TableColumn]) -> Series:
    def ours(trials: Trials | None) -> MeanStd | None:
        return MeanStd.from_trials(trials, "best_accuracy") if trials else None

    def paper(published: PaperValue | None) -> MeanStd | None:
        return MeanStd(published.mean, published.std or 0.0) if published else None

    keys = [(column.key, label) for column in columns]
    papers = [paper(results.experiment.paper.get(key)) for key in keys]
    return Series(display_name(label), [ours(results.trials.get(key)) for key in keys], papers)


def _draw_fairness(results: TableResults, out: Path) -> list[Path]:
    settings = {}
    for column in results.columns:
        methods = []
        for trials in _finished(results, column):
            clients, overall = zip(*(client_accuracies(run) for run in trials.runs), strict=True)
            paper = format_published(results.experiment.paper.get((column.key, trials.method)))
            methods.append(
                ClientAccuracies(display_name(trials.method), 100 * np.array(clients), 100 * np.array(overall), paper)
            )
        settings[_data_name(results, column, column.group)] = methods
    return figures.draw_fairness(settings, _stem(results, out), figure_title(results))


def _draw_curves(results: TableResults, out: Path) -> list[Path]:
    paths: list[Path] = []
    for column in results.columns:
        if methods := _finished(results, column):
            drawn = png_and_pdf(_stem(results, out, column))
            figures.draw_learning_curves(methods, drawn, figure_title(results, column), losses=True)
            paths += drawn
    return paths


def _draw_features(results: TableResults, out: Path) -> list[Path]:
    """Draw t-SNE of the features that are stored next to the runs, and the classes of clients."""
    paths: list[Path] = []
    for column in results.columns:
        methods = _finished(results, column)
        stored = [feature_map for trials in methods if (feature_map := feature_maps.first_map(trials)) is not None]
        if methods and not stored:
            raise GpflError(f"{column.key} has no features to draw")
        if stored:
            paths += _draw_column_features(stored, _stem(results, out, column), results, column)
    return paths


def _draw_column_features(methods: Sequence[FeatureMap], stem: Path, results: TableResults, column: TableColumn) -> list[Path]:
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


def _to_record(method: FeatureMap) -> dict[str, object]:
    names = ("method", "run", "round", "selected_by", "width")
    tsne = {"perplexity": min(PERPLEXITY, (method.metrics.rows - 1) / 3), "seed": feature_maps.SEED}
    return {**{name: getattr(method, name) for name in names}, **vars(method.metrics), "tsne": tsne}
