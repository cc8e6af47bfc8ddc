"""Figures of runs and data: learning curves, t-SNE of features, classes of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.definitions import display_name
from gpfl.experiments.features import FeatureProjection
from gpfl.experiments.stored_runs import Trials
from gpfl.federation import Federation
from gpfl.report.plotting import (
    COLORS,
    MARKERS,
    annotate,
    figure_style,
    method_styles,
    new_figure,
    printable,
    save_figure,
    save_png_and_pdf,
    use_integer_ticks,
    use_log_scale,
    use_name_ticks,
)
from gpfl.report.tables import format_value
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


def _draw_curve(axes: Axes, rounds: Floats, values: Floats, window: int, style: Mapping[str, Any], label: str) -> None:
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


# Features.


@figure_style()
def draw_features(methods: Sequence[FeatureProjection], stem: Path, title: str) -> list[Path]:
    """Draw t-SNE of the features of each method: a colour for each class, a marker for each client. Return the files."""
    if not methods:
        raise GpflError("there are no features to draw: run some methods first")
    columns = min(3, len(methods))
    rows = -(-len(methods) // columns)
    entries = [min(len(np.unique(ids)), most) for ids, most in ((methods[0].label, 24), (methods[0].client, len(MARKERS)))]
    figure = new_figure(2.9 * columns + 1.6, max(3.2 * rows + 1, 0.18 * sum(entries) + 1))
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
    annotate(figure, title, footnote)
    return save_png_and_pdf(figure, stem)


def _draw_projection(axes: Axes, method: FeatureProjection) -> None:
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
        f"purity {metrics['purity']}, in other clients {metrics['purity_across']}"
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#bbbbbb")


def _add_feature_legends(figure: Figure, method: FeatureProjection) -> None:
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


class ClassCounts(NamedTuple):
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
        classes = federation.class_names
        return cls(federation.table.name, [shard.name for shard in shards], classes, counts)


@figure_style()
def draw_class_counts(data: ClassCounts, *paths: Path) -> None:
    """Draw a disc for each client and class, its area by the number of samples."""
    n_clients, n_classes = data.counts.shape
    figure = new_figure(float(np.clip(0.4 * n_clients + 3, 7, 12)), float(np.clip(0.25 * n_classes + 2, 3, 12)))
    axes = figure.add_subplot()
    clients, classes = np.nonzero(data.counts)
    scale = min(200, 60_000 / max(n_clients, n_classes) ** 1.5) / data.counts.max()
    sizes = np.maximum(1, scale * data.counts[clients, classes])  # a single sample stays visible
    discs = axes.scatter(clients, classes, s=sizes, color="#c44e52", linewidth=0)
    entries = discs.legend_elements("sizes", num=3, func=lambda size: size / scale, fmt="{x:,.0f}", color="#c44e52")
    figure.legend(*entries, loc="outside right upper", title="samples", labelspacing=0.8)
    use_name_ticks(axes.xaxis, data.clients)
    use_name_ticks(axes.yaxis, data.classes)
    if sum(map(len, data.clients)) > 60:
        axes.tick_params("x", rotation=90)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.8, n_clients - 0.2), ylim=(-0.8, n_classes - 0.2))
    annotate(figure, ": ".join(filter(None, [printable(data.data, 40), "samples of each class on each client"])))
    save_figure(figure, *paths)
