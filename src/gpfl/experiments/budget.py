"""Budgets of searches: what was tried of each method's, and whether all had the same."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gpfl.errors import GpflError, pluralize
from gpfl.training import config as configs

STUDY, CANDIDATES, BEST = "study.toml", "candidates.jsonl", "best.toml"


@dataclass(frozen=True)
class SearchInfo:
    """How a choice was made: what was tried of the budget, and a note on command, commit and device."""

    budget: int
    candidates: int
    searched: bool  # False where the method has nothing to search
    note: str = ""


def read_made(folder: Path) -> SearchInfo:
    """Gives how the choice in a method's folder was made; where only its candidates are known, they count as its budget."""
    study = configs.read_sections(folder / STUDY)
    try:
        count = len((folder / CANDIDATES).read_text(encoding="utf-8").splitlines())
        plain = {"budget": count, "candidates": count, "searched": bool(study["space"])}
        return SearchInfo(**cast(dict[str, Any], study.get("made", plain)))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise GpflError(f"the search in {folder} is damaged ({problem!r}): search it again") from None


def all_made(out: Path) -> dict[str, SearchInfo]:
    """Gives how the choices of a folder of searches were made, by method."""
    places = sorted(path.parent for path in out.glob(f"*/{BEST}") if (path.parent / STUDY).is_file())
    return {place.name: read_made(place) for place in places}


def read_search_info_or_none(folder: Path) -> SearchInfo | None:
    """Gives how the choice in a method's folder was made; None where there is none, or a damaged one."""
    with suppress(GpflError):
        return read_made(folder) if (folder / BEST).is_file() else None
    return None


def short(tried: Mapping[str, SearchInfo]) -> list[str]:
    """Gives the methods that had fewer candidates than another, though their ranges may have more."""
    most = max((made.candidates for made in tried.values()), default=0)
    return [name for name, made in tried.items() if made.searched and made.candidates == made.budget < most]


def describe_unequal_budgets(tried: Mapping[str, SearchInfo]) -> str:
    """Gives methods' budgets and how to make them equal; "" where they are. Methods without anything to search are aside."""
    few = short(tried)
    if not few:
        return ""
    counts = {name: made.candidates for name, made in tried.items() if made.searched}
    most, least = max(counts.values()), min(counts[name] for name in few)
    listed = ", ".join(f"{name} {pluralize(count, 'candidate')}" for name, count in counts.items())
    more = ", ".join(name for name, count in counts.items() if count > least)
    return (
        f"unequal budgets ({listed}): search {', '.join(few)} with --budget {most}, or {more} with --budget {least}, "
        "which runs nothing"
    )
