"""The pictures of an experiment, chosen by what it measures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpfl.errors import GpflError
from gpfl.experiments import maps
from gpfl.experiments.definitions import TableColumn, display_name
from gpfl.experiments.features import FeatureMetrics
from gpfl.experiments.maps import FeatureMap
from gpfl.experiments.results import TableResults
from gpfl.experiments.trials import Trials
from gpfl.report import curves, fairness, features, figures, lines, paper_tables, plotting

AXES: Mapping[str, str] = {
    "scalability": "clients N, on a logarithmic axis; 10|50: ten of the fifty",
    "stability": "share ρ of clients that join a round",
}
"""Experiments on accuracy whose columns are steps of one quantity, and that quantity."""

Tell = Callable[[str], None]
"""Hears what a person should know while pictures are drawn."""


def draw(results: TableResults, out: Path, tell: Tell = lambda words: None) -> list[Path]:
    """Writes the pictures of an experiment into a folder, each as PNG and PDF, and gives the files; none where none fits.

    Cells that were not run are left out.
    """
    if not any(results.trials.values()):
        return []
    if results.experiment.measure == "features":
        return draw_features(results, out, tell)
    kinds: Mapping[str, Callable[[TableResults, Path], list[Path]]] = {
        "accuracy": draw_lines,
        "fairness": draw_fairness,
        "curves": draw_curves,
    }
    return kinds[results.experiment.measure](results, out)


def finished(results: TableResults, column: TableColumn) -> list[Trials]:
    """Gives the trials of a column's rows that were run."""
    found = (results.trials.get((column.key, row.label)) for row in results.rows)
    return [trials for trials in found if trials is not None and trials.folders]


def stem(results: TableResults, out: Path, column: TableColumn | None = None) -> Path:
    """Gives the path of a picture without its ending; a column is named where the experiment has several."""
    name = results.experiment.name
    return out / (f"{name}-{column.key.replace('/', '-')}" if column and len(results.columns) > 1 else name)


def heading(results: TableResults, column: TableColumn | None = None) -> str:
    """Gives the title of a picture: what, on what, by which protocol, and whether values are others than usual."""
    what = f"{results.experiment.title}, {column.heading}" if column else results.experiment.title
    columns = results.columns if column is None else [column]
    part = ", part of the data" if all(results.is_partial(one.key) for one in columns) else ""
    values = ", values set by hand" * bool(results.settings) + ", tuned values" * bool(results.tuned)
    return f"{what} ({results.protocol} protocol{part}{values})"


def named(results: TableResults, column: TableColumn, *more: str) -> str:
    """Gives the name of a column's data in a picture, and whether they are a part."""
    return ", ".join([column.heading, *more]) + (" (part of the data)" if results.is_partial(column.key) else "")


# Accuracy.


def draw_lines(results: TableResults, out: Path) -> list[Path]:
    """Draws accuracy against the columns where they are steps of one quantity; refuses a single one."""
    axis = AXES.get(results.experiment.name)
    if axis is None:
        return []
    run = [column for column in results.columns if finished(results, column)]
    if len(run) < 2:
        raise GpflError(f"{run[0].key} is the only column that was run, and a line needs two")
    stops, columns = stops_of(results.experiment.name, run)
    series = [line_of(results, row.label, columns) for row in results.rows]
    drawn = [one for one in series if one.last is not None]
    title = heading(dataclasses.replace(results, columns=tuple(run)))
    return lines.draw(drawn, stops, stem(results, out), title, what="best test accuracy, %", axis=axis)


def line_of(results: TableResults, label: str, columns: list[TableColumn]) -> lines.Series:
    """Gives a method's accuracies and the paper's, in percent."""
    ours, papers = [], []
    for column in columns:
        trials, paper = results.trials.get((column.key, label)), results.experiment.paper.get((column.key, label))
        ours.append([100 * value for value in trials.values("best_accuracy")] if trials else None)
        papers.append((paper.mean, paper.std or 0.0) if paper else None)
    return lines.series_of(label, ours, papers)


def stops_of(experiment: str, run: Sequence[TableColumn]) -> tuple[list[lines.Stop], list[TableColumn]]:
    """Gives the stops of the axis and the column of each, of those that were run.

    Numbers of clients stand on a logarithmic axis. Some of M clients stand beside it, and all M of them end their line.
    """
    if experiment != "scalability":
        stops = [lines.Stop(column.heading, float(place), column.group) for place, column in enumerate(run)]
        return stops, list(run)
    whole = sorted((column for column in run if not drawn_of(column)), key=clients_of)
    some = [column for column in run if drawn_of(column)]
    ends = [column for column in whole if some and clients_of(column) == drawn_of(some[0])]
    stops = [lines.Stop(short(column), math.log10(clients_of(column)), "all") for column in whole]
    start = (stops[-1].x if stops else 0.0) + 0.35
    beside = [lines.Stop(short(column), start + 0.3 * place, "some") for place, column in enumerate([*some, *ends])]
    return [*stops, *beside], [*whole, *some, *ends]


def clients_of(column: TableColumn) -> int:
    """Gives the number of a column's clients."""
    return int(str(column.given["partition"]["clients"]))


def drawn_of(column: TableColumn) -> int:
    """Gives the number of clients that a column's are drawn from; 0 where they are all."""
    return int(str(column.given["partition"].get("total_clients", 0)))


def short(column: TableColumn) -> str:
    """Gives a heading without the letter that the axis names."""
    return column.heading.removeprefix("N = ")


# The others.


def draw_fairness(results: TableResults, out: Path) -> list[Path]:
    """Draws the distribution of accuracy over clients, a panel a column."""
    paper = results.experiment.paper
    settings = [
        fairness.Setting(
            named(results, column, column.group),
            [fairness.spread(trials, paper.get((column.key, trials.method))) for trials in finished(results, column)],
        )
        for column in results.columns
    ]
    return fairness.draw(settings, stem(results, out), heading(results))[0]


def draw_curves(results: TableResults, out: Path) -> list[Path]:
    """Draws accuracy and training loss by round, a picture a column."""
    paths: list[Path] = []
    for column in results.columns:
        rows = finished(results, column)
        if rows:
            paths += curves.draw(rows, stem(results, out, column), heading(results, column))[0]
    return paths


# Features.


def draw_features(results: TableResults, out: Path, tell: Tell) -> list[Path]:
    """Draws t-SNE of features and the classes of clients, a picture a column, and measures the features of all trials.

    Points and measures are kept beside the runs, and taken from there where they are.
    """
    paths: list[Path] = []
    for column in results.columns:
        rows = finished(results, column)
        if not rows:
            continue
        if any(lacking(trials) for trials in rows):
            tell("Measuring features and drawing them by t-SNE, which takes minutes.")
        made = [one for trials in rows if (one := map_of(trials, tell)) is not None]
        if not made:
            raise GpflError(f"{column.key} has no features to draw")
        path = stem(results, out, column)
        paths += features.draw(made, path, heading(results, column))
        paths += draw_classes(made[0], path, named(results, column))
        for words in features.Measured(column, measures_of(results, column)).sentences():
            tell(words)
    return paths


def lacking(trials: Trials) -> bool:
    """Tells whether measures, or points of the first trial, are not kept and can be had of models that are there."""
    held = [(maps.read_map(run), run) for run in trials.folders if (run / "models").is_dir()]
    return any(one is None or (run == trials.folders[0] and not one.has_points) for one, run in held)


def map_of(trials: Trials, tell: Tell) -> FeatureMap | None:
    """Gives the map of the first trial that points can be had of, having measured all; None where there are no points."""
    found: list[FeatureMap] = []
    for run in trials.folders:
        try:
            found.append(maps.get_map(run, trials.method, points=not any(one.has_points for one in found)))
        except GpflError as problem:
            tell(f"{display_name(trials.method)}, {run.name}: {problem}")
    first = next((one for one in found if one.has_points), None)
    if first is None:
        tell(f"{display_name(trials.method)} is left out of the picture: no points of these trials were kept")
    return first


def draw_classes(one: FeatureMap, path: Path, data: str) -> list[Path]:
    """Draws the rows of each class on each client, the data called as in other pictures."""
    if one.held is None:
        return []
    holding = figures.Holding(data, one.clients, one.classes, one.held)
    paths = [path.with_name(f"{path.name}-classes{ending}") for ending in plotting.BOTH]
    for picture in paths:
        figures.draw_bubbles(holding, picture)
    return paths


def added(results: TableResults) -> paper_tables.Added:
    """Gives what an experiment's table has besides accuracies: measures of features, as far as they are kept beside runs."""
    if results.experiment.measure != "features":
        return paper_tables.Added()
    found = [features.Measured(column, measures_of(results, column), results.name).added() for column in results.columns]
    return paper_tables.Added(
        [line for one in found for line in one.lines],
        {place: numbers for one in found for place, numbers in one.numbers.items()},
        "".join(one.tex for one in found),
    )


def measures_of(results: TableResults, column: TableColumn) -> dict[str, list[FeatureMetrics]]:
    """Gives the measures of a column's rows that are kept, a list a row."""
    runs = {row.label: results.trials.get((column.key, row.label)) for row in results.rows}
    return {
        label: [one.measures for run in (trials.folders if trials else ()) if (one := maps.read_map(run)) is not None]
        for label, trials in runs.items()
    }
