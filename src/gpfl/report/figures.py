"""Figures: learning curves, accuracy against a setting, fairness over clients, t-SNE of features, classes of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.definitions import display_name
from gpfl.experiments.feature_maps import FeatureMap
from gpfl.experiments.stored_runs import Trials
from gpfl.federation import Federation
from gpfl.report.plotting import (
    COLORS,
    MARKERS,
    LineStyle,
    annotate,
    figure_style,
    max_label_length,
    method_styles,
    new_figure,
    printable,
    save_figure,
    save_png_and_pdf,
    use_integer_ticks,
    use_log_scale,
    use_name_ticks,
)
from gpfl.report.tables import MeanStd, format_value
from gpfl.training.run_dir import MetricsRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]


# Learning curves.


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


@figure_style()
def draw_learning_curves(methods: Sequence[Trials], paths: Sequence[Path], title: str, *, losses: bool = False) -> None:
    """Draw accuracy, and losses below it, by round: the mean over trials, smoothed, in a band of one standard deviation."""
    if not methods or not all(trials.runs for trials in methods):
        raise GpflError("there are no finished trials to draw: run some first")
    metrics = list(METRICS.items())[: 3 if losses else 1]
    curves = {display_name(trials.method): [learning_curve(trials, value) for _, value in metrics] for trials in methods}
    window = smoothing_window(max(len(rounds) for (rounds, _), *_ in curves.values()))
    means = {label: running_mean(accuracies, window).mean(0) for label, ((_, accuracies), *_) in curves.items()}
    styles = method_styles(list(curves))
    figure = new_figure(8, 2.6 * len(metrics) + 1.2)
    panels = figure.subplots(len(metrics), squeeze=False, sharex=True)[:, 0]
    for k, (axes, (name, _)) in enumerate(zip(panels, metrics, strict=True)):
        for label in sorted(curves, key=lambda label: -means[label][-1]):
            _draw_curve(axes, *curves[label][k], window, styles[label], f"{label} ({means[label][-1]:.1f} %)")
        if k > 0 and all((curve[k][1] > 0).all() for curve in curves.values()):
            use_log_scale(axes.yaxis)
        axes.set_ylabel(name)
    if window > 1:  # the first rounds would flatten all others
        late = np.concatenate([mean[len(mean) // 5 :] for mean in means.values()])
        panels[0].set_ylim(late.min() - 0.2 * np.ptp(late) - 0.5, late.max() + 0.1 * np.ptp(late) + 0.5)
    panels[-1].set_xlabel("round")
    panels[-1].margins(x=0.01)
    use_integer_ticks(panels[-1].xaxis)
    seeds = sorted({len(trials.runs) for trials in methods})
    notes = {
        f"Lines: running means over {window} evaluated rounds; faint: single rounds.": window > 1,
        "The first rounds may lie below the axis.": window > 1,
        f"Mean over {' or '.join(map(str, seeds))} seeds, up to the last round of all; bands: ±\u00a0std.": seeds[-1] > 1,
        "In parentheses: accuracy at the end.": True,
        "The objective is the sum of a method's loss terms: its level does not compare between methods.": losses,
        "Per-FedAvg's cross-entropy is that after adapting, FedPHP's is times 1 − λ.": losses,
    }
    annotate(figure, title, [note for note, applies in notes.items() if applies], panels)
    save_figure(figure, *paths)


def _draw_curve(axes: Axes, rounds: Floats, values: Floats, window: int, style: LineStyle, label: str) -> None:
    smooth = running_mean(values, window)
    mean, std = smooth.mean(0), smooth.std(0)
    if window > 1:
        axes.plot(rounds, values.mean(0), color=style.color, linewidth=0.6, alpha=0.3)
    axes.fill_between(rounds, mean - std, mean + std, color=style.color, alpha=0.12, linewidth=0)
    axes.plot(rounds, mean, **style.line, markevery=max(1, len(mean) // 8), label=label)


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


# Accuracy against a setting.


@dataclass(frozen=True)
class Series:
    """A method's accuracies in several settings, ours and the paper's, in percent."""

    label: str
    ours: Sequence[MeanStd | None]
    paper: Sequence[MeanStd | None]


@figure_style()
def draw_settings(
    series: Sequence[Series], settings: Sequence[str], groups: Sequence[str], stem: Path, title: str, axis_label: str
) -> list[Path]:
    """Draw accuracy against a setting, ours next to the paper's; lines join settings of one group. Return the files."""
    series = sorted((s for s in series if any(s.ours)), key=lambda s: -max(value.mean for value in s.ours if value))
    if not series:
        raise GpflError("there are no finished trials to draw: run some first")
    styles = method_styles([method.label for method in series])
    figure = new_figure(9, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("ours", "paper"), strict=True):
        for k, method in enumerate(series):
            shift = 0.2 * (k / max(1, len(series) - 1) - 0.5)  # keeps error bars apart
            numbers: Sequence[MeanStd | None] = getattr(method, name)
            for group in dict.fromkeys(groups):
                points = [(x, value) for x, value in enumerate(numbers) if value is not None and groups[x] == group]
                axes.errorbar(
                    *([x + shift for x, _ in points], [value.mean for _, value in points], [value.std for _, value in points]),
                    **(styles[method.label].line | {"linewidth": 1.2, "elinewidth": 0.8, "capsize": 1.5}),
                    label=method.label,
                )
        axes.set_title({"ours": "ours", "paper": "the paper"}[name])
        axes.set_xticks(range(len(settings)), settings)
        axes.set_xlabel(axis_label)
    panels[0].set_ylabel("best test accuracy, %")
    annotate(figure, title, ["Bars: ± std over trials."], panels)
    return save_png_and_pdf(figure, stem)


# Fairness.


@dataclass(frozen=True)
class ClientAccuracies:
    """A method's accuracies at the best round, in percent, with the paper's numbers as text."""

    label: str
    clients: Floats  # (trials, clients)
    overall: Floats  # (trials,), over all samples
    paper: str | None = None

    @property
    def std(self) -> Floats:
        """Population standard deviation over clients, by trial."""
        return cast(Floats, self.clients.std(1))

    @property
    def cov(self) -> Floats:
        """Coefficient of variation in hundredths, by trial: std over the accuracy of all samples, 0 if that is 0."""
        return 100 * np.divide(self.std, self.overall, out=np.zeros_like(self.std), where=self.overall > 0)


@figure_style()
def draw_fairness(settings: Mapping[str, Sequence[ClientAccuracies]], stem: Path, title: str) -> list[Path]:
    """Draw the accuracies of clients, a panel for each setting and a row for each method, the fairest at the top."""
    panels = {name: sorted(methods, key=lambda m: -m.cov.mean()) for name, methods in settings.items() if methods}
    if not panels:
        raise GpflError("there are no finished trials to draw: run some first")
    heights = [0.9 + 0.25 * len(methods) for methods in panels.values()]
    figure = new_figure(8, sum(heights) + 0.8)
    columns = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, methods) in zip(columns, panels.items(), strict=True):
        _draw_clients(axes, methods)
        axes.set_title(printable(name, 60), loc="left")
    columns[-1].set_xlabel("accuracy of a client, %")
    footnote = [
        "Marks: a client in one trial, at its best round. Bars: quartiles; lines: medians; triangles: all samples.",
        "Right: std [CoV] over clients, mean over trials; CoV = std / accuracy, in hundredths; less is fairer.",
    ]
    annotate(figure, title, footnote)
    return save_png_and_pdf(figure, stem)


def _draw_clients(axes: Axes, methods: Sequence[ClientAccuracies]) -> None:
    axes.use_sticky_edges = False  # else bars up to 100 % end the axis
    rows = np.arange(len(methods))
    styles = method_styles([method.label for method in methods])
    low, median, high = np.array([np.percentile(method.clients, [25, 50, 75]) for method in methods]).T
    axes.barh(rows, high - low, left=low, height=0.7, color="#e4e4e4")
    axes.plot(median, rows, "|", color="black", markersize=11, markeredgewidth=1.5)
    axes.plot([method.overall.mean() for method in methods], rows - 0.36, "^", color="black", markersize=3.5)
    for row, method in zip(rows, methods, strict=True):
        trials, clients = method.clients.shape
        heights = row + np.linspace(-0.2, 0.2, trials + 2)[1:-1, None] + 0.05 * np.sin(2.4 * np.arange(clients))
        style = styles[method.label]
        axes.scatter(method.clients, heights, s=8, marker=style.marker, color=style.color, alpha=0.55, linewidth=0, zorder=3)
    axes.set_yticks(rows, [method.label for method in methods])
    axes.set_ylim(-0.7, len(rows) - 0.4)
    axes.grid(visible=False, axis="y")
    numbers = axes.secondary_yaxis("right")
    papers = any(method.paper for method in methods)
    paper = [f"   paper {format_value(method.paper)}" * papers for method in methods]
    ours = [f"{method.std.mean():.2f} [{method.cov.mean():.2f}]" for method in methods]
    numbers.set_yticks(rows, [a + b for a, b in zip(ours, paper, strict=True)])
    numbers.tick_params(length=0)
    numbers.spines["right"].set_visible(False)


# Features.


@figure_style()
def draw_features(methods: Sequence[FeatureMap], stem: Path, title: str) -> list[Path]:
    """Draw t-SNE of the features of each method: a colour for each class, a marker for each client. Return the files."""
    if not methods:
        raise GpflError("there are no features to draw: run some methods first")
    columns = min(3, len(methods))
    rows = -(-len(methods) // columns)
    entries = [min(len(np.unique(ids)), most) for ids, most in ((methods[0].label, 24), (methods[0].client, len(MARKERS)))]
    figure = new_figure(2.9 * columns + 1.6, max(3.2 * rows + 1, 0.18 * sum(entries) + 1))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, method in zip(panels, methods, strict=False):
        _draw_map(axes, method)
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
    annotate(figure, title, footnote)
    return save_png_and_pdf(figure, stem)


def _draw_map(axes: Axes, method: FeatureMap) -> None:
    colors = class_colors(len(method.classes) or int(method.label.max()) + 1)
    size = float(np.clip(9000 / len(method.label), 3, 22))
    for client in np.unique(method.client):
        samples = method.client == client
        color = [colors[label] for label in method.label[samples]]
        marker = MARKERS[client % len(MARKERS)]
        x, y = method.points[samples].T
        axes.scatter(x, y, s=size, marker=marker, color=color, alpha=0.6, linewidth=0, rasterized=True)
    metrics = {name: format_value(value, ".2f") for name, value in vars(method.metrics).items()}
    axes.set_title(
        f"{display_name(method.method)}, round {method.round}\n"
        f"silhouette {metrics['silhouette']}, with client {metrics['silhouette_islands']}\n"
        f"purity {metrics['purity']}, in other clients {metrics['purity_across']}",
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#bbbbbb")


def _add_feature_legends(figure: Figure, method: FeatureMap) -> None:
    from matplotlib.lines import Line2D

    def entry(k: int, names: Sequence[str], color: str, marker: str) -> Line2D:
        return Line2D([], [], linestyle="", label=printable(names[k], 16) if names else str(k), color=color, marker=marker)

    labels, clients = np.unique(method.label).tolist(), np.unique(method.client).tolist()
    colors = class_colors(len(method.classes) or max(labels) + 1)
    if len(labels) <= 24:
        entries = [entry(k, method.classes, colors[k], "o") for k in labels]
        figure.legend(handles=entries, title="class", loc="outside right upper")
    if len(clients) <= len(MARKERS):
        entries = [entry(k, method.clients, "#444444", MARKERS[k]) for k in clients]
        figure.legend(handles=entries, title="client", loc="outside right lower")


def class_colors(classes: int) -> list[str]:
    """Return a colour for each class."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if classes <= len(COLORS):
        return list(COLORS[:classes])
    return [to_hex(colormaps["turbo"](value)) for value in np.linspace(0.03, 0.97, classes)]


# Classes of clients.


@dataclass(frozen=True)
class ClassCounts:
    """Number of samples of each class on each client, with the names to print."""

    data: str
    clients: Sequence[str]
    classes: Sequence[str]
    counts: npt.NDArray[np.integer | np.floating]  # (clients, classes)

    @classmethod
    def from_federation(cls, federation: Federation) -> ClassCounts:
        """Return the counts of a federation, training, validation and test samples together."""
        shards = federation.shards
        counts = federation.count_labels([np.concatenate([shard.train, shard.validation, shard.test]) for shard in shards])
        classes = [federation.class_name(label) for label in range(federation.table.classes)]
        return cls(federation.table.name, [shard.name for shard in shards], classes, counts)


@figure_style()
def draw_class_counts(data: ClassCounts, *paths: Path) -> None:
    """Draw a disc for each client and class, its area by the number of samples."""
    counts, n_clients, n_classes = data.counts, len(data.clients), len(data.classes)
    across = np.clip(4 / n_clients, 0.35, 2) if n_clients < 30 else 10.5 / n_clients  # inches from client to client
    up = min(0.3, 11 / n_classes)
    client_labels, class_labels = (0.08 * max_label_length(names) for names in (data.clients, data.classes))
    upright = client_labels > across
    height = max(2.5, up * (n_classes + 1) + 1 + client_labels * upright)
    figure = new_figure(across * (n_clients + 1) + 1.5 + class_labels, height)
    axes = figure.add_subplot()
    largest = np.clip(72 * min(across, up), 8, 18)  # diameter in points

    def area(count: float) -> float:
        return float(max(1, largest**2 * count / counts.max()))  # a single sample stays visible

    clients, classes = np.nonzero(counts)
    axes.scatter(clients, classes, s=[area(count) for count in counts[clients, classes]], color="#c44e52", linewidth=0)
    for count in round_counts(int(counts.max())):
        axes.scatter([], [], s=area(count), color="#c44e52", linewidth=0, label=f"{count:,}")
    figure.legend(loc="outside right upper", title="samples", labelspacing=0.8)
    use_name_ticks(axes.xaxis, data.clients)
    use_name_ticks(axes.yaxis, data.classes)
    axes.tick_params("x", rotation=90 if upright else 0)
    axes.set(xlabel="client", ylabel="class")
    right, above = (0.5 + largest / 144 / step for step in (across, up))
    axes.set(xlim=(-right, n_clients - 1 + right), ylim=(-above, n_classes - 1 + above))
    annotate(figure, f"{printable(data.data, 40)}: samples of each class on each client")
    save_figure(figure, *paths)


def round_counts(largest: int) -> list[int]:
    """Return up to three round numbers from `largest` down, each about a quarter of the one before."""
    numbers: list[int] = []
    while largest >= 1 and len(numbers) < 3:
        power = 10 ** (len(str(largest)) - 1)
        numbers.append(next(step * power for step in (5, 2, 1) if step * power <= largest))
        largest = numbers[-1] // 4
    return numbers
