"""Learning curves: accuracy and training loss by round, as measured and smoothed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.definitions import display_name
from gpfl.experiments.trials import Trials
from gpfl.report import plotting
from gpfl.report.plotting import End, Style
from gpfl.training.run_dir import MetricsRecord, RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = npt.NDArray[np.float64]

ASIDE = ("head_ce", "global_ce")
"""Logged terms that the client's own model does not descend: of FedRep's head, trained before, and of Ditto's global model."""


def accuracy(line: MetricsRecord) -> float:
    """Gives the test accuracy of a round in percent."""
    return 100 * cast(float, line["accuracy"])


def cross_entropy(line: MetricsRecord) -> float:
    """Gives the mean cross-entropy of training; Per-FedAvg's is that after adapting, FedPHP's is times 1 − λ."""
    terms = trained(line)
    return terms.get("adapted_ce", terms.get("ce", float("nan")))


def objective(line: MetricsRecord) -> float:
    """Gives the sum of the terms that a client's own model descends: each method's own, so that levels do not compare."""
    terms = trained(line)
    if "adapted_ce" in terms:  # Per-FedAvg descends this alone
        return terms["adapted_ce"]
    own = [value for name, value in terms.items() if name not in ASIDE]
    return sum(own) if own else float("nan")


def trained(line: MetricsRecord) -> Mapping[str, float]:
    """Gives the terms of training before a line; none in round 0, and where nobody joined."""
    return cast(Mapping[str, float], line.get("train", {}))


@dataclass(frozen=True)
class Panel:
    """A quantity that is drawn by round."""

    heading: str
    of: Callable[[MetricsRecord], float]
    log: bool = False
    digits: int = 1


PANELS: Mapping[str, Panel] = {
    "accuracy": Panel("test accuracy, %", accuracy),
    "objective": Panel("training loss: own objective", objective, log=True, digits=3),
    "ce": Panel("training loss: cross-entropy", cross_entropy, log=True, digits=3),
}


@dataclass(frozen=True)
class Curve:
    """A quantity of a method's trials by round."""

    method: str
    rounds: Floats  # (rounds,)
    values: Floats  # (trials, rounds), NaN where there is none

    @property
    def mean(self) -> Floats:
        """The mean over trials."""
        mean: Floats = self.values.mean(0)
        return mean

    def smooth(self, window: int) -> Curve:
        """Gives running means over `window` evaluated rounds."""
        return Curve(self.method, self.rounds, np.array([running_mean(values, window) for values in self.values]))


def curve(trials: Trials, panel: Panel) -> Curve:
    """Gives a quantity over the rounds that all trials have."""
    runs = [RunDir(folder).whole_curve() for folder in trials.folders]
    shortest = min(len(lines) for lines in runs)
    rounds = np.array([cast(int, line["round"]) for line in runs[0][:shortest]], dtype=np.float64)
    values = np.array([[panel.of(line) for line in lines[:shortest]] for lines in runs])
    there = ~np.isnan(values).all(0)
    return Curve(trials.method, rounds[there], values[:, there])


BANDS = 4
"""So many times the band of the curves' later halves is shown of what rises into it."""


def running_mean(values: Floats, window: int) -> Floats:
    """Gives the mean of the `window` values around each, of those that there are; the ends have half a window."""
    there = ~np.isnan(values)
    before, after = (window - 1) // 2, window // 2
    padded = [np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(there, values, 0.0), there.astype(np.float64))]
    places = np.arange(len(values))
    low, high = np.maximum(0, places - before), np.minimum(len(values), places + after + 1)
    total, count = (sums[high] - sums[low] for sums in padded)
    mean: Floats = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    return mean


def fitting_window(rounds: int) -> int:
    """Gives a window that smooths a curve of so many rounds: about a fiftieth, and odd; short curves are left as they are."""
    return max(3, 2 * (rounds // 100) + 1) if rounds >= 15 else 1


def draw(
    rows: Sequence[Trials], stem: Path, title: str, *, window: int = 0, panels: Sequence[str] = tuple(PANELS)
) -> tuple[list[Path], dict[str, list[Curve]]]:
    """Draws panels of curves, one below the other, and gives the files and the raw curves of each panel.

    The mean over trials is strong where it is smoothed and faint as measured, the band is a standard deviation on each side.
    `window` 0 chooses one by the number of rounds.
    """
    if not rows or any(not trials.folders for trials in rows):
        raise GpflError("there are no finished trials to draw curves of: run some first")
    drawn = {name: [curve(trials, PANELS[name]) for trials in rows] for name in panels}
    window = window or fitting_window(max(len(one.rounds) for curves in drawn.values() for one in curves))
    looks = plotting.method_styles([display_name(trials.method) for trials in rows])
    inches = max(2.3, 0.155 * len(rows))
    figure = plotting.new_figure(7.2, len(panels) * (inches + 0.45) + 0.7)
    panes = figure.subplots(len(panels), squeeze=False, sharex=True)
    cut = False
    for place, (axes, name) in enumerate(zip(panes.flat, panels, strict=True)):
        cut |= draw_panel(axes, PANELS[name], drawn[name], window, looks, inches)
        if place == 0:
            letters = plotting.Letters()
            axes.set_title(letters.line(title, 90), fontfamily=letters.fonts, parse_math=False, loc="left", fontsize=10)
    last = max(float(one.rounds.max(initial=1.0)) for curves in drawn.values() for one in curves)
    axes.set_xlim(min(float(one.rounds.min(initial=last)) for curves in drawn.values() for one in curves), last)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(plotting.whole_numbers())
    counts = sorted({len(trials.folders) for trials in rows})
    words = [f"Strong: running mean over {window} evaluated rounds; faint: as measured" if window > 1 else "As measured"]
    words[0] += f"; mean of {' or '.join(map(str, counts))} seeds, band ± std" if counts[-1] > 1 else "; one seed"
    if counts[-1] > 1:
        there = "; the numbers there are the running mean's" if window > 1 else ""
        words.append(f"Curves end with the round that all seeds of a method reached{there}.")
    if cut:
        words.append("The first rounds are below the axis.")
    if "objective" in panels:
        words.append("An objective is the sum of a method's own loss terms: its level does not compare between methods.")
    if "ce" in panels:
        words.append("Cross-entropy is that of the local training steps, Per-FedAvg's after adapting, FedPHP's times 1 − λ.")
    plotting.add_footnote(figure, words)
    return plotting.save_png_and_pdf(figure, stem), drawn


def draw_panel(
    axes: Axes, panel: Panel, curves: Sequence[Curve], window: int, looks: Mapping[str, Style], inches: float
) -> bool:
    """Draws the curves of one quantity, GPFL's above the others, with labels at their ends; says whether the axis cuts some."""
    ends: list[End] = []
    for place, raw in enumerate(curves):
        if not len(raw.rounds):
            continue
        label = display_name(raw.method)
        look, smooth = looks[label], raw.smooth(window)
        mean, std = smooth.mean, smooth.values.std(0)
        level = 3 if look.width > 2 else 2
        if window > 1:
            axes.plot(raw.rounds, raw.mean, color=look.colour, linewidth=0.7, alpha=0.3, zorder=1)
        if len(raw.values) > 1:
            axes.fill_between(raw.rounds, mean - std, mean + std, color=look.colour, alpha=0.1, linewidth=0, zorder=1)
        every = max(1, len(mean) // 7)
        axes.plot(
            *(raw.rounds, mean),
            **{**look.line, "markersize": 3.5, "markevery": (place * every // max(1, len(curves)), every), "zorder": level},
        )
        ends.append(End(label, float(raw.rounds[-1]), float(mean[-1]), f"{mean[-1]:.{panel.digits}f}"))
    if panel.log and all((one.mean > 0).all() for one in curves):
        axes.set_yscale("log")
    cut = fit(axes, curves, window)
    if axes.get_yscale() == "log":
        plotting.plain_numbers(axes)
    axes.set_ylabel(panel.heading)
    plotting.tidy(axes)
    if ends:
        plotting.label_ends(axes, ends, looks, inches)
    return cut


def fit(axes: Axes, curves: Sequence[Curve], window: int) -> bool:
    """Sets the limits of the upright axis by the smoothed curves, and says whether it starts above some of their values.

    A single outlier of a raw curve does not flatten all, nor do the first rounds where what rises ends in a narrow band.
    """
    means = [one.smooth(window).mean for one in curves if len(one.rounds)]
    if not means:
        return False
    values = np.concatenate(means)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if axes.get_yscale() == "log":
        axes.set_ylim(low / (high / low) ** 0.05 / 1.02, high * (high / low) ** 0.05 * 1.02)
        return False
    band = high - min(float(np.nanmin(mean[len(mean) // 2 :])) for mean in means)
    seen = max(low, high - BANDS * band) if len(values) > 2 * len(means) and band > 0 else low
    room = 0.05 * (high - seen) or 1.0
    axes.set_ylim(seen - room, high + room)
    return seen > low
