"""Figures: curves of run folders, and the classes of a federation's clients."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from gpfl.experiments.trials import Trials
from gpfl.federation.federation import Federation
from gpfl.report.plotting import COLOURS, DASHES, Letters, check_image_path, new_figure, save_figure
from gpfl.training.run_dir import RunDir

DISC = "#c44e52"
LETTER = 0.08
"""Inches that a letter takes at an axis."""
LONGEST = 40
"""Letters of the data's name."""
WIDE = 0x2E80
"""From here on letters are about twice as wide as ours."""


def draw_curves(rows: Sequence[Trials], path: Path, title: str) -> None:
    """Draws test accuracy by round, the mean over trials with the range between them; readable without colour."""
    check_image_path(path)
    figure = new_figure(7 if len(rows) <= 5 else 8.5, 4)
    axes = figure.add_subplot()
    for place, trials in enumerate(rows):
        rounds, accuracies = curves(trials)
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        mean = accuracies.mean(0)
        axes.fill_between(rounds, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(rounds, mean, color=colour, linestyle=dash, linewidth=1.8, label=f"{trials.method} ({mean[-1]:.1f} %)")
    axes.set(xlabel="round", ylabel="test accuracy, %")
    letters = Letters()
    lines = textwrap.fill(letters.line(title, 150), 75)
    axes.set_title(lines, fontfamily=letters.fonts, parse_math=False)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    if len(rows) > 5:  # beside the curves, where it hides none
        figure.legend(loc="outside right upper", title="method (last round)")
    else:
        axes.legend(loc="lower right", title="method (last round)")
    save_figure(figure, path)


def curves(trials: Trials) -> tuple[np.ndarray, np.ndarray]:
    """Gives rounds and accuracies in percent, (trials, rounds), over the rounds that all trials have."""
    runs = [RunDir(folder).whole_curve() for folder in trials.folders]
    shortest = min(len(lines) for lines in runs)
    rounds = np.array([cast(int, line["round"]) for line in runs[0][:shortest]])
    return rounds, 100 * np.array([[cast(float, line["accuracy"]) for line in lines[:shortest]] for lines in runs])


@dataclass(frozen=True)
class Holding:
    """How many rows of each class each client holds, training and test together, and how they are called."""

    data: str
    clients: Sequence[str]
    classes: Sequence[str]
    rows: np.ndarray  # (clients, classes)

    @classmethod
    def of(cls, federation: Federation) -> Holding:
        """Gives what the clients of a federation hold."""
        table, shards = federation.table, federation.shards
        rows = federation.count_labels([np.concatenate([shard.train, shard.validation, shard.test]) for shard in shards])
        classes = [federation.class_name(label) for label in range(table.classes)]
        return cls(table.name, [shard.name for shard in shards], classes, rows)


def draw_bubbles(federation: Federation | Holding, path: Path) -> None:
    """Draws a disc for every client and class, its area by the number of rows, training and test together."""
    check_image_path(path)
    held = federation if isinstance(federation, Holding) else Holding.of(federation)
    clients, classes, rows = bubbles(held)
    letters = Letters()
    names, labels = letters.ticks(held.clients), letters.ticks(held.classes)
    sheet = Sheet.around(len(held.clients), len(held.classes), widest(names), widest(labels))
    figure = new_figure(sheet.width, sheet.height)
    axes = figure.add_subplot()
    axes.set_facecolor("#eaeaf2")
    axes.grid(color="white", linewidth=1, zorder=0)
    area = sheet.disc**2 / rows.max()
    axes.scatter(clients, classes, s=np.maximum(1, area * rows), color=DISC, zorder=2, linewidth=0)  # a single row is seen
    for shown in round_numbers(int(rows.max())):
        axes.scatter([], [], s=max(1, area * shown), color=DISC, linewidth=0, label=f"{shown:,}")
    figure.legend(loc="outside right upper", title="rows", labelspacing=0.8, frameon=False)
    name = letters.line(held.data, LONGEST)
    title = f"{name}:{' ' if len(name) <= 12 else chr(10)}rows of each class on each client"
    axes.set_title(title, fontfamily=letters.fonts, parse_math=False)
    letters.label(axes.xaxis, "client", names)
    letters.label(axes.yaxis, "class", labels)
    axes.tick_params("x", rotation=90 if sheet.upright else 0)
    axes.set_xlim(-sheet.margins[0], len(held.clients) - 1 + sheet.margins[0])
    axes.set_ylim(-sheet.margins[1], len(held.classes) - 1 + sheet.margins[1])
    save_figure(figure, path)


@dataclass(frozen=True)
class Sheet:
    """The measures of a picture of discs, in inches: class names at its left, client names below, the key at its right."""

    width: float
    height: float
    upright: bool  # client names, where they are too long to lie side by side
    disc: float  # the largest diameter, in points
    margins: tuple[float, float]  # from the outermost discs' centres to the border, in clients and in classes

    @classmethod
    def around(cls, clients: int, classes: int, client_name: int, class_name: int) -> Sheet:
        """Gives room for so many clients and classes, whose longest names have so many letters."""
        beside = 1.5 + LETTER * class_name
        width = min(14.0, beside + max(4.5, 0.35 * clients))  # a title needs 4.5
        across = (width - beside) / (clients + 0.5)  # from one client to the next
        upright = LETTER * client_name > across - 0.1 and client_name > 0
        below = 1.3 + (LETTER * client_name if upright else 0.0)
        height = min(13.0, below + max(1.5, 0.28 * classes))
        up = (height - below) / (classes + 0.5)
        disc = min(18.0, max(8.0, 0.9 * 72 * min(across, up)))
        return cls(width, height, upright, disc, (0.5 + disc / 144 / across, 0.5 + disc / 144 / up))


def widest(names: Sequence[str]) -> int:
    """Gives the width of the longest name, in letters of our alphabet."""
    return max((sum(2 if ord(letter) >= WIDE else 1 for letter in name) for name in names), default=0)


def round_numbers(most: int) -> list[int]:
    """Gives up to three round numbers that are not above `most`, the largest first, each about a quarter of the one before."""
    numbers: list[int] = []
    while most >= 1 and len(numbers) < 3:
        tens = 10 ** (len(str(most)) - 1)
        numbers.append(next(step * tens for step in (5, 2, 1) if step * tens <= most))
        most = numbers[-1] // 4
    return numbers


def bubbles(federation: Federation | Holding) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives client, class and number of rows for every pair that has some."""
    held = federation if isinstance(federation, Holding) else Holding.of(federation)
    clients, classes = np.nonzero(held.rows)
    return clients, classes, held.rows[clients, classes]
