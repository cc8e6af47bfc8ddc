"""Times rounds of an engine against the plain loop, in the same process on the same machine.

    python benchmarks/speed.py CASE … --out benchmarks/results/NAME

A case is task/method/clients, such as cifar100/gpfl/20, or the name of a list; after a colon it may say what else differs:
b50 for batches of 50, x3 for three trials at once, tf32 or bf16, as in cifar100/gpfl/20:x3,tf32. The loop is timed on one
client of middle size and multiplied by steps, since its time per step does not depend on the client. Writes NAME.json and
NAME.md; cases that NAME.json holds already are kept, so that a list can be run in parts. Every case has a process of its
own. Compiling takes most of the time: with --at-once K, K of them compile at once, and then time one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import multiprocessing
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tasks import TASKS
from torch.utils.flop_counter import FlopCounterMode

from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.engine import ENGINES, Engine, RunSpec, limit_threads, make_engine, matmul_precision
from gpfl.engine.base import TrainRequest
from gpfl.experiments.machine import limits, timed
from gpfl.io.provenance import commit
from gpfl.methods import METHODS
from gpfl.training import config as configs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAPER = [name for name in METHODS if name != "local"]
NETS = ("digits", "amazon", "har", "agnews", "fmnist", "cifar100", "tiny", "tiny-resnet18")
LISTS = {
    "fast": [
        "cifar100/gpfl/20",
        "fmnist/gpfl/20",
        "cifar100/gpfl/100",
        "cifar100/gpfl/500",
        "agnews/fedavg/20",
        "agnews/gpfl/20",
        "tiny-resnet18/gpfl/20",
    ],
    "methods20": [f"cifar100/{name}/20" for name in PAPER],
    "methods100": [f"cifar100/{name}/100" for name in PAPER],
    "growth": [f"even/{method}/{clients}" for clients in (20, 100, 500, 2000, 10_000) for method in ("gpfl", "fedavg")],
    "batches": [f"cifar100/gpfl/20:b{size}" for size in (5, 20, 50, 100)],
    "nets": [f"{task}/gpfl/20" for task in NETS],
    "options": [f"cifar100/gpfl/20:{option}" for option in ("x3", "tf32", "bf16")],
    "cpu": [f"{task}/{method}" for method in ("gpfl", "fedavg") for task in ("digits", "fmnist", "amazon", "agnews")],
}


REPEATS = 5
USUAL = {"amazon": 4}
"""Clients where a case does not say how many; elsewhere 20."""


def listed(words: list[str]) -> list[str]:
    return [case for word in words for case in LISTS.get(word, [word])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help=f"task/method/clients, or {', '.join(LISTS)}")
    parser.add_argument("--out", type=Path, default=Path("speed"))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--compile", default="on", choices=("on", "off"))
    parser.add_argument("--at-once", type=int, default=1)
    given = parser.parse_args()
    cases = [case if case.count("/") == 2 else f"{case}/{USUAL.get(case.split('/')[0], 20)}" for case in listed(given.cases)]
    for case in cases:
        Case.read(case, given.engine, given.compile)  # a word that is not understood is said now
    file = given.out.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # what it takes of the device goes back with it
            write(file, {"machine": pool.apply(machine), "cases": {}})
    held = json.loads(file.read_text())["cases"]
    wanted = [case for case in dict.fromkeys(cases) if key_of(case, given) not in held]
    failed = []
    for start in range(0, len(wanted), given.at_once):
        failed += measure_group(wanted[start : start + given.at_once], given, file)
    if failed:
        raise SystemExit(f"not timed, for reasons given above: {', '.join(failed)}")


def key_of(case: str, given: argparse.Namespace) -> str:
    words = [case, *([given.engine] if given.engine != "auto" else []), *(["uncompiled"] if given.compile == "off" else [])]
    return ":".join(words)


@dataclasses.dataclass(frozen=True)
class Turn:
    """A process says when it has compiled, and waits until it may time."""

    ready: Any
    go: Any


def measure_group(cases: list[str], given: argparse.Namespace, file: Path) -> list[str]:
    """Times cases, each in a process of its own; all compile at once, then they time one by one. Gives those that failed."""
    context = multiprocessing.get_context("spawn")
    turns = [Turn(context.Event(), context.Event()) for _ in cases]
    workers = [
        context.Process(target=measure_one, args=(case, given, file, turn)) for case, turn in zip(cases, turns, strict=True)
    ]
    for worker in workers:
        worker.start()
    for worker, turn in zip(workers, turns, strict=True):
        while worker.is_alive() and not turn.ready.wait(0.5):  # one that has died is not waited for
            pass
    for worker, turn in zip(workers, turns, strict=True):
        turn.go.set()
        worker.join()
    return [case for case, worker in zip(cases, workers, strict=True) if worker.exitcode]


def measure_one(case: str, given: argparse.Namespace, file: Path, turn: Turn) -> None:
    """Times a case and adds it to the file."""
    limits = json.loads(file.read_text())["machine"]
    ready = prepare(Case.read(case, given.engine, given.compile))
    turn.ready.set()
    turn.go.wait()
    found = ready(limits)
    held = json.loads(file.read_text())
    held["cases"][key_of(case, given)] = found
    write(file, held)
    file.with_suffix(".md").write_text(page(held))
    print(row(key_of(case, given), found), flush=True)


def write(file: Path, held: dict[str, Any]) -> None:
    """Writes all or nothing: a process may be ended at any time."""
    whole = file.with_suffix(".tmp")
    whole.write_text(json.dumps(held, indent=1))
    whole.replace(file)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed."""

    task: str
    method: str
    clients: int
    engine: str = "auto"
    compile: str = "on"
    batch_size: int = 10
    trials: int = 1
    precision: str = "float32"

    @classmethod
    def read(cls, words: str, engine: str, compile: str) -> Case:
        where, _, rest = words.partition(":")
        task, method, clients = [*where.split("/"), "", ""][:3]
        if task not in TASKS or method not in METHODS:
            raise SystemExit(
                f"{words}: tasks are {', '.join(TASKS)}; methods are {', '.join(METHODS)}; lists {', '.join(LISTS)}"
            )
        if not clients.isdecimal() or not int(clients):
            raise SystemExit(f"{words}: '{clients}' is no number of clients")
        options: dict[str, Any] = {}
        for word in filter(None, rest.split(",")):
            if found := re.fullmatch(r"([bx])(\d+)", word):
                options[{"b": "batch_size", "x": "trials"}[found[1]]] = int(found[2])
            elif word in ("tf32", "bf16"):
                options["precision"] = word
            else:
                raise SystemExit(f"{words}: '{word}' is none of bNUMBER, xNUMBER, tf32, bf16")
        return cls(task, method, int(clients), engine, compile, **options)

    def setting(self) -> RunSpec:
        federation = TASKS[self.task].federation(self.clients)
        sections: configs.ConfigDict = {
            "run": {"compile": self.compile, "precision": self.precision},
            "net": dict(TASKS[self.task].net),
            "method": {"name": self.method},
            "train": {"rounds": 2000, "batch_size": self.batch_size},
        }
        return prepare(configs.resolve_config(sections, federation=federation), federation, None, None)[1]


def rounds_of(engine: Engine, setting: RunSpec, trials: int) -> Callable[[int], object]:
    """Gives the function that trains all clients of so many trials in a round."""
    everyone = [client for client in range(len(setting.federation)) if engine.can_train(client)]
    states = [start(setting, seed) for seed in range(trials)]
    index = torch.as_tensor(everyone, device=setting.device)
    own = [(shared, tree.take(private, index)) for shared, private in states]
    schedules = [dataclasses.replace(setting.schedule, seed=seed) for seed in range(trials)]

    def run(number: int) -> object:
        asked = [
            TrainRequest(*state, everyone, number, schedule, everyone, setting.method)
            for state, schedule in zip(own, schedules, strict=True)
        ]
        return engine.train_rounds(asked)

    return run


def prepare(case: Case) -> Callable[[dict[str, object]], dict[str, object]]:
    """Compiles what a case needs, and gives the function that times it on a machine of some limits."""
    setting = case.setting()
    gc.collect()
    reset_memory()
    engine = make_engine(case.engine, setting)
    with limit_threads(setting), matmul_precision(setting.precision):
        run = rounds_of(engine, setting, case.trials)
        first = timed(lambda: run(0), DEVICE)
        engine.evaluate(*start(setting), 0, "test")
    return lambda limits: measure(case, setting, engine, run, first, limits)


def measure(
    case: Case, setting: RunSpec, engine: Engine, run: Callable[[int], object], first: float, limits: dict[str, object]
) -> dict[str, object]:
    task = TASKS[case.task]
    with limit_threads(setting), matmul_precision(setting.precision):
        shared, private = start(setting)
        everyone = [client for client in range(len(setting.federation)) if engine.can_train(client)]
        steps = [sum(len(part) for part in engine.plan(client, 0)) for client in everyone]
        numbers = iter(range(1, 10**6))
        train = [timed(lambda: run(next(numbers)), DEVICE) for _ in range(REPEATS)]
        judge = [timed(lambda: engine.evaluate(shared, private, 0, "test"), DEVICE) for _ in range(REPEATS)]
        memory = peak_memory()
    with matmul_precision(setting.precision):
        client_step, judged = loop_step(setting, everyone, steps)
    total = sum(steps)
    scale = len(everyone) / total * 1e3
    floor = floors(setting, everyone[0], len(everyone) * case.trials, limits)
    client_step, judged = client_step * case.trials, judged * case.trials
    judge = [each * case.trials for each in judge]
    out = {
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "engine": engine.name,
        "compile": case.compile if setting.device.type == "cuda" else "off",
        "note": task.note,
        "clients": len(everyone),
        "batch_size": case.batch_size,
        "trials": case.trials,
        "precision": case.precision,
        "client_steps": total,
        "first_round_s": first,
        "train_s": train,
        "judge_s": judge,
        "round_s": float(np.median(train) + np.median(judge)),
        "step_ms": float(np.median(train)) * scale,
        "step_ms_range": [min(train) * scale, max(train) * scale],
        "loop_step_ms": client_step * len(everyone) * 1e3,
        "loop_round_s": client_step * total + judged,
        "memory_bytes": memory,
        **floor,
    }
    out["ratio"] = out["loop_step_ms"] / out["step_ms"]
    out["fraction"] = max(floor["floor_bytes_ms"], floor["floor_operations_ms"]) / out["step_ms"]
    return out


def start(setting: RunSpec, seed: int = 0) -> tuple[tree.Tree, tree.Tree]:
    shared, private = (tree.to(part, setting.device) for part in setting.method.init(seed))
    return shared, tree.repeat(private, len(setting.federation))


def loop_step(setting: RunSpec, everyone: list[int], steps: list[int]) -> tuple[float, float]:
    """Seconds of one client's step and of everyone's judgement under the loop engine, with torch's own number of threads."""
    loop = ENGINES["loop"](setting)
    shared, private = start(setting)
    client = everyone[int(np.argsort(steps)[len(steps) // 2])]
    plan = [part[: max(1, 60 // len(steps_of))] for steps_of in [loop.plan(client, 0)] for part in steps_of]
    alone = loop.facts([client], 0).select(0)
    own = tree.take(private, client)

    def run() -> None:
        local_round(setting.method, shared, own, setting.federation.table, plan, alone)

    run()
    count = sum(len(part) for part in plan)
    each = float(np.median([timed(run, DEVICE) for _ in range(3)])) / count
    rows = setting.federation.n_samples("test")
    with torch.no_grad():
        judge = timed(lambda: loop.score_client(shared, own, client, alone, "test"), DEVICE)
        judge = timed(lambda: loop.score_client(shared, own, client, alone, "test"), DEVICE)
    return each, judge * float(rows.sum()) / float(rows[client])


def floors(setting: RunSpec, client: int, clients: int, limits: dict[str, Any]) -> dict[str, float]:
    """The least time of a step of all clients, over the phases of a round: weights that it moves are read twice, then read
    and written once more; operations at the peak.
    """
    method, engine, (shared, private) = setting.method, ENGINES["loop"](setting), start(setting)
    plan, alone = engine.plan(client, 0), engine.client_info([client], 0).select(0)
    sizes, operations = [], []
    for phase, steps in zip(method.phases(), plan, strict=True):
        work = method.download(shared, tree.take(private, client), alone)
        rows = torch.from_numpy(steps[0]).to(setting.device)
        with FlopCounterMode(display=False) as counter:
            after, _ = phase.step(shared, work, setting.federation.table.batch(rows[rows >= 0]), alone)
        before = tree.flatten(work)
        moved = {path: leaf for path, leaf in tree.flatten(after).items() if not torch.equal(leaf, before[path])}
        sizes.append(sum(touched(path, leaf, setting) for path, leaf in moved.items()))
        operations.append(counter.get_total_flops())
    size, operation = (float(np.average(part, weights=[len(steps) for steps in plan])) for part in (sizes, operations))
    return {
        "parameter_bytes": size,
        "operations": operation,
        "floor_bytes_ms": clients * 4 * size / limits["bytes_per_s"] * 1e3,
        "floor_operations_ms": clients * operation / limits["operations_per_s"] * 1e3,
    }


def touched(path: str, leaf: torch.Tensor, setting: RunSpec) -> int:
    """Bytes of a weight that a step reads and writes: of an embedding, the rows of a batch's words."""
    rows = setting.schedule.batch_size * math.prod(setting.federation.table.shape)
    entries = min(leaf.numel(), rows * leaf.shape[-1]) if "embedding" in path else leaf.numel()
    return entries * leaf.element_size()


# The machine.


def machine() -> dict[str, object]:
    peak = limits(DEVICE)
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "operations_per_s": peak.operations,
        "bytes_per_s": peak.bytes,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


def reset_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    status = Path("/proc/self/status")
    if status.exists():  # what this process took, without the one that started it
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Words.


def row(key: str, case: dict[str, object]) -> str:
    low, high = case["step_ms_range"]  # type: ignore[misc]
    return (
        f"| {key} | {case['engine']} | {case['step_ms']:.3f} ({low:.3f}–{high:.3f}) | {case['loop_step_ms']:.1f} | "
        f"{case['ratio']:.1f}× | {case['round_s']:.3f} | {case['loop_round_s']:.1f} | {case['memory_bytes'] / 2**30:.2f} | "  # type: ignore[operator]
        f"{case['floor_bytes_ms']:.3f} / {case['floor_operations_ms']:.3f} | {case['fraction']:.0%} | {case['commit']} |"
    )


def page(held: dict[str, dict[str, Any]]) -> str:
    facts = held["machine"]
    lines = [
        f"# Speed on {facts['device']}",
        "",
        f"torch {facts['torch']}. Measured limits of the machine: "
        f"{facts['operations_per_s'] / 1e12:.2f} TFLOP/s in float32 products, {facts['bytes_per_s'] / 1e12:.3f} TB/s copied.",
        "",
        "A step is one batch of every client. The floor is the larger of reading weights twice and updating them, and of the",
        "operations at the machine's peak; our kernels use tensor cores, which are faster than that peak. bN: batches of",
        "N, not 10; xN: N trials at once. Every case was timed against the loop in its own process (on one machine",
        "the loop's time differs by up to a fifth between them); the command of each is in the JSON.",
        "",
        "| task/method/clients | engine | step, ms (range) | loop, ms | ratio | round, s | loop, s "
        "| memory, GiB | floor, ms | of it | commit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *[row(key, case) for key, case in held["cases"].items()],  # type: ignore[arg-type]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
