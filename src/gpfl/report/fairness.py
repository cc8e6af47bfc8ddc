"""Fairness: how accuracy is distributed over clients at the best round, method by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.definitions import PaperValue, display_name
from gpfl.experiments.statistics import client_accuracies
from gpfl.experiments.trials import Trials
from gpfl.report import plotting
from gpfl.report.plotting import SMALL, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """A method's clients at the best round of each trial, in percent."""

    method: str
    clients: Floats  # (trials, clients)
    accuracy: Floats  # (trials,), over all rows
    paper: PaperValue | None = None

    @property
    def std(self) -> Floats:
        """The population standard deviation over clients, of each trial."""
        std: Floats = self.clients.std(1)
        return std

    @property
    def cov(self) -> Floats:
        """The coefficient of variation in hundredths, of each trial: std over the accuracy over all rows."""
        cov: Floats = 100 * np.divide(self.std, self.accuracy, out=np.zeros_like(self.std), where=self.accuracy > 0)
        return cov

    @property
    def words(self) -> str:
        """Standard deviation and coefficient of variation as the paper writes them, the means over trials."""
        return f"{self.std.mean():.2f} [{self.cov.mean():.2f}]"


@dataclass(frozen=True)
class Setting:
    """A setting and its methods."""

    heading: str
    spreads: Sequence[Spread]


def spread(trials: Trials, paper: PaperValue | None = None) -> Spread:
    """Gives the distribution over clients at the best round of each trial."""
    found = [client_accuracies(folder) for folder in trials.folders]
    return Spread(
        trials.method,
        100 * np.array([clients for clients, _ in found]),
        100 * np.array([accuracy for _, accuracy in found]),
        paper,
    )


def draw(settings: Sequence[Setting], stem: Path, title: str) -> tuple[list[Path], list[Setting]]:
    """Draws a row of points and a box for each method, the fairest uppermost, and gives the files and what was drawn.

    A point is a client in one trial, a box their quartiles with the median, a triangle the accuracy over all rows.
    """
    filled = [one for one in settings if one.spreads]
    shown = [Setting(one.heading, sorted(one.spreads, key=lambda spread: float(spread.cov.mean()))) for one in filled]
    if not shown:
        raise GpflError("there are no finished trials to draw clients of: run some first")
    looks = plotting.method_styles(
        [display_name(method) for method in dict.fromkeys(s.method for one in shown for s in one.spreads)]
    )
    heights = [0.7 + 0.24 * len(one.spreads) for one in shown]
    figure = plotting.new_figure(7.2, sum(heights) + 0.7)
    panels = figure.subplots(len(shown), squeeze=False, height_ratios=heights).flat
    for one, axes in zip(shown, panels, strict=True):
        draw_setting(axes, one, looks)
    axes.set_xlabel("accuracy of a client, %", fontsize=plotting.MIDDLE)
    letters = plotting.Letters()
    figure.suptitle(letters.line(title, 90), fontsize=10, x=0.01, ha="left", fontfamily=letters.fonts, parse_math=False)
    plotting.add_footnote(
        figure,
        [
            "A mark is a client in one trial at its best round, a grey box their quartiles, a black line their median,",
            "a triangle below the row the accuracy over all rows. Sorted by CoV = std over that accuracy; less is fairer.",
        ],
    )
    return plotting.save_png_and_pdf(figure, stem), shown


def draw_setting(axes: Axes, setting: Setting, looks: Mapping[str, Style]) -> None:
    """Draws the methods of one setting, from above."""
    rows = len(setting.spreads)
    for place, one in enumerate(setting.spreads):
        look, y = looks[display_name(one.method)], rows - 1 - place
        values = one.clients.ravel()
        low, middle, high = np.percentile(values, [25, 50, 75])
        axes.fill_betweenx([y - 0.34, y + 0.34], low, high, color="#e4e4e4", linewidth=0, zorder=1)
        axes.plot([middle, middle], [y - 0.34, y + 0.34], color="black", linewidth=1.6, zorder=4)
        axes.scatter(
            *(values, y + scatter(one.clients.shape)),
            s=9 if values.size <= 400 else 4,
            marker=look.marker,
            alpha=0.55,
            linewidth=0,
            color=look.colour,
            zorder=3,
            rasterized=values.size > 2000,
        )
        axes.plot(one.accuracy.mean(), y - 0.4, marker="^", color="black", markersize=4, zorder=5, clip_on=False)
    axes.set_yticks(range(rows), [display_name(one.method) for one in reversed(setting.spreads)])
    axes.set_ylim(-0.6, rows - 0.4)
    plotting.tidy(axes)
    axes.grid(visible=False, axis="y")
    letters = plotting.Letters()
    axes.set_title(
        letters.line(setting.heading, 60), fontsize=plotting.MIDDLE, loc="left", fontfamily=letters.fonts, parse_math=False
    )
    print_numbers(axes, setting)


def print_numbers(axes: Axes, setting: Setting) -> None:
    """Writes std [CoV] at the right of each row, and the paper's."""
    papers = any(one.paper is not None for one in setting.spreads)
    columns = {1.02: "std [CoV]", **({1.19: "paper"} if papers else {})}
    across = axes.get_yaxis_transform()
    rows = len(setting.spreads)
    for x, heading in columns.items():
        axes.text(x, 1.0, heading, transform=axes.transAxes, fontsize=SMALL, va="bottom", fontweight="bold")
    for place, one in enumerate(setting.spreads):
        printed = [one.words, paper_words(one.paper)]
        for x, words in zip(columns, printed, strict=False):
            axes.text(x, rows - 1 - place, words, transform=across, fontsize=SMALL, va="center")


def paper_words(paper: PaperValue | None) -> str:
    """Gives the paper's standard deviation and coefficient of variation."""
    if paper is None:
        return "–"
    return f"{paper.mean:.2f}" + (f" [{paper.cov:.2f}]" if paper.cov is not None else "")


def scatter(shape: tuple[int, ...]) -> Floats:
    """Gives heights within a row for (trials, clients): trials one above the other, clients of a trial to and fro."""
    trials, clients = shape
    lanes = np.linspace(-0.2, 0.2, trials) if trials > 1 else np.zeros(1)
    sway = 0.05 * np.sin(2.4 * np.arange(clients))
    heights: Floats = (lanes[:, None] + sway[None]).ravel()
    return heights
