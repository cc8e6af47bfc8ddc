"""Estimates: how long a cell will take, from cells that were run before, from recorded speeds or from what it asks for.

Seconds = rounds × batches of a round × seconds of a batch × seeds. A batch's seconds are those of finished cells of the same
data, net, method and options in the same folder on the same device; else those of benchmarks/results/*.json, where a checkout
has them; else either of the method with other options, or of another method with the same data and net, as much longer as the
operations of a round say (`work`); else what these operations take on a machine that multiplies and copies as fast as this one.
Rounds are those after which finished cells of the same data and net ended, on average; else all that were asked, which patience
may cut short. Memory = the rows, and for each seed what all clients hold if they train at once, without activations.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from gpfl.data import DATASETS
from gpfl.engine.vmap import Vmap
from gpfl.errors import GpflError
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.machine import Limits, limits_at_hand
from gpfl.experiments.stored_runs import PROVENANCE_FILE, read_provenance
from gpfl.experiments.trials import Sections
from gpfl.experiments.work import Machine, Round, machine_at_hand, round_of
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict, RunOptions, TrainOptions
from gpfl.training.devices import device_name, find_device
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir


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
    trials: int = 1  # of a benchmark: those that train at once
    precision: str = "float32"
    planned: float = math.inf  # rounds that the run was given
    given: ConfigDict = field(
        default_factory=dict
    )  # the sections of its config that a batch's work depends on; {}: as they come
    device: str = "cpu"  # its type
    limits: Limits | None = None  # of the machine of a benchmark, where that is another than this one

    @property
    def slower_here(self) -> float:
        """How many times as long as timed a step takes on this machine."""
        found = limits_at_hand(torch.device(self.device)) if self.limits else None
        return self.limits.times_as_fast_as(found) if self.limits and found else 1.0

    def tells(self, rounds: int) -> bool:
        """Tells whether its end says something of a run of at most so many rounds: patience ended it, or as many rounds."""
        return self.rounds is not None and (self.rounds < self.planned or self.planned == rounds) and self.rounds <= rounds


@dataclass(frozen=True)
class Estimate:
    """What a job may take. None where nothing like it was timed, and it was not or could not be counted."""

    seconds: float | None
    most: bool  # its rounds may end earlier
    memory: int
    source: str = ""
    rounds: float = 0.0  # after which a run is thought to end; 0 where nothing is known
    way: str = ""  # "scaled": from the time of another step by what both ask of a machine; "counted": by that alone

    @property
    def words(self) -> str:
        """The time in words."""
        if self.seconds is None:
            return "unknown"
        return f"{'up to ' if self.most else 'about '}{duration(self.seconds)}{f' ({self.way})' if self.way else ''}"


def estimates(jobs: Iterable[Job], plan: GridPlan, device: torch.device, *, count: bool) -> dict[Path, Estimate]:
    """Gives what jobs may take on a device, by their folders; those like which none was timed are counted if that is asked for.

    Counting takes about a second a job.
    """
    known = speeds(plan.out, device)
    return {job.folder: estimate(job, plan, known, device if count else None) for job in jobs}


def estimate(job: Job, plan: GridPlan, speeds: Sequence[Speed], device: torch.device | None = None) -> Estimate:
    """Gives what the seeds that a job lacks may take; counted on a device, where one is given and nothing like it was timed."""
    lacking = len(plan.seeds) - len(job.finished(plan.seeds))
    memory = job.rows + max(1, lacking) * job.memory
    task, precision = task_of(job), str(plan.run.get("precision", "float32"))
    alike = [speed for speed in speeds if speed.task[:2] == task[:2] and speed.precision == precision]
    if not alike:
        return by_operations(job, plan, lacking, memory, device) if device else Estimate(None, True, memory)
    clients = clients_of(job)

    # Its own method's time before another's, a finished cell's before a benchmark's, then as many trials at once and clients.
    def distance(speed: Speed) -> tuple[float, ...]:
        foreign = (speed.task != task, not same_step(job, speed), speed.rounds is None)
        return (*foreign, abs(speed.trials - lacking), abs(speed.clients - clients))

    least = min(distance(speed) for speed in alike)
    nearest, times = closest(job, [speed for speed in alike if distance(speed) == least], lacking)
    ended = [speed.rounds for speed in alike if speed.rounds is not None and speed.tells(plan.rounds)]
    rounds = float(np.mean(ended)) if ended and plan.may_end_early else float(plan.rounds)
    known = bool(ended) or not plan.may_end_early
    here = " at the speed of this machine" if nearest.limits else ""
    source = f"{nearest.source}{here}{'' if nearest.task == task else ' of other methods'}{'' if times == 1 else SCALED}"
    seconds, way = rounds * job.steps * nearest.step * nearest.slower_here * times * lacking, "" if times == 1 else "scaled"
    return Estimate(seconds, not known, memory, source, rounds, way)


SCALED = ", scaled by the operations of a round"


def by_operations(job: Job, plan: GridPlan, lacking: int, memory: int, device: torch.device) -> Estimate:
    """Gives an estimate of a job of which nothing like it was timed; it is counted in float32, whatever its precision."""
    if plan.run.get("engine") == "loop":  # which runs clients one by one, and is for checks
        return Estimate(None, True, memory)
    clients = job.sample.clients if job.sample else 0
    step = counted(job, job.given, lacking * clients, device.type, machine_at_hand(device)) if lacking else 0.0
    if step is None:
        return Estimate(None, True, memory)
    seconds = plan.rounds * job.steps * step * lacking
    source = f"the operations of a round on this machine ({device_name(device)}) as busy as it is"
    return Estimate(seconds, plan.may_end_early, memory, source, way="counted")


def work_of(job: Job, trials: int) -> float | None:
    """Gives the work of a round of so many trials as counted, in seconds of a benchmark's machine; None where it cannot be."""
    run = job.given.get("run", {})
    if job.sample is None or not trials or run.get("engine") == "loop":
        return None
    device = find_device(str(run.get("device", "auto")))
    step = counted(job, job.given, trials * job.sample.clients, device.type)
    return step * job.steps * trials if step else None


# How much longer another step takes.


def same_step(job: Job, speed: Speed) -> bool:
    """Tells whether a job's steps are known to be those that were timed."""
    timed, method = sections_of_step(speed.given), job.given["method"]
    if "method" not in speed.given:
        usual = job.complete["run"]["protocol"] == RunOptions.protocol and dict(method) == {"name": speed.task.method}
        return usual and sections_of_step(job.complete)[1:] == timed[1:]
    return sections_of_step(job.complete) == timed


def sections_of_step(given: Sections) -> list[object]:
    """Gives what a step's work depends on besides data and net: the method, the defence and the rows of a batch."""
    train = given.get("train", {})
    return [dict(given.get("method", {})), dict(given.get("defence", {})), train.get("batch_size", TrainOptions.batch_size)]


def closest(job: Job, timed: Sequence[Speed], trials: int) -> tuple[Speed, float]:
    """Gives of steps that were timed the one most like a job's, and how many times as long as it the job's takes.

    That is 1 where it is the same, and where it cannot be told.
    """
    if not trials or same_step(job, timed[0]):
        return timed[0], 1.0
    told = [(speed, times) for speed in timed if (times := times_as_long(job, speed, trials)) is not None]
    return min(told, key=lambda each: abs(math.log(each[1])), default=(timed[0], 1.0))


def times_as_long(job: Job, speed: Speed, trials: int) -> float | None:
    """Gives how many times as long as the timed step a job's takes in trials at once; None where that cannot be told."""
    method, defence, rows = sections_of_step({"method": {"name": speed.task.method}, **speed.given})
    train = {**job.given.get("train", {}), "batch_size": rows}
    run = {**job.given.get("run", {}), "protocol": RunOptions.protocol}  # that of benchmarks; others' methods are complete
    timed = {**job.given, "method": method, "defence": defence, "train": train, "run": run}
    clients = trials * (clients_of(job) or speed.clients)
    own, other = (counted(job, cast(ConfigDict, given), clients, speed.device) for given in (job.given, timed))
    return own / other if own and other else None


COUNTED: dict[str, Round | None] = {}
"""Rounds that were counted: tracing one takes a while, and many cells have the same but for their rows."""


def counted(job: Job, given: ConfigDict, clients: int, device: str, machine: Machine | None = None) -> float | None:
    """Gives what a config may take for each step on the data of a job; None where it cannot be counted."""
    if job.sample is None:
        return None
    sections = {section: given.get(section, {}) for section in ("data", "net", "run")}
    train = {
        key: value for key, value in given.get("train", {}).items() if key not in ("rounds", "patience", "client_fraction")
    }
    what = [sections, train, sections_of_step(given), min(clients, Vmap.max_slots), device, machine]
    key = json.dumps(what, sort_keys=True, default=str)
    if key not in COUNTED:
        plain = {**given, "run": {**given.get("run", {}), "device": "cpu", "precision": "float32"}}
        try:
            _, setting = prepare(configs.resolve_config(plain), job.sample.federation, None, None)
            COUNTED[key] = round_of(setting, clients, torch.device(device), machine)
        except GpflError:  # the timed method may not take what this one does
            COUNTED[key] = None
    found = COUNTED[key]
    return found.of_step(job.sample) if found else None


def task_of(job: Job) -> Task:
    """Gives what a job's time depends on."""
    data = str(job.given["data"]["name"])
    return Task(data, str(job.given.get("net", {}).get("name", usual_net(data))), str(job.given["method"]["name"]))


def clients_of(job: Job) -> int:
    """Gives the number of clients that a job's partition asks for; 0 where the data decide."""
    return int(cast(int, job.given.get("partition", {}).get("clients", 0)))


def usual_net(data: str) -> str:
    """Gives the net that data are run with unless another is named."""
    return str(DATASETS[data].defaults.get("net", {}).get("name", "")) if data in DATASETS else ""


def speeds(out: Path, device: torch.device) -> list[Speed]:
    """Gives the times that are known for a device: of finished cells of a folder, and of recorded benchmarks."""
    return [*measured(out, device), *recorded(benchmarks(), device)]


def measured(out: Path, device: torch.device) -> Iterator[Speed]:
    """Gives the times of finished runs; what cannot be read is no time."""
    for path in sorted(out.glob("runs/*/seed-*/summary.json")):
        try:
            note = read_provenance(path.parents[1] / PROVENANCE_FILE.format(path.parent.name.removeprefix("seed-")))
            steps = float(str(note["steps"]))
            config = tomllib.loads((path.parent / "config.toml").read_text(encoding="utf-8"))
            task = Task(config["data"]["name"], config["net"]["name"], config["method"]["name"])
            given: ConfigDict = {key: values for key, values in config.items() if key in ("method", "defence", "train")}
            precision, planned = str(config["run"]["precision"]), float(config["train"]["rounds"])
            summary = RunDir(path.parent).read_summary()
        except (OSError, ValueError, KeyError, TypeError, GpflError):
            continue
        rounds, seconds = cast(float, summary["rounds"]), cast(float, summary["seconds"])
        if summary["device"] == device_name(device) and rounds and steps:
            step, clients = seconds / rounds / steps, cast(int, summary["clients"])
            source, kind = "cells that were run", device.type
            yield Speed(task, clients, step, rounds, source, 1, precision, planned, given=given, device=kind)


def benchmarks() -> Path:
    """Gives the folder of recorded speeds at the root of a checkout, whether it is there or not."""
    return Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def recorded(folder: Path, device: torch.device) -> Iterator[Speed]:
    """Gives the speeds of benchmarks on this kind of device: the same GPU, or a CPU."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            facts, cases = dict(content["machine"]), dict(content["cases"])
            machine, limits = str(facts["device"]), Limits(float(facts["operations_per_s"]), float(facts["bytes_per_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if machine != device_name(device) and not (device.type == "cpu" and machine.endswith("threads")):
            continue
        other = limits if device.type == "cpu" else None
        for name, case in cases.items():
            speed = speed_of(name, case, f"benchmarks on {machine}")
            if speed is not None:
                yield dataclasses.replace(speed, device=device.type, limits=other)


def speed_of(name: str, case: Mapping[str, object], source: str) -> Speed | None:
    """Gives the speed of a benchmark such as cifar100/gpfl/20:x3,tf32; None of one with batches of another size than ours."""
    task, method, clients = name.partition(":")[0].split("/")[:3]
    data, _, net = task.partition("-")
    if case.get("batch_size", TrainOptions.batch_size) != TrainOptions.batch_size:
        return None
    trials = int(cast(int, case.get("trials", 1)))
    step = cast(float, case["round_s"]) / cast(float, case["client_steps"]) / trials
    key = Task(data, net or usual_net(data), method)
    return Speed(key, int(clients), step, None, source, trials, str(case.get("precision", "float32")))


def duration(seconds: float) -> str:
    """Gives a time in a unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
