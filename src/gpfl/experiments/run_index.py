"""What a folder holds: the runs of cells, found by their configs and without their data, and what of them is damaged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from gpfl.core.net import Net
from gpfl.errors import GpflError
from gpfl.experiments.definitions import Cell
from gpfl.experiments.grid import GridPlan, Job, Problems
from gpfl.experiments.run_checks import UNCOMPARED, Sections, find_folder_damage, find_trial_damage
from gpfl.experiments.run_hash import data_digest, held_configs, named_by_content
from gpfl.experiments.stored_runs import PROVENANCE_FILE, read_provenance
from gpfl.models.custom import net_name
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict


def find_jobs(cells: Iterable[Cell], plan: GridPlan) -> tuple[list[Job], Problems]:
    """Gives the jobs of cells that a folder holds runs of, and what is wrong with others, by column and row.

    They are found by their configs, so that the data need not be here; those with a damaged one are none.
    """
    held = held_configs(plan.out)
    jobs: dict[Path, Job] = {}
    wrong: Problems = {}
    for cell in cells:
        try:
            given = plan.given(cell)
            asked = without_data(given)
        except GpflError:  # what no run can have, none has
            continue
        found = [folder for folder, sections in held.items() if fits(asked, sections)]
        if len(found) > 1 and len({data_digest(folder) for folder in found}) > 1:
            names = ", ".join(folder.name for folder in found)
            words = f"several runs differ in their data alone: remove all but one of {names}"
            wrong[cell.column.key, cell.variant.label] = words
            continue
        if found:
            folder = original(found, held)
            before = jobs[folder].cells if folder in jobs else ()
            words = next(
                (
                    str(note["data"])
                    for path in folder.glob(PROVENANCE_FILE.format("*"))
                    if "data" in (note := read_provenance(path))
                ),
                "",
            )
            jobs[folder] = Job((*before, cell), given, folder, words)
    return list(jobs.values()), wrong


def original(copies: Sequence[Path], held: Mapping[Path, Sections]) -> Path:
    """Gives the folder that has the name which its content gives, of several with the same content; or the first."""
    if len(copies) == 1:
        return copies[0]
    return next((folder for folder in copies if named_by_content(folder, held[folder], folder)), copies[0])


def without_data(given: ConfigDict) -> Sections:
    """Gives the sections of a config with all filled in that does not depend on its data."""
    config = configs.resolve_config(given)
    if config.net is None:  # never so in a cell
        return config.sections()
    lr = config.net.lr if math.isnan(config.train.lr) else config.train.lr
    named = cast(Net, SimpleNamespace(name=net_name(config.net)))  # all that options depend on
    method = config.method.bind(named, lr=lr, epochs=config.train.epochs)
    train = dataclasses.replace(config.train, lr=lr)
    return dataclasses.replace(config, train=train, method=method).sections()


def fits(asked: Sections, held: Mapping[str, object]) -> bool:
    """Tells whether a complete config is one that was asked for; a net's option of 0 is the data's to fill in."""
    if asked.keys() != held.keys():
        return False
    for section, values in asked.items():
        others = cast(Mapping[str, object], held[section])
        for key in values.keys() | others.keys():
            free = (section, key) in UNCOMPARED or (section == "net" and values.get(key) == 0)
            if not free and values.get(key) != others.get(key):
                return False
    return True


def describe_damage(out: Path, found: Iterable[Job], seeds: Iterable[int]) -> list[str]:
    """Gives a sentence about everything damaged in `out` that tables of these jobs may be without, with the way out."""
    jobs = {job.folder: job for job in found}
    folders = [
        jobs[path].fault if path in jobs else find_folder_damage(path) for path in sorted(out.glob("runs/*")) if path.is_dir()
    ]
    trials = [find_trial_damage(folder / f"seed-{seed}") for folder in sorted(jobs) for seed in seeds if not jobs[folder].fault]
    return [f"a stored run is ignored: {fault}" for fault in dict.fromkeys((*folders, *trials)) if fault]
