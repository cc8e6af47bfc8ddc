"""Time rounds of an engine against the plain loop, in the same process on the same machine.

    python benchmarks/speed.py CASE … --out benchmarks/results/NAME

A case is task/method/clients, such as cifar100/gpfl/20, or the name of a list. Options follow a colon: b50 for batches of 50,
x3 for three concurrent trials, tf32 or bf16, as in cifar100/gpfl/20:x3,tf32. The loop is timed on one client of median size
and multiplied by the number of steps, since its time per step does not depend on the client. Writes NAME.json and NAME.md.
Cases that NAME.json already has are skipped, so a list can be run in several calls. Each case runs in its own process.
Compiling takes most of the time: with --jobs K, K cases compile in parallel and are then timed one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import multiprocessing
import re
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import DEVICE, device_name, measure_peak_speed, peak_memory, reset_peak_memory, seconds
from tasks import TASKS
from torch.utils.flop_counter import FlopCounterMode

from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.engine import ENGINES, Engine, RunSpec, limit_threads, make_engine, matmul_precision
from gpfl.engine.base import EvalRequest, TrainRequest
from gpfl.io.provenance import current_commit
from gpfl.methods import METHODS
from gpfl.training.config import ConfigDict, resolve_config
from gpfl.training.prepare import prepare

PAPER_METHODS = [name for name in METHODS if name not in ("local", "fedavg-ft")]
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
    "methods20": [f"cifar100/{name}/20" for name in PAPER_METHODS],
    "methods100": [f"cifar100/{name}/100" for name in PAPER_METHODS],
    "growth": [f"even/{method}/{clients}" for clients in (20, 100, 500, 2000, 10_000) for method in ("gpfl", "fedavg")],
    "batches": [f"cifar100/gpfl/20:b{size}" for size in (5, 20, 50, 100)],
    "nets": [f"{task}/gpfl/20" for task in NETS],
    "options": [f"cifar100/gpfl/20:{option}" for option in ("x3", "tf32", "bf16")],
    "cpu": [f"{task}/{method}" for method in ("gpfl", "fedavg") for task in ("digits", "fmnist", "amazon", "agnews")],
}
REPEATS = 5
DEFAULT_CLIENTS = {"amazon": 4}
"""Clients of cases without a number, where it is not 20."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help=f"task/method/clients, or {', '.join(LISTS)}")
    parser.add_argument("--out", type=Path, default=Path("speed"))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--compile", default="on", choices=("on", "off"))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    cases = [case for name in args.cases for case in LISTS.get(name, [name])]
    cases = [case if case.count("/") == 2 else f"{case}/{DEFAULT_CLIENTS.get(case.split('/')[0], 20)}" for case in cases]
    for case in cases:
        Case.parse(case, args.engine, args.compile)  # report errors before the first is timed
    file = args.out.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # frees the device's memory at its end
            write_json(file, {"machine": pool.apply(describe_machine), "cases": {}})
    done = json.loads(file.read_text())["cases"]
    missing = [case for case in dict.fromkeys(cases) if key_of(case, args) not in done]
    failed = []
    for start in range(0, len(missing), args.jobs):
        failed += time_cases(missing[start : start + args.jobs], args, file)
    if failed:
        raise SystemExit(f"failed, see above: {', '.join(failed)}")


def key_of(case: str, args: argparse.Namespace) -> str:
    parts = [case, *([args.engine] if args.engine != "auto" else []), *(["uncompiled"] if args.compile == "off" else [])]
    return ":".join(parts)


@dataclasses.dataclass(frozen=True)
class Turn:
    """Events with which a process says that it has compiled and is told to start timing."""

    compiled: Event
    start: Event


def time_cases(cases: list[str], args: argparse.Namespace, file: Path) -> list[str]:
    """Time cases, each in its own process: all compile in parallel, then they are timed in turn. Return the failed ones."""
    context = multiprocessing.get_context("spawn")
    turns = [Turn(context.Event(), context.Event()) for _ in cases]
    processes = [
        context.Process(target=time_case, args=(case, args, file, turn)) for case, turn in zip(cases, turns, strict=True)
    ]
    for process in processes:
        process.start()
    for process, turn in zip(processes, turns, strict=True):
        while process.is_alive() and not turn.compiled.wait(0.5):  # a process may have died
            pass
    for process, turn in zip(processes, turns, strict=True):
        turn.start.set()
        process.join()
    return [case for case, process in zip(cases, processes, strict=True) if process.exitcode]


def time_case(case: str, args: argparse.Namespace, file: Path, turn: Turn) -> None:
    """Time a case and add it to the file."""
    machine = json.loads(file.read_text())["machine"]
    measure = compile_case(Case.parse(case, args.engine, args.compile))
    turn.compiled.set()
    turn.start.wait()
    result = measure(machine)
    results = json.loads(file.read_text())
    results["cases"][key_of(case, args)] = result
    write_json(file, results)
    file.with_suffix(".md").write_text(page(results))
    print(row(key_of(case, args), result), flush=True)


def write_json(file: Path, results: dict[str, Any]) -> None:
    """Write the file at once: a process may be killed at any time."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1))
    temporary.replace(file)


@dataclasses.dataclass(frozen=True)
class Case:
    """A task, a method and how they run."""

    task: str
    method: str
    clients: int
    engine: str = "auto"
    compile: str = "on"
    batch_size: int = 10
    trials: int = 1
    precision: str = "float32"

    @classmethod
    def parse(cls, text: str, engine: str, compile: str) -> Case:
        path, _, options = text.partition(":")
        task, method, clients = [*path.split("/"), "", ""][:3]
        if task not in TASKS or method not in METHODS:
            raise SystemExit(
                f"{text}: tasks are {', '.join(TASKS)}; methods are {', '.join(METHODS)}; lists are {', '.join(LISTS)}"
            )
        if not clients.isdecimal() or not int(clients):
            raise SystemExit(f"{text}: '{clients}' is not a number of clients")
        values: dict[str, Any] = {}
        for option in filter(None, options.split(",")):
            if found := re.fullmatch(r"([bx])(\d+)", option):
                values[{"b": "batch_size", "x": "trials"}[found[1]]] = int(found[2])
            elif option in ("tf32", "bf16"):
                values["precision"] = option
            else:
                raise SystemExit(f"{text}: unknown option '{option}'; use bNUMBER, xNUMBER, tf32 or bf16")
        return cls(task, method, int(clients), engine, compile, **values)

    def run_spec(self) -> RunSpec:
        federation = TASKS[self.task].federation(self.clients)
        sections: ConfigDict = {
            "run": {"compile": self.compile, "precision": self.precision},
            "net": dict(TASKS[self.task].net),
            "method": {"name": self.method},
            "train": {"rounds": 2000, "batch_size": self.batch_size},
        }
        return prepare(resolve_config(sections, federation=federation), federation)[1]


def initial_state(spec: RunSpec, seed: int = 0) -> tuple[tree.Tree, tree.Tree]:
    shared, private = (tree.to(part, spec.device) for part in spec.method.init(seed))
    return shared, tree.repeat(private, len(spec.federation))


def trainable_clients(engine: Engine) -> list[int]:
    return [client for client in range(len(engine.federation)) if engine.can_train(client)]


def round_function(engine: Engine, spec: RunSpec, trials: int) -> Callable[[int], object]:
    """Return the function that runs a round of all clients for a number of concurrent trials."""
    clients = trainable_clients(engine)
    index = torch.as_tensor(clients, device=spec.device)
    states = [initial_state(spec, seed) for seed in range(trials)]
    states = [(shared, tree.take(private, index)) for shared, private in states]
    schedules = [dataclasses.replace(spec.schedule, seed=seed) for seed in range(trials)]

    def run(round_: int) -> object:
        requests = [
            TrainRequest(*state, clients, round_, schedule, clients, spec.method)
            for state, schedule in zip(states, schedules, strict=True)
        ]
        return engine.train_rounds(requests)

    return run


def compile_case(case: Case) -> Callable[[dict[str, Any]], dict[str, object]]:
    """Compile what a case needs, and return the function that times it."""
    spec = case.run_spec()
    gc.collect()
    reset_peak_memory()
    engine = make_engine(case.engine, spec)
    with limit_threads(spec), matmul_precision(spec.precision):
        run = round_function(engine, spec, case.trials)
        first = seconds(lambda: run(0))
        engine.evaluate(*initial_state(spec), 0, "test")
    return lambda machine: measure(case, spec, engine, run, first, machine)


def measure(
    case: Case, spec: RunSpec, engine: Engine, run: Callable[[int], object], first: float, machine: dict[str, Any]
) -> dict[str, object]:
    clients = trainable_clients(engine)
    with limit_threads(spec), matmul_precision(spec.precision):
        shared, private = initial_state(spec)
        steps = [sum(len(phase) for phase in engine.plan(client, 0)) for client in clients]
        rounds = iter(range(1, 10**6))
        train = [seconds(lambda: run(next(rounds))) for _ in range(REPEATS)]
        evaluate = [seconds(lambda: engine.evaluate(shared, private, 0, "test")) for _ in range(REPEATS)]
        memory = peak_memory()
    with matmul_precision(spec.precision):
        client_step, loop_evaluation = time_loop(spec, clients, steps)
    total = sum(steps)
    scale = len(clients) / total * 1e3
    floor = floor_times(spec, clients[0], len(clients) * case.trials, machine)
    client_step, loop_evaluation = client_step * case.trials, loop_evaluation * case.trials
    evaluate = [each * case.trials for each in evaluate]
    out = {
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "engine": engine.name,
        "compile": case.compile,
        "note": TASKS[case.task].note,
        "clients": len(clients),
        "batch_size": case.batch_size,
        "trials": case.trials,
        "precision": case.precision,
        "client_steps": total,
        "first_round_s": first,
        "train_s": train,
        "judge_s": evaluate,
        "round_s": float(np.median(train) + np.median(evaluate)),
        "step_ms": float(np.median(train)) * scale,
        "step_ms_range": [min(train) * scale, max(train) * scale],
        "loop_step_ms": client_step * len(clients) * 1e3,
        "loop_round_s": client_step * total + loop_evaluation,
        "memory_bytes": memory,
        **floor,
    }
    out["ratio"] = out["loop_step_ms"] / out["step_ms"]
    out["fraction"] = max(floor["floor_bytes_ms"], floor["floor_operations_ms"]) / out["step_ms"]
    return out


def time_loop(spec: RunSpec, clients: list[int], steps: list[int]) -> tuple[float, float]:
    """Return the seconds of one client's step and of the evaluation of all clients with the loop engine."""
    loop = ENGINES["loop"](spec)
    shared, private = initial_state(spec)
    client = clients[int(np.argsort(steps)[len(steps) // 2])]
    phases = loop.plan(client, 0)
    plan = [phase[: max(1, 60 // len(phases))] for phase in phases]
    info = loop.client_info(range(len(spec.federation)), 0)
    own = tree.take(private, client)

    def run() -> None:
        local_round(spec.method, shared, own, spec.federation.table, plan, info.select(client))

    run()
    step = float(np.median([seconds(run) for _ in range(3)])) / sum(len(phase) for phase in plan)
    request = EvalRequest(shared, private, range(len(spec.federation)), 0, "test")
    sizes = spec.federation.n_samples("test")
    with torch.no_grad():
        loop.score_client(request, client, info)
        evaluation = seconds(lambda: loop.score_client(request, client, info))
    return step, evaluation * float(sizes.sum()) / float(sizes[client])


def floor_times(spec: RunSpec, client: int, clients: int, machine: dict[str, Any]) -> dict[str, float]:
    """Return the least time of a step of all clients, averaged over the phases of a round.

    Weights that the step changes are read twice, then read and written once more; operations run at the peak speed.
    """
    method, engine, (shared, private) = spec.method, ENGINES["loop"](spec), initial_state(spec)
    plan, info = engine.plan(client, 0), engine.client_info([client], 0).select(0)
    sizes, operations = [], []
    for phase, steps in zip(method.phases(), plan, strict=True):
        local_state = method.download(shared, tree.take(private, client), info)
        indices = torch.from_numpy(steps[0]).to(spec.device)
        with FlopCounterMode(display=False) as counter:
            after, _ = phase.step(shared, local_state, spec.federation.table.batch(indices[indices >= 0]), info)
        before = tree.flatten(local_state)
        changed = {path: leaf for path, leaf in tree.flatten(after).items() if not torch.equal(leaf, before[path])}
        sizes.append(sum(bytes_changed(path, leaf, spec) for path, leaf in changed.items()))
        operations.append(counter.get_total_flops())
    size, operation = (float(np.average(each, weights=[len(steps) for steps in plan])) for each in (sizes, operations))
    return {
        "parameter_bytes": size,
        "operations": operation,
        "floor_bytes_ms": clients * 4 * size / machine["bytes_per_s"] * 1e3,
        "floor_operations_ms": clients * operation / machine["operations_per_s"] * 1e3,
    }


def bytes_changed(path: str, leaf: torch.Tensor, spec: RunSpec) -> int:
    """Return the bytes of a weight that a step changes: of an embedding, the rows of the batch's words."""
    rows = spec.schedule.batch_size * math.prod(spec.federation.table.shape)
    entries = min(leaf.numel(), rows * leaf.shape[-1]) if "embedding" in path else leaf.numel()
    return entries * leaf.element_size()


def describe_machine() -> dict[str, object]:
    peak = measure_peak_speed()
    return {
        "device": device_name() + ("" if DEVICE.type == "cuda" else f", {torch.get_num_threads()} threads"),
        "torch": torch.__version__,
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "operations_per_s": peak.operations,
        "bytes_per_s": peak.bytes,
    }


def row(key: str, case: dict[str, Any]) -> str:
    low, high = case["step_ms_range"]
    return (
        f"| {key} | {case['engine']} | {case['step_ms']:.3f} ({low:.3f}–{high:.3f}) | {case['loop_step_ms']:.1f} | "
        f"{case['ratio']:.1f}× | {case['round_s']:.3f} | {case['loop_round_s']:.1f} | {case['memory_bytes'] / 2**30:.2f} | "
        f"{case['floor_bytes_ms']:.3f} / {case['floor_operations_ms']:.3f} | {case['fraction']:.0%} | {case['commit']} |"
    )


def page(results: dict[str, dict[str, Any]]) -> str:
    machine = results["machine"]
    lines = [
        f"# Speed on {machine['device']}",
        "",
        f"torch {machine['torch']}. Measured peaks: {machine['operations_per_s'] / 1e12:.2f} TFLOP/s in float32 products, "
        f"{machine['bytes_per_s'] / 1e12:.3f} TB/s in copies.",
        "",
        "A step is one batch of every client. Its lower bound, the *floor*, is the larger of two times: reading the weights",
        "twice and updating them at the copy speed (memory), and the operations at the product speed (arithmetic). Our",
        "kernels use tensor cores, which are faster than that. bN: batches of N instead of 10; xN: N concurrent trials. Each",
        "case was timed against the loop in its own process (the loop's time differs by up to a fifth between processes on",
        "one machine). The JSON file has the commands.",
        "",
        "| task/method/clients | engine | step, ms (range) | loop, ms | ratio | round, s | loop, s "
        "| memory, GiB | floor: memory / arithmetic, ms | floor / step | commit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *[row(key, case) for key, case in results["cases"].items()],
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
