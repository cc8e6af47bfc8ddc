"""The privacy studies' runs: cells of the grid like those of any table, so that what is there is not run again."""

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
from gpfl.engine.loop import Loop
from gpfl.errors import GpflError
from gpfl.experiments import definitions as experiments
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.experiments.grid import FederationCache, GridPlan, Job, make_job
from gpfl.experiments.privacy_table import METHODS
from gpfl.io import toml
from gpfl.methods.gpfl import GPFL
from gpfl.training import api
from gpfl.training import config as configs
from gpfl.training.config import SECTIONS, ConfigDict
from gpfl.training.defences import accounting_inputs, probe_samples
from gpfl.training.execute import open_run
from gpfl.training.prepare import prepare
from gpfl.training.result import Result

NONE = "none"
"""The key of the runs without a defence."""

FILE = "attacks/privacy.toml"


@dataclass(frozen=True)
class Family:
    """Defences of one kind, which differ in one number."""

    name: str  # the option
    words: str
    level: str = ""  # of what is promised, if anything is

    def point(self, value: float) -> str:
        """Gives the key of a value's runs."""
        return f"{self.name.replace('_', '-')}-{value:g}"


FAMILIES = (
    Family("noise", "clip and noise, client level", "client"),
    Family("example_noise", "clip and noise, example level", "example"),
    Family("top_k", "largest entries"),
    Family("bits", "few bits"),
)


def file_sections() -> ConfigDict:
    """Gives the sections of the study's own file."""
    content = toml.read(experiments.config_dir() / FILE)
    return {name: dict(values) for name, values in content.items() if isinstance(values, dict)}


def config_of_runs() -> ConfigDict:
    """Gives the config of the runs that are attacked, but for their methods."""
    return {section: values for section, values in file_sections().items() if section in SECTIONS}


def cell(entrant: MethodVariant, key: str, heading: str, defence: Mapping[str, object], weights: bool) -> Cell:
    """Gives the cell of a method under a defence."""
    given = config_of_runs() | ({"defence": dict(defence)} if defence else {})
    column = TableColumn(f"privacy/{key}", heading, "privacy", given, weights=weights)
    experiment = Experiment("privacy", "Privacy", "", "accuracy", (entrant,), (column,), {})
    return Cell(experiment, column, entrant)


def open_cells(methods: Sequence[str] = METHODS) -> list[Cell]:
    """Gives the runs of methods without a defence, with their weights; usually those behind the nine columns."""
    return [cell(MethodVariant(name, {"name": name}), NONE, "no defence", {}, True) for name in methods]


@dataclass(frozen=True)
class Spot:
    """A point of the curves before it is run."""

    method: str
    family: Family | None
    value: float
    cell: Cell

    @property
    def variant(self) -> str:
        """The method's own settings, as flags."""
        own = {key: value for key, value in self.cell.variant.method.items() if key != "name"}
        shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in own.items()}
        return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in shown.items())


Variants = Mapping[tuple[str, str], MethodVariant]
"""Methods that are defended in a variant of their own, by their names and those of families of defences."""


def spots(
    methods: Sequence[str],
    values: Mapping[str, Sequence[float]],
    clip: float,
    example_clip: float,
    delta: float,
    weights: bool,
    variants: Variants | None = None,
) -> list[Spot]:
    """Gives the points of the curves: every method without a defence, in each of its variants, and under every value."""
    found = []
    for method in methods:
        plain = MethodVariant(method, {"name": method})
        used = {family: (variants or {}).get((method, family.name), plain) for family in FAMILIES if values.get(family.name)}
        for entrant in unique([plain, *used.values()]):
            found.append(Spot(method, None, 0.0, cell(entrant, NONE, "no defence", {}, weights)))
        for family, entrant in used.items():
            for value in values[family.name]:
                defence = defence_of(family, value, clip, example_clip, delta)
                heading = f"{family.words}, {value:g}"
                found.append(Spot(method, family, value, cell(entrant, family.point(value), heading, defence, weights)))
    return found


def defence_of(family: Family, value: float, clip: float, example_clip: float, delta: float) -> dict[str, object]:
    """Gives the options of a family's defence."""
    if family.name == "noise":
        return {"clip": clip, "noise": value, "delta": delta}
    if family.name == "example_noise":
        return {"example_clip": example_clip, "example_noise": value, "delta": delta}
    return {family.name: int(value) if family.name == "bits" else value}


def unique(entrants: Iterable[MethodVariant]) -> list[MethodVariant]:
    """Gives entrants without repeats, in order."""
    found: list[MethodVariant] = []
    for entrant in entrants:
        if entrant not in found:
            found.append(entrant)
    return found


def variants_of(bare: Sequence[Spot], plan: GridPlan, grounds: FederationCache) -> dict[tuple[str, str], MethodVariant]:
    """Gives the variants in which GPFL is defended.

    At example level its loss must be a mean over rows: the magnitude term by rows, λ times √B. Where updates are clipped or
    cut to their largest entries there is no weight decay, which would fill them: it moves valve and embeddings many times
    as far as the data move anything.
    """
    found = {}
    for spot in bare:
        setting = setting_of(spot.cell, plan, grounds)
        method = setting.method
        if isinstance(method, GPFL) and method.mlg_norm == "batch":
            lam = round(method.lam * math.sqrt(setting.schedule.batch_size), 6)
            by_rows = {"name": spot.method, "mlg_norm": "sample_mean", "lam": lam}
            found[spot.method, "example_noise"] = MethodVariant(spot.method, by_rows)
        if isinstance(method, GPFL) and method.reg == "wd" and method.mu:
            undecayed = MethodVariant(spot.method, {"name": spot.method, "mu": 0.0})
            found |= {(spot.method, name): undecayed for name in ("noise", "top_k")}
    return found


def noises(family: Family, epsilons: Sequence[float], like: Cell, plan: GridPlan, grounds: FederationCache) -> list[float]:
    """Gives the noise for each ε in the setting of a cell that has some of the family's, by what holds as it is run."""
    setting = setting_of(like, plan, grounds)
    method = cast(Defended, setting.method)
    crowd = accounting_inputs(method, setting.federation, setting.schedule)
    if family.level == "example":
        crowd = replace(crowd, coupling=check_coupling(method, setting.federation.table, probe_samples(setting.federation)))

    def made(noise: float) -> float:
        if family.level == "client":
            return cast(float, client_guarantee(replace(method.defence, noise=noise), crowd)["epsilon"])
        return cast(float, example_guarantee(replace(method.defence, example_noise=noise), crowd)["epsilon"])

    return [find_noise(epsilon, made) for epsilon in epsilons]


def setting_of(like: Cell, plan: GridPlan, grounds: FederationCache) -> RunSpec:
    """Gives the setting of a cell, on the CPU."""
    given = plan.given(like)
    asked = configs.resolve_config({**given, "run": {**given["run"], "device": "cpu", "precision": "float32"}})
    return prepare(asked, grounds.federation(asked), None, None)[1]


# What was run.


def loaded(job: Job, seed: int) -> Result:
    """Gives a finished run of a job with its models."""
    path = job.folder / f"seed-{seed}"
    if not (path / "checkpoint.safetensors").is_file():
        raise GpflError(f"the weights of the run in {path} are gone: remove the folder {job.folder}, and it is run again")
    return api.load(path)


def engine_of(job: Job, seed: int) -> Loop:
    """Gives the engine of a finished run, whose weights may be gone: before round 0 they follow from the seed."""
    return Loop(open_run(job.folder / f"seed-{seed}").spec)


def jobs_of(cells: Iterable[Cell], plan: GridPlan, grounds: FederationCache) -> dict[Cell, Job]:
    """Gives the job of each cell; what cannot be run is refused in the words of its setting."""
    found = {}
    for one in cells:
        try:
            found[one] = make_job(one, plan, grounds)
        except GpflError as problem:
            words = re.sub("leave out --example-clip( and --example-noise)?", "say --example-noise none", str(problem))
            raise GpflError(f"{one.column.key} {one.variant.label}: {words}") from None
    return found
