"""Run the CPU benchmarks of the speed page, each on two cores of its own, and write their files into a folder of results.

    python benchmarks/cpu_suite.py --out benchmarks/results [--minutes 6] [--one-after-another]

Lanes of two cores run side by side, as many as the machine has; with --one-after-another there is one. A lane starts no
command when the time is up; `cpu.py` writes its file after every case, so a measurement that is stopped keeps what it has.
At the end the files of all lanes are merged into one each for the rounds of one thread, of two threads and of two processes,
the growth, the start-up and the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BENCHMARKS = Path("benchmarks")  # commands are recorded as they are run, in the root of the repository
GROWTH = [(clients, name) for clients in (20, 100, 500) for name in ("plain", "ours", "compiled")]
N_LANES, N_LARGE = 7, 10  # lanes, and the rounds' time in large cases: 8, plus 8 small and 8 of two processes at an eighth each
SECONDS_OF_THE_REST = 420  # growth, start-up and curves on two cores
MERGED = {f"rounds/cpu-{kind}": f"rounds-{kind}-*" for kind in ("1-thread", "2-threads", "2-processes")}
MERGED |= {"growth/cpu": "growth-*", "startup/cpu": "startup-*", "curves/cpu": "curves"}


def lanes(out: Path, old: str, seconds: int) -> list[list[list[str]]]:
    """Return the commands of each lane: those that are compared with each other are in one.

    Args:
        out: The folder of their files.
        old: The options of `startup.py` for an older checkout; empty without one.
        seconds: The time of a case of large nets.
    """
    large = ["fmnist/gpfl fmnist/fedavg", "cifar10/gpfl cifar10/fedavg"]
    small = "digits/gpfl digits/fedavg agnews/gpfl agnews/fedavg"
    long, short = (f"--repeats 100 --seconds {each} --out {out}/rounds" for each in (seconds, seconds // 8))
    processes = f"-m torch.distributed.run --nproc-per-node 2 {BENCHMARKS / 'cpu.py'}"
    growth = [f"--clients {n} --only {name} --repeats 3 --out {out}/growth-{n}-{name}" for n, name in GROWTH]
    commands = [
        *([f"cpu.py {cases} {long}-1-thread-{i}"] for i, cases in enumerate(large)),
        *([f"cpu.py {cases} --threads 2 {long}-2-threads-{i}"] for i, cases in enumerate(large)),
        [f"cpu.py {small} {short}-1-thread-small", f"cpu.py {small} --threads 2 {short}-2-threads-small"],
        [f"cpu.py even/gpfl --threads 2 {each}" for each in growth]
        + [f"{processes} {cases} --only ours compiled {short}-2-processes-{i}" for i, cases in enumerate([*large, small])],
        [f"startup.py {old} --out {out}/startup-before"] * bool(old)
        + [f"startup.py --out {out}/startup-now", f"curve.py --out {out}/curves"],
    ]
    return [[shlex.split(command) for command in lane] for lane in commands]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results")
    parser.add_argument("--old-source", type=Path, help="the src folder of an older checkout, whose start-up is timed as well")
    parser.add_argument("--old-commit", default="unknown")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--one-after-another", action="store_true")
    args = parser.parse_args()
    old = f"--source {args.old_source} --commit {args.old_commit}" if args.old_source else ""
    deadline = time.monotonic() + 60 * args.minutes
    cores = sorted(os.sched_getaffinity(0))
    pairs = [cores[i : i + 2] for i in range(0, len(cores) - 1, 2)] or [cores]
    with tempfile.TemporaryDirectory() as parts:
        alone = args.one_after_another or len(pairs) < N_LANES
        seconds = (60 * args.minutes - SECONDS_OF_THE_REST) / N_LARGE if alone else 60 * args.minutes / 5
        work = lanes(Path(parts), old, max(10, round(seconds)))
        if alone:
            work = [[command for lane in work for command in lane]]
        with ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(lambda lane: run_lane(*lane, deadline), zip(work, pairs, strict=False)))
        merge(
            Path(parts), args.out, f"python benchmarks/cpu_suite.py --minutes {args.minutes:g}" + alone * " --one-after-another"
        )


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
            state, output = f"exit code {done.returncode}", done.stdout + done.stderr[-2000:]
        except subprocess.TimeoutExpired:
            state, output = "stopped: the time is up", ""
        print(f"{' '.join(command)}\n{output}{state}, {time.monotonic() - start:.0f} s on cores {cores}\n", flush=True)


def merge(parts: Path, out: Path, command: str) -> None:
    """Merge the files of the lanes into `out`. Rounds record the suite's command; the temporary folder `parts` is cut out."""
    for name, pattern in MERGED.items():
        files = sorted(parts.glob(f"{pattern}.json"), key=lambda path: path.stat().st_mtime)
        results = [json.loads(path.read_text(encoding="utf-8").replace(f"{parts}/", "")) for path in files]
        if not results:
            continue
        merged: object = results if name.startswith(("growth", "startup")) else results[0]
        if name.startswith("rounds"):
            merged = {**results[0], "command": command, "cases": {k: v for each in results for k, v in each["cases"].items()}}
        path = (out / name).with_suffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(merged, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
