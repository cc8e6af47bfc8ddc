"""What a data owner asks besides images: do uploads tell a client's labels, do personal models tell their training rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from gpfl.experiments.definitions import display_name
from gpfl.io import files
from gpfl.privacy.label_inference import Leak, label_leaks, spoken_of
from gpfl.privacy.membership import Membership, interval, memberships
from gpfl.privacy.victims import ROUNDS, state_at
from gpfl.report import attack_tables as table
from gpfl.training.result import Result

VERSION = 1
"""Of kept findings; those of another are made again."""


@dataclass(frozen=True)
class Findings:
    """What one method's run tells: by round what of labels, at the round that it keeps what of members."""

    method: str
    round: int  # that the run keeps
    selected_by: str
    accuracy: float  # at that round, on test rows
    clients: int
    labels: Mapping[str, Sequence[Leak]]
    members: Sequence[Membership]


def findings_of(result: Result, rounds: Sequence[str] = ROUNDS) -> Findings:
    """Gives what a run tells, all clients asked."""
    engine, everyone, summary = result.engine, range(len(result.federation)), result.summary
    return Findings(
        method=engine.method.name,
        round=cast(int, summary["selected_round"]),
        selected_by=str(summary["selected_by"]),
        accuracy=cast(float, summary["selected_accuracy"]),
        clients=len(everyone),
        labels={which: label_leaks(engine, state_at(result, which), everyone) for which in rounds},
        members=memberships(engine, state_at(result, "best"), everyone),
    )


def write_leaks(
    runs: Mapping[Path, Callable[[], Result]],
    out: Path,
    *,
    origin: str = "",
    tell: Callable[[Findings], None] = lambda found: None,
) -> list[Path]:
    """Writes table and records of run folders, and gives the files; what `out` holds of a run is not asked again."""
    found = []
    for folder, opened in runs.items():
        path, mark = out / "kept" / f"{folder.parent.name}-{folder.name}.json", mark_of(folder)
        findings = kept(path, mark)
        if findings is None:
            findings = findings_of(opened())
            files.write_text(path, json.dumps({"mark": mark, **asdict(findings)}, allow_nan=False))
        tell(findings)
        found.append(findings)
    files.write_text(out / "table.md", markdown(found, origin))
    files.write_text(
        out / "results.json", json.dumps([asdict(findings) for findings in found], indent=1, allow_nan=False) + "\n"
    )
    return [out / "table.md", out / "results.json"]


def mark_of(folder: Path) -> str:
    """Gives what tells a run from another that was made in its place."""
    return f"{VERSION}-{zlib.crc32((folder / 'summary.json').read_bytes()):08x}"


def kept(path: Path, mark: str) -> Findings | None:
    """Gives what was kept of a run, if it is whole and of the same run."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(held) if held.pop("mark") == mark else None
    except (OSError, ValueError, KeyError, TypeError):  # none is there, or it is damaged
        return None


def from_plain(held: Mapping[str, object]) -> Findings:
    """Gives what plain values say."""
    leaks = cast(Mapping[str, Sequence[Mapping[str, object]]], held["labels"])
    members = cast(Sequence[Mapping[str, object]], held["members"])
    return Findings(
        cast(str, held["method"]),
        cast(int, held["round"]),
        cast(str, held["selected_by"]),
        cast(float, held["accuracy"]),
        cast(int, held["clients"]),
        {which: [Leak(**leak) for leak in of_round] for which, of_round in leaks.items()},  # type: ignore[arg-type]
        [Membership(**member) for member in members],  # type: ignore[arg-type]
    )


def markdown(found: Sequence[Findings], origin: str) -> str:
    """Gives the table of all methods and what its numbers are."""
    rounds = list(found[0].labels)
    when = {"0": "untrained", "best": "trained"}
    headings = ["method", *(f"labels, {when[which]}" for which in rounds), "members, AUC", "loss, training", "loss, test"]
    rows = [
        [
            display_name(findings.method),
            *(distance(findings.labels[which]) for which in rounds),
            span([member.auc for member in findings.members]),
            *(f"{np.mean([getattr(member, name) for member in findings.members]):.3f}" for name in ("train_loss", "test_loss")),
            *(f"{100 * findings.accuracy:.2f}", str(findings.round)),
        ]
        for findings in found
    ]
    text = "\n".join(table.rows_of([*headings, "accuracy, %", "round"], rows, 1))
    return "\n\n".join([text, *notes(found), *filter(None, [origin])]) + "\n"


def notes(found: Sequence[Findings]) -> list[str]:
    """Gives the sentences under the table: what its numbers are, and where they say little."""
    leaks = next(iter(found[0].labels.values()))
    uniform, overall = (float(np.mean([getattr(leak, name) for leak in leaks])) for name in ("uniform", "overall"))
    chosen = ", ".join(sorted({findings.selected_by for findings in found}))
    weak = [
        display_name(findings.method)
        for findings in found
        if any((far := mean_guess(leaks)) is not None and far >= min(uniform, overall) for leaks in findings.labels.values())
    ]
    doubt = f" At or above them ({', '.join(weak)}) this guess is weak, which does not make the upload safe." if weak else ""
    return [
        "Labels: how far the server's guess of a client's label distribution is from the truth, from one local round's upload "
        f"alone; total variation distance, mean over {spoken_of(leaks, found[0].clients)}, 0 is exact. Guesses without an "
        f"upload: all classes alike {uniform:.3f}, like all clients together {overall:.3f}.{doubt} Labels stay the same from "
        "round to round, so the server keeps its best guess of any. A dash: nothing is sent that labels could be read from "
        "directly.",
        "Members: the chance that a client's own model has less loss on a training row than on a test row, mean over clients "
        f"with its 95 % interval; 0.5 is chance. Models of the round selected by '{chosen}'.",
    ]


def mean_guess(leaks: Sequence[Leak]) -> float | None:
    """Gives the mean distance of the guesses, if there are any."""
    guesses = [leak.guess for leak in leaks if leak.guess is not None]
    return float(np.mean(guesses)) if guesses else None


def distance(leaks: Sequence[Leak]) -> str:
    """Gives the mean distance of the guesses in words."""
    far = mean_guess(leaks)
    return "–" if far is None else f"{far:.3f}"


def span(values: Sequence[float]) -> str:
    """Gives a mean with its interval."""
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}" if np.isfinite(half) else f"{mean:.3f}"
