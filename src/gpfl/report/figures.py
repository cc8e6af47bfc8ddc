"""Figures of runs, data and experiments: learning curves, t-SNE of features, classes of clients, accuracy, fairness."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments import features
from gpfl.experiments.definitions import TableColumn, display_name
from gpfl.experiments.features import PERPLEXITY, FeatureProjection
from gpfl.experiments.grid import TableResults
from gpfl.experiments.statistics import client_accuracies
from gpfl.experiments.stored_runs import Trials
from gpfl.federation import Federation
from gpfl.io import files
from gpfl.report import plotting
from gpfl.report.comparison import Entry, column_entries
from gpfl.report.paper_tables import format_ours, format_published
from gpfl.report.tables import MeanStd, format_value
from gpfl.training.run_dir import MetricsRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Floats = npt.NDArray[np.float64]


_OTHER_MODELS = ("head_ce", "global_ce")  # losses of FedRep's head and of Ditto's global model, not of the personal model


def cross_entropy(record: MetricsRecord) -> float:
    """Return the mean cross-entropy in training; NaN in round 0 and in rounds in which no client trained."""
    losses = cast(Mapping[str, float], record.get("train", {}))
    return losses.get("adapted_ce", losses.get("ce", float("nan")))


def objective(record: MetricsRecord) -> float:
    """Return the sum of the loss terms of the personal model in training, or NaN."""
    losses = cast(Mapping[str, float], record.get("train", {}))
    if "adapted_ce" in losses:  # all that Per-FedAvg minimises
        return losses["adapted_ce"]
    return sum(value for name, value in losses.items() if name not in _OTHER_MODELS) if losses else float("nan")


METRICS: Mapping[str, Callable[[MetricsRecord], float]] = {
    "test accuracy, %": lambda record: 100 * cast(float, record["accuracy"]),
    "training objective": objective,
    "training cross-entropy": cross_entropy,
}
"""Panels of learning curves; losses have logarithmic axes."""


@plotting.figure_style()
def draw_learning_curves(methods: Sequence[Trials], paths: Sequence[Path], title: str, *, losses: bool = False) -> list[Path]:
    """Draw accuracy, and losses below it, by round: the mean over trials, smoothed, in a band of one standard deviation."""
    if not methods or not all(trials.runs for trials in methods):
        raise GpflError("there are no finished trials to draw: run some first")
    metrics = list(METRICS.items())[: 3 if losses else 1]
    curves = {display_name(trials.method): [learning_curve(trials, value) for _, value in metrics] for trials in methods}
    window = smoothing_window(max(len(rounds) for (rounds, _), *_ in curves.values()))
    means = {label: running_mean(accuracies, window).mean(0) for label, ((_, accuracies), *_) in curves.items()}
    styles = plotting.method_styles(list(curves))
    figure = plotting.new_figure(8, 2.6 * len(metrics) + 1.2)
    panels = figure.subplots(len(metrics), squeeze=False, sharex=True)[:, 0]
    for k, (axes, (name, _)) in enumerate(zip(panels, metrics, strict=True)):
        for label in sorted(curves, key=lambda label: -means[label][-1]):
            _draw_curve(axes, *curves[label][k], window, styles[label], f"{label} ({means[label][-1]:.1f} %)")
        if k > 0 and all((curve[k][1] > 0).all() for curve in curves.values()):
            plotting.use_log_scale(axes.yaxis)
        axes.set_ylabel(name)
    if window > 1:  # the first rounds would flatten all others
        late = np.concatenate([mean[len(mean) // 5 :] for mean in means.values()])
        panels[0].set_ylim(late.min() - 0.2 * np.ptp(late) - 0.5, late.max() + 0.1 * np.ptp(late) + 0.5)
    panels[-1].set_xlabel("round")
    panels[-1].margins(x=0.01)
    plotting.use_integer_ticks(panels[-1].xaxis)
    seeds = sorted({len(trials.runs) for trials in methods})
    notes = {
        f"Lines: running means over {window} evaluated rounds; faint: single rounds.": window > 1,
        "The first rounds may lie below the axis.": window > 1,
        f"Mean over {' or '.join(map(str, seeds))} seeds, up to the last round of all; bands: ±\u00a0std.": seeds[-1] > 1,
        "In parentheses: accuracy at the end.": True,
        "The objective is the sum of a method's loss terms: its level does not compare between methods.": losses,
        "Per-FedAvg's cross-entropy is that after adapting, FedPHP's is times 1 − λ.": losses,
    }
    plotting.annotate(figure, title, [note for note, applies in notes.items() if applies], panels)
    return plotting.save_figure(figure, *paths)


def _draw_curve(axes: "Axes", rounds: Floats, values: Floats, window: int, style: Mapping[str, Any], label: str) -> None:
    smooth = running_mean(values, window)
    mean, std = smooth.mean(0), smooth.std(0)
    if window > 1:
        axes.plot(rounds, values.mean(0), color=style["color"], linewidth=0.6, alpha=0.3)
    axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.12, linewidth=0)
    axes.plot(rounds, mean, **style, markevery=max(1, len(mean) // 8), label=label)


def learning_curve(trials: Trials, value: Callable[[MetricsRecord], float]) -> tuple[Floats, Floats]:
    """Return the rounds in which all trials have a value, and the values, (trials, rounds)."""
    runs = [run.metrics() for run in trials.runs]
    records = [run[: min(map(len, runs))] for run in runs]
    rounds = np.array([cast(int, record["round"]) for record in records[0]], dtype=np.float64)
    values = np.array([[value(record) for record in run] for run in records])
    defined = ~np.isnan(values).any(0)
    return rounds[defined], values[:, defined]


def smoothing_window(rounds: int) -> int:
    """Return an odd number of rounds, about a fiftieth of the curve; 1 for short curves."""
    return max(3, 2 * (rounds // 100) + 1) if rounds >= 15 else 1


def running_mean(values: Floats, window: int) -> Floats:
    """Return the mean of the `window` (odd) values around each, along the last axis; fewer at the ends."""
    half, kernel = window // 2, np.ones(window)
    total = np.apply_along_axis(np.convolve, -1, values, kernel)
    mean: Floats = (total / np.convolve(np.ones(values.shape[-1]), kernel))[..., half : half + values.shape[-1]]
    return mean


@plotting.figure_style()
def draw_features(methods: Sequence[FeatureProjection], stem: Path, title: str) -> list[Path]:
    """Draw t-SNE of the features of each method: a colour for each class, a marker for each client. Return the files."""
    if not methods:
        raise GpflError("there are no features to draw: run some methods first")
    columns = min(3, len(methods))
    rows = -(-len(methods) // columns)
    n_classes, n_clients = len(np.unique(methods[0].label)), len(np.unique(methods[0].client))
    entries = min(n_classes, 24) + min(n_clients, len(plotting.MARKERS))
    figure = plotting.new_figure(2.9 * columns + 1.6, max(3.2 * rows + 1, 0.18 * entries + 1))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, method in zip(panels, methods, strict=False):
        _draw_projection(axes, method)
    for axes in panels[len(methods) :]:
        axes.set_visible(False)
    _add_feature_legends(figure, methods[0])
    metrics = methods[0].metrics
    chance = "" if metrics.purity_by_chance is None else f" ({metrics.purity_by_chance:.2f} by chance)"
    footnote = [
        "Each sample passes through its client's model. Silhouettes (−1 to 1) are by class, and by class and client.",
        f"Purity: share of {metrics.neighbours} nearest samples, or those of other clients, with the same class{chance}.",
        "All are computed on the features, not on the plane.",
    ]
    plotting.annotate(figure, title, footnote)
    return plotting.save_figure(figure, *plotting.png_and_pdf(stem))


def _draw_projection(axes: "Axes", method: FeatureProjection) -> None:
    colors = class_colors(len(method.classes) or int(method.label.max()) + 1)
    size = float(np.clip(9000 / len(method.label), 3, 22))
    for client in np.unique(method.client):
        samples = method.client == client
        color = [colors[label] for label in method.label[samples]]
        marker = plotting.MARKERS[client % len(plotting.MARKERS)]
        x, y = method.points[samples].T
        axes.scatter(x, y, s=size, marker=marker, color=color, alpha=0.6, linewidth=0, rasterized=True)
    metrics = {name: format_value(value, ".2f") for name, value in vars(method.metrics).items()}
    axes.set_title(
        f"{display_name(method.method)}, round {method.round}\n"
        f"silhouette {metrics['silhouette']}, with client {metrics['silhouette_islands']}\n"
        f"purity {metrics['purity']}, in other clients {metrics['purity_across']}"
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#bbbbbb")


def _add_feature_legends(figure: "Figure", method: FeatureProjection) -> None:
    from matplotlib.lines import Line2D

    def entry(k: int, names: Sequence[str], color: str, marker: str) -> Line2D:
        label = plotting.printable(names[k], 16) if names else str(k)
        return Line2D([], [], linestyle="", label=label, color=color, marker=marker)

    labels, clients = np.unique(method.label).tolist(), np.unique(method.client).tolist()
    colors = class_colors(len(method.classes) or max(labels) + 1)
    if len(labels) <= 24:
        entries = [entry(k, method.classes, colors[k], "o") for k in labels]
        figure.legend(handles=entries, title="class", loc="outside right upper")
    if len(clients) <= len(plotting.MARKERS):
        entries = [entry(k, method.clients, "#444444", plotting.MARKERS[k]) for k in clients]
        figure.legend(handles=entries, title="client", loc="outside right lower")


def class_colors(classes: int) -> list[str]:
    """Return a colour for each class."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if classes <= len(plotting.COLORS):
        return list(plotting.COLORS[:classes])
    return [to_hex(colormaps["turbo"](value)) for value in np.linspace(0.03, 0.97, classes)]


class ClassCounts(NamedTuple):
    """Number of samples of each class on each client, with the names to print."""

    data: str
    clients: Sequence[str]
    classes: Sequence[str]
    counts: npt.NDArray[np.integer | np.floating]  # (clients, classes)

    @classmethod
    def from_federation(cls, federation: Federation) -> "ClassCounts":
        """Return the counts of a federation, training, validation and test samples together."""
        shards = federation.shards
        counts = federation.count_labels([np.concatenate([shard.train, shard.validation, shard.test]) for shard in shards])
        classes = federation.class_names
        return cls(federation.table.name, [shard.name for shard in shards], classes, counts)


@plotting.figure_style()
def draw_class_counts(data: ClassCounts, *paths: Path) -> list[Path]:
    """Draw a disc for each client and class, its area by the number of samples."""
    n_clients, n_classes = data.counts.shape
    figure = plotting.new_figure(float(np.clip(0.4 * n_clients + 3, 7, 12)), float(np.clip(0.25 * n_classes + 2, 3, 12)))
    axes = figure.add_subplot()
    clients, classes = np.nonzero(data.counts)
    scale = min(200, 60_000 / max(n_clients, n_classes) ** 1.5) / data.counts.max()
    sizes = np.maximum(1, scale * data.counts[clients, classes])  # a single sample stays visible
    discs = axes.scatter(clients, classes, s=sizes, color="#c44e52", linewidth=0)
    entries = discs.legend_elements("sizes", num=3, func=lambda size: size / scale, fmt="{x:,.0f}", color="#c44e52")
    figure.legend(*entries, loc="outside right upper", title="samples", labelspacing=0.8)
    plotting.use_name_ticks(axes.xaxis, data.clients)
    plotting.use_name_ticks(axes.yaxis, data.classes)
    if sum(map(len, data.clients)) > 60:
        axes.tick_params("x", rotation=90)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.8, n_clients - 0.2), ylim=(-0.8, n_classes - 0.2))
    name = plotting.printable(data.data, 40)
    plotting.annotate(figure, f"{name}: " * bool(name) + "samples of each class on each client")
    return plotting.save_figure(figure, *paths)


AXES: Mapping[str, str] = {"scalability": "clients N; 10|50: ten of the fifty", "stability": "share ρ of clients in a round"}
"""Experiments on accuracy whose columns are values of one setting, and the label of its axis."""


def draw(results: TableResults, out: Path) -> list[Path]:
    """Draw the figures of an experiment into a folder and return the files: as PNG and PDF, without cells that were not run."""
    if not any(results.trials.values()):
        return []
    if results.experiment.measure == "accuracy":
        return draw_settings(results, out)
    if results.experiment.measure == "fairness":
        return draw_fairness(results, out)
    draw_column = draw_column_curves if results.experiment.measure == "curves" else draw_column_features
    return [path for column in results.columns if results.column_trials(column) for path in draw_column(results, column, out)]


def figure_title(results: TableResults, column: TableColumn | None = None) -> str:
    """Return the title of a figure: experiment, column and protocol, and whether data or values are not the usual ones."""
    title = f"{results.experiment.title}, {column.heading}" if column else results.experiment.title
    columns = results.columns if column is None else [column]
    part = ", part of the data" if all(results.is_partial(each.key) for each in columns) else ""
    values = ", values set by hand" * bool(results.plan.settings) + ", tuned values" * bool(results.tuned)
    return f"{title} ({results.plan.protocol} protocol{part}{values})"


def _stem(results: TableResults, out: Path, column: TableColumn | None = None) -> Path:
    name = results.experiment.name
    return out / (f"{name}-{column.key.replace('/', '-')}" if column and len(results.columns) > 1 else name)


def _data_name(results: TableResults, column: TableColumn, *more: str) -> str:
    return ", ".join([column.heading, *more]) + (" (part of the data)" if results.is_partial(column.key) else "")


@plotting.figure_style()
def draw_settings(results: TableResults, out: Path) -> list[Path]:
    """Draw accuracy by column, ours next to the paper's, the best methods first; lines join columns of one group."""
    if results.experiment.name not in AXES:
        return []
    columns = [column for column in results.columns if results.column_trials(column)]
    if len(columns) < 2:
        raise GpflError(f"{columns[0].key} is the only column that was run, and a line needs two")
    by_column = [column_entries(results, column) for column in columns]
    methods = [entries for entries in zip(*by_column, strict=True) if any(entry.trials for entry in entries)]
    methods.sort(key=lambda entries: -np.nanmax([entry.score for entry in entries]))
    styles = plotting.method_styles([display_name(first.label) for first, *_ in methods])
    figure = plotting.new_figure(9, 4.2)
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
        axes.set(title=title, xlabel=AXES[results.experiment.name])
        axes.set_xticks(range(len(columns)), [column.heading.removeprefix("N = ") for column in columns])
    panels[0].set_ylabel("best test accuracy, %")
    plotting.annotate(figure, figure_title(results), ["Bars: ± std over trials."], panels)
    return plotting.save_figure(figure, *plotting.png_and_pdf(_stem(results, out)))


@plotting.figure_style()
def draw_fairness(results: TableResults, out: Path) -> list[Path]:
    """Draw the accuracies of clients, a panel for each column and a row for each method, the fairest at the top."""
    entries_run = {column: [e for e in column_entries(results, column) if e.trials] for column in results.columns}
    panels = {column: entries for column, entries in entries_run.items() if entries}
    heights = [0.9 + 0.25 * len(entries) for entries in panels.values()]
    figure = plotting.new_figure(8, sum(heights) + 0.8)
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (column, entries) in zip(rows, panels.items(), strict=True):
        _draw_clients(axes, sorted(entries, key=lambda entry: -entry.score))
        axes.set_title(plotting.printable(_data_name(results, column, column.group), 60), loc="left")
    rows[-1].set_xlabel("accuracy of a client, %")
    footnote = [
        "Marks: a client in one trial, at its best round. Bars: quartiles; lines: medians; triangles: all samples.",
        "Right: std [CoV] over clients, mean over trials; CoV = std / accuracy, in hundredths; less is fairer.",
    ]
    plotting.annotate(figure, figure_title(results), footnote)
    return plotting.save_figure(figure, *plotting.png_and_pdf(_stem(results, out)))


def _draw_clients(axes: "Axes", entries: Sequence[Entry]) -> None:
    axes.use_sticky_edges = False  # else bars up to 100 % end the axis
    styles = plotting.method_styles([display_name(entry.label) for entry in entries])
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


def draw_column_curves(results: TableResults, column: TableColumn, out: Path) -> list[Path]:
    """Draw the learning curves of a column."""
    paths = plotting.png_and_pdf(_stem(results, out, column))
    return draw_learning_curves([*results.column_trials(column).values()], paths, figure_title(results, column), losses=True)


def draw_column_features(results: TableResults, column: TableColumn, out: Path) -> list[Path]:
    """Draw the features of a column's methods and the classes of its clients, and write the metrics as JSON."""
    trials = results.column_trials(column).values()
    methods = [projection for each in trials if (projection := features.first_projection(each)) is not None]
    if not methods:
        raise GpflError(f"{column.key} has no features to draw")
    first, stem = methods[0], _stem(results, out, column)
    paths = draw_features(methods, stem, figure_title(results, column))
    record = stem.with_name(f"{stem.name}.json")
    files.write_text(record, json.dumps([_to_record(method) for method in methods], indent=2) + "\n")
    paths.append(record)
    if first.class_counts is not None:
        counts = ClassCounts(_data_name(results, column), first.clients, first.classes, first.class_counts)
        paths += draw_class_counts(counts, *plotting.png_and_pdf(stem.with_name(f"{stem.name}-classes")))
    return paths


def _to_record(method: FeatureProjection) -> dict[str, object]:
    names = ("method", "run", "round", "selected_by", "width")
    tsne = {"perplexity": min(PERPLEXITY, (method.metrics.rows - 1) / 3), "seed": features.SEED}
    return {**{name: getattr(method, name) for name in names}, **vars(method.metrics), "tsne": tsne}
