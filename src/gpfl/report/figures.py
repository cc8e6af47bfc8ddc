"""Figures: curves of run folders, and the classes of a federation's clients."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from gpfl import files
from gpfl.errors import GpflError
from gpfl.federation import Federation
from gpfl.runs import RunFolder
from gpfl.study.trials import Trials

if TYPE_CHECKING:  # matplotlib takes half a second, which commands that draw nothing need not wait
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)
FORMATS = (".png", ".pdf", ".svg")
DISC = "#c44e52"
LETTER = 0.08
"""Inches that a letter takes at an axis."""
MOST_TICKS, LONGEST_TICK, LONGEST = 40, 24, 40
"""Names at an axis, letters of such a name, letters of the data's name."""
WIDE = 0x2E80
"""From here on letters are about twice as wide as ours."""
SCRIPTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans", "Yu Gothic", "Malgun Gothic"),
    *("Apple SD Gothic Neo", "Arial Unicode MS", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Bengali"),
)
"""Fonts of other scripts, taken where they are here."""


def check_picture(path: Path) -> None:
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


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in the format that the path ends in."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower())
    files.write_bytes(path, content.getvalue())


def draw_curves(rows: Sequence[Trials], path: Path, title: str) -> None:
    """Draws test accuracy by round, the mean over trials with the range between them; readable without colour."""
    check_picture(path)
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
    save(figure, path)


def curves(trials: Trials) -> tuple[np.ndarray, np.ndarray]:
    """Gives rounds and accuracies in percent, (trials, rounds), over the rounds that all trials have."""
    runs = [RunFolder(folder).whole_curve() for folder in trials.folders]
    shortest = min(len(lines) for lines in runs)
    rounds = np.array([cast(int, line["round"]) for line in runs[0][:shortest]])
    return rounds, 100 * np.array([[cast(float, line["accuracy"]) for line in lines[:shortest]] for lines in runs])


def draw_bubbles(federation: Federation, path: Path) -> None:
    """Draws a disc for every client and class, its area by the number of rows, training and test together."""
    check_picture(path)
    clients, classes, rows = bubbles(federation)
    letters = Letters()
    names = letters.ticks([shard.name for shard in federation.shards])
    labels = letters.ticks([federation.class_name(label) for label in range(federation.table.classes)])
    sheet = Sheet.around(len(federation), federation.table.classes, widest(names), widest(labels))
    figure = new_figure(sheet.width, sheet.height)
    axes = figure.add_subplot()
    axes.set_facecolor("#eaeaf2")
    axes.grid(color="white", linewidth=1, zorder=0)
    area = sheet.disc**2 / rows.max()
    axes.scatter(clients, classes, s=np.maximum(1, area * rows), color=DISC, zorder=2, linewidth=0)  # a single row is seen
    for shown in round_numbers(int(rows.max())):
        axes.scatter([], [], s=max(1, area * shown), color=DISC, linewidth=0, label=f"{shown:,}")
    figure.legend(loc="outside right upper", title="rows", labelspacing=0.8, frameon=False)
    name = letters.line(federation.table.name, LONGEST)
    title = f"{name}:{' ' if len(name) <= 12 else chr(10)}rows of each class on each client"
    axes.set_title(title, fontfamily=letters.fonts, parse_math=False)
    letters.label(axes.xaxis, "client", names)
    letters.label(axes.yaxis, "class", labels)
    axes.tick_params("x", rotation=90 if sheet.upright else 0)
    axes.set_xlim(-sheet.margins[0], len(federation) - 1 + sheet.margins[0])
    axes.set_ylim(-sheet.margins[1], federation.table.classes - 1 + sheet.margins[1])
    save(figure, path)


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
        from matplotlib.ticker import MaxNLocator

        hidden = any(tick == f"#{place}" for place, tick in enumerate(ticks))
        axis.set_label_text(f"{what} (#: no font here has its letters)" if hidden else what)
        if ticks:
            axis.set_ticks(range(len(ticks)), ticks, fontfamily=self.fonts, parse_math=False)
        else:
            axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


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


def bubbles(federation: Federation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives client, class and number of rows for every pair that has some."""
    rows = [np.concatenate([shard.train, shard.validation, shard.test]) for shard in federation.shards]
    counts = federation.count_labels(rows)
    clients, classes = np.nonzero(counts)
    return clients, classes, counts[clients, classes]
