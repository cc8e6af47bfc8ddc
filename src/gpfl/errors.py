"""The exception a user's mistake raises, the one of a run that diverges, and words that messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LOWER = "lower train.lr"
"""How the way out of a run that diverges begins."""


class GpflError(Exception):
    """A mistake in what the user gave: one line that names the thing, the value, the limit and the way out."""


class DivergenceError(GpflError):
    """The end of a run whose loss is no number any more: in which round and `what` happened, and the way out."""

    def __init__(self, what: str, way: str) -> None:
        super().__init__(what, way)
        self.what, self.way = what, way

    def __str__(self) -> str:
        return f"{self.what}: {self.way}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Gives the tail of an "unknown name" message: the closest known name, in whatever case, or all of them."""
    names = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{names[close[0]]}'?"
    return "known: " + ", ".join(sorted(names.values()))


def counted(number: int, noun: str) -> str:
    """Gives a number with its noun: "1 class", "2 classes", "1,200 rows"."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
