"""Tables of hyperparameter searches: the chosen values, every candidate and where the numbers come from."""

from collections.abc import Sequence

from gpfl.errors import pluralize
from gpfl.experiments.tuned_values import describe_unequal_budgets
from gpfl.experiments.tuning import Candidate, MethodSearch, SearchResult, Values
from gpfl.report.tables import Bold, MeanStd, ResultColumn, ResultTable, Value, format_csv, render_page
from gpfl.training.devices import device_name


def describe_values(values: Values) -> str:
    """Return hyperparameters as text: "lam 0.01, mu 0.1"."""
    return ", ".join(f"{key.split('.')[1]} {value:g}" for key, value in values.items()) or "defaults"


def format_score(candidate: Candidate) -> str:
    """Return the validation accuracy of a candidate, or why it failed."""
    if candidate.failure:
        return f"scores 0, since training diverged: {candidate.failure}"
    std = f" ± {candidate.std:.2%}" if len(candidate.scores) > 1 else ""
    rounds = ", ".join(map(str, candidate.rounds))
    return f"validation {candidate.score:.2%}{std} (best round {rounds}), {candidate.seconds:.1f} s"


def format_origin(search: MethodSearch, command: str, commit: str) -> str:
    """Return command, commit, seeds, budget and device of a search in one line."""
    options = search.options
    samples = int(search.federation.n_samples("validation").sum())
    return (
        f"Command: {command}; commit {commit}; seeds {', '.join(map(str, options.seeds))}; "
        f"budget {pluralize(options.budget, 'candidate')} per method; search seed {options.seed}; "
        f"{pluralize(search.config.train.rounds, 'round')}; {device_name(search.federation.table.y.device)}. "
        f"Chosen on {pluralize(samples, 'validation sample')}; test samples were not used."
    )


def to_markdown(search: MethodSearch, results: Sequence[SearchResult]) -> str:
    """Return a page: the chosen values of all methods, each method's candidates, and notes. `search` is one of the searches."""
    partition = search.config.partition.name if search.config.partition else "as in a manifest"
    headers = ["method", "searched", "candidates", "chosen", "validation, %", "with defaults, %"]
    columns = [ResultColumn(header, ".2f", align="left" if k < 4 else "right") for k, header in enumerate(headers)]
    rows: list[list[Value]] = []
    for result in results:
        ranges = "; ".join(f"`{key}` {text}" for key, text in result.study["space"].items()) or "nothing"
        scores = [_percent(result.best), _percent(result.candidates[0])]
        rows.append([result.method, ranges, str(len(result.candidates)), describe_values(result.best.values), *scores])
    unequal = describe_unequal_budgets({result.method: result.study for result in results})
    origins: dict[str, list[str]] = {}
    for result in results:
        origins.setdefault(str(result.study["result"]["note"]), []).append(result.method)
    return render_page(
        f"Tuned values: {search.config.data}, {pluralize(len(search.federation), 'client')} ({partition})",
        [
            ResultTable(columns, rows, notes=[f"The methods above had {unequal}."] * bool(unequal)),
            *map(_candidate_table, results),
        ],
        notes=[f"{', '.join(methods)}: {origin}" if len(origins) > 1 else origin for origin, methods in origins.items()],
    )


def to_csv(results: Sequence[SearchResult]) -> str:
    """Return all candidates of all methods as CSV; accuracies are fractions of 1."""
    keys = dict.fromkeys(key for result in results for key in result.study["space"])
    return format_csv(
        [
            {
                "method": result.method,
                "candidate": candidate.number,
                "chosen": int(candidate is result.best),
                **{key: candidate.values.get(key, "") for key in keys},
                "validation": candidate.score,
                "std": candidate.std,
                "rounds": " ".join(map(str, candidate.rounds)),
                "seconds": candidate.seconds,
                "failure": candidate.failure,
            }
            for result in results
            for candidate in result.candidates
        ]
    )


def _candidate_table(result: SearchResult) -> ResultTable:
    keys = list(result.study["space"])
    columns = [
        *(ResultColumn("candidate"), *(ResultColumn(f"`{key}`", "g") for key in keys), ResultColumn("validation, %", ".2f")),
        *(ResultColumn("best round"), ResultColumn("seconds", ".1f")),
    ]
    rows: list[list[Value | Bold]] = []
    for candidate in result.candidates:
        values = [candidate.values[key] for key in keys]
        rounds = "diverged" if candidate.failure else " ".join(map(str, candidate.rounds))
        row: list[Value] = [str(candidate.number), *values, _percent(candidate), rounds, candidate.seconds]
        rows.append([Bold(cell) if candidate is result.best else cell for cell in row])
    return ResultTable(columns, rows, title=result.method)


def _percent(candidate: Candidate) -> MeanStd:
    trials = 1 if candidate.failure else len(candidate.scores)
    return MeanStd(100 * candidate.score, 100 * candidate.std, trials)
