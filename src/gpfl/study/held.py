"""What a folder holds: the runs of cells, found by their configs and without their data, and what of them is damaged."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from gpfl import config as configs
from gpfl import files
from gpfl.config import Given
from gpfl.errors import GpflError
from gpfl.net import Net
from gpfl.ranks import ranks
from gpfl.runs import RunFolder
from gpfl.study.experiments import Cell
from gpfl.study.grid import NOTE, Job, Plan, Sections, read_note
from gpfl.study.trials import NEGLIGIBLE, check_trials
from gpfl.study.whole import begun, whole_config


def held_jobs(cells: Iterable[Cell], plan: Plan) -> tuple[list[Job], dict[tuple[str, str], str]]:
    """Gives the jobs of cells that a folder holds runs of, and what is wrong with others, by column and row.

    They are found by their configs, so that the data need not be here; those with a damaged one are none.
    """
    held, _ = held_configs(plan.out)
    jobs: dict[Path, Job] = {}
    wrong: dict[tuple[str, str], str] = {}
    for cell in cells:
        try:
            given = plan.given(cell)
            asked = without_data(given)
        except GpflError:  # what no run can have, none has
            continue
        found = [folder for folder, sections in held.items() if fits(asked, sections)]
        if len(found) > 1:
            names = ", ".join(folder.name for folder in found)
            words = f"several runs differ in their data alone: remove all but one of {names}"
            wrong[cell.column.key, cell.entrant.label] = words
            continue
        for folder in found:
            before = jobs[folder].cells if folder in jobs else ()
            words = next((note["data"] for path in folder.glob(NOTE.format("*")) if "data" in (note := read_note(path))), "")
            jobs[folder] = Job((*before, cell), given, folder, words)
    return list(jobs.values()), wrong


def held_configs(out: Path) -> tuple[dict[Path, Given], dict[Path, str]]:
    """Gives the configs of the folders of trials in `out`, and what is wrong with those that are damaged."""
    held: dict[Path, Given] = {}
    wrong: dict[Path, str] = {}
    for folder in sorted(path for path in out.glob("runs/*") if begun(path)):
        try:
            held[folder] = whole_config(folder)
        except GpflError as problem:
            wrong[folder] = str(problem)
    return held, wrong


def without_data(given: Given) -> Sections:
    """Gives the sections of a config with all filled in that does not depend on its data."""
    config = configs.resolve(given)
    if config.net is None:  # never so in a cell
        return tomllib.loads(config.to_toml())
    lr = config.net.lr if math.isnan(config.train.lr) else config.train.lr
    named = cast(Net, SimpleNamespace(name=configs.name_of(config.net)))  # all that options depend on
    method = config.method.bind(named, lr=lr, epochs=config.train.epochs)
    train = dataclasses.replace(config.train, lr=lr)
    return tomllib.loads(dataclasses.replace(config, train=train, method=method).to_toml())


def fits(asked: Sections, held: Mapping[str, object]) -> bool:
    """Tells whether a complete config is one that was asked for; a net's option of 0 is the data's to fill in."""
    if asked.keys() != held.keys():
        return False
    for section, values in asked.items():
        others = cast(Mapping[str, object], held[section])
        for key in values.keys() | others.keys():
            free = (section, key) in NEGLIGIBLE or (section == "net" and values.get(key) == 0)
            if not free and values.get(key) != others.get(key):
                return False
    return True


# Damage.


def damages(jobs: Iterable[Job], plan: Plan) -> list[str]:
    """Gives a sentence about everything damaged that tables of these jobs are without, with the way out."""
    found = {job.folder for job in jobs}
    _, wrong = held_configs(plan.out)
    words = [
        f"a cell counts as not run, as {problem}: run it again, which mends it, or remove {folder}"
        for folder, problem in wrong.items()
        if folder not in found
    ]
    runs = [RunFolder(folder / f"seed-{seed}") for folder in sorted(found) for seed in plan.seeds]
    for run in (run for run in runs if run.finished):
        try:
            run.summary()
        except GpflError as problem:
            words.append(f"a trial counts as not run, as {problem}")
    return words


def mend(jobs: Iterable[Job], plan: Plan, tell: Callable[[str], None]) -> None:
    """Writes configs that are damaged anew, as all in them is known, and tells of them and of trials that will be run again."""
    if ranks().first:
        for job in jobs:
            done = job.finished(plan.seeds)
            trials = {job.folder / f"seed-{seed}": seed for seed in plan.seeds if seed not in done}
            for folder, seed in {job.folder: plan.seeds[0], **trials}.items():
                words = mend_config(job, folder, seed)
                if words:
                    tell(words)
            for folder in trials:
                if RunFolder(folder).finished:
                    tell(f"{folder / 'summary.json'} is damaged: the trial is run again")
    ranks().wait()


def mend_config(job: Job, folder: Path, seed: int) -> str:
    """Gives what was wrong with the config of a job or of one of its trials; "" where nothing is."""
    if not begun(folder):
        return ""
    try:
        whole_config(folder)
        return ""
    except GpflError as problem:
        wrong = str(problem)
    try:
        files.write_text(folder / "config.toml", check_trials(job.given, [seed], None)[0].to_toml())
    except GpflError as problem:
        return f"{wrong}, and cannot be mended: {problem}"
    return f"{wrong}: it is written anew"
