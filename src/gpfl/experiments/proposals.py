"""Proposals: the ranges that methods document, and the values that Optuna would try next in them."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from gpfl.core import options
from gpfl.core.options import SearchRange
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.training.config import ConfigDict, TrainOptions

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Values = dict[str, float | int]
"""Values by section and key: {"method.lam": 0.01}."""

Space = dict[str, SearchRange | tuple[int, ...]]
"""What is searched, by section and key."""

AT_RANDOM = 10
"""Values that are drawn at random before outcomes guide the next: Optuna's own number."""

DRAWS = 200
"""Proposals that are looked at, of which some may have been tried or be refused by the method."""


def search_space(method: str, given: ConfigDict, with_lr: bool) -> Space:
    """Gives what is searched for a method: its options that have a range and no value by hand.

    The learning rate is among them if it is asked for.
    """
    records = {"method": METHODS[method], **({"train": TrainOptions} if with_lr else {})}
    return {
        f"{section}.{key}": described.search
        for section, record in records.items()
        for key, described in options.options_of(record).items()
        if described.search is not None and key not in given.get(section, {})
    }


def count_of(space: Space, budget: int) -> int:
    """Gives the candidates that a budget is good for: fewer where there are not as many values."""
    sizes = [budget if isinstance(kind, SearchRange) else len(kind) for kind in space.values()]
    return min(budget, math.prod(sizes))


def describe_space(space: Space) -> dict[str, str]:
    """Gives the ranges in words, by key."""
    return {key: str(kind) if isinstance(kind, SearchRange) else ", ".join(map(str, kind)) for key, kind in space.items()}


def describe_values(values: Values) -> str:
    """Gives values in words."""
    return ", ".join(f"{key.split('.')[1]} {value:g}" for key, value in values.items()) or "defaults"


def propose(
    space: Space,
    known: Sequence[Values],
    scores: Sequence[float],
    wanted: int,
    state: str,
    refusal: Callable[[Values], str],
) -> list[Values]:
    """Gives as many values as are wanted, all new, or those that are left; a function of all that is given.

    `scores` are those of the first of the `known` values, the higher the better; `state` seeds what is drawn. Values for
    which `refusal` has a reason are passed over.
    """
    if wanted < 1:
        return []
    optuna = import_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=zlib.crc32(state.encode()), n_startup_trials=AT_RANDOM, multivariate=True, constant_liar=True
        )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    kinds = distributions(space)
    for values, score in zip(known, scores, strict=False):
        if within(space, values):
            study.add_trial(optuna.trial.create_trial(params=values, distributions=kinds, value=score))
    fresh: list[Values] = []
    problem = ""
    for _ in range(DRAWS):
        trial = study.ask(kinds)
        values = rounded(trial.params, space)
        reason = refusal(values)
        if reason or values in known or values in fresh:
            problem = reason or problem
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        fresh.append(values)
        if len(fresh) == wanted:
            break
    if problem and not fresh:
        raise GpflError(f"none of {DRAWS} proposals can be run; one of them: {problem}")
    return fresh


def import_optuna() -> ModuleType:
    """Gives Optuna, or says how to install it."""
    try:
        import optuna
    except ImportError:
        raise GpflError(
            "gpfl tune needs Optuna, which is not installed: pip install 'gpfl[tune]' or pip install optuna"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Gives the space in Optuna's words."""
    kinds = import_optuna().distributions
    return {
        key: kinds.FloatDistribution(kind.low, kind.high, log=kind.log)
        if isinstance(kind, SearchRange)
        else kinds.CategoricalDistribution(kind)
        for key, kind in space.items()
    }


def within(space: Space, values: Values) -> bool:
    """Tells whether values lie in the space; defaults need not."""
    return all(values[key] in kind for key, kind in space.items())


def rounded(values: Mapping[str, float | int], space: Space) -> Values:
    """Gives values with three digits, as a person would write them."""
    return {key: float(f"{values[key]:.3g}") if isinstance(kind, SearchRange) else values[key] for key, kind in space.items()}
