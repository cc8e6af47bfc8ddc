"""Figures drawn from run folders."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from gpfl import files
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

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
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
    axes.legend(loc="lower right", title="method (last round)")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:])
    files.write_bytes(path, content.getvalue())


def curves(trials: Trials) -> tuple[np.ndarray, np.ndarray]:
    """Gives rounds and accuracies in percent, (trials, rounds), over the rounds that all trials have."""
    runs = [RunFolder(folder).lines() for folder in trials.folders]
    shortest = min(len(lines) for lines in runs)
    rounds = np.array([cast(int, line["round"]) for line in runs[0][:shortest]])
    return rounds, 100 * np.array([[cast(float, line["accuracy"]) for line in lines[:shortest]] for lines in runs])
