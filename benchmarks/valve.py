"""Time steps and rounds of GPFL with the full and the factored valve beside FedPer, and measure memory with 500 clients.

    python benchmarks/valve.py [CASE …] --out benchmarks/results/valve/NAME

The data are random with the shapes of the published ones. FedPer and both forms of GPFL run in turn in one process, a round
each; of all repeats the shortest counts, in CPU time of one thread. A round is training and test evaluation. Memory is the
peak of a process that runs one round. Writes NAME.json and NAME.md; cases that NAME.json has are skipped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu import images
from machine import cpu_name, peak_memory
from tasks import TASKS, VOCABULARY, Task

import gpfl
from gpfl.core import tree
from gpfl.core.method import ClientInfo
from gpfl.defences import upload_bytes
from gpfl.engine import RunSpec, limit_threads, make_engine
from gpfl.engine.allocator import retain_freed_memory
from gpfl.io.provenance import current_commit
from gpfl.methods.fedper import FedPer
from gpfl.methods.gpfl import GPFL
from gpfl.models.architectures import CNN4, HARCNN, FastText, net_from_architecture
from gpfl.training.config import ConfigDict, resolve_config
from gpfl.training.prepare import prepare

DIRICHLET = {"partition": "dirichlet", "beta": 1.0}


def har(n: int = 2_000) -> gpfl.Table:
    x = np.random.default_rng(0).normal(size=(n, 9, 1, 128)).astype(np.float32)
    return gpfl.Table(x, np.arange(n) % 6, classes=6, name="har-like")


WIDE = {"name": "mlp", "hidden": [1664]}
CASES: dict[str, tuple[Task, int, float | None]] = {  # clients, and the goal for a round in rounds of FedPer
    "cnn4, Cifar100": (Task(lambda: images(5_000, (3, 32, 32), 100, "cifar100-like"), {"name": "cnn4"}, DIRICHLET), 20, 1.35),
    "HAR-CNN": (Task(har, {"name": "harcnn"}, DIRICHLET), 6, 1.35),
    "ResNet-18, Tiny-ImageNet": (
        Task(lambda: images(200, (3, 64, 64), 20, "tiny-like"), {"name": "resnet18"}, DIRICHLET), 4, None,
    ),
    "MLP, digits": (Task(TASKS["digits"].table, WIDE, TASKS["digits"].partition), 6, 1.6),
}  # fmt: skip
EXTRA = ("bytes", "memory")
METHODS: dict[str, dict[str, object]] = {
    "FedPer": {"name": "fedper"},
    "full": {"name": "gpfl", "valve": "full"},
    "factored": {"name": "gpfl", "valve": "factored"},
    "low rank": {"name": "gpfl", "valve": "factored", "valve_upload": "low_rank"},
}
LANES = {  # engine, and whether steps are compiled
    "loop": ("loop", "off"),
    "workers": ("workers", "off"),
    "vmap": ("vmap", "off"),
    "workers, compiled": ("workers", "on"),
    "vmap, compiled": ("vmap", "on"),
}
FORMS = ("full", "low_rank", "factors")  # of uploads
UPLOADS = {  # by net: shape of the samples, or vocabulary, and number of classes
    "cnn4": ((3, 32, 32), 100),
    "harcnn": ((9, 1, 128), 6),
    "fasttext": (VOCABULARY, 4),
}
MANY = 500
MEMORY = {"cnn4": {"name": "cnn4"}, "MLP of width 1664": WIDE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES, *EXTRA], metavar="CASE", help=", ".join([*CASES, *EXTRA]))
    parser.add_argument("--out", type=Path, default=Path("valve"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lanes", nargs="*", default=[*LANES], choices=LANES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    file = args.out.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"cases": {}, "memory": {}}
    results |= {"machine": cpu_name(), "torch": torch.__version__, "command": f"python benchmarks/valve.py --out {args.out}"}
    for case in args.cases:
        if case == "bytes":
            results["bytes"] = {net: count_upload_bytes(net) for net in UPLOADS}
        elif case == "memory":
            jobs = [(net, method) for net in MEMORY for method in METHODS]
            results["memory"] = {f"{net}/{method}": measure_in_process(net, method) for net, method in jobs}
        else:
            lanes = results["cases"].setdefault(case, {})
            for lane in (lane for lane in args.lanes if lane not in lanes):
                lanes[lane] = {"commit": current_commit(), **time_case(case, *LANES[lane], args.repeats)}
                file.write_text(json.dumps(results, indent=1) + "\n")
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(page(results), flush=True)
    file.with_suffix(".md").write_text(page(results), encoding="utf-8")


def run_spec(
    federation: gpfl.Federation, net: Mapping[str, object], method: Mapping[str, object], compile: str = "off"
) -> RunSpec:
    sections: ConfigDict = {"run": {"compile": compile}, "net": dict(net), "method": dict(method), "train": {"rounds": 100}}
    return prepare(resolve_config(sections, federation=federation), federation)[1]


def time_case(case: str, engine_name: str, compile: str, repeats: int) -> dict[str, object]:
    """Return the shortest times of training with aggregation, and of evaluation, of each method, in seconds."""
    task, clients, _ = CASES[case]
    federation = task.federation(clients)
    specs = {name: run_spec(federation, task.net, method, compile) for name, method in METHODS.items()}
    engines = {name: make_engine(engine_name, spec) for name, spec in specs.items()}
    states = {name: spec.method.init(0) for name, spec in specs.items()}
    states = {name: (shared, tree.repeat(private, clients)) for name, (shared, private) in states.items()}
    train: dict[str, list[float]] = {name: [] for name in METHODS}
    evaluate: dict[str, list[float]] = {name: [] for name in METHODS}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            with limit_threads(specs[name]):
                start = time.process_time()
                result = engine.train(*states[name], range(clients), repeat)
                engine.method.aggregate(states[name][0], result.mean)
                middle = time.process_time()
                engine.evaluate(*states[name], repeat, "test")
                end = time.process_time()
            if repeat:  # the first round traces and allocates
                train[name].append(middle - start)
                evaluate[name].append(end - middle)
    steps = sum(len(phase) for client in range(clients) for phase in engines["FedPer"].plan(client, 0))
    return {
        "width": specs["full"].method.net.width,
        "client_steps": steps,
        "step_ms": {name: 1e3 * min(times) / steps for name, times in train.items()},
        "round_s": {name: min(times) + min(evaluate[name]) for name, times in train.items()},
    }


def count_upload_bytes(name: str) -> dict[str, int]:
    """Return the bytes that a client of FedPer sends in a round, and of GPFL with each form of the valve."""
    shape, classes = UPLOADS[name]
    if isinstance(shape, int):
        net = net_from_architecture(FastText(vocabulary=shape), name, torch.zeros(2, 8, dtype=torch.int64), classes)
    else:
        net = net_from_architecture({"cnn4": CNN4, "harcnn": HARCNN}[name](), name, torch.zeros(2, *shape), classes)
    client = ClientInfo(torch.tensor(float(classes)), torch.ones(classes), *torch.zeros(3))
    sizes = {}
    for form, method in {"FedPer": FedPer(), **{form: GPFL(valve_upload=form) for form in FORMS}}.items():
        bound = method.bind(net, lr=0.005, epochs=1)
        shared, private = bound.init(0)
        sizes[form] = upload_bytes(bound, bound.upload(shared, bound.download(shared, private, client), private, client)[0])
    return {"width": net.width, "classes": classes, **sizes}


def measure_in_process(net: str, method: str) -> int:
    """Return the peak memory of a process of its own that trains a round of many clients with `vmap`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_memory, (net, method))


def measure_memory(net: str, method: str) -> int:
    torch.set_num_threads(1)
    shape = (3, 32, 32) if net == "cnn4" else (1, 8, 8)
    even = {"partition": "pathological", "classes_per_client": 10, "balanced": True}
    federation = gpfl.federate(images(40 * MANY, shape, 100, "even"), clients=MANY, **even)
    spec = run_spec(federation, MEMORY[net], METHODS[method])
    shared, private = spec.method.init(0)
    with limit_threads(spec):
        make_engine("vmap", spec).train(shared, tree.repeat(private, MANY), range(MANY), 0)
    return peak_memory()


def page(results: dict[str, Any]) -> str:
    lines = [
        "# Cost of GPFL's valve",
        "",
        f"CPU time of one thread, {results['machine']}, torch {results['torch']}, `{results['command']}`. Random data of the",
        "published shapes, batch size 10, the shortest of all repeats of methods that run in turn.",
        "A round is training, aggregation and test evaluation. *Full* trains V, *factored* A and B; *low rank* adds",
        "`--valve-upload low_rank`. Ratios are to FedPer.",
        "",
    ]
    sent = (
        ["", "Bytes that a client sends in a round, of the valve and in all:", "", *byte_rows(results)]
        if "bytes" in results
        else []
    )
    return "\n".join([*lines, *rows(results), *sent]) + "\n"


def byte_rows(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table of uploads."""
    lines = [
        "| net | K | U | valve: `full` | `low_rank` | `factors` | upload: `full` | `low_rank` | `factors` | FedPer |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for net, sizes in results["bytes"].items():
        others = sizes["full"] - 4 * (2 * sizes["width"] ** 2 + 6 * sizes["width"])
        numbers = [sizes["width"], sizes["classes"], *(sizes[form] - others for form in FORMS)]
        numbers += [sizes[form] for form in (*FORMS, "FedPer")]
        lines.append(f"| {net} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return lines


def rows(results: dict[str, Any]) -> list[str]:
    """Return the lines of the tables."""
    lines = [
        "| net and data | K | engine | training per step, ms: FedPer | full | factored | low rank | "
        "round: full | factored | low rank | goal |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in (case for case in CASES if case in results["cases"]):
        result, goal = results["cases"][case], CASES[case][2]
        for lane, timed in ((lane, result[lane]) for lane in LANES if lane in result):
            steps = " | ".join(f"{timed['step_ms'][name]:.2f}" for name in METHODS)
            rounds = [timed["round_s"][name] / timed["round_s"]["FedPer"] for name in METHODS][1:]
            ratios = " | ".join(f"{ratio:.2f} ×" for ratio in rounds)
            lines.append(f"| {case} | {timed['width']} | {lane} | {steps} | {ratios} | {f'{goal:.2f} ×' if goal else '–'} |")
    if results["memory"]:
        lines += [
            "",
            f"Peak memory of a round of {MANY} clients with `vmap` (64 clients at once), GiB:",
            "",
            "| net | FedPer | full | factored |",
            "| --- | ---: | ---: | ---: |",
        ]
        for net in MEMORY:
            cells = " | ".join(f"{results['memory'][f'{net}/{name}'] / 2**30:.2f}" for name in METHODS)
            lines.append(f"| {net} | {cells} |")
    return lines


if __name__ == "__main__":
    main()
