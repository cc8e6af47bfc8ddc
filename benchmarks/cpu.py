"""Time whole rounds (training and test evaluation) on a CPU beside hand-written loops, all in one process.

    python benchmarks/cpu.py [CASE …] --out benchmarks/results/cpu-rounds

A case is task/method, by default all of them. The contestants run in turn, a round each; of all repeats the shortest counts.
With one thread it is the CPU time of the process, which is the time of a round on one otherwise idle core; with more
--threads the wall clock. Writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import cpu_name
from plain_loops import PlainLoop, Problem, TightLoop
from tasks import TASKS, Task, agnews, images

import gpfl
from gpfl.engine import RunSpec, limit_threads, make_engine
from gpfl.engine.allocator import retain_freed_memory
from gpfl.io.provenance import current_commit
from gpfl.training.config import ConfigDict, resolve_config
from gpfl.training.prepare import prepare

CLIENTS, ROWS, BATCH_SIZE = 20, 5_000, 10
METHODS = ("gpfl", "fedavg")
CASES = {
    "fmnist": Task(lambda: images(ROWS, (1, 28, 28), 10, "fmnist-like"), TASKS["fmnist"].net, TASKS["fmnist"].partition),
    "cifar10": Task(lambda: images(ROWS, (3, 32, 32), 10, "cifar10-like"), TASKS["cifar100"].net, TASKS["cifar100"].partition),
    "digits": TASKS["digits"],
    "agnews": Task(lambda: agnews(ROWS), TASKS["agnews"].net, TASKS["agnews"].partition),
}
CONTESTANTS = ("plain", "tight", "loop", "ours", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[f"{task}/{method}" for method in METHODS for task in CASES])
    parser.add_argument("--out", type=Path, default=Path("cpu-rounds"))
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; with more than one, the clock counts")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--engine", default="auto", help="engine of 'ours' and 'compiled'")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    retain_freed_memory()
    results: dict[str, Any] = {
        "machine": f"{cpu_name()}, {args.threads} thread{'s' * (args.threads > 1)}",
        "torch": torch.__version__,
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "clock": "CPU time" if args.threads == 1 else "wall clock",
        "cases": {},
    }
    for case in args.cases:
        results["cases"][case] = time_case(case, args)
        print(row(case, results["cases"][case]), flush=True)
        gc.collect()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1))
    args.out.with_suffix(".md").write_text(page(results))


def time_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the shortest seconds of a round of every contestant."""
    task, method = case.split("/")
    spec = run_spec(CASES[task].federation(CLIENTS), CASES[task].net, method)
    rounds: dict[str, Callable[[], object]] = {}
    engine_name = ""
    for name in args.only:
        if name in ("plain", "tight"):
            rounds[name] = {"plain": PlainLoop, "tight": TightLoop}[name](problem(spec)).run_round
        else:
            compiled = dataclasses.replace(spec, compile="on" if name == "compiled" else "off")
            rounds[name], found = engine_round(compiled, "loop" if name == "loop" else args.engine)
            engine_name = engine_name if name == "loop" else found
    clock = time.process_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(args.repeats + 1):
        for name, run in rounds.items():
            start = clock()
            run()
            if repeat:  # the first round traces and allocates
                times[name].append(clock() - start)
    steps = sum(max(1, len(shard.train) // BATCH_SIZE) for shard in spec.federation.shards)
    return {"engine": engine_name, "client_steps": steps, "seconds": {name: min(each) for name, each in times.items()}}


def run_spec(federation: gpfl.Federation, net: Any, method: str) -> RunSpec:
    sections: ConfigDict = {
        "net": dict(net),
        "method": {"name": method},
        "train": {"rounds": 100, "batch_size": BATCH_SIZE},
    }
    return prepare(resolve_config(sections, federation=federation), federation)[1]


def engine_round(spec: RunSpec, name: str) -> tuple[Callable[[], object], str]:
    """Return the function that runs the next round of an engine with its evaluation, and the engine's name."""
    engine = make_engine(name, spec)
    shared, private = spec.method.init(0)
    private = engine.initial_private(private)
    round_ = 0

    def run() -> float:
        nonlocal shared, private, round_
        with limit_threads(spec):
            result = engine.train(shared, private, range(len(spec.federation)), round_)
            shared, private, round_ = spec.method.aggregate(shared, result.mean), result.private, round_ + 1
            return engine.evaluate(shared, private, round_, "test").accuracy

    return run, engine.name


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


def row(case: str, result: dict[str, Any]) -> str:
    seconds = result["seconds"]
    ours = [seconds[name] for name in ("ours", "compiled") if name in seconds]
    cells = [f"{seconds[name] * 1e3:.0f}" if name in seconds else "–" for name in ("ours", "compiled")]
    for name in ("plain", "tight", "loop"):
        ratios = " / ".join(f"{seconds[name] / each:.2f}" for each in ours) if name in seconds else ""
        cells.append(f"{seconds[name] * 1e3:.0f} ({ratios})" if name in seconds else "–")
    return f"| {case} | {result['engine']} | {' | '.join(cells)} |"


def page(results: dict[str, Any]) -> str:
    lines = [
        f"# Rounds beside hand-written loops: {results['machine']}",
        "",
        f"Milliseconds of a round (training and test evaluation): {CLIENTS} clients, {ROWS:,} samples in total (digits 1,797),",
        f"batch size {BATCH_SIZE}: {results['clock']}, the shortest of all repeats. In brackets: how many times as long as",
        "ours without and with compiled steps. The *plain loop* is written in the manner of the usual libraries, the",
        "*tight loop* with as few calls as eager PyTorch allows (both in `benchmarks/plain_loops.py`).",
        f"torch {results['torch']}, commit {results['commit']}, `{results['command']}`.",
        "",
        "| case | engine | ours | compiled | plain loop | tight loop | our `loop` |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *[row(case, result) for case, result in results["cases"].items()],
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
