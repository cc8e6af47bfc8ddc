"""Ours beside the paper's: the numbers of a table, before they are written down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from gpfl.errors import GpflError
from gpfl.experiments import statistics
from gpfl.experiments.definitions import MAX_PAPER_STDS, PaperValue, TableColumn, display_name
from gpfl.experiments.results import TableResults
from gpfl.experiments.trials import Trials

Chance = float | None
"""A p-value; None where there was no test."""

REFERENCE = "gpfl"
"""The row that others are tested against; where it was not run, the best one."""

LAST = 10
"""The rounds that a mean of the last ones is of."""


@dataclass(frozen=True)
class MeanStd:
    """A mean over trials, and its population standard deviation."""

    mean: float
    std: float

    @classmethod
    def of(cls, trials: Trials, key: str) -> MeanStd:
        """Gives a number of the trials' summaries, in percent."""
        return cls(100 * trials.mean(key), 100 * trials.std(key))


@dataclass(frozen=True)
class Entry:
    """One method in one column: ours, all in percent, and what the paper prints."""

    label: str
    trials: Trials | None = None
    paper: PaperValue | None = None
    problem: str = ""
    fairness: bool = False
    rank: float | None = None
    paper_rank: float | None = None
    p: float | None = None  # over clients, among all methods
    seeds_p: float | None = None  # over seeds, of which six are needed

    @property
    def state(self) -> str:
        """Whether it was run."""
        return "run" if self.trials else "failed" if self.problem else "not run"

    @property
    def count(self) -> int:
        """The number of trials."""
        return len(self.trials.summaries) if self.trials else 0

    @property
    def accuracy(self) -> MeanStd | None:
        """The accuracy of the best round on test rows, which is what the paper reports."""
        return MeanStd.of(self.trials, "best_accuracy") if self.trials else None

    @property
    def last_ten(self) -> MeanStd | None:
        """The mean accuracy of the last ten rounds; None where a trial has fewer."""
        return MeanStd.of(self.trials, "last_ten_accuracy") if self.trials and not self.short else None

    @property
    def short(self) -> bool:
        """Tells whether a trial has fewer rounds than the mean of the last ones is of."""
        return self.trials is not None and min(self.trials.values("rounds")) < LAST

    @property
    def validated(self) -> MeanStd | None:
        """The test accuracy of the round that was best on validation rows."""
        kept = self.trials and all("validation_best_accuracy" in summary for summary in self.trials.summaries)
        return MeanStd.of(self.trials, "validation_best_accuracy") if self.trials and kept else None

    @property
    def client_std(self) -> MeanStd | None:
        """The standard deviation over clients at the best round."""
        return MeanStd.of(self.trials, "std") if self.trials else None

    @property
    def client_cov(self) -> MeanStd | None:
        """The coefficient of variation at the best round, in hundredths."""
        return MeanStd.of(self.trials, "cov") if self.trials else None

    @property
    def ours(self) -> MeanStd | None:
        """The number that the paper's table is about: accuracy, or for fairness the deviation over clients."""
        return self.client_std if self.fairness else self.accuracy

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return self.ours.mean - self.paper.mean if self.ours and self.paper else None

    @property
    def cov_difference(self) -> float | None:
        """Our coefficient of variation minus the paper's."""
        ours, theirs = self.client_cov, self.paper.cov if self.paper else None
        return None if ours is None or theirs is None else ours.mean - theirs

    @property
    def far(self) -> bool | None:
        """Tells whether the difference is beyond two of the paper's standard deviations; None where it prints none."""
        std = self.paper.std if self.paper else None
        return None if std is None or self.difference is None else abs(self.difference) > MAX_PAPER_STDS * std + 1e-9

    @property
    def ranked_by(self) -> float:
        """The number that ranks, pairs and the best go by; NaN where there is none."""
        number = self.client_cov if self.fairness else self.accuracy
        return float(statistics.round_values(number.mean)) if number else math.nan

    @property
    def paper_ranked_by(self) -> float:
        """The paper's number that ranks go by; NaN where there is none."""
        number = (self.paper.cov if self.fairness else self.paper.mean) if self.paper else None
        return math.nan if number is None else number

    @property
    def between(self) -> tuple[float, float] | None:
        """The least and the most that the paper's number may be; None where it prints one, or has none."""
        return self.paper.between if self.paper else None

    def told_from(self, other: Entry) -> bool:
        """Tells whether the paper's numbers say which of two is ahead."""
        (low, high), (least, most) = (e.between or (e.paper_ranked_by, e.paper_ranked_by) for e in (self, other))
        return high < least or most < low


@dataclass(frozen=True)
class Block:
    """A column of the table."""

    column: TableColumn
    entries: tuple[Entry, ...]
    caveat: str = ""
    is_partial: bool = False  # the data are fewer rows than were published
    fairness: bool = False
    reference: str = ""  # the row that others were tested against
    untested: Mapping[str, str] = field(default_factory=dict)  # rows that could not be, and why

    @property
    def best(self) -> Entry | None:
        """The best entry that was run, whether or not the paper has it."""
        return foremost(self.entries)

    @property
    def ranked(self) -> bool:
        """Tells whether any entry has a rank."""
        return any(entry.rank is not None for entry in self.entries)

    def leads(self, entry: Entry) -> bool:
        """Tells whether no other entry is better."""
        return self.best is not None and entry.ranked_by == self.best.ranked_by

    @property
    def printed(self) -> bool:
        """Tells whether the paper has a number of it."""
        return any(entry.paper for entry in self.entries)

    @property
    def run(self) -> bool:
        """Tells whether anything of it was run."""
        return any(entry.trials for entry in self.entries)

    @property
    def order(self) -> str:
        """How our order of methods compares with the paper's, in a sentence; "" where there is nothing to compare."""
        known = [entry for entry in self.entries if entry.trials and not math.isnan(entry.paper_ranked_by)]
        pairs = [(a, b) for a, b in combinations(known, 2) if a.told_from(b)]
        if not pairs:
            return ""
        turned = [
            (a, b) if (a.ranked_by > b.ranked_by) != self.fairness else (b, a)
            for a, b in pairs
            if (a.ranked_by - b.ranked_by) * (a.paper_ranked_by - b.paper_ranked_by) <= 0
        ]
        open_ = len(known) * (len(known) - 1) // 2 - len(pairs)
        about = open_ and any(e.between for e in known)
        rest = f" (of {open_} more the paper's numbers do not tell which is ahead)" if about else ""
        first = f"{len(pairs) - len(turned)} of {len(pairs)} pairs of methods stand in the paper's order{rest}"
        if not turned:
            return f"{first}."
        shown = ", ".join(
            f"{display_name(a.label)} {'level with' if a.ranked_by == b.ranked_by else 'before'} {display_name(b.label)}"
            for a, b in turned
        )
        return f"{first}; not so here: {shown}."


def blocks(results: TableResults) -> list[Block]:
    """Gives the columns of a table with all that is computed for them."""
    return [block(results, column) for column in results.columns]


def block(results: TableResults, column: TableColumn) -> Block:
    """Gives a column: its entries with their ranks, and the test of each against the reference."""
    fairness = results.experiment.measure == "fairness"
    entries = [
        Entry(
            row.label,
            results.trials.get((column.key, row.label)),
            results.experiment.paper.get((column.key, row.label)),
            results.problems.get((column.key, row.label), ""),
            fairness,
        )
        for row in results.rows
    ]
    known = {row.label for row in results.experiment.rows}
    printed = any(entry.paper for entry in entries)
    ranking = [entry for entry in entries if entry.label in known and (entry.paper or not printed)]
    compared = [entry for entry in ranking if entry.trials] or ranking  # ranks of both are among the same methods
    ours = ranked([e.ranked_by if e in compared else math.nan for e in entries], fairness)
    theirs = ranked([math.nan if e.between or e not in compared else e.paper_ranked_by for e in entries], fairness)
    entries = [replace(e, rank=a, paper_rank=b) for e, a, b in zip(entries, ours, theirs, strict=True)]
    reference = against(entries)
    chances, untested = tests(entries, reference, fairness)
    nothing = (None, None)
    done = tuple(replace(e, p=p, seeds_p=q) for e in entries for p, q in [chances.get(e.label, nothing)])
    return Block(
        column, done, results.caveats.get(column.key, ""), results.is_partial(column.key), fairness, reference, untested
    )


def ranked(values: Sequence[float], lowest: bool) -> list[float | None]:
    """Gives ranks from 1, the best; equals share the mean of their places, and NaN has none."""
    places = statistics.rank_columns(np.array(values)[:, None], best="lowest" if lowest else "highest").columns[:, 0]
    return [None if math.isnan(place) else float(place) for place in places]


def foremost(entries: Iterable[Entry]) -> Entry | None:
    """Gives the best entry that was run."""
    run = [entry for entry in entries if entry.trials]
    return min(run, key=lambda entry: entry.ranked_by if entry.fairness else -entry.ranked_by) if run else None


def against(entries: Sequence[Entry]) -> str:
    """Gives the row that others are tested against; "" where nothing was run."""
    if any(entry.label == REFERENCE and entry.trials for entry in entries):
        return REFERENCE
    best = foremost(entries)
    return best.label if best else ""


def tests(entries: Iterable[Entry], reference: str, fairness: bool) -> tuple[dict[str, tuple[Chance, Chance]], dict[str, str]]:
    """Gives the p-values of paired tests over clients and over seeds against the reference, for reading side by side (Holm).

    They are of accuracies, for fairness of how far those lie from their mean. Beside them the rows that could not be tested,
    such as for a file that was lost, and why; the table still has their numbers.
    """
    run = {entry.label: entry.trials for entry in entries if entry.trials}
    others = [label for label in run if label != reference]
    over_clients: list[Chance] = []
    over_seeds: list[Chance] = []
    untested: dict[str, str] = {}
    for label in others:
        found: tuple[Chance, Chance] = (None, None)
        try:
            compared = statistics.compare_paired(run[label], run[reference], spread=fairness)
            found = compared.clients.p, compared.seeds.p
        except GpflError as problem:
            untested[label] = str(problem)
        except OSError as problem:
            untested[label] = f"{problem.filename} cannot be read ({problem.strerror})"
        over_clients.append(found[0])
        over_seeds.append(found[1])
    both = zip(statistics.holm_correction(over_clients), statistics.holm_correction(over_seeds), strict=True)
    return dict(zip(others, both, strict=True)), untested
