"""Estimates: how long a cell will take, from cells that were run before or from recorded speeds.

Seconds = rounds × batches of a round × seconds of a batch × seeds. A batch's seconds are those of finished cells of the same
data, net and method in the same folder on the same device; else those of benchmarks/results/*.json, where a checkout has
them. Rounds are those after which finished cells of the same data and net ended, on average; else all that were asked, which
patience may cut short. Memory = the rows, and for each seed four times the weights of all clients.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from gpfl.data import DATA
from gpfl.runs import device_name
from gpfl.study.grid import NOTE, Job, Plan
from gpfl.study.trials import read_trials


class Task(NamedTuple):
    """What a batch's time depends on."""

    data: str
    net: str
    method: str


@dataclass(frozen=True)
class Speed:
    """A measured time."""

    task: Task
    clients: int
    step: float  # seconds of a client's batch
    rounds: float | None  # after which a run ended; None in a benchmark
    source: str


@dataclass(frozen=True)
class Estimate:
    """What a job may take. None where nothing of its kind was measured."""

    seconds: float | None
    most: bool  # its rounds may end earlier
    memory: int
    source: str = ""

    @property
    def words(self) -> str:
        """The time in words."""
        if self.seconds is None:
            return "unknown"
        return f"{'up to ' if self.most else 'about '}{duration(self.seconds)}"


def estimate(job: Job, plan: Plan, speeds: Sequence[Speed]) -> Estimate:
    """Gives what the seeds that a job lacks may take."""
    lacking = len(plan.seeds) - len(job.finished(plan.seeds))
    memory = job.rows + max(1, lacking) * job.memory
    task, clients = task_of(job), clients_of(job)
    fitting = [speed for speed in speeds if speed.task == task]
    own = [speed for speed in fitting if speed.rounds is not None] or fitting
    if not own:
        return Estimate(None, True, memory)
    nearest = min(own, key=lambda speed: abs(speed.clients - clients))
    alike = [speed.rounds for speed in speeds if speed.task[:2] == task[:2] and speed.rounds is not None]
    ended = [rounds for rounds in alike if rounds <= plan.rounds]
    rounds = float(np.mean(ended)) if ended and plan.patience else float(plan.rounds)
    known = bool(ended) or not plan.patience
    return Estimate(rounds * job.steps * nearest.step * lacking, not known, memory, nearest.source)


def task_of(job: Job) -> Task:
    """Gives what a job's time depends on."""
    data = str(job.given["data"]["name"])
    return Task(data, str(job.given.get("net", {}).get("name", usual_net(data))), str(job.given["method"]["name"]))


def clients_of(job: Job) -> int:
    """Gives the number of clients that a job's split asks for; 0 where the data decide."""
    return int(cast(int, job.given.get("split", {}).get("clients", 0)))


def usual_net(data: str) -> str:
    """Gives the net that data are run with unless another is named."""
    return str(DATA[data].defaults.get("net", {}).get("name", "")) if data in DATA else ""


def speeds(out: Path, device: torch.device) -> list[Speed]:
    """Gives the times that are known for a device: of finished cells of a folder, and of recorded benchmarks."""
    return [*measured(out, device), *recorded(benchmarks(), device)]


def measured(out: Path, device: torch.device) -> Iterator[Speed]:
    """Gives the times of finished cells; what cannot be read is no time."""
    for path in sorted(out.glob(f"runs/*/{NOTE}")):
        try:
            steps = float(json.loads(path.read_text(encoding="utf-8"))["steps"])
            config = tomllib.loads((path.parent / "config.toml").read_text(encoding="utf-8"))
            trials = read_trials(path.parent)
            task = Task(config["data"]["name"], config["net"]["name"], config["method"]["name"])
        except (OSError, ValueError, KeyError):
            continue
        for summary in trials.summaries:
            rounds, seconds = cast(float, summary["rounds"]), cast(float, summary["seconds"])
            if summary["device"] == device_name(device) and rounds and steps:
                clients = cast(int, summary["clients"])
                yield Speed(task, clients, seconds / rounds / steps, rounds, "cells that were run")


def benchmarks() -> Path:
    """Gives the folder of recorded speeds at the root of a checkout, whether it is there or not."""
    return Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def recorded(folder: Path, device: torch.device) -> Iterator[Speed]:
    """Gives the speeds of benchmarks on this kind of device: the same GPU, or a CPU."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            machine, cases = str(content["machine"]["device"]), dict(content["cases"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if machine != device_name(device) and not (device.type == "cpu" and machine.endswith("threads")):
            continue
        for name, case in cases.items():
            task, method, clients, *_ = name.split("/")
            data, _, net = task.partition("-")
            key = Task(data, net or usual_net(data), method)
            yield Speed(key, int(clients), case["round_s"] / case["client_steps"], None, f"benchmarks on {machine}")


def duration(seconds: float) -> str:
    """Gives a time in a unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
