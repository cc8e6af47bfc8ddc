"""What a defence promises: (ε, δ) by a maintained accountant, and under which assumptions.

Two neighbours are compared. As run: one client's data, or one row, exchanged for another, so the bound counts twice; cohorts
are drawn as they are, a fixed number without replacement, and rows are passed over in an order, so batches give no
amplification. As papers mostly state it: one client or row more or less, cohorts and batches drawn by independent coins
(Poisson sampling), which nobody does here. ε is never our own arithmetic: dp-accounting's RDP accountant composes it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import cast

from gpfl.core.local_round import Schedule, count_of
from gpfl.core.method import Phase
from gpfl.defences.config import DefenceConfig
from gpfl.defences.coupling import Tried
from gpfl.errors import GpflError, pluralize

Facts = dict[str, object]
"""What is promised at one level, as summary.json has it."""

EXTRA = "pip install 'gpfl[privacy]'"
SIZES = 8
"""Sizes of clients that are tried for the worst one, from either end: which one it is depends on the noise."""
FINEST = 1000
"""Steps of the noise that is searched for an ε, in a factor of ten."""


@dataclass(frozen=True)
class AccountingInputs:
    """What the promise depends on besides the defence."""

    schedule: Schedule
    phases: tuple[Phase, ...]
    rows: tuple[int, ...]  # training rows of each client
    idle: int = 0  # clients that never join
    tried: Tried | None = None  # where rows are protected

    @property
    def joining(self) -> tuple[int, int]:
        """The fewest and the most clients that join a round."""
        join, clients = self.schedule.client_fraction, len(self.rows)
        shares = join if isinstance(join, tuple) else (join, join)
        low, high = (count_of(share, clients) for share in shares)
        return max(1, low - self.idle), min(high, max(1, clients - self.idle))

    @property
    def most_rounds(self) -> int:
        """The rounds that the busiest client joins."""
        clients = len(self.rows)
        if self.schedule.client_fraction == 1.0:
            return self.schedule.rounds
        joined = Counter(c for number in range(self.schedule.rounds) for c in self.schedule.sample_clients(number, clients))
        return max(joined.values())


# Events, and what the accountant makes of them.


def accountant() -> str:
    """Gives the accountant with its version; "" where it is not installed."""
    try:
        return f"dp-accounting {metadata.version('dp-accounting')}"
    except metadata.PackageNotFoundError:
        return ""


def library() -> ModuleType:
    """Gives the accountant's library, or says how to have it.

    It warns of orders that it leaves out; the bound of those that are left holds, so it need not.
    """
    if not accountant():
        raise GpflError(f"ε needs the package dp-accounting: {EXTRA}")
    import_module("dp_accounting.rdp")
    logging.getLogger("absl").setLevel(logging.ERROR)
    return import_module("dp_accounting")


@cache
def gaussian(noise: float, times: int, delta: float) -> float:
    """Gives ε of so many releases with Gaussian noise, as a multiple of how far neighbours can be apart."""
    lib = library()
    return composed(lib.GaussianDpEvent(noise), times, delta, lib.NeighboringRelation.REPLACE_ONE)


@cache
def without_replacement(noise: float, drawn: int, of: int, times: int, delta: float) -> float:
    """Gives ε of so many releases over cohorts of a fixed size, neighbours having one client exchanged."""
    if drawn >= of:
        return gaussian(noise, times, delta)
    lib = library()
    event = lib.SampledWithoutReplacementDpEvent(of, drawn, lib.GaussianDpEvent(noise))
    return min(composed(event, times, delta, lib.NeighboringRelation.REPLACE_ONE), gaussian(noise, times, delta))


@cache
def poisson(noise: float, rate: float, times: int, delta: float) -> float:
    """Gives ε of so many releases over Poisson samples, neighbours having one client or row more or less."""
    lib = library()
    event = lib.PoissonSampledDpEvent(min(1.0, rate), lib.GaussianDpEvent(noise))
    return composed(event, times, delta, lib.NeighboringRelation.ADD_OR_REMOVE_ONE)


def composed(event: object, times: int, delta: float, relation: object) -> float:
    """Gives ε of an event that happens several times."""
    lib = library()
    ledger = lib.rdp.RdpAccountant(neighboring_relation=relation)
    ledger.compose(lib.SelfComposedDpEvent(event, times))
    return float(ledger.get_epsilon(delta))


# Statements.


def client_level(defence: DefenceConfig, crowd: AccountingInputs) -> Facts:
    """Gives what is promised to a client whose updates are clipped and noisy; ε is missing without the accountant."""
    fewest, most = crowd.joining
    clients, rounds = len(crowd.rows), crowd.schedule.rounds
    facts: Facts = {
        "clip": defence.clip,
        "noise": defence.noise,
        "upload_noise": defence.noise / math.sqrt(fewest),
        "delta": defence.delta,
        "clients": clients,
        "joining": [fewest, most],
        "sampling_rate": most / clients,
        "rounds": rounds,
        "most_rounds": crowd.most_rounds,
    }
    if not accountant():
        return facts
    fixed = not isinstance(crowd.schedule.client_fraction, tuple)
    drawn = (
        count_of(crowd.schedule.client_fraction, clients) if not isinstance(crowd.schedule.client_fraction, tuple) else clients
    )
    half, own = defence.noise / 2, defence.noise / 2 / math.sqrt(fewest)
    return facts | {
        "epsilon": without_replacement(half, drawn, clients, rounds, defence.delta),
        **({"epsilon_if_poisson": poisson(defence.noise, drawn / clients, rounds, defence.delta)} if fixed else {}),
        "epsilon_if_cohorts_are_known": gaussian(half, crowd.most_rounds, defence.delta),
        "epsilon_of_one_upload": gaussian(own, 1, defence.delta),
        "epsilon_of_all_uploads": gaussian(own, crowd.most_rounds, defence.delta),
    }


def example_level(defence: DefenceConfig, crowd: AccountingInputs) -> Facts:
    """Gives what is promised to a row of the worst client, whose gradients are clipped and noisy."""
    tried = crowd.tried or Tried((1,) * len(crowd.phases), False)
    passes = sum(phase.epochs * descents for phase, descents in zip(crowd.phases, tried.descents, strict=True))
    rounds = crowd.most_rounds
    facts: Facts = {
        "clip": defence.example_clip,
        "noise": defence.example_noise,
        "delta": defence.delta,
        "rounds": rounds,
        "gradients_a_round": passes,
        "label_counts_known": tried.uses_counts,
    }
    if not accountant():
        return facts
    sizes = sorted({size for size in crowd.rows if size})
    sampled = [(*sampling(size, crowd, tried), size) for size in {*sizes[:SIZES], *sizes[-SIZES:]}]
    worst = max((poisson(defence.example_noise, rate, steps * rounds, defence.delta), rate, n) for rate, steps, n in sampled)
    return facts | {
        "epsilon": gaussian(defence.example_noise / 2, passes * rounds, defence.delta),
        "epsilon_if_poisson": worst[0],
        "sampling_rate": worst[1],
        "worst_rows": worst[2],
    }


def sampling(size: int, crowd: AccountingInputs, tried: Tried) -> tuple[float, int]:
    """Gives the share of a client's rows in a batch, and its noisy gradients in a round."""
    width, steps = crowd.schedule.batch_size, 0
    for phase, descents in zip(crowd.phases, tried.descents, strict=True):
        whole, left = divmod(size, width * phase.batches)
        kept = whole + (phase.batches == 1 and left > 0 and (not crowd.schedule.drop_last or not whole))
        steps += phase.epochs * descents * kept
    return min(1.0, width / size), max(1, steps)


def statement(defence: DefenceConfig, crowd: AccountingInputs) -> Facts:
    """Gives all that is promised, for summary.json; nothing where there is no noise."""
    out: Facts = {}
    if defence.noise:
        out["client"] = finite(client_level(defence, crowd))
    if defence.example_noise:
        out["example"] = finite(example_level(defence, crowd))
    return {**out, "accountant": accountant() or "not installed"} if out else out


def finite(facts: Facts) -> Facts:
    """Gives facts with None for an endless ε."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()}


def noise_for(epsilon: float, make: Callable[[float], float]) -> float:
    """Gives the least noise, to three digits, for which `make(noise)` gives at most ε."""
    low, high = 1e-3, 1e-3
    while make(high) > epsilon:
        low, high = high, high * 10
        if high > 1e9:
            raise GpflError(f"no noise below 1e9 gives ε = {epsilon:g}: ask for fewer rounds or a larger ε")
    while high / low > 1 + 1 / FINEST:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if make(middle) > epsilon else (low, middle)
    digits = 10.0 ** (2 - math.floor(math.log10(high)))
    return math.ceil(high * digits) / digits


# Words.


def words(stated: Mapping[str, object]) -> list[str]:
    """Gives the sentences about what is promised."""
    text: list[str] = []
    for level, told in (("client", client_words), ("example", example_words)):
        if level in stated:
            facts = cast(Facts, stated[level])
            text += [told(facts)] if "epsilon" in facts else [f"{clipping(facts, level)}. ε is not stated: {EXTRA}"]
    return text


def clipping(facts: Facts, level: str) -> str:
    """Gives the beginning of a sentence: what is clipped, and how much noise there is."""
    what = "updates" if level == "client" else "rows' gradients"
    return (
        f"{level.capitalize()} level: {what} clipped to {facts['clip']:g}, summed noise {facts['noise']:g} × {facts['clip']:g}"
    )


def client_words(facts: Facts) -> str:
    """Gives the sentence about clients."""
    usual = (
        f"; {number(facts['epsilon_if_poisson'])} if cohorts were Poisson samples and a client more or less"
        if "epsilon_if_poisson" in facts
        else ""
    )
    known = (
        f"; {number(facts['epsilon_if_cohorts_are_known'])} to who knows the cohorts"
        if weaker(facts["epsilon_if_cohorts_are_known"], facts["epsilon"])
        else ""
    )
    return (
        f"{clipping(facts, 'client')}: ε = {number(facts['epsilon'])}, δ = {facts['delta']:g} for all that "
        f"{pluralize(cast(int, facts['rounds']), 'round')} release, one client exchanged{known}{usual}. To the server, which "
        f"sees single uploads: ε = {number(facts['epsilon_of_one_upload'])} of one, "
        f"{number(facts['epsilon_of_all_uploads'])} of all that a client sends."
    )


def example_words(facts: Facts) -> str:
    """Gives the sentence about rows."""
    exchanged = "of the same class exchanged (label counts are not hidden)" if facts["label_counts_known"] else "exchanged"
    return (
        f"{clipping(facts, 'example')}: ε = {number(facts['epsilon'])}, δ = {facts['delta']:g} for all that a client sends, "
        f"one row {exchanged}; {number(facts['epsilon_if_poisson'])} for the worst client ({facts['worst_rows']} rows) if "
        "batches were Poisson samples and a row more or less."
    )


def weaker(epsilon: object, than: object) -> bool:
    """Tells whether an ε promises less than another; None is endless."""
    return than is not None and (epsilon is None or cast(float, epsilon) > cast(float, than))


def number(value: object) -> str:
    """Gives an ε in words."""
    if value is None:
        return "endless"
    epsilon = cast(float, value)
    return f"{epsilon:.3g}" if epsilon < 1000 else f"{epsilon:.1e}"
