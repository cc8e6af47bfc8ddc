"""Style, line styles of methods, text and files of all figures. matplotlib is imported lazily."""

import io
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpfl.errors import GpflError
from gpfl.io import files
from gpfl.methods import METHODS
from gpfl.report.tables import shorten

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = (
    *("#d55e00", "#000000", "#7f7f7f", "#56b4e9", "#0072b2", "#009e73"),
    *("#e69f00", "#cc79a7", "#882255", "#44aa99", "#332288", "#999933", "#663300"),
)
"""Colours for colour-blind readers, in the order of METHODS."""

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "p", "h", "d")
DASHES = ((0, ()), (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
FORMATS = (".png", ".pdf", ".svg")
FALLBACK_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans", "Yu Gothic", "Malgun Gothic"),
    *("Apple SD Gothic Neo", "Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Bengali"),
)
"""Fonts for names in other scripts, if they are installed."""

MAX_TICKS, MAX_TICK_LENGTH = 40, 24  # names on an axis, characters of a name

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "lines.markersize": 4.5,
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # names of data and clients may contain $
    "svg.hashsalt": "gpfl",  # equal figures give equal files
    "pdf.fonttype": 42,  # journals accept these fonts
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the style of all figures; decorate functions that draw and save a figure with `@figure_style()`."""
    from matplotlib import rc_context

    with rc_context(cast("Any", {**_STYLE, "font.family": _fonts()})):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def line_style(index: int) -> dict[str, Any]:
    """Return the keyword arguments of `plot` for an index; 0 is GPFL's and has the thickest line.

    Markers distinguish all methods without colour, dashes most of them.
    """
    styles = {"color": COLORS, "linestyle": DASHES, "marker": MARKERS}
    return {name: values[index % len(values)] for name, values in styles.items()} | {"linewidth": 1.4 if index else 2.2}


def method_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a style for each label: methods have the same one in all figures, other labels get the unused ones."""
    numbers = {re.sub("[-+]", "", name): index for index, name in enumerate(METHODS)}
    names = {label: re.sub("[-+]", "", label.lower()) for label in labels}  # Per-FedAvg is perfedavg
    indices = {label: numbers[name] for label, name in names.items() if name in numbers}
    unused = [index for index in range(len(COLORS)) if index not in indices.values()] or [0]
    others = [label for label in labels if label not in indices]
    indices |= {label: unused[k % len(unused)] for k, label in enumerate(others)}
    return {label: line_style(indices[label]) for label in labels}


def annotate(figure: "Figure", title: str = "", footnote: Iterable[str] = (), legend_of: Iterable["Axes"] = ()) -> None:
    """Add a title above the panels, sentences below them, and right of them a legend with an entry for each label."""
    if title:
        figure.suptitle(_wrap(printable(title, 200), figure, 10), fontsize=10, x=0.01, ha="left")
    if sentences := list(footnote):
        figure.supxlabel(_wrap(" ".join(sentences), figure, 7.5), fontsize=7.5, color="#444444", x=0.01, ha="left")
    entries: dict[str, Artist] = {}
    for axes in legend_of:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if entries:
        figure.legend(list(entries.values()), list(entries), loc="outside right upper")


def use_log_scale(axis: "Axis") -> None:
    """Give an axis a logarithmic scale with a few plain numbers at its ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    low, high = axis.get_view_interval()
    decades = LogLocator(numticks=6) if high > 200 * low else LogLocator(subs=(1, 2, 5))
    axis.set_major_locator(decades if high > 10 * low else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def use_integer_ticks(axis: "Axis") -> None:
    """Put ticks at integers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def use_name_ticks(axis: "Axis", names: Sequence[str]) -> None:
    """Put a tick at each name, or at integers if there are too many names. A name that no font can print becomes #3."""
    if len(names) > MAX_TICKS:
        use_integer_ticks(axis)
    else:
        axis.set_ticks(range(len(names)), [printable(name, MAX_TICK_LENGTH) or f"#{k}" for k, name in enumerate(names)])


def printable(text: str, max_length: int) -> str:
    """Return text as one line of at most `max_length` characters without its middle and characters that no font has."""
    line = " ".join("".join(character for character in text if character.isspace() or character in _characters()).split())
    return shorten(line, max_length)


def check_image_path(path: Path) -> None:
    """Raise if a figure cannot be written to the path."""
    if path.suffix.lower() not in FORMATS:
        ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise GpflError(f"the figure '{path}' {ending}; it must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if path.is_dir():
        raise GpflError(f"the figure '{path}' is a folder: name a file")


def save_figure(figure: "Figure", *paths: Path) -> list[Path]:
    """Write a figure to files, in the formats of their endings, and return them. Equal figures give equal files."""
    for path in paths:
        kind, content = path.suffix[1:].lower(), io.BytesIO()
        undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
        figure.savefig(content, format=kind, metadata=undated)
        files.write_bytes(path, content.getvalue())
    return list(paths)


def png_and_pdf(stem: Path) -> list[Path]:
    """Return `stem`.png and `stem`.pdf."""
    return [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "pdf")]


def _wrap(text: str, figure: "Figure", size: float) -> str:
    return textwrap.fill(text, int(figure.get_figwidth() * 122 / size))  # a character is about 0.58 × size points wide


def _fonts() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(font for font in FALLBACK_FONTS if font in installed)]


@cache
def _characters() -> frozenset[str]:
    from matplotlib import font_manager

    paths = [font_manager.findfont(font) for font in _fonts()]
    return frozenset(chr(code) for path in paths for code in font_manager.get_font(path).get_charmap())
