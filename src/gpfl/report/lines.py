"""Lines: a number of each method against a setting, such as accuracy against the number of clients, beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.definitions import display_name
from gpfl.report import plotting
from gpfl.report.plotting import End, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

Floats = npt.NDArray[np.float64]

OVERLAID = 4
"""Methods up to which ours and the paper's lines share a panel; more have a panel each."""
ACROSS = (4, 3)
"""Panels side by side: whichever leaves fewer places empty."""


@dataclass(frozen=True)
class Stop:
    """A place of the axis: a setting, where it stands, and the run of settings that a line joins it with."""

    heading: str
    x: float
    group: str = ""


@dataclass(frozen=True)
class Series:
    """A method's numbers at all stops, in percent; NaN where there is none."""

    label: str
    mean: Floats
    std: Floats
    paper: Floats
    paper_std: Floats

    @property
    def last(self) -> int | None:
        """The last stop with a number of ours."""
        held = np.flatnonzero(~np.isnan(self.mean))
        return int(held[-1]) if len(held) else None


def draw(series: Sequence[Series], stops: Sequence[Stop], stem: Path, title: str, *, what: str, axis: str) -> list[Path]:
    """Draws every method's numbers against the stops, with error bars, and gives the files.

    One panel holds all of ours, labelled at their ends. Below, each method has a panel with ours and the paper's numbers,
    all others faint behind; a few methods have the paper's numbers in the first panel instead.
    """
    if not any(one.last is not None for one in series):
        raise GpflError("there are no finished trials to draw lines of: run some first")
    looks = plotting.method_styles([one.label for one in series])
    several = len(series) > OVERLAID
    across = min(ACROSS, key=lambda wide: -len(series) % wide)
    rows = -(-len(series) // across) if several else 0
    inches = max(2.8, 0.16 * len(series))
    figure = plotting.new_figure(7.2, inches + 1.2 + 1.55 * rows)
    upper: FigureBase = figure
    if several:
        upper, lower = np.ravel(figure.subfigures(2, 1, height_ratios=[inches + 0.8, 1.55 * rows]))  # type: ignore[arg-type]
        draw_each(lower, series, stops, looks, (rows, across))
    top = upper.subplots()
    draw_all(top, series, stops, looks, inches, papers=not several)
    top.set(ylabel=what, xlabel=axis)
    letters = plotting.Letters()
    top.set_title(letters.line(title, 90), fontfamily=letters.fonts, parse_math=False, loc="left", fontsize=10)
    plotting.add_footnote(figure, [notes(series)])
    return plotting.save_png_and_pdf(figure, stem)


def draw_each(
    figure: FigureBase, series: Sequence[Series], stops: Sequence[Stop], looks: Mapping[str, Style], shape: tuple[int, int]
) -> None:
    """Draws a panel for each method, in so many rows and columns."""
    for place, axes in enumerate(figure.subplots(*shape, squeeze=False, sharex=True, sharey=True).flat):
        if place < len(series):
            draw_one(axes, series, place, stops, looks[series[place].label])
            axes.tick_params("x", labelbottom=place >= len(series) - shape[1])  # the lowest of each column
        else:
            axes.set_visible(False)


def notes(series: Sequence[Series]) -> str:
    """Gives the sentence that explains the marks."""
    bars = "bars ± std over trials"
    papers = any(not np.isnan(one.paper).all() for one in series)
    return f"Filled marks: our runs, {bars}." + (" Hollow marks on dotted lines: the paper's numbers." if papers else "")


def draw_all(
    axes: Axes, series: Sequence[Series], stops: Sequence[Stop], looks: Mapping[str, Style], inches: float, *, papers: bool
) -> None:
    """Draws all methods in one panel, with labels at the ends of their lines."""
    wide = 0.012 * (max(stop.x for stop in stops) - min(stop.x for stop in stops) or 1.0)
    for place, one in enumerate(series):
        look = looks[one.label]
        aside = wide * (place - (len(series) - 1) / 2) / max(1, len(series) - 1) * 2  # so that bars do not hide each other
        for part in groups(stops):
            x = np.array([stops[k].x for k in part]) + aside
            axes.errorbar(x, one.mean[part], one.std[part], **look.line, markersize=5, capsize=2, elinewidth=0.8)
            if papers:
                draw_paper(axes, x, one, part, look)
    mark_stops(axes, stops)
    plotting.tidy(axes)
    axes.autoscale_view()
    plotting.label_ends(axes, [end_of(one, one.last, stops) for one in series if one.last is not None], looks, inches)


def end_of(one: Series, last: int, stops: Sequence[Stop]) -> End:
    """Gives the end of a method's line, with its number there, and where that is if it is not the end of the axis."""
    where = "" if last == len(stops) - 1 else f" ({stops[last].heading})"
    return End(one.label, stops[last].x, float(one.mean[last]), f"{one.mean[last]:.1f}{where}")


def draw_one(axes: Axes, series: Sequence[Series], place: int, stops: Sequence[Stop], look: Style) -> None:
    """Draws one method beside the paper's numbers, the others faint behind it."""
    one = series[place]
    for part in groups(stops):
        x = np.array([stops[k].x for k in part])
        for other in series:
            axes.plot(x, other.mean[part], color="#d0d0d0", linewidth=0.7, zorder=1)
        axes.errorbar(
            *(x, one.mean[part], one.std[part]),
            color=look.colour,
            linewidth=1.5,
            marker=look.marker,
            markersize=4,
            capsize=1.5,
            elinewidth=0.8,
            zorder=3,
        )
        draw_paper(axes, x, one, part, look)
    mark_stops(axes, stops)
    axes.set_title(one.label, fontsize=plotting.SMALL + 0.5, pad=2)
    plotting.tidy(axes)
    axes.tick_params(labelsize=6)
    axes.tick_params("x", rotation=90 if len(stops) > 4 else 0)


def draw_paper(axes: Axes, x: Floats, one: Series, part: Sequence[int], look: Style) -> None:
    """Draws the paper's numbers: hollow marks on a dotted line."""
    hollow = {**look.line, "linestyle": ":", "linewidth": 1.1, "markersize": 5.5, "markerfacecolor": "white"}
    std = np.nan_to_num(one.paper_std[part])
    axes.errorbar(x, one.paper[part], std, **hollow, elinewidth=0.7, capsize=1.5, zorder=2)


def mark_stops(axes: Axes, stops: Sequence[Stop]) -> None:
    """Writes the settings below the axis."""
    letters = plotting.Letters()
    ticks = [letters.line(stop.heading, plotting.LONGEST_TICK) for stop in stops]
    axes.set_xticks([stop.x for stop in stops], ticks, fontfamily=letters.fonts, parse_math=False)


def groups(stops: Sequence[Stop]) -> list[list[int]]:
    """Gives the places of stops that a line joins, group by group."""
    found: dict[str, list[int]] = {}
    for place, stop in enumerate(stops):
        found.setdefault(stop.group, []).append(place)
    return list(found.values())


def series_of(label: str, ours: Sequence[Sequence[float] | None], papers: Sequence[tuple[float, float] | None]) -> Series:
    """Gives the series of a method from its trials' numbers at each stop, and the paper's mean and deviation."""
    nothing = (float("nan"), float("nan"))
    mine = [(float(np.mean(values)), float(np.std(values))) if values else nothing for values in ours]
    theirs = [numbers or nothing for numbers in papers]
    columns = [np.array(column, dtype=np.float64) for pairs in (mine, theirs) for column in zip(*pairs, strict=True)]
    return Series(display_name(label), *columns)
