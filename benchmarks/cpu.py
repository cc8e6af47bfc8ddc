"""Time whole rounds (training and test evaluation) on a CPU beside hand-written loops, all in one process.

    python benchmarks/cpu.py [CASE …] --out benchmarks/results/rounds/cpu

A case is task/method, by default all of them. The contestants run in turn, a round each; of all repeats the shortest counts.
With one thread it is the CPU time of the process, which is the time of a round on one otherwise idle core; with more
--threads the wall clock. Under torchrun every process has its own clients, and only our engines take part. Writes NAME.json.

"kernels" are the convolutions and matrix products of all training steps of a round on their own, as the traced step calls
them, in float32 and in bf16: no engine that uses them can be faster. They are compared with "training", our shortest round
without its evaluation. "untraced" and "nchw" are our engine without traced steps and without channels-last weights; "unfused"
is it with compiled steps that leave the weight updates of linear layers to libraries, "bf16" is our engine in bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine import cpu_name, peak_memory
from plain_loops import PlainLoop, Problem, TightLoop
from tasks import TASKS, Task, agnews, images

import gpfl
from gpfl.core import tree
from gpfl.engine import RunSpec, limit_threads, make_engine, matmul_precision
from gpfl.engine.allocator import retain_freed_memory
from gpfl.engine.base import Engine, EvalRequest, TrainRequest
from gpfl.engine.compiler.program import Program
from gpfl.engine.distributed import exit_process, process_group
from gpfl.engine.workers import Workers, num_threads
from gpfl.errors import GpflError
from gpfl.io.provenance import current_commit
from gpfl.training.config import ConfigDict, resolve_config
from gpfl.training.devices import cpu_has_bf16
from gpfl.training.prepare import prepare

CLIENTS, ROWS, BATCH_SIZE = 20, 5_000, 10
METHODS = ("gpfl", "fedavg")
EVEN = {"partition": "pathological", "classes_per_client": 2, "balanced": True}  # for any number of clients
CASES = {
    "fmnist": Task(lambda: images(ROWS, (1, 28, 28), 10, "fmnist-like"), TASKS["fmnist"].net, TASKS["fmnist"].partition),
    "cifar10": Task(lambda: images(ROWS, (3, 32, 32), 10, "cifar10-like"), TASKS["cifar100"].net, TASKS["cifar100"].partition),
    "even": Task(lambda: images(ROWS, (1, 28, 28), 10, "fmnist-like"), TASKS["fmnist"].net, EVEN),
    "digits": TASKS["digits"],
    "agnews": Task(lambda: agnews(ROWS), TASKS["agnews"].net, TASKS["agnews"].partition),
}
LOOPS: dict[str, Callable[[Problem], PlainLoop | TightLoop]] = {"plain": PlainLoop, "tight": TightLoop}
OURS = ("loop", "untraced", "nchw", "ours", "unfused", "compiled", "bf16")
KERNELS = {"kernels": torch.float32, "kernels bf16": torch.bfloat16}
CONTESTANTS = (*LOOPS, *OURS, *KERNELS)
GOALS = {"fmnist": (2.0, 1.6), "cifar10": (2.0, 1.6), "digits": (8.0, 3.0), "agnews": (6.0, 3.0)}  # plain and tight loop / ours
MAX_OVER_KERNELS = 1.25  # training / kernels
COLUMNS = {
    "untraced": "untraced",
    "nchw": "not channels-last",
    "ours": "ours",
    "unfused": "compiled, not fused",
    "compiled": "compiled",
    "bf16": "ours in bf16",
}
COLUMNS |= {"plain": "plain loop", "tight": "tight loop", "loop": "our `loop`"}
COLUMNS |= {"training": "training", "kernels": "kernels", "kernels bf16": "kernels in bf16"}
GOALS_CAPTION = f"""{{met}} of {{count}} ratios meet their goal; those in bold miss it. Rounds (training and test evaluation) of
{CLIENTS} clients with {ROWS:,} samples in total (digits 1,797), batch size {BATCH_SIZE}; ours with or without compiled steps,
whichever is faster. The *plain loop* is written in the manner of the usual libraries, the *tight loop* with as few calls as
eager PyTorch allows (`benchmarks/plain_loops.py`). *Kernels* are the convolutions and matrix products of the training steps
alone, compared with our training alone. The contestants of a case take turns in one process; of all rounds the shortest
counts: CPU time with one thread, wall clock with two. {{machine}}, torch {{torch}}, commit {{commit}}, `{{command}}`.
"""
aten = torch.ops.aten
KERNEL_CALLS = (
    *(aten.convolution.default, aten.convolution_backward.default, aten.mm.default, aten.addmm.default, aten.addmm_.default),
    *(aten.bmm.default, aten.baddbmm.default, aten.baddbmm_.default),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", default=[f"{task}/{method}" for method in METHODS for task in CASES if task != "even"]
    )
    parser.add_argument("--out", type=Path, default=Path("cpu-rounds"))
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; with more than one, the clock counts")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end of a case, after at least one repeat")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--engine", default="auto", help="engine of 'ours' and its variants")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    retain_freed_memory()
    group = process_group()
    processes = f", {group.world_size} processes" if group.world_size > 1 else ""
    results: dict[str, Any] = {
        "machine": f"{cpu_name()}{processes}, {args.threads} thread{'s' * (args.threads > 1)}",
        "torch": torch.__version__,
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "clock": "CPU time" if args.threads == group.world_size == 1 else "wall clock",
        "clients": args.clients,
        "cases": {},
    }
    for case in args.cases:
        results["cases"][case] = time_case(case, args, results["clock"])
        if group.is_main:
            print(row(case, results["cases"][case]), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(results, indent=1))  # after every case: the next may be stopped
        gc.collect()
    exit_process()


def time_case(case: str, args: argparse.Namespace, clock_name: str) -> dict[str, Any]:
    """Return the shortest seconds of a round of every contestant, and the peak memory of the process."""
    task, method = case.split("/")
    spec = run_spec(CASES[task].federation(args.clients), CASES[task].net, method)
    clock = time.process_time if clock_name == "CPU time" else time.perf_counter
    rounds: dict[str, Callable[[], object]] = {}
    training: list[float] = []
    engine_name = ""
    for name in args.only:
        if name in LOOPS:
            rounds[name] = LOOPS[name](problem(spec)).run_round
        elif name in OURS and (engine := make_contestant(name, spec, args.engine)):
            precise = dataclasses.replace(spec, precision="bf16" if name == "bf16" else "float32")
            rounds[name] = round_function(engine, precise, clock, training if name in ("ours", "compiled") else [])
            engine_name = engine.name if name != "loop" else engine_name
            if name == "unfused":
                expand = "gpfl.engine.compiler.program.expand_outer_products"
                with patch(expand, lambda graph: None), suppress(GpflError):  # no compiler on the machine
                    rounds[name]()  # compiles
    times: dict[str, list[float]] = {name: [] for name in rounds}
    end = float("inf")
    for repeat in range(args.repeats + 1):
        if repeat > 1 and process_group().broadcast(time.perf_counter() > end):
            break
        for name, run in list(rounds.items()):
            start = clock()
            try:
                run()
            except GpflError as error:  # no compiler on the machine
                print(f"{case}: without '{name}': {error}", file=sys.stderr)
                del rounds[name], times[name]
                continue
            if repeat:  # the first round traces and allocates
                times[name].append(clock() - start)
        if repeat == 0:
            training.clear()
            end = time.perf_counter() + args.seconds
    seconds = {name: min(each) for name, each in times.items()} | ({"training": min(training)} if training else {})
    steps = sum(max(1, len(shard.train) // BATCH_SIZE) for shard in spec.federation.shards)
    if set(KERNELS) & set(args.only):
        seconds |= kernel_seconds(spec, steps, args, clock)
    return {"engine": engine_name, "client_steps": steps, "peak_bytes": peak_memory(), "seconds": seconds}


def make_contestant(name: str, spec: RunSpec, engine_name: str) -> Engine | None:
    """Return the engine of a contestant; None where it would be the same as another or the CPU cannot run it."""
    if name == "bf16" and not cpu_has_bf16():
        return None
    spec = dataclasses.replace(spec, compile="on" if name in ("unfused", "compiled") else "off")
    engine = make_engine("loop" if name == "loop" else engine_name, spec)
    if name == "untraced":
        engine.min_calls_to_trace = 10**9  # type: ignore[attr-defined]
    if name == "nchw":
        if not isinstance(engine, Workers):
            return None
        engine.max_channels_last = 0  # type: ignore[misc]
    return engine


def kernel_seconds(spec: RunSpec, steps: int, args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds that the convolutions and matrix products of all steps of a round take, by contestant."""
    engine = make_engine(args.engine, dataclasses.replace(spec, compile="off"))
    if not isinstance(engine, Workers):  # its steps are of other shapes
        return {}
    round_function(engine, spec)()
    program = next(iter(engine._programs.values()))[0]
    if program is None:
        return {}
    workers, out = engine.n_workers, {}
    for name in set(KERNELS) & set(args.only):
        calls = [kernel_calls(program, KERNELS[name]) for _ in range(workers)]
        times = []
        with num_threads(1), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in range(args.repeats * 3):
                start = clock()
                list(pool.map(run_calls, calls))
                times.append(clock() - start)
        out[name] = min(times) / CALLS * steps / workers
    return out


CALLS = 20  # steps whose kernels are timed at once


def kernel_calls(program: Program, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Return the kernels of a traced step as functions, on random inputs of the same shapes and memory formats."""

    def example(value: object) -> object:
        if not isinstance(value, torch.fx.Node):
            return value
        like = value.meta["val"]
        sizes = [1 if stride == 0 else size for size, stride in zip(like.shape, like.stride(), strict=True)]  # expanded
        return torch.empty_strided(sizes, like.stride()).normal_(std=0.01).to(dtype).expand(like.shape)

    nodes = [node for node in program._run.graph.nodes if node.target in KERNEL_CALLS]  # type: ignore[attr-defined]
    return [partial(node.target, *map(example, node.args), **node.kwargs) for node in nodes]


def run_calls(calls: list[Callable[[], object]]) -> None:
    with torch.no_grad():
        for _ in range(CALLS):
            for call in calls:
                call()


def run_spec(federation: gpfl.Federation, net: Any, method: str, **train: object) -> RunSpec:
    sections: ConfigDict = {
        "net": dict(net),
        "method": {"name": method},
        "train": {"rounds": 100, "batch_size": BATCH_SIZE, **train},
        "run": {"device": "cpu"},
    }
    return prepare(resolve_config(sections, federation=federation), federation)[1]


def round_function(
    engine: Engine, spec: RunSpec, clock: Callable[[], float] = time.perf_counter, training: list[float] | None = None
) -> Callable[[], float]:
    """Return the function that runs the next round of an engine with its evaluation, and returns its accuracy.

    It appends the seconds of the round without its evaluation to `training`.
    """
    shared, private = spec.method.init(0)
    clients, cohort, round_ = list(engine.local_clients), range(len(spec.federation)), 0
    private = tree.take(engine.initial_private(private), torch.tensor(clients))

    def run() -> float:
        nonlocal shared, private, round_
        start = clock()
        with limit_threads(spec), matmul_precision(spec.precision):
            result = engine.train_round(TrainRequest(shared, private, clients, round_, spec.schedule, cohort, spec.method))
            shared, private, round_ = spec.method.aggregate(shared, result.mean), result.private, round_ + 1
            if training is not None:
                training.append(clock() - start)
            return engine.evaluate_clients(EvalRequest(shared, private, clients, round_, "test")).accuracy

    return run


def problem(spec: RunSpec) -> Problem:
    """Return a run as the hand-written loops take it, with converted samples in memory."""
    federation, net, method = spec.federation, spec.method.net, spec.method
    return Problem(
        x=federation.table.inputs(torch.arange(len(federation.table))),
        y=federation.table.y,
        train=[shard.train for shard in federation.shards],
        test=[shard.test for shard in federation.shards],
        base=net.make_module("base"),
        head=net.make_module("head"),
        width=net.width,
        classes=net.classes,
        method=method.name,
        lr=method.lr,
        batch_size=spec.schedule.batch_size,
        lam=getattr(method, "lam", 0.0),
        mu=getattr(method, "mu", 0.0),
    )


def goals_page(results: list[dict[str, Any]]) -> str:
    """Return the table of the ratios that have a goal, a column for each number of threads, and the number that meet it."""
    threads = [result["machine"].split(", ")[-1] for result in results]
    met = count = 0
    rows = []
    for case in dict.fromkeys(case for result in results for case in result["cases"]):
        task, cells = case.split("/")[0], [case]
        limits = [*(f"≥ {goal:g}" for goal in GOALS[task]), f"≤ {MAX_OVER_KERNELS}"]
        for index, limit in enumerate(limits):
            ratios = [goal_ratios(result["cases"][case]["seconds"])[index] for result in results if case in result["cases"]]
            if not any(ratios):
                cells += ["–"] * (1 + len(results))
                continue
            cells.append(limit)
            for ratio in ratios:
                reached = ratio is not None and (ratio >= GOALS[task][index] if index < 2 else ratio <= MAX_OVER_KERNELS)
                count, met = count + (ratio is not None), met + reached
                cells.append("–" if ratio is None else f"{ratio:.2f}" if reached else f"**{ratio:.2f}**")
        rows.append(f"| {' | '.join(cells)} |")
    heads = [f"{name}: goal | {' | '.join(threads)}" for name in ("plain loop / ours", "tight loop / ours", "ours / kernels")]
    lines = [
        GOALS_CAPTION.format(met=met, count=count, **{**results[0], "machine": results[0]["machine"].split(", ")[0]}),
        f"| case | {' | '.join(heads)} |",
        f"| --- {'| ---: ' * len(heads) * (1 + len(results))}|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def goal_ratios(seconds: dict[str, float]) -> list[float | None]:
    """Return the times of the plain and the tight loop in ours, and our training in its kernels; None where not timed."""
    ours = min((seconds[name] for name in ("ours", "compiled") if name in seconds), default=None)
    ratios = [seconds[name] / ours if ours and name in seconds else None for name in LOOPS]
    return [*ratios, seconds["training"] / seconds["kernels"] if {"training", "kernels"} <= set(seconds) else None]


def rounds_page(result: dict[str, Any]) -> str:
    """Return the table of the milliseconds of a round, a column for each contestant that was timed."""
    names = [name for name in COLUMNS if any(name in case["seconds"] for case in result["cases"].values())]
    lines = [
        f"**{result['machine']}, {result['clock']}**",
        "",
        f"| case | engine | {' | '.join(COLUMNS[name] for name in names)} |",
        f"| --- | --- {'| ---: ' * len(names)}|",
        *[row(case, values, names) for case, values in result["cases"].items()],
    ]
    return "\n".join(lines) + "\n"


def row(case: str, result: dict[str, Any], names: Sequence[str] = tuple(COLUMNS)) -> str:
    cells = [milliseconds(result["seconds"], name) for name in names]
    return f"| {case} | {result['engine']} | {' | '.join(cells)} |"


def milliseconds(seconds: dict[str, float], name: str) -> str:
    return f"{seconds[name] * 1e3:.{0 if seconds[name] > 0.05 else 1}f}" if name in seconds else "–"


def growth_page(results: list[dict[str, Any]]) -> str:
    """Return the table of rounds by number of clients, each contestant measured in a process of its own."""
    first = results[0]
    names = [name for name in CONTESTANTS if any(name in result["cases"]["even/gpfl"]["seconds"] for result in results)]
    cells: dict[tuple[int, str], str] = {}
    for result in results:
        case = result["cases"]["even/gpfl"]
        for name, seconds in case["seconds"].items():
            cells[result["clients"], name] = f"{seconds:.2f} s, {case['peak_bytes'] / 2**20:,.0f} MiB"
    lines = [
        "## Rounds by number of clients",
        "",
        f"A round of GPFL and the peak memory of the process: 28×28 CNN, {ROWS:,} samples in total, {first['machine']}, torch",
        f"{first['torch']}, commit {first['commit']}, {first['clock']}. One process each, such as",
        f"`{first['command']}`.",
        "",
        f"| clients | {' | '.join(names)} |",
        f"| ---: {'| ---: ' * len(names)}|",
    ]
    for clients in sorted({clients for clients, _ in cells}):
        lines.append(f"| {clients} | {' | '.join(cells.get((clients, name), '–') for name in names)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
