"""Decisions from scores of repeated splits: whether joining is better than staying alone, for each client and on average.

*Joining* is a procedure: federate with the method whose models are best on the validation samples of a split. It is carried
out within each split, and only its test score counts, so that the choice among several methods does not make it look better.
"""

from __future__ import annotations

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

CLEAR = 0.95
"""Probability from which an answer is clear."""

ALONE = "local"
GLOBAL_METHODS = ("fedavg", "fedprox")
"""Methods that give all clients the same model."""

ALL = slice(None)
"""All clients: the members of the average."""

MIN_REPEATS = 5
"""Fewest repeats from which anything is concluded."""


@dataclass(frozen=True)
class Gain:
    """The posterior of a mean difference of scores.

    Attributes:
        mean: Expected gain.
        low: Lower end of its 95 % interval.
        high: Upper end.
        better: Probability of a gain larger than the region of practical equivalence.
        same: Probability of a difference inside it.
        worse: Probability of a loss larger than it.
        n_repeats: Number of repeats.

    """

    mean: float
    low: float
    high: float
    better: float
    same: float
    worse: float
    n_repeats: int

    @property
    def answer(self) -> Answer:
        """Whether there is a gain that matters."""
        return "yes" if self.better >= CLEAR else "no" if self.better <= 1 - CLEAR else "unclear"


@dataclass(frozen=True)
class Scores:
    """Scores of all methods in repeated splits, (repeats, clients); higher is better, NaN where the metric is undefined.

    Attributes:
        clients: Names of the clients.
        metric: Metric that the scores are made of; losses have a negative sign.
        validation: Scores on validation samples by method.
        test: Scores on test samples by method.
        constant: Test scores of always predicting the class frequencies of a client's training samples.
        n_samples: Samples of each client.
        n_train: Training samples of each client, mean over repeats.
        n_test: Test samples of each client, mean over repeats.

    """

    clients: Sequence[str]
    metric: str
    validation: Mapping[str, Floats]
    test: Mapping[str, Floats]
    constant: Floats
    n_samples: npt.NDArray[np.int64]
    n_train: Floats
    n_test: Floats

    @property
    def n_repeats(self) -> int:
        """Number of repeats."""
        return len(self.constant)

    @property
    def federated(self) -> list[str]:
        """Methods other than staying alone, those with one model for all clients first."""
        methods = [name for name in self.test if name != ALONE]
        return sorted(methods, key=lambda name: name not in GLOBAL_METHODS)

    @property
    def personalised(self) -> list[str]:
        """Federated methods with a model for each client."""
        return [name for name in self.federated if name not in GLOBAL_METHODS]

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
    def best_score(self) -> float:
        """Best possible score."""
        return 0.0 if METRICS[self.metric].lower_is_better else 1.0

    @property
    def defined(self) -> npt.NDArray[np.bool_]:
        """Where the test metric is defined for all methods, (repeats, clients)."""
        undefined: npt.NDArray[np.bool_] = np.isnan(sum(self.test.values(), start=self.constant))
        return ~undefined

    @property
    def judged(self) -> npt.NDArray[np.bool_]:
        """Clients whose metric is defined in enough repeats: half of them and at least `MIN_REPEATS`."""
        enough: npt.NDArray[np.bool_] = self.defined.sum(0) >= required_repeats(self.n_repeats)
        return enough


@dataclass(frozen=True)
class CurveScores:
    """Test scores of staying alone and of joining with fewer training samples, each (repeats, fractions, clients).

    The last fraction is 1. Joining is by one method, `method`.
    """

    fractions: Floats
    method: str
    alone: Floats
    joined: Floats


@dataclass(frozen=True)
class Verdict:
    """Joining against staying alone, for one client or on average over clients.

    Attributes:
        name: Name of the client; "" for the average.
        n_samples: Number of samples.
        alone: Mean test score of staying alone.
        joined: Mean test score of joining.
        constant: Mean test score of always predicting the class frequencies of training samples.
        gain: Gain of joining; None if the metric is undefined in too many repeats.
        answer: Whether joining is better.
        reason: Why the answer is unclear.
        methods: Methods that are best on validation samples within noise, best first.
        more_samples: How many times the samples would make the answer clear; None if it is clear or unknown.

    """

    name: str
    n_samples: int
    alone: float
    joined: float
    constant: float
    gain: Gain | None
    answer: Answer
    reason: Reason
    methods: tuple[str, ...]
    more_samples: SampleEstimate | None = None


@dataclass(frozen=True)
class Advice:
    """What the scores say.

    Attributes:
        choice: Recommendation for the federation.
        method: Recommended method; "" if nothing is recommended.
        average: Joining against staying alone, mean over the clients that can be judged.
        clients: The same for each client.
        global_gain: Gain of one global model over staying alone.
        personal_gain: Gain of the personalised methods over one global model; None without such methods.
        chosen: In how many repeats each federated method was chosen on validation samples.

    """

    choice: Choice
    method: str
    average: Verdict
    clients: tuple[Verdict, ...]
    global_gain: Gain | None
    personal_gain: Gain | None
    chosen: Mapping[str, int]

    @property
    def is_noisy(self) -> bool:
        """Whether more samples might make an answer clear."""
        return any(verdict.reason == "noise" for verdict in (self.average, *self.clients))

    @property
    def exceptions(self) -> list[Verdict]:
        """Clients for which the answer is clearly another than that for the federation."""
        if self.choice == "unclear":
            return [client for client in self.clients if client.answer != "unclear"]
        opposite = "no" if self.choice != "alone" else "yes"
        return [client for client in self.clients if client.answer == opposite]


def give_advice(scores: Scores, rope: float, curves: CurveScores | None = None, seed: int = 0) -> Advice:
    """Return the advice that scores of repeated splits support."""
    joined, chosen = follow_choice(scores, scores.federated)
    average = judge(scores, joined, ALL, rope, curves, seed)
    one_model, _ = follow_choice(scores, [name for name in scores.federated if name in GLOBAL_METHODS])
    global_gain = average_gain(scores, one_model - scores.test[ALONE], rope)
    personal_gain = None
    if scores.personalised:
        personal, _ = follow_choice(scores, scores.personalised)
        personal_gain = average_gain(scores, personal - one_model, rope)
    choice = choose(average, global_gain, personal_gain)
    return Advice(
        choice=choice,
        method=recommended_method(scores, choice),
        average=average,
        clients=tuple(judge(scores, joined, [client], rope, curves, seed) for client in range(len(scores.clients))),
        global_gain=global_gain,
        personal_gain=personal_gain,
        chosen={name: chosen.count(name) for name in scores.federated},
    )


def choose(average: Verdict, global_gain: Gain | None, personal_gain: Gain | None) -> Choice:
    """Return the recommendation for a federation: the simplest choice that is not clearly worse than another.

    Staying alone costs nothing, so joining must be clearly better. One global model is simpler than many, so it is
    recommended if it is clearly better than staying alone itself and personalised methods are not clearly better than it.
    """
    if average.answer == "unclear":
        return "unclear"
    if average.answer == "no":
        return "alone"
    personal_wins = personal_gain is not None and personal_gain.answer == "yes"
    global_wins = global_gain is not None and global_gain.answer == "yes"
    return "global" if personal_gain is None or (global_wins and not personal_wins) else "personalised"


def recommended_method(scores: Scores, choice: Choice) -> str:
    """Return the method of the chosen kind with the best validation score over all repeats."""
    if choice == "unclear":
        return ""
    if choice == "alone":
        return ALONE
    if choice == "personalised":
        return best_on_validation(scores, scores.personalised)
    return best_on_validation(scores, [name for name in scores.federated if name in GLOBAL_METHODS])


def best_on_validation(scores: Scores, methods: Sequence[str]) -> str:
    """Return the method with the best mean validation score over repeats and clients, the first of equals."""
    means = [_mean(_mean_over(scores.validation[name], axis=1)) for name in methods]
    return methods[_first_best(means)]


def follow_choice(scores: Scores, methods: Sequence[str]) -> tuple[Floats, list[str]]:
    """Return the test scores of the method chosen on validation samples in each repeat, and the choices.

    The method with the best mean over clients is chosen, the first of equals.
    """
    validation = np.stack([_mean_over(scores.validation[name], axis=1) for name in methods])  # (methods, repeats)
    chosen = [methods[_first_best(list(column))] for column in validation.T]
    test = np.stack([scores.test[name][repeat] for repeat, name in enumerate(chosen)])
    return test, chosen


def judge(
    scores: Scores, joined: Floats, members: Members, rope: float, curves: CurveScores | None = None, seed: int = 0
) -> Verdict:
    """Return joining against staying alone, mean over `members`; `joined` has the scores of joining, (repeats, clients)."""
    ratio, min_std = _settings_of(scores, members)
    alone, together, constant = (_mean_of(scores, members, values) for values in (scores.test[ALONE], joined, scores.constant))
    defined = ~np.isnan(alone)
    verdict = Verdict(
        name=scores.clients[members[0]] if isinstance(members, list) else "",
        n_samples=int(scores.n_samples[members].sum()),
        alone=_mean(alone),
        joined=_mean(together),
        constant=_mean(constant),
        gain=None,
        answer="unclear",
        reason="undefined",
        methods=methods_within_noise(
            {name: _mean_over(values[:, members], axis=1) for name, values in scores.validation.items()}, ratio, rope, min_std
        ),
    )
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
            np.stack([_mean_of(scores, members, values) for values in curve.swapaxes(0, 1)], axis=1)[defined]
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
            best=scores.best_score,
            seed=seed,
        )
    return replace(verdict, reason="noise", more_samples=more)


def required_repeats(n_repeats: int) -> float:
    """Return in how many repeats a metric must be defined."""
    return max(MIN_REPEATS, n_repeats / 2)


def average_gain(scores: Scores, differences: Floats, rope: float) -> Gain | None:
    """Return the gain on average over the clients that can be judged; None if there are too few repeats."""
    values = _mean_of(scores, ALL, differences)
    values = values[~np.isnan(values)]
    ratio, min_std = _settings_of(scores, ALL)
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
    names = list(validation)
    defined = np.logical_and.reduce([~np.isnan(validation[name]) for name in names])
    if defined.sum() < MIN_REPEATS:
        return ()
    values = {name: validation[name][defined] for name in names}
    ordered = sorted(names, key=lambda name: -round(float(values[name].mean()), DECIMALS))
    best = values[ordered[0]]
    return tuple(
        name
        for name in ordered
        if name == ordered[0] or measure_gain(best - values[name], test_train_ratio, rope, min_std).answer != "yes"
    )


def mean_of_clients(scores: Scores, values: Floats) -> float:
    """Return the mean over repeats of the average over the clients that can be judged."""
    return _mean(_mean_of(scores, ALL, values))


def _mean_of(scores: Scores, members: Members, values: Floats) -> Floats:
    """Return the mean over the members that can be judged and for which the metric is defined, (repeats,)."""
    return _mean_over(np.where(scores.defined & scores.judged, values, np.nan)[:, members], axis=1)


def _settings_of(scores: Scores, members: Members) -> tuple[float, float]:
    """Return the ratio of test to other samples and the lowest standard deviation of the mean over the judged members."""
    judged = scores.judged[members]
    judged = judged if judged.any() else ~judged
    n_test, n_samples, min_std = (each[members][judged] for each in (scores.n_test, scores.n_samples, scores.min_std))
    return float(n_test.sum() / (n_samples - n_test).sum()), float(np.sqrt((min_std**2).sum()) / judged.sum())


def _mean(values: Floats) -> float:
    """Return the mean of the values that are defined; NaN if there is none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else float("nan")


def _mean_over(values: Floats, axis: int) -> Floats:
    """Return means over an axis without NaN; NaN where there is nothing else."""
    count = (~np.isnan(values)).sum(axis)
    means: Floats = np.divide(np.nansum(values, axis), count, out=np.full(count.shape, np.nan), where=count > 0)
    return means


def _first_best(means: Sequence[float]) -> int:
    """Return the index of the largest number, the first of equals; 0 if none is defined."""
    values = np.array(means).round(DECIMALS)
    return 0 if np.isnan(values).all() else int(np.nanargmax(values))
