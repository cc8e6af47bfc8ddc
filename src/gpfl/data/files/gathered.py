"""Own files on their way to a table: what the user said of them, and the rows gathered from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpfl.data.files.layout import Piece
from gpfl.data.files.sheet import MISSING, NO_VALUE, Array, Mask, Places, Sheet, ignoring, missing_in, shortened
from gpfl.errors import GpflError, pluralize


@dataclass(frozen=True)
class Columned:
    """Which columns are not inputs, by the names that the user gave; "" is to be found."""

    label: str = ""
    client: str = ""
    split_column: str = ""
    group: str = ""
    ignore: Sequence[str] = ()
    scale: str = "standard"
    missing: str = "refuse"

    def check(self) -> None:
        """Refuses a column that is named for two things."""
        named: dict[str, str] = {}
        one = {what: [getattr(self, what)] for what in ("label", "client", "split_column", "group")}
        for what, names in {**one, "ignore": self.ignore}.items():
            for name in filter(None, names):
                if named.setdefault(name, what) != what:
                    raise GpflError(
                        f"column '{name}' is named by both {flag(named[name])} and {flag(what)}: take it out of one"
                    )


def flag(name: str) -> str:
    """Return the command-line flag of an option."""
    return f"--{name.replace('_', '-')}"


@dataclass
class Gathered:
    """All rows of all pieces: inputs, labels as they stand in the files, what else is told of them, and words about them."""

    x: Array
    labels: Array
    clients: Array | None
    parts: Array | None
    together: Array | None
    words: str
    label_name: str = "class"
    client_name: str = ""
    recipe: dict[str, object] = field(default_factory=dict)
    """How inputs were made and files were read, to be kept with the manifest."""
    notes: list[str] = field(default_factory=list)
    """Lines that a person should read."""
    places: Places | None = None
    commas: bool = False


def read_as(columned: Columned, label: str, client: str, part: str) -> dict[str, object]:
    """Gives how files were read, with the names that were found."""
    together = {"group": columned.group} if columned.group else {}
    return {
        "label": label,
        "client": client,
        "split_column": part,
        **together,
        "ignore": list(columned.ignore),
        "missing": columned.missing,
    }


def without_missing(
    pieces: Sequence[Piece], sheets: Sequence[Sheet], needed: Sequence[str], inputs: Sequence[str], ignore: Sequence[str]
) -> tuple[list[Piece], list[Sheet], str]:
    """Gives the rows that have a value in each column, and a line about those that have not; `needed` hold no inputs."""
    kept_pieces, kept, counts = [], [], dict.fromkeys([*needed, *inputs], 0)
    for piece, sheet in zip(pieces, sheets, strict=True):
        bad: Mask = np.zeros(len(sheet.numbers), dtype=bool)
        for name in counts:
            absent = missing_in(sheet.columns[name], NO_VALUE if name in needed else MISSING)
            counts[name] += int(absent.sum())
            bad |= absent
        if not bad.all():
            kept_pieces.append(piece)
            kept.append(sheet.rows(~bad))
    before = sum(len(sheet.numbers) for sheet in sheets)
    if not kept:
        worst = max(counts, key=lambda name: counts[name])
        way = "" if worst in needed else f": leave it out with {ignoring(ignore, [worst])}"
        raise GpflError(f"each of {pluralize(before, 'row')} lacks a value, most of them that of column '{worst}'{way}")
    left = before - sum(len(sheet.numbers) for sheet in kept)
    lacking = shortened([f"{name} {count:,}" for name, count in counts.items() if count])
    have = "has" if left == 1 else "have"
    note = (
        f"{left:,} of {pluralize(before, 'row')} {have} missing values and {'is' if left == 1 else 'are'} left out: {lacking}."
    )
    gone = [piece.path.name for piece in pieces if piece not in kept_pieces]
    note += f" Nothing is left of {shortened(gone)}." if gone else ""
    return kept_pieces, kept, note if left else "No row has missing values."


def refuse_missing(name: str, missing: Mask, places: Places) -> None:
    """Refuses missing labels or clients."""
    if missing.any():
        first = f"{'first ' if missing.sum() > 1 else ''}in {places.first(missing)}"
        raise GpflError(
            f"column '{name}' has {pluralize(int(missing.sum()), 'missing value')}, {first}: fill in the file, "
            "or leave such rows out with --missing drop"
        )


def case_remarks(names: Mapping[str, Sequence[str]]) -> list[str]:
    """Gives a line for names of one kind that differ in small and capital letters alone."""
    said = []
    for kind, entries in names.items():
        seen: dict[str, str] = {}
        for entry in entries:
            other = seen.setdefault(entry.casefold(), entry)
            if other != entry:
                said.append(f"The {kind} '{other}' and '{entry}' differ in small and capital letters alone: are they one?")
                break
    return said
