"""What pictures share: figures and how they are saved, letters, and a line, a dash and a mark for every method."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.io import files
from gpfl.methods import METHODS

if TYPE_CHECKING:  # matplotlib takes half a second, which commands that draw nothing need not wait
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

Dash = tuple[float, tuple[float, ...]]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[Dash, ...] = (
    (0, ()),
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "p", "h")
FORMATS = (".png", ".pdf", ".svg")
BOTH = (".png", ".pdf")
"""What `write` makes of one figure: pixels, and a vector form that LaTeX takes in."""
SMALL, MIDDLE = 7.5, 9.0
"""Points of the letters beside curves, and at axes."""
START, SAMPLE = 1.035, 0.05
"""Where the samples beside curves begin, and how long they are, in widths of the axes."""
EARLY = 0.1
"""Widths of the axes by which a curve that ends before the others ends early."""
SCRIPTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans", "Yu Gothic", "Malgun Gothic"),
    *("Apple SD Gothic Neo", "Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Bengali"),
)
"""Fonts of other scripts, taken where they are here."""
MOST_TICKS, LONGEST_TICK = 40, 24
"""Names at an axis, letters of such a name."""


# Files.


def check_image_path(path: Path) -> None:
    """Refuses a path that no picture can be written to."""
    if path.suffix.lower() not in FORMATS:
        ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise GpflError(f"the picture '{path}' {ending}; it must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if path.is_dir():
        raise GpflError(f"the picture '{path}' is a folder: name a file")


def new_figure(width: float, height: float) -> Figure:
    """Gives an empty figure of so many inches, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure in the format that the path ends in."""
    files.write_bytes(path, rendered(figure, path.suffix))


def save_png_and_pdf(figure: Figure, stem: Path) -> list[Path]:
    """Writes a figure as pixels and as vectors, both or none, and gives the files; `stem` is their path without an ending."""
    paths = [stem.with_name(stem.name + ending) for ending in BOTH]
    for path in paths:
        check_image_path(path)
    contents = [rendered(figure, path.suffix) for path in paths]
    for path, content in zip(paths, contents, strict=True):
        files.write_bytes(path, content)
    return paths


def markdown_images(paths: Sequence[Path]) -> str:
    """Gives the last lines of a Markdown page, which show those of the files beside it that are pixels."""
    return "".join(f"\n![{path.stem.replace('-', ' ')}]({path.name})\n" for path in paths if path.suffix == ".png")


def rendered(figure: Figure, ending: str) -> bytes:
    """Gives a figure as the content of a file; equal figures give equal bytes."""
    from matplotlib import rc_context

    kind = ending[1:].lower()
    dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "gpfl", "pdf.fonttype": 42}):  # fonts that journals accept, in a form that can be searched
        figure.savefig(content, format=kind, metadata=dated)
    return content.getvalue()


# A line, a dash and a mark for every method, the same in all pictures.


@dataclass(frozen=True)
class Style:
    """How a method is drawn: the mark tells it without the colour, and the dash from most others."""

    colour: str
    dash: Dash
    marker: str
    width: float = 1.4

    @property
    def line(self) -> dict[str, Any]:
        """What matplotlib's lines take."""
        return {"color": self.colour, "linestyle": self.dash, "linewidth": self.width, "marker": self.marker}


PALETTE = (
    *("#d55e00", "#000000", "#7f7f7f", "#56b4e9", "#0072b2", "#009e73"),
    *("#e69f00", "#cc79a7", "#882255", "#44aa99", "#332288", "#999933"),
)
"""For the methods in the order of METHODS: GPFL's is the warmest."""


def method_styles(labels: Sequence[str]) -> dict[str, Style]:
    """Gives each label its style: methods always have theirs, other labels take those that are left, and then any."""
    places = {name: place for place, name in enumerate(METHODS)}
    known = {label: places[plain(label)] for label in labels if plain(label) in places}
    left = [place for place in range(len(PALETTE)) if place not in known.values()] or [0]
    others = [label for label in labels if label not in known]
    known |= {label: left[number % len(left)] for number, label in enumerate(others)}
    return {label: style_at(known[label]) for label in labels}


def style_at(place: int) -> Style:
    """Gives the style with a number; GPFL's, the first, is the strongest."""
    dash = DASHES[place % len(DASHES)]
    return Style(PALETTE[place % len(PALETTE)], dash, MARKERS[place % len(MARKERS)], 2.2 if place == 0 else 1.4)


def plain(label: str) -> str:
    """Gives a label as METHODS would have it: "Per-FedAvg" is perfedavg."""
    return label.lower().replace("-", "").strip()


# Labels at the ends of curves, in place of a legend.


class End(NamedTuple):
    """The end of a curve, and what is written beside it."""

    label: str
    x: float
    y: float
    words: str = ""


def label_ends(axes: Axes, ends: Sequence[End], looks: Mapping[str, Style], inches: float) -> None:
    """Writes each label right of the axes, at the height of its curve's end and clear of the others.

    A thin line leads from the end to a sample of the curve's dash and mark, a dotted one where the curve ends well before the
    others, so that nobody takes it for more of the curve. `inches` is the height of the axes; their limits must be final.
    """
    from matplotlib.lines import Line2D

    across, heights = (axes.transScale + axes.transLimits).transform(np.array([(end.x, end.y) for end in ends])).T
    dashes = [(0, (1, 3)) if early else "-" for early in across < across.max() - EARLY]
    letters = Letters()
    for end, dash, place in zip(ends, dashes, apart(heights, 1.35 * SMALL / 72 / inches), strict=True):
        look = looks[end.label]
        axes.annotate(
            *("", (end.x, end.y), (START, place), "data", "axes fraction"),
            arrowprops={
                "arrowstyle": "-",
                "color": look.colour,
                "linewidth": 0.5,
                "linestyle": dash,
                "shrinkA": 0,
                "shrinkB": 1,
            },
            annotation_clip=False,
        )
        line = Line2D([START, START + SAMPLE / 2, START + SAMPLE], [place] * 3, markersize=4, markevery=[1], **look.line)
        line.set(transform=axes.transAxes, clip_on=False)
        axes.add_artist(line)
        words = f"{letters.line(end.label, LONGEST_TICK)} {end.words}".strip()
        text = axes.text(START + 1.3 * SAMPLE, place, words, transform=axes.transAxes, va="center", fontsize=SMALL)
        text.set(fontfamily=letters.fonts, parse_math=False)


def apart(wanted: npt.ArrayLike, gap: float) -> npt.NDArray[np.float64]:
    """Gives places from 0 to 1, as near to the wanted ones as may be, in the same order and at least `gap` apart.

    Where there is no room for the gap, it is as wide as there is room.
    """
    from sklearn.isotonic import isotonic_regression

    heights = np.asarray(wanted, dtype=np.float64)
    order = np.argsort(heights, kind="stable")
    steps = min(gap, 1 / max(1, len(heights) - 1)) * np.arange(len(heights))
    # Places less their steps must not fall: the nearest such are an isotonic regression.
    found = np.empty_like(heights)
    found[order] = isotonic_regression(heights[order] - steps, y_min=0.0, y_max=1 - steps[-1]) + steps
    return found


# Words at marks, clear of one another.


class Box(NamedTuple):
    """A short line of words, or a mark: its left, its foot and its width, in points."""

    left: float
    foot: float
    width: float

    def meets(self, other: Box) -> bool:
        """Says whether the two run into one another."""
        beside = self.left < other.left + other.width and other.left < self.left + self.width
        return beside and abs(self.foot - other.foot) < SMALL - 1


def first_clear(boxes: Sequence[Box], taken: Sequence[Box]) -> int:
    """Gives the first of the boxes that meets none of those that are taken; where all do, the first."""
    return next((place for place, box in enumerate(boxes) if not any(box.meets(other) for other in taken)), 0)


def tidy(axes: Axes) -> None:
    """Gives axes a faint grid, no frame above and at the right, and letters of a middle size."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=MIDDLE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(MIDDLE)


def plain_numbers(axes: Axes) -> None:
    """Gives a logarithmic upright axis plain numbers: 0.2, 0.5, 1, 2, and more of them where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def whole_numbers() -> Locator:
    """Gives ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def add_footnote(figure: Figure, sentences: Iterable[str]) -> None:
    """Writes what must be known of a picture below it."""
    letters = Letters()
    figure.supxlabel(
        "\n".join(sentences), fontsize=SMALL, color="#444444", x=0.01, ha="left", fontfamily=letters.fonts, parse_math=False
    )


# Letters.


class Letters:
    """The letters that can be drawn here: those of matplotlib's own font, and of fonts for other scripts that are here."""

    def __init__(self) -> None:
        from matplotlib import font_manager

        here = set(font_manager.get_font_names())
        self.fonts = ["DejaVu Sans", *(font for font in SCRIPTS if font in here)]
        paths = [font_manager.findfont(font) for font in self.fonts]
        self._known = {code for path in paths for code in font_manager.get_font(path).get_charmap()}

    def line(self, text: str, most: int) -> str:
        """Gives a text in one line of at most `most` letters, without its middle; ? for a letter that cannot be drawn."""
        whole = "".join(letter if ord(letter) in self._known else "?" for letter in " ".join(text.split()))
        head = (most - 1) // 2
        return whole if len(whole) <= most else f"{whole[:head]}…{whole[head + 1 - most :]}"

    def ticks(self, names: Sequence[str]) -> list[str]:
        """Gives the names as they stand at an axis, a place (#3) where one cannot be drawn; none where there are too many."""
        if len(names) > MOST_TICKS:
            return []
        drawn = [self._known.issuperset(map(ord, name)) for name in names]
        return [self.line(name, LONGEST_TICK) if drawn[place] else f"#{place}" for place, name in enumerate(names)]

    def label(self, axis: Axis, what: str, ticks: Sequence[str]) -> None:
        """Writes what an axis shows, and its ticks; whole numbers where there are none."""
        hidden = any(tick == f"#{place}" for place, tick in enumerate(ticks))
        axis.set_label_text(f"{what} (#: no font here has its letters)" if hidden else what)
        if ticks:
            axis.set_ticks(range(len(ticks)), ticks, fontfamily=self.fonts, parse_math=False)
        else:
            axis.set_major_locator(whole_numbers())
