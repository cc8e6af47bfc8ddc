"""Statistics: whether two methods differ by more than chance, and which rank a method has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError
from gpfl.experiments.stored_runs import StoredRun, Trials

Floats = npt.NDArray[np.float64]

ROUNDS = {"best": "best_round", "selected": "selected_round"}
"""Rounds whose models are judged, and the key of the summary that names them."""

FEWEST = 6
"""Pairs that a signed-rank test needs: with 5, not even 5 wins of 5 give a two-sided p below 0.05."""

DIGITS = 9
"""Digits behind the point in which numbers differ; what is smaller comes of adding in another order."""


@dataclass(frozen=True)
class SignedRank:
    """A two-sided Wilcoxon signed-rank test of paired differences; `unit` says what one pair is."""

    unit: str
    n: int
    difference: float  # the mean, in shares of rows
    wins: int  # pairs in which the first is better
    losses: int
    p: float | None  # None where there are fewer than FEWEST pairs

    @property
    def words(self) -> str:
        """The test in a few words, the difference in points of a percent."""
        p = f"p {format_p(self.p)}" if self.p is not None else f"too few for a test ({FEWEST} are needed)"
        count = f"{self.wins} better, {self.losses} worse, {self.n - self.wins - self.losses} equal"
        return f"{100 * self.difference:+.2f} over {self.n} × {self.unit}: {count}; {p}"


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same federations and seeds, tested three ways.

    - `pairs`: one pair a client and seed. Clients of a seed are trained together, and a client has the same rows in every
      seed, so that these pairs are not independent and p is too small: read it as a description of the clients at hand.
    - `clients`: one pair a client, its mean over seeds. It asks whether the difference holds across clients of this
      federation; that all were trained in the same runs stays unaccounted for.
    - `seeds`: one pair a seed, the accuracy over all rows. Seeds are independent trainings, so that this alone speaks of
      the next training; three seeds are too few for it to say anything.
    """

    one: str
    other: str
    at: str
    pairs: SignedRank
    clients: SignedRank
    seeds: SignedRank

    @property
    def words(self) -> str:
        """The comparison in lines."""
        tests = (self.pairs, self.clients, self.seeds)
        return "\n".join([f"{self.one} − {self.other}, in points, at the {self.at} round:", *(f"  {t.words}" for t in tests)])


def compare_paired(one: Trials, other: Trials, *, at: str = "best", spread: bool = False) -> Comparison:
    """Gives the comparison of two methods over the seeds that both have, client by client.

    Accuracies are those of each trial's best round by test rows, as the paper reports them, or of the round that was
    `selected` for its models to be kept. With `spread` it is how far they lie from their mean over clients that is compared,
    and of a trial their standard deviation. Trials on different federations are refused.
    """
    if at not in ROUNDS:
        raise GpflError(f"at is '{at}'; it must be one of {', '.join(ROUNDS)}")
    mine, theirs = ({run.seed: run for run in trials.runs} for trials in (one, other))
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        raise GpflError(f"{one.method} and {other.method} have no seed in common: run both with the same --seeds")
    for seed in seeds:
        check_same_clients(one.method, mine[seed], other.method, theirs[seed])
    seen = client_deviations if spread else client_accuracies
    first, second = ([seen(runs[seed], at) for seed in seeds] for runs in (mine, theirs))
    by_client = np.array([a for a, _ in first]) - np.array([b for b, _ in second])  # (seeds, clients)
    by_trial = np.array([a for _, a in first]) - np.array([b for _, b in second])  # (seeds,)
    return Comparison(
        one.method,
        other.method,
        at,
        pairs=signed_rank("client of a seed", by_client.ravel()),
        clients=signed_rank("client, mean over seeds", by_client.mean(0)),
        seeds=signed_rank("seed", by_trial),
    )


def signed_rank(unit: str, differences: Sequence[float] | Floats) -> SignedRank:
    """Gives the test of differences; those of 0 count as pairs and as ties, and say nothing about p."""
    from scipy import stats  # takes half a second, which commands without a table need not wait

    values = round_values(differences)
    moved = values[values != 0]
    p: float | None = None
    if len(values) >= FEWEST:
        p = float(stats.wilcoxon(moved).pvalue) if len(moved) else 1.0
    return SignedRank(unit, len(values), float(values.mean()), int((values > 0).sum()), int((values < 0).sum()), p)


def round_values(values: npt.ArrayLike) -> Floats:
    """Gives numbers as they are compared: equal shares of rows are equal, however they were added up."""
    numbers: Floats = np.asarray(values, dtype=np.float64)
    return numbers.round(DIGITS)


def holm_correction(chances: Sequence[float | None]) -> list[float | None]:
    """Gives p-values of several tests such that one may be read among the others (Holm's step-down); None stays None."""
    tested = sorted((p, place) for place, p in enumerate(chances) if p is not None)
    adjusted: list[float | None] = [None] * len(chances)
    least = 0.0
    for done, (p, place) in enumerate(tested):
        least = max(least, min(1.0, p * (len(tested) - done)))
        adjusted[place] = least
    return adjusted


@dataclass(frozen=True)
class Ranks:
    """Ranks of rows in every column, 1 for the best, equals sharing the mean of their places; NaN where there is no value."""

    columns: Floats  # (rows, columns)

    @property
    def counted(self) -> npt.NDArray[np.int64]:
        """The number of columns in which each row has a rank."""
        held: npt.NDArray[np.int64] = (~np.isnan(self.columns)).sum(1)
        return held

    @property
    def mean(self) -> Floats:
        """The mean rank of each row over the columns that it has; means over different columns do not compare."""
        total = np.nansum(self.columns, axis=1)
        mean: Floats = np.divide(total, self.counted, out=np.full(len(total), np.nan), where=self.counted > 0)
        return mean


def rank_columns(values: npt.ArrayLike, *, best: str = "highest") -> Ranks:
    """Gives the ranks of values (rows, columns), NaN where something was not run; `best` is "highest" or "lowest"."""
    from scipy import stats

    table = round_values(values)
    if table.ndim != 2 or best not in ("highest", "lowest"):
        raise GpflError(f"ranks are of rows and columns, the highest or the lowest best: shape {table.shape}, best='{best}'")
    ranked = np.full(table.shape, np.nan)
    for column, place in zip(table.T, ranked.T, strict=True):
        there = ~np.isnan(column)
        place[there] = stats.rankdata(-column[there] if best == "highest" else column[there])
    return Ranks(ranked)


# Parts of the above, and what pictures share with them.


def client_accuracies(run: StoredRun, at: str = "best") -> tuple[Floats, float]:
    """Return the accuracy of each client and that over all samples, in the best round or the selected one."""
    clients, accuracy = run.accuracies(run.summary.get(ROUNDS[at]))
    return np.array(clients, dtype=np.float64), accuracy


def client_deviations(run: StoredRun, at: str = "best") -> tuple[Floats, float]:
    """Return how far each client's accuracy is from their mean, and the standard deviation over clients."""
    clients, _ = client_accuracies(run, at)
    return np.abs(clients - clients.mean()), float(clients.std())


def check_same_clients(one: str, first: StoredRun, other: str, second: StoredRun) -> None:
    """Raise if the clients of two runs hold different samples."""
    if first.partition_hash() != second.partition_hash():
        raise GpflError(
            f"{one} and {other} were run on different federations ({first.path}, {second.path}): their clients are not "
            "paired; run both on the same federation"
        )


def format_p(p: float) -> str:
    """Return a p-value as text."""
    return "< 0.0001" if p < 0.0001 else f"= {p:.2g}"
