"""Tables of searches: what was chosen for each method, every candidate, and what is behind the numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from gpfl.errors import pluralize
from gpfl.experiments.budget import describe_unequal_budgets
from gpfl.experiments.proposals import describe_space, describe_values
from gpfl.experiments.tune import Candidate, SearchResult
from gpfl.training.run_dir import device_name


def score_words(candidate: Candidate) -> str:
    """Gives how a candidate did."""
    if candidate.trouble:
        return f"counts as 0, since training failed: {candidate.trouble}"
    at = ", ".join(str(place) for place in candidate.rounds)
    spread = f" ± {candidate.std:.2%}" if len(candidate.scores) > 1 else ""
    return f"validation {candidate.score:.2%}{spread} (best round {at}), {candidate.seconds:.1f} s"


def note_words(found: Sequence[SearchResult], command: str, commit: str) -> str:
    """Gives the command, commit, seeds, budget and device behind the numbers, in a line."""
    plan = found[0].plan
    validation = int(plan.federation.n_samples("validation").sum())
    return (
        f"Command: {command}; commit {commit}; seeds {', '.join(map(str, plan.search.seeds))}; "
        f"budget {pluralize(plan.search.budget, 'candidate')} a method; search seed {plan.search.seed}; "
        f"{pluralize(plan.config.train.rounds, 'round')}; {device_name(plan.federation.table.y.device)}. "
        f"Chosen on {pluralize(validation, 'validation row')}; test rows had no part in it."
    )


UNKNOWN = "the command that searched it was not noted, or has not ended."
"""Stands for a note that there is none of."""


def markdown(found: Sequence[SearchResult]) -> str:
    """Gives the table of methods, each method's candidates, and the notes on them."""
    plan = found[0].plan
    partition = plan.config.partition.name if plan.config.partition else "as in a manifest"
    lines = [f"# Tuned values: {plan.config.data}, {pluralize(len(plan.federation), 'client')} ({partition})", ""]
    lines += [
        "| method | searched | candidates | chosen | validation, % | with defaults, % |",
        "| --- " * 4 + "| ---: | ---: |",
    ]
    for tuned in found:
        ranges = "; ".join(f"`{key}` {words}" for key, words in describe_space(tuned.plan.space).items()) or "nothing"
        first = percent(tuned.candidates[0])
        lines.append(
            f"| {tuned.plan.method} | {ranges} | {len(tuned.candidates)} | {describe_values(tuned.best.values)} "
            f"| {percent(tuned.best)} | {first} |"
        )
    for tuned in found:
        keys = list(tuned.plan.space)
        lines += ["", f"## {tuned.plan.method}", ""]
        lines += [
            "| " + " | ".join(["candidate", *(f"`{key}`" for key in keys), "validation, %", "best round", "seconds"]) + " |"
        ]
        lines += ["| ---: " * (len(keys) + 4) + "|"]
        for candidate in tuned.candidates:
            mark = "**" if candidate is tuned.best else ""
            rounds = " ".join(map(str, candidate.rounds))
            cells = [f"{mark}{candidate.number}{mark}", *(f"{candidate.values[key]:g}" for key in keys)]
            cells += [
                f"{mark}{percent(candidate)}{mark}",
                "failed" if candidate.trouble else rounds,
                f"{candidate.seconds:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if words := describe_unequal_budgets({tuned.plan.method: tuned.made for tuned in found}):
        lines += ["", f"The methods above had {words}."]
    return "\n".join([*lines, "", *notes(found), ""])


def notes(found: Sequence[SearchResult]) -> list[str]:
    """Gives the notes on methods, each once; with the methods it is on, where there are several."""
    known: dict[str, list[str]] = {}
    for tuned in found:
        known.setdefault(tuned.note or UNKNOWN, []).append(tuned.plan.method)
    return [f"- {', '.join(names)}: {note}" for note, names in known.items()] if len(known) > 1 else list(known)


def percent(candidate: Candidate) -> str:
    """Gives a validation accuracy in percent, mean ± std where there are several seeds."""
    spread = f" ± {100 * candidate.std:.2f}" if len(candidate.scores) > 1 and not candidate.trouble else ""
    return f"{100 * candidate.score:.2f}{spread}"


def table_csv(found: Sequence[SearchResult]) -> str:
    """Gives all candidates of all methods, a line each; accuracies are shares of one."""
    keys = list(dict.fromkeys(key for tuned in found for key in tuned.plan.space))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "candidate", "chosen", *keys, "validation", "std", "rounds", "seconds", "trouble"])
    for tuned in found:
        for candidate in tuned.candidates:
            cells = [candidate.values.get(key, "") for key in keys]
            rounds, chosen = " ".join(map(str, candidate.rounds)), int(candidate is tuned.best)
            tail = [candidate.score, candidate.std, rounds, candidate.seconds, candidate.trouble]
            writer.writerow([tuned.plan.method, candidate.number, chosen, *cells, *tail])
    return text.getvalue()
