"""Figures drawn from run folders."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from gpfl import files
from gpfl.federation import Federation
from gpfl.runs import RunFolder
from gpfl.study.trials import Trials

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)


def draw_curves(rows: Sequence[Trials], path: Path, title: str) -> None:
    """Draws test accuracy by round, the mean over trials with the range between them; readable without colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 if len(rows) <= 5 else 8.5, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, trials in enumerate(rows):
        rounds, accuracies = curves(trials)
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        mean = accuracies.mean(0)
        axes.fill_between(rounds, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(rounds, mean, color=colour, linestyle=dash, linewidth=1.8, label=f"{trials.method} ({mean[-1]:.1f} %)")
    axes.set(xlabel="round", ylabel="test accuracy, %", title=title)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    if len(rows) > 5:  # beside the curves, where it hides none
        figure.legend(loc="outside right upper", title="method (last round)")
    else:
        axes.legend(loc="lower right", title="method (last round)")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:])
    files.write_bytes(path, content.getvalue())


def curves(trials: Trials) -> tuple[np.ndarray, np.ndarray]:
    """Gives rounds and accuracies in percent, (trials, rounds), over the rounds that all trials have."""
    runs = [RunFolder(folder).whole_curve() for folder in trials.folders]
    shortest = min(len(lines) for lines in runs)
    rounds = np.array([cast(int, line["round"]) for line in runs[0][:shortest]])
    return rounds, 100 * np.array([[cast(float, line["accuracy"]) for line in lines[:shortest]] for lines in runs])


def draw_bubbles(federation: Federation, path: Path) -> None:
    """Draws a disc for every client and class, its area by the number of rows, training and test together."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    clients, classes, areas = bubbles(federation)
    tall = min(12.0, 2.5 + 0.25 * federation.table.classes)
    figure = Figure(figsize=(min(14.0, 3.0 + 0.3 * len(federation)), tall), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("#eaeaf2")
    axes.grid(color="white", linewidth=1, zorder=0)
    axes.scatter(clients, classes, s=300 * areas / areas.max(), color="#c44e52", zorder=2, linewidth=0)
    axes.set(xlabel="client", ylabel="class", title=f"{federation.table.name}: rows of each class on each client")
    if len(federation) <= 30:
        axes.set_xticks(
            range(len(federation)), [shard.name for shard in federation.shards], rotation=90 if len(federation) > 12 else 0
        )
    if federation.table.classes <= 30:
        axes.set_yticks(range(federation.table.classes))
    axes.margins(0.05)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png")
    files.write_bytes(path, content.getvalue())


def bubbles(federation: Federation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives client, class and number of rows for every pair that has some."""
    rows = [np.concatenate([shard.train, shard.validation, shard.test]) for shard in federation.shards]
    counts = federation.count_labels(rows)
    clients, classes = np.nonzero(counts)
    return clients, classes, counts[clients, classes]
