"""What a data owner asks besides images: do uploads tell a client's labels, do personal models tell their training rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from gpfl import files
from gpfl.privacy import table
from gpfl.privacy.labels import Leak, label_leaks
from gpfl.privacy.membership import Membership, interval, memberships
from gpfl.privacy.victim import ROUNDS, state_at
from gpfl.result import Result
from gpfl.study.experiments import spelled

FORM = 1
"""The form of a kept file; those of another are made again."""


@dataclass(frozen=True)
class Told:
    """What one method's run tells: by round what of labels, at its best round what of members."""

    method: str
    best_round: int
    accuracy: float  # at the best round
    labels: Mapping[str, Sequence[Leak]]
    members: Sequence[Membership]


def told_by(result: Result, rounds: Sequence[str] = ROUNDS) -> Told:
    """Gives what a run tells, all clients asked."""
    engine, everyone = result.engine, range(len(result.federation))
    labels = {which: label_leaks(engine, state_at(result, which), everyone) for which in rounds}
    members = memberships(engine, state_at(result, "best"), everyone)
    summary = result.summary
    accuracy = cast(float, summary["selected_accuracy"])
    return Told(engine.method.name, cast(int, summary["selected_round"]), accuracy, labels, members)


def all_told(
    results: Mapping[str, Callable[[], Result]],
    out: Path,
    *,
    origin: str = "",
    tell: Callable[[Told], None] = lambda told: None,
) -> list[Path]:
    """Writes table and records of runs, named by their folders, and gives the files; what `out` holds is not asked again."""
    found = []
    for name, opened in results.items():
        path = out / "kept" / f"{name}.json"
        told = read(path)
        if told is None:
            told = told_by(opened())
            files.write_text(path, json.dumps({"form": FORM, **asdict(told)}))
        tell(told)
        found.append(told)
    files.write_text(out / "table.md", markdown(found, origin))
    files.write_text(out / "results.json", json.dumps([asdict(told) for told in found], indent=1) + "\n")
    return [out / "table.md", out / "results.json"]


def read(path: Path) -> Told | None:
    """Gives what was kept, if it was in this form."""
    if not path.is_file():
        return None
    held = json.loads(path.read_text(encoding="utf-8"))
    return from_plain(held) if held.pop("form", 0) == FORM else None


def from_plain(held: Mapping[str, object]) -> Told:
    """Gives what plain values say."""
    leaks = cast(Mapping[str, Sequence[Mapping[str, object]]], held["labels"])
    members = cast(Sequence[Mapping[str, object]], held["members"])
    return Told(
        cast(str, held["method"]),
        cast(int, held["best_round"]),
        cast(float, held["accuracy"]),
        {which: [Leak(**leak) for leak in of_round] for which, of_round in leaks.items()},  # type: ignore[arg-type]
        [Membership(**member) for member in members],  # type: ignore[arg-type]
    )


def markdown(found: Sequence[Told], origin: str) -> str:
    """Gives the table of all methods and what its numbers are."""
    rounds = list(found[0].labels)
    headings = ["method", *(f"labels, round {which}" for which in rounds), "members, AUC", "loss, training", "loss, test"]
    rows = [
        [
            spelled(told.method),
            *(distance(told.labels[which]) for which in rounds),
            span([member.auc for member in told.members]),
            *(f"{np.mean([getattr(member, name) for member in told.members]):.3f}" for name in ("train_loss", "test_loss")),
            *(f"{100 * told.accuracy:.2f}", str(told.best_round)),
        ]
        for told in found
    ]
    leaks = found[0].labels[rounds[0]]
    uniform, overall = (float(np.mean([getattr(leak, name) for leak in leaks])) for name in ("uniform", "overall"))
    notes = [
        f"Labels: how far the server's guess of a client's label distribution is from the truth, from one local round's upload "
        f"alone; total variation distance, mean over {len(leaks)} clients, 0 is exact. Guesses without an upload: all classes "
        f"alike {uniform:.3f}, like all clients together {overall:.3f}. A dash: nothing is sent that labels could be read from "
        "directly.",
        "Members: the chance that a client's own model has less loss on a training row than on a test row, mean over clients "
        "with its 95 % interval; 0.5 is chance. Models of the best round on test rows.",
        origin,
    ]
    return (
        "\n".join(table.rows_of([*headings, "accuracy, %", "best round"], rows, 1))
        + "\n\n"
        + "\n\n".join(filter(None, notes))
        + "\n"
    )


def distance(leaks: Sequence[Leak]) -> str:
    """Gives the mean distance of the guesses."""
    guesses = [leak.guess for leak in leaks if leak.guess is not None]
    return f"{np.mean(guesses):.3f}" if guesses else "–"


def span(values: Sequence[float]) -> str:
    """Gives a mean with its interval."""
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}" if np.isfinite(half) else f"{mean:.3f}"
