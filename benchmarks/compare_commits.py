"""Compare two revisions of this repository: are their results equal to the bit, and is an engine of the new one slower?

    python benchmarks/compare_commits.py OLD NEW [--numbers-only | --speed-only]

Each revision is checked out into a temporary git worktree and run in processes of its own.

Numbers: every method on every engine trains an mlp on digits for 20 clients and 3 rounds. The accuracy of each round and the
tensors of all exported models must be equal; names and metadata of tensors are ignored. GPFL's factored valve rounds
differently from revisions that trained the whole valve, so numbers are compared with --valve full by default; a revision
without that option has no other form. --valve auto compares what runs train, between revisions that both have it. That the two
forms agree in float64 is shown by tests/methods/test_factored_valve.py. Speed is always that of the default form.

Speed: both revisions are loaded once and then time rounds in turn, so that a change of the machine's load affects both. A
round trains and evaluates all clients. On a busy machine medians differ by several percent, so an engine counts as slower only
if both the ratio of the medians and that of the minima are above --max-slowdown.

Exits with code 1 if a number differs or an engine is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

METHODS = (
    "gpfl",
    "fedavg",
    "fedprox",
    "perfedavg",
    "pfedme",
    "ditto",
    "fedper",
    "fedrep",
    "fedrod",
    "fedphp",
    "fedproto",
    "local",
    "fedavg-ft",
)
ENGINES = ("loop", "vmap", "workers")
TASKS = ("digits mlp", "images cnn4")
SAMPLE_SECONDS = 0.3
"""Least duration of one timing, for which a round is repeated."""

Numbers = dict[str, dict[str, Any]]
"""Accuracies by round and digests of exported models, by "method engine"."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="git revision")
    parser.add_argument("new", help="git revision")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--numbers-only", action="store_true")
    only.add_argument("--speed-only", action="store_true")
    parser.add_argument("--methods", default=",".join(METHODS), help="for the numbers")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--valve", choices=("full", "factored", "auto"), default="full", help="GPFL's form, for the numbers")
    parser.add_argument("--repeats", type=int, default=9, help="timings of each revision (default 9)")
    parser.add_argument("--max-slowdown", type=float, default=1.03, help="largest allowed ratio new/old (default 1.03)")
    args = parser.parse_args()
    methods, engines = args.methods.split(","), args.engines.split(",")
    ok = True
    with worktrees(args.old, args.new) as (old, new):
        if not args.speed_only:
            print(f"Numbers of {args.new} against {args.old}: accuracies of 3 rounds, exported models")
            differences = compare_numbers(*(run_numbers(each, methods, engines, args.valve) for each in (old, new)))
            print(numbers_table(differences, methods, engines), flush=True)
            ok = not any(differences.values())
        if not args.numbers_only:
            print(f"\nSpeed: milliseconds per round, median of {args.repeats}")
            ratios = [compare_speed(old, new, task, engine, args.repeats) for task in TASKS for engine in engines]
            ok = all(ratio <= args.max_slowdown for ratio in ratios) and ok
    print("\nOK" if ok else "\nDIFFERENT OR SLOWER", flush=True)
    raise SystemExit(0 if ok else 1)


@contextlib.contextmanager
def worktrees(*revisions: str) -> Iterator[list[Path]]:
    """Check revisions out into temporary worktrees."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("old", "new")[: len(revisions)]]
        try:
            for path, revision in zip(paths, revisions, strict=True):
                git(root, "worktree", "add", "--quiet", "--detach", str(path), revision)
            yield paths
        finally:
            for path in paths:
                if path.exists():
                    git(root, "worktree", "remove", "--force", str(path))


def git(root: Path, *args: str) -> None:
    subprocess.run(["git", "-C", str(root), *args], check=True, stdout=subprocess.DEVNULL)


def start_worker(tree: Path, *args: str) -> subprocess.Popen[str]:
    """Start this file with the package of a worktree."""
    command = [sys.executable, __file__, "--worker", *args]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return subprocess.Popen(command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_json(worker: subprocess.Popen[str]) -> Any:
    line = pipe(worker.stdout).readline()
    if not line:
        raise SystemExit(f"a worker failed with code {worker.wait()}, see above")
    return json.loads(line)


def pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ValueError("the worker has no pipe")
    return stream


# The numbers.


def run_numbers(tree: Path, methods: list[str], engines: list[str], valve: str) -> Numbers:
    worker = start_worker(tree, "numbers", ",".join(methods), ",".join(engines), valve)
    numbers: Numbers = read_json(worker)
    worker.communicate()
    return numbers


def compare_numbers(old: Numbers, new: Numbers) -> dict[str, str]:
    """Return the difference of each entry as a text, empty where there is none."""
    return {key: difference(old[key], new[key]) for key in old if key in new}


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old["accuracy"] != new["accuracy"]:
        gaps = [abs(a - b) for a, b in zip(old["accuracy"], new["accuracy"], strict=False)]
        return f"accuracy by {max(gaps, default=math.nan):.2g}"
    return "" if old["models"] == new["models"] else "tensors"


def numbers_table(differences: Mapping[str, str], methods: list[str], engines: list[str]) -> str:
    lines = [f"{'method':12}" + "".join(f"{engine:>20}" for engine in engines)]
    for method in methods:
        cells = [differences.get(f"{method} {engine}", "in one only") or "equal" for engine in engines]
        lines.append(f"{method:12}" + "".join(f"{cell:>20}" for cell in cells))
    count = sum(not text for text in differences.values())
    return "\n".join([*lines, f"equal to the bit: {count} of {len(differences)}"])


def numbers(methods: list[str], engines: list[str], valve: str) -> Numbers:
    """Return the numbers of the package on the path, without methods that it does not have."""
    import gpfl

    federation, out = digits(), {}
    for method in [name for name in methods if name in gpfl.methods.METHODS]:
        options: dict[str, Any] = {"valve": valve} if hasattr(gpfl.methods.METHODS[method], "valve") else {}
        for engine in engines:
            result = gpfl.fit(method, federation, net="mlp", rounds=3, seed=0, engine=engine, lr=0.05, **options)
            out[f"{method} {engine}"] = {
                "accuracy": [record["accuracy"] for record in result.history],
                "models": export_digests(result),
            }
    return out


def export_digests(result: Any) -> list[list[str]]:
    """Return for every client's model the sorted digests of its tensors."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        models = [load_file(path) for path in sorted(map(Path, result.export(folder)))]
    return [
        sorted(hashlib.sha256(f"{t.dtype} {t.shape}".encode() + t.tobytes()).hexdigest() for t in model.values())
        for model in models
    ]


def digits() -> Any:
    import gpfl

    options: dict[str, Any] = {"clients": 20, "classes_per_client": 4}
    try:
        return gpfl.federate("digits", partition="pathological", **options)
    except gpfl.GpflError:  # before the option was renamed
        return gpfl.federate("digits", split="pathological", **options)


# The speed.


def compare_speed(old: Path, new: Path, task: str, engine: str, repeats: int) -> float:
    """Time rounds of both revisions in turn, print the ratios new/old, and return the smaller one."""
    workers = [start_worker(tree, "speed", task, engine) for tree in (old, new)]
    try:
        first = [read_json(worker) for worker in workers]
        rounds = max(1, math.ceil(SAMPLE_SECONDS / min(first)))
        times: list[list[float]] = [[], []]
        for repeat in range(repeats):
            for index in (0, 1) if repeat % 2 == 0 else (1, 0):
                print(rounds, file=pipe(workers[index].stdin), flush=True)
                times[index].append(read_json(workers[index]))
    finally:
        for worker in workers:
            worker.communicate()
    before, after = (statistics.median(each) * 1e3 for each in times)
    median, least = after / before, min(times[1]) / min(times[0])
    print(
        f"{task:12} {engine:8} old {before:9.2f}   new {after:9.2f}   new/old {median:.3f} (of minima {least:.3f})", flush=True
    )
    return min(median, least)


def speed(task: str, engine: str, commands: IO[str], answers: IO[str]) -> None:
    """Time as many rounds as each command says, with the package on the path."""
    import torch

    import gpfl

    federation = digits() if task == "digits mlp" else images()
    # As many rounds as make steps worth tracing.
    result = gpfl.fit("gpfl", federation, net=task.split()[1], rounds=30, seed=0, engine=engine, lr=0.05, eval_every=30)
    state, runner, clients = result.outcome.last, result.engine, range(len(federation))
    if task == "digits mlp":
        torch.set_num_threads(1)  # as in a run

    def run(rounds: int) -> float:
        start = time.perf_counter()
        for round_ in range(rounds):
            runner.train(state.shared, state.private, clients, round_)
            runner.evaluate(state.shared, state.private, round_, "test")
        return (time.perf_counter() - start) / rounds

    run(1)
    print(json.dumps(run(1)), file=answers, flush=True)
    for line in commands:
        print(json.dumps(run(int(line))), file=answers, flush=True)


def images() -> Any:
    """Return 8 clients with 40 random images of 28 × 28 each."""
    import numpy as np

    import gpfl

    rng = np.random.default_rng(0)
    return gpfl.federate([(rng.integers(0, 256, (40, 1, 28, 28), dtype=np.uint8), np.arange(40) % 10) for _ in range(8)])


def work(job: str, *args: str) -> None:
    """Do a worker's job; its answers are the only output to stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch

    import gpfl

    if not Path(gpfl.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"gpfl is imported from {gpfl.__file__}, not from the worktree {Path.cwd()}")
    if job == "numbers":
        torch.set_num_threads(2)  # the order of sums of workers depends on it
        print(json.dumps(numbers(args[0].split(","), args[1].split(","), args[2])), file=answers, flush=True)
    else:
        speed(args[0], args[1], sys.stdin, answers)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that worktrees are removed
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
