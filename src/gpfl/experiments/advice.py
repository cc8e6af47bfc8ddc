"""Decisions from scores of repeated splits: whether joining is better than staying alone, for each client and on average.

*Joining* is a procedure: federate with the method whose models are best on the validation samples of a split. It is carried
out within each split, and only its test score counts, so that the choice among several methods does not make it look better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpfl.core.metrics import METRICS
from gpfl.experiments.learning_curve import SampleEstimate, estimate_samples
from gpfl.experiments.statistics import DECIMALS, correlated_t_posterior

Floats = npt.NDArray[np.float64]
Answer = Literal["yes", "no", "unclear"]
Choice = Literal["alone", "global", "personalised", "unclear"]
Reason = Literal["", "noise", "no signal", "undefined"]
Members = slice | list[int]

CLEAR = 0.95  # probability from which an answer is clear
MIN_REPEATS = 5  # fewest repeats from which anything is concluded
ALONE = "local"
GLOBAL_METHODS = ("fedavg", "fedprox")  # methods that give all clients the same model
ALL = slice(None)  # all clients: the members of the average


@dataclass(frozen=True)
class Gain:
    """The posterior of a mean difference of scores."""

    mean: float
    low: float  # ends of the 95 % interval
    high: float
    better: float  # probability of a gain larger than the region of practical equivalence
    same: float  # probability of a difference inside it
    worse: float  # probability of a loss larger than it
    n_repeats: int

    @property
    def answer(self) -> Answer:
        """Whether there is a gain that matters."""
        return "yes" if self.better >= CLEAR else "no" if self.better <= 1 - CLEAR else "unclear"


@dataclass(frozen=True)
class Scores:
    """Scores of all methods in repeated splits, (repeats, clients); higher is better, NaN where the metric is undefined."""

    clients: Sequence[str]
    metric: str  # losses have a negative sign in scores
    validation: Mapping[str, Floats]  # scores on validation samples by method
    test: Mapping[str, Floats]
    constant: Floats  # test scores of always predicting the class frequencies of a client's training samples
    n_samples: npt.NDArray[np.int64]  # of each client
    n_train: Floats  # of each client, mean over repeats
    n_test: Floats

    @property
    def n_repeats(self) -> int:
        """Number of repeats."""
        return len(self.constant)

    @property
    def one_model(self) -> list[str]:
        """Methods with one model for all clients."""
        return [name for name in self.test if name in GLOBAL_METHODS]

    @property
    def personalised(self) -> list[str]:
        """Federated methods with a model for each client."""
        return [name for name in self.test if name not in (ALONE, *GLOBAL_METHODS)]

    @property
    def federated(self) -> list[str]:
        """Methods other than staying alone, those with one model for all clients first."""
        return self.one_model + self.personalised

    @property
    def min_std(self) -> Floats:
        """Lowest credible standard deviation of a client's score between splits.

        If a client's samples are all predicted alike by two models, up to about 3 of n further samples may still be predicted
        differently. So one discordant sample in n + 2 is assumed: with it, no difference in n samples means at most about
        3/n. Losses are continuous and do not need it.
        """
        if METRICS[self.metric].lower_is_better:
            return np.zeros(len(self.clients))
        lowest: Floats = np.sqrt(1 / ((self.n_samples + 2) * self.n_test))
        return lowest

    @property
    def has_enough_repeats(self) -> npt.NDArray[np.bool_]:
        """Whether the metric of each client is defined in half of the repeats and at least `MIN_REPEATS`."""
        enough: npt.NDArray[np.bool_] = self._defined.sum(0) >= required_repeats(self.n_repeats)
        return enough

    @property
    def _defined(self) -> npt.NDArray[np.bool_]:
        undefined: npt.NDArray[np.bool_] = np.isnan(sum(self.test.values(), start=self.constant))
        return ~undefined

    def mean_over(self, members: Members, values: Floats) -> Floats:
        """Return the mean over members with enough repeats for which the metric is defined, (repeats,)."""
        return mean_of_defined(np.where(self._defined & self.has_enough_repeats, values, np.nan)[:, members], axis=1)


@dataclass(frozen=True)
class CurveScores:
    """Test scores of staying alone and of joining with fewer training samples, each (repeats, fractions, clients)."""

    fractions: Floats  # the last is 1
    method: str  # of joining
    alone: Floats
    joined: Floats


@dataclass(frozen=True)
class Verdict:
    """How joining compares with staying alone, for one client or on average over clients."""

    name: str  # "" for the average
    n_samples: int
    alone: float  # mean test score
    joined: float
    constant: float
    gain: Gain | None  # None if the metric is undefined in too many repeats
    answer: Answer  # whether joining is better
    reason: Reason  # why the answer is unclear
    methods: tuple[str, ...]  # those that are best on validation samples within noise, best first
    more_samples: SampleEstimate | None = None  # how many would make the answer clear; None if it is clear or unknown


@dataclass(frozen=True)
class Advice:
    """What the scores say."""

    choice: Choice  # for the federation
    method: str  # recommended method; "" if nothing is recommended
    average: Verdict  # over the clients with enough repeats
    clients: tuple[Verdict, ...]
    global_gain: Gain | None  # of one global model over staying alone
    personal_gain: Gain | None  # of personalised methods over one global model; None without such methods
    chosen: Mapping[str, int]  # repeats in which each federated method was chosen on validation samples

    @property
    def is_noisy(self) -> bool:
        """Whether more samples might make an answer clear."""
        return any(verdict.reason == "noise" for verdict in (self.average, *self.clients))

    @property
    def exceptions(self) -> list[Verdict]:
        """Clients for which the answer is clearly another than that for the federation."""
        expected = {"unclear": "unclear", "alone": "no"}.get(self.choice, "yes")
        return [client for client in self.clients if client.answer not in ("unclear", expected)]


def give_advice(scores: Scores, rope: float, curves: CurveScores | None = None, seed: int = 0) -> Advice:
    """Return the advice that scores of repeated splits support."""
    joined, chosen = follow_choice(scores, scores.federated)
    average = assess_joining(scores, joined, ALL, rope, curves, seed)
    one_model, _ = follow_choice(scores, scores.one_model)
    global_gain = average_gain(scores, one_model - scores.test[ALONE], rope)
    personal_gain = None
    if scores.personalised:
        personal_gain = average_gain(scores, follow_choice(scores, scores.personalised)[0] - one_model, rope)
    choice = choose(average, global_gain, personal_gain)
    candidates = {"alone": [ALONE], "global": scores.one_model, "personalised": scores.personalised}
    return Advice(
        choice=choice,
        method="" if choice == "unclear" else best_on_validation(scores, candidates[choice]),
        average=average,
        clients=tuple(assess_joining(scores, joined, [client], rope, curves, seed) for client in range(len(scores.clients))),
        global_gain=global_gain,
        personal_gain=personal_gain,
        chosen={name: chosen.count(name) for name in scores.federated},
    )


def choose(average: Verdict, global_gain: Gain | None, personal_gain: Gain | None) -> Choice:
    """Return the recommendation for a federation: the simplest choice that is not clearly worse than another.

    Staying alone costs nothing, so joining must be clearly better. One global model is simpler than many, so it is
    recommended if it is clearly better than staying alone itself and personalised methods are not clearly better than it.
    """
    if average.answer != "yes":
        return "alone" if average.answer == "no" else "unclear"
    personal_wins = personal_gain is not None and personal_gain.answer == "yes"
    global_wins = global_gain is not None and global_gain.answer == "yes"
    return "global" if personal_gain is None or (global_wins and not personal_wins) else "personalised"


def best_on_validation(scores: Scores, methods: Sequence[str]) -> str:
    """Return the method with the best mean validation score over repeats and clients, the first of equals."""
    means = [mean_of_defined(mean_of_defined(scores.validation[name], axis=1)) for name in methods]
    return methods[_first_best(means)]


def follow_choice(scores: Scores, methods: Sequence[str]) -> tuple[Floats, list[str]]:
    """Return the test scores of the method chosen on validation samples in each repeat, and the choices.

    The method with the best mean over clients is chosen, the first of equals.
    """
    validation = np.stack([mean_of_defined(scores.validation[name], axis=1) for name in methods])  # (methods, repeats)
    chosen = [methods[_first_best(column)] for column in validation.T]
    return np.stack([scores.test[name][repeat] for repeat, name in enumerate(chosen)]), chosen


def assess_joining(
    scores: Scores, joined: Floats, members: Members, rope: float, curves: CurveScores | None = None, seed: int = 0
) -> Verdict:
    """Compare joining with staying alone, on average over `members`; `joined` has the scores of joining, (repeats, clients)."""
    ratio, min_std = _test_settings(scores, members)
    alone, together, constant = (scores.mean_over(members, values) for values in (scores.test[ALONE], joined, scores.constant))
    on_validation = {name: mean_of_defined(values[:, members], axis=1) for name, values in scores.validation.items()}
    verdict = Verdict(
        name=scores.clients[members[0]] if isinstance(members, list) else "",
        n_samples=int(scores.n_samples[members].sum()),
        alone=float(mean_of_defined(alone)),
        joined=float(mean_of_defined(together)),
        constant=float(mean_of_defined(constant)),
        gain=None,
        answer="unclear",
        reason="undefined",
        methods=methods_within_noise(on_validation, ratio, rope, min_std),
    )
    defined = ~np.isnan(alone)
    if defined.sum() < required_repeats(scores.n_repeats):
        return verdict
    alone, together, constant = alone[defined], together[defined], constant[defined]
    gain = measure_gain(together - alone, ratio, rope, min_std)
    verdict = replace(verdict, gain=gain)
    if not any(measure_gain(arm - constant, ratio, rope, min_std).answer == "yes" for arm in (alone, together)):
        return replace(verdict, reason="no signal")  # differences between models that have learnt nothing mean nothing
    if gain.answer != "unclear":
        return replace(verdict, answer=gain.answer, reason="")
    more = None
    if curves is not None:
        at_alone, at_joined = (
            np.stack([scores.mean_over(members, values) for values in curve.swapaxes(0, 1)], axis=1)[defined]
            for curve in (curves.alone, curves.joined)
        )  # (repeats, fractions)
        more = estimate_samples(
            curves.fractions * scores.n_train[members].sum(),
            at_alone,
            at_joined,
            together - alone,
            rope=rope,
            clear=CLEAR,
            test_train_ratio=ratio,
            min_std=min_std,
            best=0.0 if METRICS[scores.metric].lower_is_better else 1.0,
            seed=seed,
        )
    return replace(verdict, reason="noise", more_samples=more)


def required_repeats(n_repeats: int) -> float:
    """Return in how many repeats a metric must be defined."""
    return max(MIN_REPEATS, n_repeats / 2)


def average_gain(scores: Scores, differences: Floats, rope: float) -> Gain | None:
    """Return the gain on average over the clients with enough repeats; None if there are too few repeats."""
    values = scores.mean_over(ALL, differences)
    values = values[~np.isnan(values)]
    ratio, min_std = _test_settings(scores, ALL)
    return measure_gain(values, ratio, rope, min_std) if len(values) >= MIN_REPEATS else None


def measure_gain(differences: Floats, test_train_ratio: float, rope: float, min_std: float = 0.0) -> Gain:
    """Return the gain of paired differences from repeated splits, by the Bayesian correlated t-test."""
    posterior = correlated_t_posterior(differences, test_train_ratio, min_std=min_std)
    better, above_loss = posterior.probability_above(rope), posterior.probability_above(-rope)
    low, high = posterior.interval()
    return Gain(posterior.mean, low, high, better, above_loss - better, 1 - above_loss, len(differences))


def methods_within_noise(
    validation: Mapping[str, Floats], test_train_ratio: float, rope: float, min_std: float = 0.0
) -> tuple[str, ...]:
    """Return the method with the best mean validation score and those that are not clearly worse, best first.

    Scores are (repeats,), NaN where undefined. Without enough defined scores nothing is ruled out, and nothing is returned.
    """
    defined = ~np.isnan(np.stack(list(validation.values()))).any(0)
    if defined.sum() < MIN_REPEATS:
        return ()
    values = {name: scores[defined] for name, scores in validation.items()}
    best, *others = sorted(values, key=lambda name: -round(float(values[name].mean()), DECIMALS))
    losses = {name: measure_gain(values[best] - values[name], test_train_ratio, rope, min_std) for name in others}
    return (best, *(name for name, loss in losses.items() if loss.answer != "yes"))


def mean_of_defined(values: Floats, axis: int | None = None) -> Floats:
    """Return means without NaN; NaN where there is nothing else."""
    means: Floats = np.ma.filled(np.ma.masked_invalid(values).mean(axis), np.nan)
    return means


def _test_settings(scores: Scores, members: Members) -> tuple[float, float]:
    """Return the ratio of test to other samples and the lowest standard deviation of the mean, over these members."""
    included = scores.has_enough_repeats[members]
    included = included if included.any() else ~included
    n_test, n_samples, min_std = (each[members][included] for each in (scores.n_test, scores.n_samples, scores.min_std))
    return float(n_test.sum() / (n_samples - n_test).sum()), float(np.sqrt((min_std**2).sum()) / included.sum())


def _first_best(means: npt.ArrayLike) -> int:
    """Return the index of the largest number, the first of equals; 0 if none is defined."""
    values = np.asarray(means).round(DECIMALS)
    return 0 if np.isnan(values).all() else int(np.nanargmax(values))
