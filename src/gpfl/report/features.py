"""Pictures of learned features: t-SNE of several methods side by side, with the numbers that a picture cannot prove."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpfl import files
from gpfl.errors import GpflError
from gpfl.report import drawing
from gpfl.report.drawing import MARKERS, SMALL
from gpfl.study.experiments import spelled
from gpfl.study.features import PERPLEXITY, Features, Measures, embed, measure

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


@dataclass(frozen=True)
class Map:
    """A method's features as points of a plane, and what was measured of them."""

    features: Features
    points: Points  # (rows, 2)
    measures: Measures


def make_map(features: Features, seed: int = 0) -> Map:
    """Gives the points and the measures of features."""
    return Map(features, embed(features, seed), measure(features))


def draw(made: Sequence[Features], stem: Path, title: str, *, seed: int = 0) -> tuple[list[Path], list[Map]]:
    """Draws t-SNE of each method's features, writes the measures as JSON beside it, and gives the files and what was drawn.

    Colour is the class, which is also written on each client's share of it, the mark is the client. The axes of t-SNE
    mean nothing, so that they have no numbers.
    """
    if not made:
        raise GpflError("there are no features to draw: run some methods first")
    maps = [make_map(features, seed) for features in made]
    across = min(3, len(maps))
    rows = -(-len(maps) // across)
    figure = drawing.new_figure(2.9 * across + 1.4, 3.2 * rows + 0.9)
    panels = figure.subplots(rows, across, squeeze=False).flat
    for axes in panels:
        axes.set_visible(False)
    for axes, one in zip(figure.axes, maps, strict=False):
        axes.set_visible(True)
        draw_map(axes, one)
    add_keys(figure, made[0])
    letters = drawing.Letters()
    figure.suptitle(letters.line(title, 100), fontsize=10, x=0.01, ha="left", fontfamily=letters.fonts, parse_math=False)
    drawing.foot(figure, notes(maps))
    record = stem.with_name(f"{stem.name}.json")
    paths = drawing.write(figure, stem)
    files.write_text(record, json.dumps(records(maps, seed), indent=2) + "\n")
    return [*paths, record], maps


def notes(maps: Sequence[Map]) -> list[str]:
    """Gives what must be known of the picture."""
    k = maps[0].measures.neighbours
    chance = maps[0].measures.purity_by_chance
    return [
        "Colour and number: class; mark: client. Every row passes through its own client's model.",
        "Silhouettes (−1 to 1) are by class, and by class and client: high where every client's share of a class is an island.",
        f"Purity is the share of the {k} nearest rows, or of those of other clients, that have a row's class"
        + (f" ({chance:.2f} by chance)." if chance is not None else "."),
        "All are taken of the features themselves, not of the picture.",
    ]


def records(maps: Sequence[Map], seed: int) -> list[dict[str, object]]:
    """Gives the measures as plain values."""
    return [
        {
            "method": one.features.method,
            "round": one.features.round,
            "selected_by": one.features.selected_by,
            "width": int(one.features.x.shape[1]),
            **one.measures.record(),
            "tsne": {"perplexity": min(PERPLEXITY, (len(one.features) - 1) / 3), "seed": seed},
        }
        for one in maps
    ]


def draw_map(axes: Axes, one: Map) -> None:
    """Draws one method's points."""
    label, client = one.features.label, one.features.client
    colours = class_colours(len(one.features.classes) or int(label.max()) + 1)
    pairs = [(c, k) for c in np.unique(client) for k in np.unique(label[client == c])]
    size = float(np.clip(9000 / len(label), 3, 22))
    for c, k in pairs:
        own = (client == c) & (label == k)
        x, y = one.points[own].T
        mark = MARKERS[c % len(MARKERS)]
        axes.scatter(x, y, s=size, marker=mark, alpha=0.55, linewidth=0, color=colours[k], rasterized=True)
    if len(pairs) <= MOST_ISLANDS:
        for island in islands(one):
            name_island(axes, island)
    numbers = one.measures
    axes.set_title(
        f"{spelled(one.features.method)}, round {one.features.round}\n"
        f"silhouette {shown(numbers.silhouette)}, by client too {shown(numbers.silhouette_islands)}\n"
        f"purity {shown(numbers.purity)}, in other clients {shown(numbers.purity_across)}",
        fontsize=drawing.MIDDLE - 0.5,
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


def islands(one: Map) -> list[Island]:
    """Gives every client's share of a class, those together whose middles are near."""
    label, client = one.features.label, one.features.client
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


def name_island(axes: Axes, island: Island) -> None:
    """Writes the class on an island, and the marks of its clients beside it, both with a white edge."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import ScaledTranslation

    x, y = map(float, island.middle)
    text = axes.text(x, y, str(island.label), fontsize=SMALL, ha="center", va="center", fontweight="bold", zorder=4)
    text.set_path_effects([withStroke(linewidth=2, foreground="white")])
    inches = axes.figure.dpi_scale_trans
    for place, c in enumerate(island.clients[:4]):
        aside = ScaledTranslation((6.5 + 6 * place) / 72, 0, inches)
        (mark,) = axes.plot(x, y, MARKERS[c % len(MARKERS)], color="black", markersize=4.5, zorder=4)
        mark.set(transform=axes.transData + aside, markeredgecolor="white", markeredgewidth=0.6)


def add_keys(figure: Figure, features: Features) -> None:
    """Adds the keys of classes and of clients, where they are few enough to be told apart."""
    from matplotlib.lines import Line2D

    letters = drawing.Letters()
    held = [int(label) for label in np.unique(features.label)]
    colours = class_colours(len(features.classes) or max(held) + 1)
    classes = [
        Line2D([], [], color=colours[k], marker="o", linestyle="", markersize=5, label=class_words(features, k, letters))
        for k in held
    ]
    marks = {int(c): MARKERS[c % len(MARKERS)] for c in np.unique(features.client)}
    clients = [
        Line2D([], [], color="#444444", marker=mark, linestyle="", markersize=5, label=client_words(features, c, letters))
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


def class_words(features: Features, label: int, letters: drawing.Letters) -> str:
    """Gives a class by number, and its name where it has one."""
    name = features.classes[label] if features.classes else str(label)
    return str(label) if name == str(label) else f"{label} {letters.line(name, 16)}"


def client_words(features: Features, place: int, letters: drawing.Letters) -> str:
    """Gives a client's name, or its place."""
    return letters.line(features.clients[place], 16) if features.clients else str(place)


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
