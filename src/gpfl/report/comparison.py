"""Our numbers next to the paper's: differences, ranks and p-values of an experiment."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from gpfl.errors import GpflError
from gpfl.experiments import statistics
from gpfl.experiments.definitions import MAX_PAPER_STDS, PaperValue, TableColumn
from gpfl.experiments.grid import TableResults
from gpfl.experiments.stored_runs import Trials
from gpfl.report.tables import MeanStd

REFERENCE = "gpfl"  # method that the others are tested against; if it was not run, the best one is
LAST_ROUNDS = 10  # rounds in the mean of the last rounds


@dataclass(frozen=True)
class Entry:
    """One method in one column, ours and the paper's, in percent."""

    label: str
    trials: Trials | None = None
    paper: PaperValue | None = None
    error: str = ""
    fairness: bool = False
    rank: float | None = None
    paper_rank: float | None = None
    p: float | None = None  # over clients, corrected for the number of methods
    seeds_p: float | None = None  # over seeds

    @property
    def status(self) -> str:
        """State of the runs as text."""
        return "run" if self.trials else "failed" if self.error else "not run"

    @property
    def n_trials(self) -> int:
        """Number of finished trials."""
        return len(self.trials.summaries) if self.trials else 0

    def mean(self, key: str) -> float | None:
        """Return the mean of a number of the summaries, or None if the method was not run."""
        return self.trials.mean(key) if self.trials else None

    def percent(self, key: str) -> MeanStd | None:
        """Return a number of the summaries in percent; None if a summary lacks it."""
        return MeanStd.from_trials(self.trials, key) if self.trials else None

    @property
    def last_rounds(self) -> MeanStd | None:
        """Mean accuracy of the last rounds; None if a trial is shorter."""
        if self.trials and min(self.trials.values("rounds")) < LAST_ROUNDS:
            return None
        return self.percent("last_ten_accuracy")

    @property
    def ours(self) -> MeanStd | None:
        """Our value of the measure: best accuracy, or for fairness the standard deviation over clients."""
        return self.percent("std" if self.fairness else "best_accuracy")

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return self.ours.mean - self.paper.mean if self.ours and self.paper else None

    @property
    def cov_difference(self) -> float | None:
        """Our coefficient of variation minus the paper's."""
        cov = self.percent("cov")
        return cov.mean - self.paper.cov if cov and self.paper and self.paper.cov is not None else None

    @property
    def is_far(self) -> bool | None:
        """Whether the difference exceeds `MAX_PAPER_STDS` of the paper's standard deviations; None if the paper prints none."""
        if self.difference is None or self.paper is None or self.paper.std is None:
            return None
        return abs(self.difference) > MAX_PAPER_STDS * self.paper.std + 1e-9

    @property
    def score(self) -> float:
        """Score for ranking: accuracy, or the coefficient of variation; NaN if not run."""
        number = self.percent("cov" if self.fairness else "best_accuracy")
        return float(statistics.round_values(number.mean)) if number else math.nan

    @property
    def paper_score(self) -> float:
        """The paper's score for ranking, or NaN."""
        score = (self.paper.cov if self.fairness else self.paper.mean) if self.paper else None
        return math.nan if score is None else score

    @property
    def paper_range(self) -> tuple[float, float]:
        """Smallest and largest value that the paper's score may have."""
        return self.paper.interval if self.paper and self.paper.interval else (self.paper_score, self.paper_score)


@dataclass(frozen=True)
class ColumnComparison:
    """All methods in one column of an experiment."""

    column: TableColumn
    entries: tuple[Entry, ...]
    caveat: str = ""  # about the data
    is_part: bool = False  # fewer samples than were published
    fairness: bool = False
    reference: str = ""  # method that the others are tested against
    untested: Mapping[str, str] = field(default_factory=dict)  # methods without a test, and why

    @property
    def key(self) -> str:
        """Key of the column."""
        return self.column.key

    def is_best(self, entry: Entry) -> bool:
        """Return whether no method that was run is better."""
        best = _best(self.entries)
        return best is not None and entry.score == best.score

    def ordered_pairs(self) -> tuple[int, int]:
        """Return how many pairs of methods have the paper's order, and of how many the paper gives one."""
        known = [entry for entry in self.entries if entry.trials and not math.isnan(entry.paper_score)]
        pairs = [(a, b) for a, b in combinations(known, 2) if _is_ordered(a, b)]
        return sum((a.score - b.score) * (a.paper_score - b.paper_score) > 0 for a, b in pairs), len(pairs)


def compare_columns(results: TableResults) -> list[ColumnComparison]:
    """Return the comparison of every column of an experiment."""
    return [compare_column(results, column) for column in results.columns]


def column_entries(results: TableResults, column: TableColumn) -> list[Entry]:
    """Return the methods of one column, without ranks and tests."""
    papers, fairness = results.experiment.paper, results.experiment.measure == "fairness"
    keys = {row.label: (column.key, row.label) for row in results.rows}
    return [
        Entry(label, results.trials.get(key), papers.get(key), results.problems.get(key, ""), fairness)
        for label, key in keys.items()
    ]


def compare_column(results: TableResults, column: TableColumn) -> ColumnComparison:
    """Return the comparison of one column, with ranks and tests."""
    fairness, entries = results.experiment.measure == "fairness", column_entries(results, column)
    # Both rankings are among the same methods: those of the experiment that the paper has and that were run.
    has_paper = any(entry.paper for entry in entries)
    known = {row.label for row in results.experiment.rows}
    candidates = [entry for entry in entries if entry.label in known and (entry.paper or not has_paper)]
    ranked = [entry for entry in candidates if entry.trials] or candidates
    ours = _ranks([entry.score if entry in ranked else math.nan for entry in entries], fairness)
    exact = [entry in ranked and not (entry.paper and entry.paper.interval) for entry in entries]
    paper = _ranks([entry.paper_score if ok else math.nan for entry, ok in zip(entries, exact, strict=True)], fairness)
    reference = _reference(entries)
    tests, untested = _paired_tests(entries, reference, fairness)
    by_client, by_seed = (
        dict(zip(tests, statistics.holm_correction([getattr(test, pairs).p for test in tests.values()]), strict=True))
        for pairs in ("clients", "seeds")
    )
    compared = [
        replace(entry, rank=rank, paper_rank=paper_rank, p=by_client.get(entry.label), seeds_p=by_seed.get(entry.label))
        for entry, rank, paper_rank in zip(entries, ours, paper, strict=True)
    ]
    caveat, is_part = results.caveats.get(column.key, ""), results.is_partial(column.key)
    return ColumnComparison(column, tuple(compared), caveat, is_part, fairness, reference, untested)


def _ranks(scores: Sequence[float], lowest_is_best: bool) -> list[float | None]:
    ranks = statistics.rank_scores(scores, lowest_is_best=lowest_is_best)
    return [None if math.isnan(rank) else float(rank) for rank in ranks]


def _best(entries: Iterable[Entry]) -> Entry | None:
    run = [entry for entry in entries if entry.trials]
    return min(run, key=lambda entry: entry.score if entry.fairness else -entry.score) if run else None


def _is_ordered(a: Entry, b: Entry) -> bool:
    """Return whether the paper's values, as far as they are known, differ between two methods."""
    (low, high), (other_low, other_high) = a.paper_range, b.paper_range
    return high < other_low or other_high < low


def _reference(entries: Sequence[Entry]) -> str:
    if any(entry.label == REFERENCE and entry.trials for entry in entries):
        return REFERENCE
    best = _best(entries)
    return best.label if best else ""


def _paired_tests(
    entries: Iterable[Entry], reference: str, fairness: bool
) -> tuple[dict[str, statistics.Comparison], dict[str, str]]:
    """Return the test of each method against the reference, and why methods could not be tested.

    The tests are of accuracies, for fairness of how far they lie from their mean.
    """
    run = {entry.label: entry.trials for entry in entries if entry.trials}
    tests: dict[str, statistics.Comparison] = {}
    untested: dict[str, str] = {}
    for label in [label for label in run if label != reference]:
        try:
            tests[label] = statistics.compare_paired(run[label], run[reference], spread=fairness)
        except GpflError as error:
            untested[label] = str(error)
        except OSError as error:
            untested[label] = f"{error.filename} cannot be read ({error.strerror})"
    return tests, untested
