"""Tables of an experiment next to the paper's: a page in Markdown, LaTeX, CSV, and tables for the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from gpfl.errors import pluralize
from gpfl.experiments.definitions import MAX_PAPER_STDS, PaperValue, display_name
from gpfl.experiments.grid import TableResults
from gpfl.experiments.stored_runs import Trials
from gpfl.report import feature_tables, tables
from gpfl.report.comparison import ColumnComparison, Entry, compare_columns
from gpfl.report.tables import Bold, Cell, ResultColumn, ResultTable, format_p_value, format_value

FAR_MARK = "†"

PROTOCOLS: Mapping[str, str] = {
    "corrected": "typos of the paper and bugs of the authors' code fixed",
    "paper": "GPFL's formulas as printed",
    "reference": "as in the authors' code",
}

Problems = Mapping[tuple[str, str], str]  # the problem of each cell that has one, by column key and row label


@dataclass(frozen=True)
class Origin:
    """The command and the commit that make a table."""

    command: str
    commit: str

    def describe(self, runs: Iterable[Trials | None], commits: AbstractSet[str], seeds: Iterable[int]) -> str:
        """Return the last line of a table: command, commits of the runs, devices, seeds and versions."""
        summaries = [summary for trials in runs if trials for summary in trials.summaries]
        devices = sorted({str(summary["device"]) for summary in summaries}) or ["none"]
        versions = sorted({f"gpfl {s.get('gpfl', '?')}, torch {s.get('torch', '?')}" for s in summaries})
        made = [f"commit {', '.join(sorted(commits)) or self.commit}", f"device {', '.join(devices)}"]
        return "; ".join([f"Made by `{self.command}`", *made, f"seeds {', '.join(map(str, seeds))}", *versions]) + "."


def save(results: TableResults, folder: Path, origin: Origin) -> list[Path]:
    """Write the tables of an experiment as table.md, table.tex and table.csv and return the paths."""
    texts = {
        "table.md": to_markdown(results, origin),
        "table.tex": to_latex(results, origin),
        "table.csv": tables.format_csv(to_records(results)),
    }
    return tables.write_texts(folder, texts)


def to_markdown(results: TableResults, origin: Origin) -> str:
    """Return the page of an experiment: a table for each column, and notes."""
    columns = compare_columns(results)
    title = results.experiment.title + (f" ({results.plan.table})" if results.plan.table else "")
    column_tables = [column_table(each) for each in columns if any(e.trials for e in each.entries) or len(columns) == 1]
    return tables.render_page(
        title,
        [*column_tables, *feature_tables.tables(results)],
        intro=[results.experiment.caption, " ".join([describe_setting(results), *_describe_numbers(results)])],
        notes=_notes(results, columns),
        origin=_origin_line(results, origin),
    )


def to_latex(results: TableResults, origin: Origin) -> str:
    """Return one LaTeX table of all columns, with rows of ours, p and the paper's for each method."""
    columns = compare_columns(results)
    rows: list[list[Cell]] = []
    for entries in zip(*(column.entries for column in columns), strict=True):
        best = [column.is_best(entry) for column, entry in zip(columns, entries, strict=True)]
        ours = [_join(format_ours(entry), _rank(entry.rank)) for entry in entries]
        papers = [_join(format_published(e.paper), _rank(e.paper_rank), format_difference(e)) for e in entries]
        lines: dict[str, Sequence[Cell]] = {
            display_name(entries[0].label): [Bold(text) if top else text for text, top in zip(ours, best, strict=True)],
            "\u2003by validation": [
                format_value(number, ".2f") if (number := entry.percent("validation_best_accuracy")) else None
                for entry in entries
            ],
            "\u2003p": [format_p_value(entry.p) for entry in entries],
            "\u2003paper": papers,
        }
        rows += [[name, *cells] for k, (name, cells) in enumerate(lines.items()) if k == 0 or any(cells)]
    headers = [ResultColumn(c.column.heading + " (part)" * c.is_part, group=c.column.group) for c in columns]
    caption = (
        f"{results.experiment.caption} First rows: ours"
        + "; paper: the paper's, and ours minus the paper's" * bool(results.experiment.paper)
        + ". In parentheses: ranks."
    )
    caveats = [f"{column.key}: {column.caveat}" for column in columns if column.caveat]
    tests = dict.fromkeys(note for column in columns for note in _test_notes(column))
    numbers = [describe_setting(results), *_describe_numbers(results)]
    notes = [*numbers, *tests, *caveats, *_notes(results, columns), _origin_line(results, origin).replace("`", "")]
    table = ResultTable([ResultColumn("Method"), *headers], rows, caption=caption, notes=notes)
    measured = [table for table in feature_tables.tables(results) if any(row[-1] for row in table.rows)]
    features = [table.to_latex(f"gpfl-{results.name}-features-{k}") for k, table in enumerate(measured, 1)]
    return "\n".join([table.to_latex(f"gpfl-{results.name}"), *features])


def terminal_tables(results: TableResults) -> list[ResultTable]:
    """Return a table for each column of which something was run or failed."""
    return [column_table(c) for c in compare_columns(results) if any(e.trials or e.error for e in c.entries)]


def column_table(column: ColumnComparison) -> ResultTable:
    """Return the table of one column, a row for each method."""
    fair = column.fairness

    def ours(entry: Entry) -> Cell:
        return Bold(format_ours(entry)) if column.is_best(entry) else format_ours(entry)

    columns: Mapping[ResultColumn, Callable[[Entry], Cell]] = {
        ResultColumn("method"): lambda entry: display_name(entry.label),
        ResultColumn("std, % [CoV]" if fair else "ours, %"): ours,
        ResultColumn("paper" if fair else "paper, %", hide=1): lambda entry: format_published(entry.paper),
        ResultColumn("difference", hide=3): format_difference,
        ResultColumn("rank", "g", hide=4): lambda entry: entry.rank,
        ResultColumn("paper's\nrank", "g", hide=4): lambda entry: entry.paper_rank,
        ResultColumn("accuracy, %" if fair else "last ten\nrounds, %", ".2f", hide=7): (
            lambda entry: entry.percent("best_accuracy") if fair else entry.last_rounds
        ),
        ResultColumn("selected on\nvalidation, %", ".2f", hide=2): lambda entry: entry.percent("validation_best_accuracy"),
        ResultColumn("best\nround", ".0f", hide=7): lambda entry: entry.mean("best_round"),
        ResultColumn("rounds", ".0f", hide=7): lambda entry: entry.mean("rounds"),
        ResultColumn("trials", "d", hide=5): lambda entry: entry.n_trials,
        ResultColumn("p", hide=6): lambda entry: format_p_value(entry.p),
        ResultColumn("p over\nseeds", hide=7): lambda entry: format_p_value(entry.seeds_p),
    }
    title = f"{column.key}: {column.column.heading}, {column.column.group}"
    caveat = f"{'Part of the data' if column.is_part else 'Unverified data'}: {column.caveat}" if column.caveat else ""
    same, pairs = column.ordered_pairs()
    order = [f"{same} of {pluralize(pairs, 'pair')} of methods are in the paper's order."] if pairs else []
    note = " ".join([*order, *_test_notes(column)])
    return ResultTable.from_items(columns, column.entries, title, caveat, [note] if note else []).drop_empty()


def to_records(results: TableResults) -> list[dict[str, object]]:
    """Return the table as plain numbers in percent, one record for each column and method; None for missing numbers."""
    features = feature_tables.to_records(results)
    return [
        {
            "experiment": results.experiment.name,
            "column": column.key,
            "method": entry.label,
            "state": entry.status,
            "trials": entry.n_trials,
            "seeds": " ".join(str(summary["seed"]) for summary in entry.trials.summaries) if entry.trials else "",
            "protocol": results.plan.protocol,
            "most_rounds": results.plan.rounds,
            "patience": results.plan.patience,
            "validation": results.plan.validation,
            "settings": ", ".join(results.plan.settings),
            "tuned": results.tuned,
            **_numbers(entry),
            "data": column.caveat,
            "problem": entry.error,
            "commit": ", ".join(results.commits.get((column.key, entry.label), ())),
            **features.get((column.key, entry.label), {}),
        }
        for column in compare_columns(results)
        for entry in column.entries
    ]


def _numbers(entry: Entry) -> dict[str, object]:
    kinds = {
        "accuracy": entry.percent("best_accuracy"),
        "last_ten": entry.last_rounds,
        "validation_selected": entry.percent("validation_best_accuracy"),
        "client_std": entry.percent("std"),
        "client_cov": entry.percent("cov"),
    }
    paper, trials = entry.paper, entry.trials
    return {
        **{name: number.mean if number else None for name, number in kinds.items()},
        **{f"{name}_std_over_trials": number.std if number else None for name, number in kinds.items()},
        "paper": paper.mean if paper else None,
        "paper_least": paper.interval[0] if paper and paper.interval else None,
        "paper_most": paper.interval[1] if paper and paper.interval else None,
        "paper_std_over_trials": paper.std if paper else None,
        "paper_cov": paper.cov if paper else None,
        "difference": entry.difference,
        "difference_cov": entry.cov_difference,
        "far": entry.is_far,
        "rank": entry.rank,
        "paper_rank": entry.paper_rank,
        "p": entry.p,
        "p_over_seeds": entry.seeds_p,
        **{key: entry.mean(key) for key in ("best_round", "rounds", "seconds")},
        "device": ", ".join(sorted({str(summary["device"]) for summary in trials.summaries})) if trials else None,
    }


def format_ours(entry: Entry) -> str:
    """Return our value, or the state of the runs if there is none."""
    cov = entry.percent("cov")
    if entry.fairness and entry.ours and cov:
        return f"{entry.ours.mean:.2f} [{cov.mean:.2f}]"
    return f"{entry.ours:.2f}" if entry.ours else entry.status


def format_published(paper: PaperValue | None) -> str | None:
    """Return the paper's value."""
    if paper is None:
        return None
    if paper.cov is not None:
        return f"{paper.mean:.2f} [{paper.cov:.2f}]"
    if paper.interval:
        return f"≈ {paper.mean:.1f} ({paper.interval[0]:.1f} to {paper.interval[1]:.1f})"
    return f"{paper.mean:.2f}" + (f" ± {paper.std:.2f}" if paper.std is not None else "")


def format_difference(entry: Entry) -> str | None:
    """Return ours minus the paper's, marked if it is far."""
    if entry.difference is None:
        return None
    digits = 1 if entry.paper and entry.paper.interval else 2
    cov = f" [{format_value(entry.cov_difference, '+.2f')}]" if entry.cov_difference is not None else ""
    return format_value(entry.difference, f"+.{digits}f") + cov + FAR_MARK * bool(entry.is_far)


def _rank(rank: float | None) -> str | None:
    return None if rank is None else f"({rank:g})"


def _join(*texts: str | None) -> str | None:
    return " ".join(text for text in texts if text) or None


def describe_rounds(rounds: int, patience: int) -> str:
    """Return the maximum number of rounds and the patience as text."""
    limit = pluralize(rounds, "round")
    return f"at most {limit}, patience {patience}" if patience else f"{limit} without patience"


def describe_setting(results: TableResults) -> str:
    """Return the sentence on protocol, rounds, seeds, validation samples and values that were tuned or set by hand."""
    plan = results.plan
    parts = [
        f"Protocol {plan.protocol} ({PROTOCOLS[plan.protocol]}), {describe_rounds(plan.rounds, plan.patience)}",
        f"{plan.validation:.0%} of each client's training samples for validation" if plan.validation else "",
        f"seeds {', '.join(map(str, plan.seeds))}",
        results.tuned,
        f"set by hand: {', '.join(plan.settings)}" if plan.settings else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def group_problems(problems: Problems) -> list[str]:
    """Return a line for each problem, with all cells that have it."""
    return [f"{_name_cells(cells, str)}: {problem}" for problem, cells in _by_problem(problems).items()]


def _describe_numbers(results: TableResults) -> list[str]:
    paper = ["The paper: 2000 rounds, three trials."] if results.experiment.paper else []
    if results.experiment.measure == "fairness":
        return [
            *paper,
            "Population standard deviation over clients in percent [coefficient of variation in hundredths: that over the "
            "accuracy of all samples], at the best round on test samples, mean over trials. Less is better; ranks go by the "
            "coefficient.",
        ]
    return [
        *paper,
        "Best accuracy of all rounds on all test samples, in percent: mean ± population standard deviation over trials.",
    ]


def _test_notes(column: ColumnComparison) -> list[str]:
    notes = []
    entries, reference = column.entries, display_name(column.reference)
    values = "distances of clients' accuracies from their mean" if column.fairness else "clients' accuracies"
    if any(entry.p is not None for entry in entries):
        notes.append(f"p: signed-rank test of {values} (means over seeds) against {reference}, with Holm's correction.")
    elif any(entry.trials and entry.label not in (column.reference, *column.untested) for entry in entries):
        notes.append("No p over clients: a signed-rank test needs six of them.")
    if any(entry.seeds_p is not None for entry in entries):
        notes.append(
            f"p over seeds: the same test of the accuracies of all samples, a pair for each seed, against {reference}."
        )
    for reason in dict.fromkeys(column.untested.values()):
        labels = [display_name(label) for label, why in column.untested.items() if why == reason]
        notes.append(f"No p for {', '.join(labels)}: {reason}.")
    return notes


def _notes(results: TableResults, columns: Sequence[ColumnComparison]) -> list[str]:
    entries = [entry for column in columns for entry in column.entries]
    notes = []
    if any(entry.is_far for entry in entries):
        notes.append(f"{FAR_MARK} more than {MAX_PAPER_STDS:g} of the paper's standard deviations from its mean.")
    ranked = [column for column in columns if any(entry.rank is not None for entry in column.entries)]
    unranked = dict.fromkeys(display_name(e.label) for column in ranked for e in column.entries if e.trials and e.rank is None)
    if unranked:
        notes.append(f"Ranks are among methods for which the paper has a number: not {', '.join(unranked)}.")
    if fewer := [text for column in columns if (text := _fewer_trials(column, len(results.plan.seeds)))]:
        notes.append(f"Trials: {len(results.plan.seeds)}, except {'; '.join(fewer)}.")
    notes += [f"{column.key}: {column.column.note}." for column in columns if column.column.note]
    run = {(column.key, entry.label) for column in columns for entry in column.entries if entry.trials}
    for problem, cells in _by_problem(results.problems).items():
        partly, failed = ([cell for cell in cells if (cell in run) == has_runs] for has_runs in (True, False))
        notes += [f"{_name_cells(partly)}: {problem}"] if partly else []
        notes += [f"{_name_cells(failed)} failed: {problem}"] if failed else []
    keys = {column.key for column in columns}
    remarks = results.experiment.remarks.items()
    return [*notes, *(f"{key}, {display_name(label)}: {remark}" for (key, label), remark in remarks if key in keys)]


def _fewer_trials(column: ColumnComparison, n_trials: int) -> str:
    labels: dict[int, list[str]] = {}
    for entry in column.entries:
        if entry.trials:
            labels.setdefault(entry.n_trials, []).append(display_name(entry.label))
    fewer = [f"{', '.join(labels[n]) if len(labels) > 1 else 'all'} {n}" for n in labels if n < n_trials]
    return f"{column.key} {', '.join(fewer)}" if fewer else ""


def _by_problem(problems: Problems) -> dict[str, list[tuple[str, str]]]:
    cells: dict[str, list[tuple[str, str]]] = {}
    for cell, problem in problems.items():
        cells.setdefault(problem, []).append(cell)
    return cells


def _name_cells(cells: Sequence[tuple[str, str]], name: Callable[[str], str] = display_name) -> str:
    columns: dict[str, list[str]] = {}
    for key in dict(cells):
        labels = ", ".join(name(label) for other, label in cells if other == key)
        columns.setdefault(labels, []).append(key)
    return "; ".join(f"{', '.join(keys)} {labels}" for labels, keys in columns.items())


def _origin_line(results: TableResults, origin: Origin) -> str:
    commits = {commit for commits in results.commits.values() for commit in commits}
    return origin.describe(results.trials.values(), commits, results.plan.seeds)
