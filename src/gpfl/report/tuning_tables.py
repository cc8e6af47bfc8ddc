"""Tables of hyperparameter searches: the chosen values, every candidate and where the numbers come from."""

from __future__ import annotations

from collections.abc import Sequence

from gpfl.errors import pluralize
from gpfl.experiments.budget import describe_unequal_budgets
from gpfl.experiments.proposals import describe_space, describe_values
from gpfl.experiments.tune import Candidate, SearchResult
from gpfl.report.tables import Bold, MeanStd, ResultColumn, ResultTable, Value, format_csv, render_page
from gpfl.training.devices import device_name

UNKNOWN_ORIGIN = "the command of the search was not recorded, or has not ended."


def format_score(candidate: Candidate) -> str:
    """Return the validation accuracy of a candidate, or why it failed."""
    if candidate.trouble:
        return f"counts as 0, since training failed: {candidate.trouble}"
    spread = f" ± {candidate.std:.2%}" if len(candidate.scores) > 1 else ""
    rounds = ", ".join(map(str, candidate.rounds))
    return f"validation {candidate.score:.2%}{spread} (best round {rounds}), {candidate.seconds:.1f} s"


def format_origin(found: Sequence[SearchResult], command: str, commit: str) -> str:
    """Return command, commit, seeds, budget and device of a search in one line."""
    plan = found[0].plan
    samples = int(plan.federation.n_samples("validation").sum())
    return (
        f"Command: {command}; commit {commit}; seeds {', '.join(map(str, plan.search.seeds))}; "
        f"budget {pluralize(plan.search.budget, 'candidate')} a method; search seed {plan.search.seed}; "
        f"{pluralize(plan.config.train.rounds, 'round')}; {device_name(plan.federation.table.y.device)}. "
        f"Chosen on {pluralize(samples, 'validation sample')}; test samples were not used."
    )


def to_markdown(found: Sequence[SearchResult]) -> str:
    """Return a page: the chosen values of all methods, each method's candidates, and notes."""
    plan = found[0].plan
    partition = plan.config.partition.name if plan.config.partition else "as in a manifest"
    headers = ["method", "searched", "candidates", "chosen", "validation, %", "with defaults, %"]
    columns = [ResultColumn(header, ".2f", align="left" if k < 4 else "right") for k, header in enumerate(headers)]
    rows: list[list[Value]] = []
    for tuned in found:
        ranges = "; ".join(f"`{key}` {text}" for key, text in describe_space(tuned.plan.space).items()) or "nothing"
        scores = [_percent(candidate) for candidate in (tuned.best, tuned.candidates[0])]
        rows.append([tuned.plan.method, ranges, str(len(tuned.candidates)), describe_values(tuned.best.values), *scores])
    unequal = describe_unequal_budgets({tuned.plan.method: tuned.made for tuned in found})
    origins: dict[str, list[str]] = {}
    for tuned in found:
        origins.setdefault(tuned.note or UNKNOWN_ORIGIN, []).append(tuned.plan.method)
    return render_page(
        f"Tuned values: {plan.config.data}, {pluralize(len(plan.federation), 'client')} ({partition})",
        [
            ResultTable(columns, rows, notes=[f"The methods above had {unequal}."] * bool(unequal)),
            *map(_candidate_table, found),
        ],
        notes=[f"{', '.join(methods)}: {origin}" if len(origins) > 1 else origin for origin, methods in origins.items()],
    )


def to_csv(found: Sequence[SearchResult]) -> str:
    """Return all candidates of all methods as CSV; accuracies are shares of one."""
    keys = dict.fromkeys(key for tuned in found for key in tuned.plan.space)
    return format_csv(
        [
            {
                "method": tuned.plan.method,
                "candidate": candidate.number,
                "chosen": int(candidate is tuned.best),
                **{key: candidate.values.get(key, "") for key in keys},
                "validation": candidate.score,
                "std": candidate.std,
                "rounds": " ".join(map(str, candidate.rounds)),
                "seconds": candidate.seconds,
                "trouble": candidate.trouble,
            }
            for tuned in found
            for candidate in tuned.candidates
        ]
    )


def _candidate_table(tuned: SearchResult) -> ResultTable:
    keys = list(tuned.plan.space)
    columns = [
        *(ResultColumn("candidate"), *(ResultColumn(f"`{key}`", "g") for key in keys), ResultColumn("validation, %", ".2f")),
        *(ResultColumn("best round"), ResultColumn("seconds", ".1f")),
    ]
    rows: list[list[Value | Bold]] = []
    for candidate in tuned.candidates:
        values = [candidate.values[key] for key in keys]
        rounds = "failed" if candidate.trouble else " ".join(map(str, candidate.rounds))
        row: list[Value] = [str(candidate.number), *values, _percent(candidate), rounds, candidate.seconds]
        rows.append([Bold(cell) if candidate is tuned.best else cell for cell in row])
    return ResultTable(columns, rows, title=tuned.plan.method)


def _percent(candidate: Candidate) -> MeanStd:
    trials = 1 if candidate.trouble else len(candidate.scores)
    return MeanStd(100 * candidate.score, 100 * candidate.std, trials)
