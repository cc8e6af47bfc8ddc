"""Time commands from their start to their end, and `gpfl run` on digits to the end of its first round.

    python benchmarks/startup.py --out benchmarks/results/startup/cpu [--source OTHER/src]

Each command runs in a process of its own; of all repeats the median counts. `--source` times another checkout of gpfl, whose
commit is named with `--commit` if it is not a git checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import cpu_name

from gpfl.io.provenance import current_commit

ROOT = Path(__file__).parents[1]
COMMANDS = ("--version", "--help", "list", "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("startup"))
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--commit", help="of --source; by default that of this checkout")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(args.source.resolve())}
    results: dict[str, Any] = {
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "torch": torch.__version__,
        "commit": args.commit or current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "seconds": {},
        "cpu_seconds": {},
    }
    for command in COMMANDS:
        times = [seconds(command, environment) for _ in range(args.repeats + 1)][1:]  # the first one reads files from disk
        results["seconds"][command], results["cpu_seconds"][command] = map(statistics.median, zip(*times, strict=True))
        print(f"gpfl {command}: {results['seconds'][command]:.2f} s, CPU time {results['cpu_seconds'][command]:.2f} s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1))


def seconds(command: str, environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds and the CPU time until a command ends, or until `run` has recorded its first round of training."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["run", "--data", "digits", "--rounds", "40", "--device", "cpu", "--out", f"{folder}/run"]
        metrics = Path(folder, "run", "metrics.jsonl")
        start, cpu_start = time.perf_counter(), cpu_seconds()
        arguments = [sys.executable, "-m", "gpfl", *(run if command == "run" else [command])]
        with subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (trained := metrics.exists() and '"round": 1' in metrics.read_text()):
                time.sleep(0.005)
            out = time.perf_counter() - start
            process.kill()
        if process.returncode and not (command == "run" and trained):
            raise SystemExit(f"gpfl {command} failed")
        return out, cpu_seconds() - cpu_start


def cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def page(results: list[dict[str, Any]]) -> str:
    """Return the table of all measurements, each with its commit."""
    lines = [
        "## Start-up",
        "",
        "Seconds from Enter to the end of a command, and of `gpfl run --data digits` (GPFL, 20 clients) to the end of the",
        "first round of training, in brackets the CPU time: medians of several processes.",
        "",
        "| commit | machine | `gpfl --version` | `gpfl --help` | `gpfl list` | `gpfl run` to the first round | command |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        cells = " | ".join(f"{result['seconds'][each]:.2f} ({result['cpu_seconds'][each]:.2f})" for each in COMMANDS)
        lines.append(f"| {result['commit']} | {result['machine']}, torch {result['torch']} | {cells} | `{result['command']}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
