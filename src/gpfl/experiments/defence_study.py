"""The runs of the defence study: methods without a defence and under defences of increasing strength, as cells of a grid."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from gpfl.defences import Defended
from gpfl.defences.accounting import client_guarantee, example_guarantee, find_noise
from gpfl.defences.coupling import check_coupling
from gpfl.engine import RunSpec
from gpfl.errors import GpflError
from gpfl.experiments import definitions as experiments
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.experiments.grid import FederationCache, GridPlan, Job, make_job
from gpfl.experiments.privacy_table import METHODS
from gpfl.io import toml
from gpfl.methods.gpfl import GPFL
from gpfl.training import config as configs
from gpfl.training.config import SECTIONS, ConfigDict
from gpfl.training.defences import accounting_inputs, probe_samples
from gpfl.training.prepare import prepare

NO_DEFENCE = "none"
"""Key of the runs without a defence."""


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


def study_defaults() -> ConfigDict:
    """Return the sections of configs/attacks/privacy.toml."""
    content = toml.read(experiments.config_dir() / "attacks" / "privacy.toml")
    return {name: dict(values) for name, values in content.items() if isinstance(values, dict)}


def make_cell(variant: MethodVariant, key: str, heading: str, defence: Mapping[str, object], keep_weights: bool) -> Cell:
    """Return the cell of a method under a defence."""
    config = {section: values for section, values in study_defaults().items() if section in SECTIONS}
    config |= {"defence": dict(defence)} if defence else {}
    column = TableColumn(f"privacy/{key}", heading, "privacy", config, weights=keep_weights)
    return Cell(Experiment("privacy", "Privacy", "", "accuracy", (variant,), (column,), {}), column, variant)


def undefended_cells(methods: Sequence[str] = METHODS) -> list[Cell]:
    """Return the cells of methods without a defence, which keep their weights."""
    return [make_cell(MethodVariant(name, {"name": name}), NO_DEFENCE, "no defence", {}, True) for name in methods]


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
    keep_weights: bool,
    variants: Variants | None = None,
) -> list[PlannedPoint]:
    """Return every method without a defence, in each of its variants, and under every value of the families."""
    points = []
    for method in methods:
        plain = MethodVariant(method, {"name": method})
        used = {
            family: (variants or {}).get((method, family.option), plain) for family in FAMILIES if values.get(family.option)
        }
        different = [plain]
        for variant in used.values():
            if variant not in different:
                different.append(variant)
        points += [
            PlannedPoint(method, None, 0.0, make_cell(variant, NO_DEFENCE, "no defence", {}, keep_weights))
            for variant in different
        ]
        for family, variant in used.items():
            for value in values[family.option]:
                heading, defence = f"{family.description}, {value:g}", bounds.defence(family, value)
                cell = make_cell(variant, family.key(value), heading, defence, keep_weights)
                points.append(PlannedPoint(method, family, value, cell))
    return points


def gpfl_variants(
    points: Sequence[PlannedPoint], plan: GridPlan, cache: FederationCache
) -> dict[tuple[str, str], MethodVariant]:
    """Return the variants of GPFL that suit the defences.

    A defence of examples needs a loss that is a mean over examples: the magnitude term is one too, with weight λ·√B. Clipped
    and sparse updates have no weight decay, which would fill them: it changes valve and embeddings far more than the data.
    """
    variants = {}
    for point in points:
        spec = cell_spec(point.cell, plan, cache)
        method = spec.method
        if isinstance(method, GPFL) and method.mlg_norm == "batch":
            lam = round(method.lam * math.sqrt(spec.schedule.batch_size), 6)
            sample_mean = {"name": point.method, "mlg_norm": "sample_mean", "lam": lam}
            variants[point.method, "example_noise"] = MethodVariant(point.method, sample_mean)
        if isinstance(method, GPFL) and method.reg == "wd" and method.mu:
            without_decay = MethodVariant(point.method, {"name": point.method, "mu": 0.0})
            variants |= {(point.method, option): without_decay for option in ("noise", "top_k")}
    return variants


def find_noises(
    family: DefenceFamily, epsilons: Sequence[float], cell: Cell, plan: GridPlan, cache: FederationCache
) -> list[float]:
    """Return the noise for each ε, as run, in the setting of a cell that has some noise of the family."""
    spec = cell_spec(cell, plan, cache)
    method = cast(Defended, spec.method)
    inputs = accounting_inputs(method, spec.federation, spec.schedule)
    if family.level == "example":
        inputs = replace(inputs, coupling=check_coupling(method, spec.federation.table, probe_samples(spec.federation)))

    def epsilon_of(noise: float) -> float:
        if family.level == "client":
            return cast(float, client_guarantee(replace(method.defence, noise=noise), inputs)["epsilon"])
        return cast(float, example_guarantee(replace(method.defence, example_noise=noise), inputs)["epsilon"])

    return [find_noise(epsilon, epsilon_of) for epsilon in epsilons]


def cell_spec(cell: Cell, plan: GridPlan, cache: FederationCache) -> RunSpec:
    """Return the run of a cell, on the CPU."""
    given = plan.given(cell)
    config = configs.resolve_config({**given, "run": {**given["run"], "device": "cpu", "precision": "float32"}})
    return prepare(config, cache.federation(config), None, None)[1]


def make_study_jobs(cells: Iterable[Cell], plan: GridPlan, cache: FederationCache) -> dict[Cell, Job]:
    """Return the job of each cell. Raise for a cell that cannot run, with the flags of the study in the message."""
    jobs = {}
    for cell in cells:
        try:
            jobs[cell] = make_job(cell, plan, cache)
        except GpflError as problem:
            text = re.sub("leave out --example-clip( and --example-noise)?", "use --example-noise none", str(problem))
            raise GpflError(f"{cell.column.key} {cell.variant.label}: {text}") from None
    return jobs
