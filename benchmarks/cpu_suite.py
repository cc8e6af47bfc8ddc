"""Run the CPU benchmarks of the speed page, each on two cores of its own, and write their files into a folder of results.

    python benchmarks/cpu_suite.py --out benchmarks/results [--minutes 6] [--one-after-another]

Lanes of two cores run side by side, as many as the machine has; with --one-after-another there is one. A lane starts no
command when the time is up; `cpu.py` writes its file after every case, so a measurement that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BENCHMARKS = Path("benchmarks")  # commands are recorded as they are run, in the root of the repository
GROWTH = [(clients, name) for clients in (20, 100, 500) for name in ("plain", "compiled")]
RESULTS = "rounds", "growth", "startup", "curves"


def lanes(out: Path, old: Path | None) -> list[list[list[str]]]:
    """Return the commands of each lane: those that are compared with each other are in one."""
    cpu, rounds = "cpu.py", out / "rounds"
    tasks = ["fmnist", "cifar10"], ["digits", "agnews"]  # large and small nets
    cases = [[f"{task}/{method}" for method in ("gpfl", "fedavg") for task in each] for each in tasks]
    engines = ["--only", "ours", "compiled", "--repeats", "6"]
    growth = [cpu, "even/gpfl", "--threads", "2", "--repeats", "2"]
    processes = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(BENCHMARKS / cpu)]
    return [
        [[cpu, *cases[0], "--repeats", "3", "--out", f"{rounds / 'cpu-1-thread-cnn'}"]],
        [[cpu, *cases[0], "--repeats", "4", "--threads", "2", "--out", f"{rounds / 'cpu-2-threads-cnn'}"]],
        [
            [cpu, *cases[1], "--repeats", "8", "--out", f"{rounds / 'cpu-1-thread-small'}"],
            [cpu, *cases[1], "--repeats", "8", "--threads", "2", "--out", f"{rounds / 'cpu-2-threads-small'}"],
            [*processes, *cases[0], *engines, "--out", f"{rounds / 'cpu-2-processes'}"],
        ],
        [
            [*growth, "--clients", f"{n}", "--only", name, "--out", f"{out / 'growth' / f'cpu-{n}-{name}'}"]
            for n, name in GROWTH
        ],
        [
            ["startup.py", "--out", f"{out / 'startup' / 'new'}"],
            *([["startup.py", "--source", f"{old}", "--out", f"{out / 'startup' / 'before'}"]] if old else []),
            ["curve.py", "--out", f"{out / 'curves' / 'cpu'}"],
        ],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--old-source", type=Path, help="the src folder of an older checkout, whose start-up is timed as well")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--one-after-another", action="store_true")
    args = parser.parse_args()
    for folder in RESULTS:
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    cores = sorted(os.sched_getaffinity(0))
    pairs = [cores[i : i + 2] for i in range(0, len(cores) - 1, 2)] or [cores]
    work = lanes(args.out, args.old_source)
    if args.one_after_another or len(pairs) < len(work):
        work = [[command for lane in work for command in lane]]
    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(lambda lane: run_lane(*lane, deadline), zip(work, pairs, strict=False)))


def run_lane(commands: list[list[str]], cores: list[int], deadline: float) -> None:
    """Run the commands one after another on some cores."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path("src").resolve()), "OMP_NUM_THREADS": "1"}
    for command in commands:
        left = deadline - time.monotonic()
        if left < 10:
            print("no time left for:", *command, flush=True)
            continue
        start = time.monotonic()
        arguments = command if command[0] == "-m" else [str(BENCHMARKS / command[0]), *command[1:]]
        tasks = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, *arguments]
        try:
            done = subprocess.run(tasks, env=environment, capture_output=True, text=True, timeout=left, check=False)
            state, output = f"exit code {done.returncode}", done.stdout + (done.stderr[-2000:] if done.returncode else "")
        except subprocess.TimeoutExpired:
            state, output = "stopped: the time is up", ""
        print(f"{' '.join(command)}\n{output}{state}, {time.monotonic() - start:.0f} s on cores {cores}\n", flush=True)


if __name__ == "__main__":
    main()
