"""Learned features: t-SNE of several methods side by side, and the numbers that a picture cannot prove, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError, pluralize
from gpfl.experiments import maps
from gpfl.experiments.definitions import TableColumn, display_name
from gpfl.experiments.features import PERPLEXITY, FeatureMetrics
from gpfl.experiments.maps import FeatureMap
from gpfl.io import files
from gpfl.report import latex, paper_tables, plotting
from gpfl.report.comparison import MeanStd
from gpfl.report.plotting import MARKERS, SMALL, Box
from gpfl.report.wording import format_mean_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = npt.NDArray[np.float32]

TEN = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
    *("#8c564b", "#999933", "#882255"),
)
"""Colours of up to ten classes, which most colour-blind people can tell apart."""
MOST_NAMES = 24
"""Classes or clients up to which a key names them."""
MOST_ISLANDS = 60
"""Pairs of a client and a class up to which the class stands on each."""
MOST_MARKS = 4
"""Clients of an island whose marks stand beside its class."""


MEASURES: Mapping[str, str] = {
    "silhouette": "silhouette by class",
    "silhouette_within": "within clients",
    "silhouette_islands": "by class and client",
    "purity": "purity",
    "purity_across": "purity in other clients",
}
"""Measures that tables have, and what they are called there."""

LEAST = 7.0
"""Inches of width that the notes below a picture need."""


# The picture.


def draw(made: Sequence[FeatureMap], stem: Path, title: str, *, seed: int = maps.SEED) -> list[Path]:
    """Draws t-SNE of each method's features, writes the measures as JSON beside it, and gives the files.

    Colour is the class, which is also written on each client's share of it, the mark is the client. The axes of t-SNE
    mean nothing, so that they have no numbers.
    """
    if not made:
        raise GpflError("there are no features to draw: run some methods first")
    across = min(3, len(made))
    rows = -(-len(made) // across)
    figure = plotting.new_figure(max(2.9 * across + 1.4, LEAST), 3.2 * rows + 0.9)
    panels = figure.subplots(rows, across, squeeze=False).flat
    for axes in panels:
        axes.set_visible(False)
    for axes, one in zip(figure.axes, made, strict=False):
        axes.set_visible(True)
        draw_map(axes, one)
    add_keys(figure, made[0])
    letters = plotting.Letters()
    figure.suptitle(letters.line(title, 100), fontsize=10, x=0.01, ha="left", fontfamily=letters.fonts, parse_math=False)
    plotting.add_footnote(figure, notes(made))
    record = stem.with_name(f"{stem.name}.json")
    paths = plotting.save_png_and_pdf(figure, stem)
    files.write_text(record, json.dumps(records(made, seed), indent=2) + "\n")
    return [*paths, record]


def notes(made: Sequence[FeatureMap]) -> list[str]:
    """Gives what must be known of the picture."""
    k = made[0].measures.neighbours
    chance = made[0].measures.purity_by_chance
    return [
        "Colour and number: class; mark: client. Every row passes through its own client's model.",
        "Silhouettes (−1 to 1) are by class, and by class and client: high where every client's share of a class is an island.",
        f"Purity is the share of the {k} nearest rows, or of those of other clients, that have a row's class"
        + (f" ({chance:.2f} by chance)." if chance is not None else "."),
        "All are taken of the features themselves, not of the picture.",
    ]


def records(made: Sequence[FeatureMap], seed: int) -> list[dict[str, object]]:
    """Gives the measures as plain values, with the run that they are of; its folder has the points."""
    return [
        {
            "method": one.method,
            "run": one.run,
            "round": one.round,
            "selected_by": one.selected_by,
            "width": one.width,
            **one.measures.record(),
            "tsne": {"perplexity": min(PERPLEXITY, (one.measures.rows - 1) / 3), "seed": seed},
        }
        for one in made
    ]


def draw_map(axes: Axes, one: FeatureMap) -> None:
    """Draws one method's points."""
    label, client = one.label, one.client
    colours = class_colours(len(one.classes) or int(label.max()) + 1)
    pairs = [(c, k) for c in np.unique(client) for k in np.unique(label[client == c])]
    size = float(np.clip(9000 / len(label), 3, 22))
    for c, k in pairs:
        own = (client == c) & (label == k)
        x, y = one.points[own].T
        mark = MARKERS[c % len(MARKERS)]
        axes.scatter(x, y, s=size, marker=mark, alpha=0.55, linewidth=0, color=colours[k], rasterized=True)
    if len(pairs) <= MOST_ISLANDS:
        name_islands(axes, islands(one))
    numbers = one.measures
    axes.set_title(
        f"{display_name(one.method)}, round {one.round}\n"
        f"silhouette {shown(numbers.silhouette)}, by client too {shown(numbers.silhouette_islands)}\n"
        f"purity {shown(numbers.purity)}, in other clients {shown(numbers.purity_across)}",
        fontsize=plotting.MIDDLE - 0.5,
    )
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")


@dataclass(frozen=True)
class Island:
    """Where clients' shares of a class lie together: the middle of the first, the class, and the clients."""

    middle: Points
    label: int
    clients: list[int]


def islands(one: FeatureMap) -> list[Island]:
    """Gives every client's share of a class, those together whose middles are near."""
    label, client = one.label, one.client
    near = 0.06 * float(np.ptp(one.points, axis=0).max())
    found: list[Island] = []
    for c in map(int, np.unique(client)):
        for k in map(int, np.unique(label[client == c])):
            own = one.points[(client == c) & (label == k)]
            middle = own[np.argmin(((own - np.median(own, axis=0)) ** 2).sum(1))]
            beside = (i for i in found if i.label == k and np.linalg.norm(middle - i.middle) < near)
            other = next(beside, None)
            if other is None:
                found.append(Island(middle, k, [c]))
            else:
                other.clients.append(c)
    return found


def name_islands(axes: Axes, found: Sequence[Island]) -> None:
    """Writes its class on every island, or as near to it as is clear of the others' names."""
    across, up = 190 / np.ptp(axes.get_xlim()), 165 / np.ptp(axes.get_ylim())  # points of a panel, about
    shifts = [(0.0, 0.0), *((right, above) for far in (8, 16) for right in (0, -far, far) for above in (far, -far))]
    taken: list[Box] = []
    for island in found:
        x, y = across * float(island.middle[0]), up * float(island.middle[1])
        wide = 10 + 6 * len(island.clients[:MOST_MARKS])
        boxes = [Box(x + right - 3, y + above, wide) for right, above in shifts]
        place = plotting.first_clear(boxes, taken)
        taken.append(boxes[place])
        name_island(axes, island, shifts[place])


def name_island(axes: Axes, island: Island, shift: tuple[float, float]) -> None:
    """Writes the class and the marks of its clients beside it, both with a white edge, so many points aside of the island."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import ScaledTranslation

    x, y = map(float, island.middle)
    inches = axes.figure.dpi_scale_trans
    right, above = shift
    aside = axes.transData + ScaledTranslation(right / 72, above / 72, inches)
    text = axes.text(x, y, str(island.label), fontsize=SMALL, ha="center", va="center", fontweight="bold", zorder=4)
    text.set(transform=aside, path_effects=[withStroke(linewidth=2, foreground="white")])
    for place, c in enumerate(island.clients[:MOST_MARKS]):
        (mark,) = axes.plot(x, y, MARKERS[c % len(MARKERS)], color="black", markersize=4.5, zorder=4)
        beside = aside + ScaledTranslation((6.5 + 6 * place) / 72, 0, inches)
        mark.set(transform=beside, markeredgecolor="white", markeredgewidth=0.6)


def add_keys(figure: Figure, one: FeatureMap) -> None:
    """Adds the keys of classes and of clients, where they are few enough to be told apart."""
    from matplotlib.lines import Line2D

    letters = plotting.Letters()
    held = [int(label) for label in np.unique(one.label)]
    colours = class_colours(len(one.classes) or max(held) + 1)
    classes = [
        Line2D([], [], color=colours[k], marker="o", linestyle="", markersize=5, label=class_words(one, k, letters))
        for k in held
    ]
    marks = {int(c): MARKERS[c % len(MARKERS)] for c in np.unique(one.client)}
    clients = [
        Line2D([], [], color="#444444", marker=mark, linestyle="", markersize=5, label=client_words(one, c, letters))
        for c, mark in marks.items()
    ]
    looks = {"frameon": False, "labelspacing": 0.25, "handletextpad": 0.2, "borderpad": 0.1}
    sizes = {"fontsize": SMALL, "title_fontsize": SMALL}
    if len(classes) <= MOST_NAMES:
        figure.legend(handles=classes, title="class", loc="outside right upper", **looks, **sizes)
    if len(clients) <= len(MARKERS):
        figure.legend(handles=clients, title="client", loc="outside right lower", **looks, **sizes)
    for text in (text for key in figure.legends for text in key.get_texts()):
        text.set(fontfamily=letters.fonts, parse_math=False)


def class_words(one: FeatureMap, label: int, letters: plotting.Letters) -> str:
    """Gives a class by number, and its name where it has one."""
    name = one.classes[label] if one.classes else str(label)
    return str(label) if name == str(label) else f"{label} {letters.line(name, 16)}"


def client_words(one: FeatureMap, place: int, letters: plotting.Letters) -> str:
    """Gives a client's name, or its place."""
    return letters.line(one.clients[place], 16) if one.clients else str(place)


def class_colours(classes: int) -> list[str]:
    """Gives a colour for each class; many classes go round a circle of hues."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if classes <= len(TEN):
        return list(TEN[:classes])
    return [to_hex(colormaps["turbo"](value)) for value in np.linspace(0.03, 0.97, classes)]


def shown(value: float | None) -> str:
    """Gives a measure with two digits."""
    return "–" if value is None else f"{value:.2f}".replace("-", "−")


# The table.


@dataclass(frozen=True)
class Measured:
    """What was measured of a column: each row's measures, one a trial; none where its features were not measured."""

    column: TableColumn
    rows: Mapping[str, Sequence[FeatureMetrics]]
    table: str = "features"  # the name of the table that it is added to

    def added(self) -> paper_tables.Added:
        """Gives what the experiment's table has of it besides accuracies."""
        return paper_tables.Added(self.lines(), self.numbers(), self.tex() if any(self.rows.values()) else "")

    def lines(self) -> list[str]:
        """Gives a section of the page."""
        lines = [f"## Features of {self.column.key}", ""]
        if not any(self.rows.values()):
            return [*lines, "Not measured: the same command without --no-figures does it where the models are.", ""]
        headings = ["method", *MEASURES.values(), "trials"]
        lines += [paper_tables.row(headings), paper_tables.rule(len(headings) - 1)]
        lines += [paper_tables.row([display_name(label), *self.cells(found)]) for label, found in self.rows.items()]
        return [*lines, "", self.meaning(), ""]

    def cells(self, found: Sequence[FeatureMetrics]) -> list[str]:
        """Gives a row's numbers, and of how many trials they are."""
        return [*(words_of(found, name) for name in MEASURES), str(len(found))]

    def sentences(self) -> list[str]:
        """Gives a line of the terminal for each row that was measured."""
        return [
            f"{self.column.key} {display_name(label)}: silhouette by class {words_of(found, 'silhouette')}, purity "
            f"{words_of(found, 'purity')} ({pluralize(len(found), 'trial')})"
            for label, found in self.rows.items()
            if found
        ]

    def meaning(self) -> str:
        """Gives what the numbers mean."""
        one = next(found[0] for found in self.rows.values() if found)
        chance = "" if one.purity_by_chance is None else f" ({one.purity_by_chance:.2f} by chance)"
        return (
            "Silhouettes (−1 to 1) are high where rows of a group lie together and apart from others: of a class, all clients' "
            "rows together; of a class among a client's own rows (mean over clients); of each client's share of each class. "
            f"Purity is the share of a row's {one.neighbours} nearest rows, or nearest rows of other clients, that have its "
            f"class{chance}. All are of the features themselves, not of the picture: at most {maps.MOST_ROWS} {maps.PART} rows "
            "of each client and class through the client's own model; mean ± population standard deviation over trials. A "
            "picture shows one trial, the first of those that were run."
        )

    def numbers(self) -> dict[tuple[str, str], dict[str, object]]:
        """Gives plain numbers by column and row; None where there is none."""
        found: dict[tuple[str, str], dict[str, object]] = {}
        for label, measured in self.rows.items():
            spreads = {name: spread_of(measured, name) for name in (*MEASURES, "purity_by_chance")}
            found[self.column.key, label] = {
                **{name: one.mean if one else None for name, one in spreads.items()},
                **{f"{name}_std_over_trials": one.std if one else None for name, one in spreads.items()},
                "measured_trials": len(measured),
            }
        return found

    def tex(self) -> str:
        """Gives a table for LaTeX."""
        headings = [*MEASURES.values(), "trials"]
        body = [[latex.text(cell) for cell in (display_name(label), *self.cells(found))] for label, found in self.rows.items()]
        caption = latex.text(f"Features of {self.column.heading}, {self.column.group}.")
        groups = [latex.text(self.column.heading)] * len(headings)
        label = f"gpfl-{self.table}-{self.column.key.replace('/', '-')}"
        return "\n" + latex.table(caption, label, groups, list(map(latex.text, headings)), body, [latex.text(self.meaning())])


def words_of(found: Sequence[FeatureMetrics], name: str) -> str:
    """Gives a measure's mean and deviation in words."""
    return format_mean_std(spread_of(found, name), len(found), digits=3).replace("-", "−")


def spread_of(found: Sequence[FeatureMetrics], name: str) -> MeanStd | None:
    """Gives a measure's mean and population standard deviation over trials; None where no trial has it."""
    values = [value for one in found if (value := getattr(one, name)) is not None]
    return MeanStd(float(np.mean(values)), float(np.std(values))) if values else None
