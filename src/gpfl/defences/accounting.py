"""The (ε, δ) that a defence guarantees, computed by dp-accounting.

Each ε comes in two versions. As run: one client or example is replaced by another, which moves a clipped sum by twice the
bound; a round samples a fixed number of clients without replacement; batches pass over the examples in order, so they are
not amplified by sampling. As papers mostly state it: one client or example is added or removed, and rounds and batches are
Poisson samples.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import cast

from gpfl.core.local_round import Schedule, count_clients
from gpfl.core.method import Phase
from gpfl.defences.config import DefenceConfig
from gpfl.defences.coupling import CouplingCheck
from gpfl.errors import GpflError, pluralize

Guarantee = dict[str, object]  # ε, δ and their assumptions for clients or for examples, as in summary.json

INSTALL_COMMAND = "pip install 'gpfl[privacy]'"
_SIZES_TRIED = 8
"""Numbers of smallest and of largest clients among which the worst is searched; which it is depends on the noise."""
_STEPS_PER_DECADE = 1000  # resolution of the search for a noise


@dataclass(frozen=True)
class AccountingInputs:
    """Inputs of the accountant besides the defence."""

    schedule: Schedule
    phases: tuple[Phase, ...]
    n_samples: tuple[int, ...]  # training samples of each client
    idle_clients: int = 0  # clients that never take part
    coupling: CouplingCheck | None = None  # if examples are protected
    uploads: int = 0  # of the busiest client, if rounds were repeated; 0: as scheduled

    @property
    def clients_per_round(self) -> tuple[int, int]:
        """The fewest and the most clients that take part in a round."""
        fraction, clients = self.schedule.client_fraction, len(self.n_samples)
        fractions = fraction if isinstance(fraction, tuple) else (fraction, fraction)
        low, high = (count_clients(share, clients) for share in fractions)
        return max(1, low - self.idle_clients), min(high, max(1, clients - self.idle_clients))

    @property
    def most_rounds(self) -> int:
        """Number of uploads of the busiest client."""
        if self.uploads:
            return self.uploads
        if self.schedule.client_fraction == 1.0:
            return self.schedule.rounds
        clients = len(self.n_samples)
        return max(Counter(c for r in range(self.schedule.rounds) for c in self.schedule.sample_clients(r, clients)).values())


# ε of events, from the accountant.


def accountant_version() -> str:
    """Return the name and version of the accountant, or "" if it is not installed."""
    try:
        return f"dp-accounting {metadata.version('dp-accounting')}"
    except metadata.PackageNotFoundError:
        return ""


def load_accountant() -> ModuleType:
    """Return the accountant's module. Raise if it is not installed."""
    if not accountant_version():
        raise GpflError(f"ε needs the package dp-accounting: {INSTALL_COMMAND}")
    import_module("dp_accounting.rdp")
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of Rényi orders that it skips, which only loosens the bound
    return import_module("dp_accounting")


@cache
def gaussian_epsilon(noise: float, releases: int, delta: float) -> float:
    """Return ε of releases with Gaussian noise, a multiple of the sensitivity, if one client or example is replaced."""
    dp = load_accountant()
    return _compose(dp.GaussianDpEvent(noise), releases, delta, dp.NeighboringRelation.REPLACE_ONE)


@cache
def fixed_size_epsilon(noise: float, sampled: int, clients: int, rounds: int, delta: float) -> float:
    """Return ε of rounds that sample a fixed number of clients without replacement, if one client is replaced."""
    if sampled >= clients:
        return gaussian_epsilon(noise, rounds, delta)
    dp = load_accountant()
    event = dp.SampledWithoutReplacementDpEvent(clients, sampled, dp.GaussianDpEvent(noise))
    sampled_epsilon = _compose(event, rounds, delta, dp.NeighboringRelation.REPLACE_ONE)
    return min(sampled_epsilon, gaussian_epsilon(noise, rounds, delta))


@cache
def poisson_epsilon(noise: float, rate: float, releases: int, delta: float) -> float:
    """Return ε of releases over Poisson samples, if one client or example is added or removed."""
    dp = load_accountant()
    event = dp.PoissonSampledDpEvent(min(1.0, rate), dp.GaussianDpEvent(noise))
    return _compose(event, releases, delta, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)


def _compose(event: object, times: int, delta: float, relation: object) -> float:
    dp = load_accountant()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp.SelfComposedDpEvent(event, times))
    return float(accountant.get_epsilon(delta))


# Guarantees.


def privacy_guarantee(defence: DefenceConfig, inputs: AccountingInputs) -> Guarantee:
    """Return the guarantee at each level, for summary.json; empty without noise. None stands for an infinite ε."""
    levels: Guarantee = {}
    if defence.noise:
        levels["client"] = _without_infinity(client_guarantee(defence, inputs))
    if defence.example_noise:
        levels["example"] = _without_infinity(example_guarantee(defence, inputs))
    return {**levels, "accountant": accountant_version() or "not installed"} if levels else levels


def client_guarantee(defence: DefenceConfig, inputs: AccountingInputs) -> Guarantee:
    """Return the guarantee for a client whose updates are clipped and noisy; without ε if the accountant is not installed."""
    fewest, most = inputs.clients_per_round
    clients, rounds, delta = len(inputs.n_samples), inputs.schedule.rounds, defence.delta
    guarantee: Guarantee = {
        "clip": defence.clip,
        "noise": defence.noise,
        "upload_noise": defence.noise / math.sqrt(fewest),
        "delta": delta,
        "clients": clients,
        "joining": [fewest, most],
        "sampling_rate": most / clients,
        "rounds": rounds,
        "most_rounds": inputs.most_rounds,
    }
    if not accountant_version():
        return guarantee
    fraction = inputs.schedule.client_fraction
    sampled = clients if isinstance(fraction, tuple) else count_clients(fraction, clients)
    replaced = defence.noise / 2  # the sum moves by twice the bound
    single = replaced / math.sqrt(fewest)
    guarantee["epsilon"] = fixed_size_epsilon(replaced, sampled, clients, rounds, delta)
    if not isinstance(fraction, tuple):
        guarantee["epsilon_if_poisson"] = poisson_epsilon(defence.noise, sampled / clients, rounds, delta)
    return guarantee | {
        "epsilon_if_cohorts_are_known": gaussian_epsilon(replaced, inputs.most_rounds, delta),
        "epsilon_of_one_upload": gaussian_epsilon(single, 1, delta),
        "epsilon_of_all_uploads": gaussian_epsilon(single, inputs.most_rounds, delta),
    }


def example_guarantee(defence: DefenceConfig, inputs: AccountingInputs) -> Guarantee:
    """Return the guarantee for an example of the worst client, whose gradients are clipped and noisy."""
    coupling = inputs.coupling or CouplingCheck((1,) * len(inputs.phases), False)
    gradients = sum(phase.epochs * per_step for phase, per_step in zip(inputs.phases, coupling.gradients, strict=True))
    rounds, noise, delta = inputs.most_rounds, defence.example_noise, defence.delta
    guarantee: Guarantee = {
        "clip": defence.example_clip,
        "noise": noise,
        "delta": delta,
        "rounds": rounds,
        "gradients_a_round": gradients,
        "label_counts_known": coupling.uses_label_counts,
    }
    if not accountant_version():
        return guarantee
    sizes = sorted({size for size in inputs.n_samples if size})
    sampled = [(*_batch_sampling(size, inputs, coupling), size) for size in {*sizes[:_SIZES_TRIED], *sizes[-_SIZES_TRIED:]}]
    worst = max((poisson_epsilon(noise, rate, steps * rounds, delta), rate, size) for rate, steps, size in sampled)
    return guarantee | {
        "epsilon": gaussian_epsilon(noise / 2, gradients * rounds, delta),
        "epsilon_if_poisson": worst[0],
        "sampling_rate": worst[1],
        "worst_rows": worst[2],
    }


def _batch_sampling(size: int, inputs: AccountingInputs, coupling: CouplingCheck) -> tuple[float, int]:
    """Return the fraction of a client's samples in a batch, and the number of its noisy gradients per round."""
    schedule, total = inputs.schedule, 0
    for phase, per_step in zip(inputs.phases, coupling.gradients, strict=True):
        steps, rest = divmod(size, schedule.batch_size * phase.batches)
        steps += phase.batches == 1 and rest > 0 and (not schedule.drop_last or not steps)
        total += phase.epochs * per_step * steps
    return min(1.0, schedule.batch_size / size), max(1, total)


def _without_infinity(guarantee: Guarantee) -> Guarantee:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in guarantee.items()}


def find_noise(epsilon: float, epsilon_of: Callable[[float], float]) -> float:
    """Return the smallest noise, to three digits, for which `epsilon_of(noise)` is at most ε."""
    low, high = 1e-3, 1e-3
    while epsilon_of(high) > epsilon:
        low, high = high, high * 10
        if high > 1e9:
            raise GpflError(f"no noise below 1e9 gives ε = {epsilon:g}: use fewer rounds or a larger ε")
    while high / low > 1 + 1 / _STEPS_PER_DECADE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon_of(middle) > epsilon else (low, middle)
    scale = 10.0 ** (2 - math.floor(math.log10(high)))
    return math.ceil(high * scale) / scale


# Descriptions.


def describe_guarantee(guarantee: Mapping[str, object]) -> list[str]:
    """Return the sentences about each level of `privacy_guarantee`."""
    descriptions = [f"Noise follows from {guarantee['noise_source']}."] if "noise_source" in guarantee else []
    for level, vectors, describe in (
        ("client", "updates", _describe_client_epsilons),
        ("example", "per-example gradients", _describe_example_epsilons),
    ):
        if level in guarantee:
            values = cast(Guarantee, guarantee[level])
            epsilons = describe(values) if "epsilon" in values else f"ε is not computed: {INSTALL_COMMAND}"
            descriptions.append(
                f"{level.capitalize()} level: {vectors} clipped to L2 norm {values['clip']:g}, noise multiplier "
                f"{values['noise']:g}. {epsilons}"
            )
    return descriptions


def _describe_client_epsilons(values: Guarantee) -> str:
    epsilon, cohorts_known = values["epsilon"], values["epsilon_if_cohorts_are_known"]
    rounds = pluralize(cast(int, values["rounds"]), "round")
    others = []
    if _as_number(cohorts_known) > _as_number(epsilon):
        others.append(f"{format_epsilon(cohorts_known)} to an observer who knows which clients were sampled")
    if "epsilon_if_poisson" in values:
        others.append(f"{format_epsilon(values['epsilon_if_poisson'])} under Poisson sampling (add or remove one client)")
    one, every = (format_epsilon(values[f"epsilon_of_{uploads}"]) for uploads in ("one_upload", "all_uploads"))
    return (
        f"After {rounds} at δ = {values['delta']:g}: "
        + "; ".join([f"ε = {format_epsilon(epsilon)} (replace one client)", *others])
        + f". Against a server that sees individual uploads: ε = {one} for one upload, {every} for all uploads of a client."
    )


def _describe_example_epsilons(values: Guarantee) -> str:
    same_class = " by another of its class, since label counts are not protected" if values["label_counts_known"] else ""
    return (
        f"Over all uploads of a client at δ = {values['delta']:g}: ε = {format_epsilon(values['epsilon'])} (replace one "
        f"example{same_class}); {format_epsilon(values['epsilon_if_poisson'])} under Poisson sampling (add or remove one "
        f"example) for the worst client, which has {pluralize(cast(int, values['worst_rows']), 'sample')}."
    )


def _as_number(epsilon: object) -> float:
    return math.inf if epsilon is None else cast(float, epsilon)


def format_epsilon(value: object) -> str:
    """Return an ε with three digits; None is infinite."""
    epsilon = _as_number(value)
    if math.isinf(epsilon):
        return "∞"
    return f"{epsilon:.3g}" if epsilon < 1000 else f"{epsilon:.1e}"
