"""The runs of the defence study: methods without a defence and under defences of increasing strength, as cells of a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from gpfl.defences import Defended
from gpfl.defences.accounting import client_guarantee, example_guarantee, find_noise
from gpfl.defences.coupling import check_coupling
from gpfl.experiments.attack_study import AttackStudy, make_cell
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell
from gpfl.methods.gpfl import GPFL
from gpfl.training.defences import accounting_inputs, probe_samples


@dataclass(frozen=True)
class DefenceFamily:
    """Defences that differ in the value of one option."""

    option: str
    description: str
    level: str = ""  # of the guarantee, if there is one

    def key(self, value: float) -> str:
        """Return the key of the runs with a value."""
        return f"{self.option.replace('_', '-')}-{value:g}"


FAMILIES = (
    DefenceFamily("noise", "clip and noise, client level", "client"),
    DefenceFamily("example_noise", "clip and noise, example level", "example"),
    DefenceFamily("top_k", "largest entries"),
    DefenceFamily("bits", "few bits"),
)


@dataclass(frozen=True)
class PrivacyBounds:
    """The options of defences that stay the same in a study."""

    clip: float
    example_clip: float
    delta: float

    def defence(self, family: DefenceFamily, value: float) -> dict[str, object]:
        """Return the options of a family's defence."""
        if family.option == "noise":
            return {"clip": self.clip, "noise": value, "delta": self.delta}
        if family.option == "example_noise":
            return {"example_clip": self.example_clip, "example_noise": value, "delta": self.delta}
        return {family.option: int(value) if family.option == "bits" else value}


@dataclass(frozen=True)
class PlannedPoint:
    """A point of the study before it is run."""

    method: str
    family: DefenceFamily | None
    value: float
    cell: Cell

    @property
    def flags(self) -> str:
        """The options in which the method differs from its default, as flags."""
        options = {key: value for key, value in self.cell.variant.method.items() if key != "name"}
        texts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in options.items()}
        return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in texts.items())


Variants = Mapping[tuple[str, str], MethodVariant]
"""The variants in which methods are defended, by method and option of the family."""


def plan_points(
    methods: Sequence[str],
    values: Mapping[str, Sequence[float]],
    bounds: PrivacyBounds,
    variants: Variants | None = None,
    *,
    keep_weights: bool,
) -> list[PlannedPoint]:
    """Return every method without a defence, in each of its variants, and under every value of the families."""
    points = []
    for method in methods:
        plain = MethodVariant(method, {"name": method})
        families = [family for family in FAMILIES if values.get(family.option)]
        used = {family: (variants or {}).get((method, family.option), plain) for family in families}
        different = [plain]
        for variant in used.values():
            if variant not in different:
                different.append(variant)
        points += [PlannedPoint(method, None, 0.0, make_cell(each, keep_weights=keep_weights)) for each in different]
        for family, variant in used.items():
            for value in values[family.option]:
                heading, defence = f"{family.description}, {value:g}", bounds.defence(family, value)
                cell = make_cell(variant, family.key(value), heading, defence, keep_weights=keep_weights)
                points.append(PlannedPoint(method, family, value, cell))
    return points


def gpfl_variants(points: Sequence[PlannedPoint], study: AttackStudy) -> Variants:
    """Return the variants of GPFL that suit the defences.

    Example-level defences need a loss that is a mean over examples, so the magnitude term becomes one, with weight λ·√B.
    Clipped and sparse updates have no weight decay, which changes valve and embeddings far more than the data do.
    """
    variants = {}
    for point in points:
        spec = study.prepare(point.cell)
        method = spec.method
        if isinstance(method, GPFL) and method.mlg_norm == "batch":
            lam = round(method.lam * math.sqrt(spec.schedule.batch_size), 6)
            sample_mean = {"name": point.method, "mlg_norm": "sample_mean", "lam": lam}
            variants[point.method, "example_noise"] = MethodVariant(point.method, sample_mean)
        if isinstance(method, GPFL) and method.reg == "wd" and method.mu:
            without_decay = MethodVariant(point.method, {"name": point.method, "mu": 0.0})
            variants |= {(point.method, option): without_decay for option in ("noise", "top_k")}
    return variants


def find_noises(family: DefenceFamily, epsilons: Sequence[float], cell: Cell, study: AttackStudy) -> list[float]:
    """Return the noise for each ε, as run, in the setting of a cell that has some noise of the family."""
    spec = study.prepare(cell)
    method = cast(Defended, spec.method)
    inputs = accounting_inputs(method, spec.federation, spec.schedule)
    if family.level == "example":
        inputs = replace(inputs, coupling=check_coupling(method, spec.federation.table, probe_samples(spec.federation)))
    guarantee = client_guarantee if family.level == "client" else example_guarantee

    def epsilon_of(noise: float) -> float:
        defence = replace(method.defence, **{family.option: noise})  # type: ignore[arg-type]
        return cast(float, guarantee(defence, inputs)["epsilon"])

    return [find_noise(epsilon, epsilon_of) for epsilon in epsilons]
