"""Runs that are trained to be attacked: their cells, their jobs, and loading them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpfl.engine import RunSpec
from gpfl.errors import GpflError
from gpfl.experiments import definitions as experiments
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.experiments.grid import FederationCache, GridPlan, Job, make_job, prepare_cell
from gpfl.io import toml
from gpfl.training.config import SECTIONS, ConfigDict
from gpfl.training.execute import load
from gpfl.training.result import Result


def study_defaults() -> ConfigDict:
    """Return the sections of configs/attacks/privacy.toml."""
    content = toml.read(experiments.config_dir() / "attacks" / "privacy.toml")
    return {name: dict(values) for name, values in content.items() if isinstance(values, dict)}


def make_cell(
    variant: MethodVariant,
    key: str = "none",
    heading: str = "no defence",
    defence: Mapping[str, object] | None = None,
    *,
    keep_weights: bool = True,
) -> Cell:
    """Return the cell of a method, without a defence unless one is given."""
    config = {section: values for section, values in study_defaults().items() if section in SECTIONS}
    config |= {"defence": dict(defence)} if defence else {}
    column = TableColumn(f"privacy/{key}", heading, "privacy", config, weights=keep_weights)
    return Cell(Experiment("privacy", "Privacy", "", "accuracy", (variant,), (column,), {}), column, variant)


def undefended_cells(methods: Sequence[str]) -> list[Cell]:
    """Return the cells of methods without a defence."""
    return [make_cell(MethodVariant(name, {"name": name})) for name in methods]


@dataclass(frozen=True)
class AttackStudy:
    """The plan of the runs and their federations."""

    plan: GridPlan
    federations: FederationCache = field(default_factory=FederationCache)

    def prepare(self, cell: Cell) -> RunSpec:
        """Return the run of a cell, on the CPU."""
        return prepare_cell(cell, self.plan, self.federations)[1]

    def make_jobs(self, cells: Iterable[Cell]) -> dict[Cell, Job]:
        """Return the job of each cell. Raise for a cell that cannot run, with the flags of the study in the message."""
        jobs = {}
        for cell in cells:
            try:
                jobs[cell] = make_job(cell, self.plan, self.federations)
            except GpflError as problem:
                text = re.sub("leave out --example-clip( and --example-noise)?", "use --example-noise none", str(problem))
                raise GpflError(f"{cell.column.key} {cell.variant.label}: {text}") from None
        return jobs


def load_run(job: Job, seed: int) -> Result:
    """Return a finished run of a job with its models."""
    path = job.folder / f"seed-{seed}"
    if not (path / "checkpoint.safetensors").is_file():
        raise GpflError(f"the weights of the run in {path} are missing: remove the folder {job.folder} to repeat the run")
    return load(path)
