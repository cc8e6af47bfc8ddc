"""Tables on a terminal: one that is too narrow has fewer columns, and no number is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

GAP = 2
"""Blanks between two columns."""


@dataclass(frozen=True)
class Strip:
    """A column of a table on a terminal."""

    heading: str  # of one line or two
    cells: Sequence[str]
    spare: int = 0  # the larger, the sooner it is left out, equals together; 0 stays

    @property
    def name(self) -> str:
        """The heading in one line."""
        return self.heading.replace("\n", " ")

    @property
    def width(self) -> int:
        """The blanks that it takes."""
        return max(map(cell_len, [*self.heading.splitlines(), *self.cells]), default=0)


@dataclass(frozen=True)
class Screen:
    """A table that leaves out columns for which a terminal has no room, and names them below; the first names the rows."""

    title: str
    how: str  # a sentence below the title
    strips: Sequence[Strip]
    strong: Sequence[bool]  # rows in bold
    elsewhere: str  # where to find what is left out, such as "table.md has them"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Gives the lines for a terminal of this width."""
        kept = fitting(self.strips, options.max_width)
        yield Text(self.title, style="table.title")
        yield Text(self.how)
        yield self.table(kept, options.max_width)
        if left := [strip.name for strip in self.strips if strip not in kept]:
            yield Text(f"Left out, as {options.max_width} columns are too few: {', '.join(left)}; {self.elsewhere}.")

    def table(self, kept: Sequence[Strip], width: int) -> RichTable:
        """Gives the table of some columns; where even these are too wide, what they hold is folded."""
        shown = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        fits = needed(kept) <= width
        for place, strip in enumerate(kept):
            shown.add_column(
                Text(strip.heading),
                justify="right" if place else "left",
                vertical="bottom",
                no_wrap=fits,
                overflow="fold",
            )
        for strong, *row in zip(self.strong, *(strip.cells for strip in kept), strict=True):
            shown.add_row(*(Text(str(cell)) for cell in row), style="bold" if strong else None)
        return shown


def fitting(strips: Sequence[Strip], width: int) -> list[Strip]:
    """Gives the columns that a terminal of this width has room for."""
    kept = list(strips)
    while needed(kept) > width and (spare := max(strip.spare for strip in kept)):
        kept = [strip for strip in kept if strip.spare != spare]
    return kept


def needed(strips: Sequence[Strip]) -> int:
    """Gives the width that columns take side by side."""
    return sum(strip.width for strip in strips) + GAP * (len(strips) - 1)
