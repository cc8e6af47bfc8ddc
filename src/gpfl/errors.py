"""The exceptions of the package and the phrases that error messages share."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class GpflError(Exception):
    """A user's mistake, reported in one line: the thing, the value, the limit and the fix."""


class DivergenceError(GpflError):
    """A run whose loss became NaN or infinite.

    Attributes:
        reason: What happened, and in which round.
        remedy: What to change.

    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}"


@contextmanager
def error_prefix(label: str) -> Iterator[None]:
    """Put a label, such as the name of a method, before the messages of errors."""
    try:
        yield
    except GpflError as error:
        raise GpflError(f"{label}: {error}" if label else str(error)) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the tail of an "unknown name" message: the closest known name ignoring case, or all known names."""
    names = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{names[close[0]]}'?"
    return "known: " + ", ".join(sorted(names.values()))


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: "1 class", "2 classes", "1,200 samples"."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"
