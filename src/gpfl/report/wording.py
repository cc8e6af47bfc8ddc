"""Words of tables beside the paper's: numbers as they are written, and the sentences about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpfl.errors import pluralize
from gpfl.experiments.definitions import MAX_PAPER_STDS, PaperValue, display_name
from gpfl.experiments.results import TableResults
from gpfl.report.comparison import LAST, Block, Entry, MeanStd

MARK = "†"
"""Stands by a difference beyond FAR standard deviations of the paper."""

NONE = "–"

PROTOCOLS: Mapping[str, str] = {
    "corrected": "slips of paper and authors' code mended",
    "paper": "GPFL's formulas as printed",
    "reference": "as in the authors' code",
}
"""What protocols are, in a few words."""


def format_mean_std(number: MeanStd | None, count: int, digits: int = 2) -> str:
    """Gives a mean, and its standard deviation where there are several trials."""
    if number is None:
        return NONE
    return f"{number.mean:.{digits}f}" + (f" ± {number.std:.{digits}f}" if count > 1 else "")


def ours(entry: Entry) -> str:
    """Gives our number of an entry, or why there is none."""
    if entry.state != "run":
        return entry.state
    if entry.fairness and entry.client_std and entry.client_cov:
        return f"{entry.client_std.mean:.2f} [{entry.client_cov.mean:.2f}]"
    return format_mean_std(entry.accuracy, entry.count)


def theirs(paper: PaperValue | None) -> str:
    """Gives the paper's number."""
    if paper is None:
        return NONE
    if paper.cov is not None:
        return f"{paper.mean:.2f} [{paper.cov:.2f}]"
    if paper.between:
        return f"≈ {paper.mean:.1f} ({paper.between[0]:.1f} to {paper.between[1]:.1f})"
    return f"{paper.mean:.2f}" + (f" ± {paper.std:.2f}" if paper.std is not None else "")


def difference(entry: Entry) -> str:
    """Gives ours minus the paper's, marked where it is far."""
    if entry.difference is None:
        return NONE
    cov = f" [{entry.cov_difference:+.2f}]" if entry.cov_difference is not None else ""
    digits = 1 if entry.between else 2
    return f"{entry.difference:+.{digits}f}{cov}{MARK if entry.far else ''}".replace("-", "−")


def place(rank: float | None) -> str:
    """Gives a rank."""
    return NONE if rank is None else f"{rank:g}"


def chance(p: float | None) -> str:
    """Gives a p-value."""
    return NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def describe_rounds(rounds: int, patience: int) -> str:
    """Gives how many rounds runs may have, and what ends them before."""
    most = pluralize(rounds, "round")
    if not patience:
        return f"{most} without patience"
    if patience >= rounds:
        return f"at most {most}, patience {patience}, which ends none before"
    return f"at most {most}, ended after {patience} without a better accuracy"


def protocol(results: TableResults) -> list[str]:
    """Gives the sentences about how the numbers were made."""
    rounds = describe_rounds(results.rounds, results.patience)
    printed = bool(results.experiment.paper)
    said = [
        f"Ours: protocol {results.protocol} ({PROTOCOLS[results.protocol]}), {rounds}; {chosen(results)}."
        + " The paper: 2000 rounds, three trials." * printed
    ]
    if results.experiment.measure == "fairness":
        said.append(
            "Standard deviation over clients (population) in percent [coefficient of variation, that deviation over the "
            "accuracy of all rows, in hundredths], both at the best round on test rows and averaged over trials. Ranks go by "
            "the coefficient; less is better."
        )
    else:
        said.append(
            "Accuracy in percent, all clients' test rows together, in the best round on test "
            f"rows{' as the paper reports it' * printed}: mean ± population standard deviation over trials. That favours every "
            "method a little; the mean of the last ten rounds does not."
        )
    said.append(
        f"{results.validation:.0%} of each client's training rows were kept for validation: the round that is best on them "
        "gives an accuracy that no test row has chosen, and patience goes by them."
        if results.validation
        else "No validation rows were kept (--validation-fraction 0.1 keeps some), so no round was selected by them."
    )
    return said


def brief(results: TableResults) -> str:
    """Gives how the numbers were made in a line for the terminal."""
    kept = f", {results.validation:.0%} of training rows for validation" if results.validation else ""
    return f"Protocol {results.protocol}, {describe_rounds(results.rounds, results.patience)}{kept}; {chosen(results)}."


def chosen(results: TableResults) -> str:
    """Gives the seeds, and the values that were searched or set by hand."""
    seeds = f"seeds {', '.join(map(str, results.seeds))}"
    by_hand = f"set by hand: {', '.join(results.settings)}" if results.settings else ""
    return "; ".join(words for words in (seeds, results.tuned, by_hand) if words)


def fewer_trials(block: Block, asked: int) -> str:
    """Gives the rows of a column that have fewer trials than were asked for, and how many; "" where none has."""
    counts = {display_name(entry.label): entry.count for entry in block.entries if entry.trials}
    fewer = sorted({count for count in counts.values() if count < asked})
    if len({*counts.values()}) == 1:
        return "".join(f"{block.column.key} {count}" for count in fewer)
    rows = [f"{', '.join(label for label in counts if counts[label] == count)} {count}" for count in fewer]
    return f"{block.column.key} {', '.join(rows)}" if rows else ""


def group_problems(problems: Mapping[tuple[str, str], str]) -> list[str]:
    """Gives what is wrong with cells in lines for the terminal: every cause once, behind all cells that have it."""
    lines = []
    for words, cells in by_words(problems).items():
        columns: dict[tuple[str, ...], list[str]] = {}
        for key, rows in by_column(cells).items():
            columns.setdefault(tuple(rows), []).append(key)
        named = "; ".join(f"{', '.join(keys)} {', '.join(rows)}" for rows, keys in columns.items())
        lines.append(f"{named}: {words}")
    return lines


def by_words(problems: Mapping[tuple[str, str], str]) -> dict[str, list[tuple[str, str]]]:
    """Gives the cells of equal words."""
    found: dict[str, list[tuple[str, str]]] = {}
    for cell, words in problems.items():
        found.setdefault(words, []).append(cell)
    return found


def by_column(cells: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Gives the rows of cells by their columns."""
    return {key: [label for other, label in cells if other == key] for key in dict(cells)}


def cells_in_words(cells: Sequence[tuple[str, str]]) -> str:
    """Gives cells as tables name them."""
    return "; ".join(f"{key}, {', '.join(map(display_name, rows))}" for key, rows in by_column(cells).items())


def tested(made: Sequence[Block], *, over_seeds: bool) -> list[str]:
    """Gives sentences about the tests behind p, and why there is none; those over seeds where the table shows them."""
    said = []
    for reference in dict.fromkeys(block.reference for block in made):
        blocks = [block for block in made if block.reference == reference]
        found = [block for block in blocks if any(entry.p is not None for entry in block.entries)]
        what = "how far clients' accuracies lie from their mean" if blocks[0].fairness else "the accuracies"
        if found:
            which = "" if len(found) == len(made) else f" ({', '.join(block.column.key for block in found)})"
            said.append(
                f"p: paired signed-rank test of {what} against {display_name(reference)} over clients (means over seeds), "
                f"corrected for the number of methods by Holm's rule{which}."
            )
        if over_seeds and any(entry.seeds_p is not None for block in blocks for entry in block.entries):
            trials = "their standard deviations" if blocks[0].fairness else "the accuracies of all rows"
            said.append(f"p over seeds: the same test of {trials}, a pair a seed, against {display_name(reference)}.")
    for block in made:
        where = f"{block.column.key}: " * (len(made) > 1)
        testable = any(entry.trials and entry.label not in (block.reference, *block.untested) for entry in block.entries)
        if testable and all(entry.p is None for entry in block.entries):
            said.append(f"{where}no p over clients, as a signed-rank test needs six of them.")
        said += [f"{where}{words}" for words in untested(block)]
    return said


def untested(block: Block) -> list[str]:
    """Gives sentences about the rows of a column that could not be tested."""
    found = []
    for why in dict.fromkeys(block.untested.values()):
        labels = [display_name(label) for label, words in block.untested.items() if words == why]
        found.append(f"No p of {', '.join(labels)}: {why}.")
    return found


def notes(results: TableResults, made: Sequence[Block]) -> list[str]:
    """Gives what must be known of single numbers."""
    said, asked = [], len(results.seeds)
    if any(entry.far for block in made for entry in block.entries):
        said.append(f"{MARK} differs from the paper's mean by more than {MAX_PAPER_STDS:g} of its standard deviations.")
    unranked = dict.fromkeys(
        display_name(e.label) for block in made for e in block.entries if e.trials and e.rank is None and block.ranked
    )
    if unranked:
        said.append(f"Ranks are among methods for which the paper has a number: not {', '.join(unranked)}.")
    if fewer := [words for block in made if (words := fewer_trials(block, asked))]:
        said.append(f"Trials are {asked}, but for {'; '.join(fewer)}.")
    if any(entry.short for block in made for entry in block.entries if not block.fairness):
        said.append(f"Trials of fewer than {LAST} rounds have no mean of the last ten.")
    said += [f"{block.column.key}: {block.column.note}." for block in made if block.column.note]
    stands = {(block.column.key, e.label) for block in made for e in block.entries if e.trials}
    for words, cells in by_words(results.problems).items():
        partly, failed = ([cell for cell in cells if (cell in stands) == there] for there in (True, False))
        said += [f"{cells_in_words(partly)}: {words}"] * bool(partly)
        said += [f"{cells_in_words(failed)} failed: {words}"] * bool(failed)
    remarks = results.experiment.remarks
    shown = {block.column.key for block in made}
    said += [f"{key}, {display_name(label)}: {words}" for (key, label), words in remarks.items() if key in shown]
    return said
