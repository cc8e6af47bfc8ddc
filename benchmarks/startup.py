"""Time commands from their start to their end, and `gpfl run` on digits to the end of its first round.

    python benchmarks/startup.py --out benchmarks/results/startup/cpu [--source OTHER/src]

Each command runs in a process of its own; of all repeats the median counts. `--source` times another checkout of gpfl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import cpu_name

ROOT = Path(__file__).parents[1]
COMMANDS = ("--version", "--help", "list", "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("startup"))
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(args.source.resolve())}
    describe = "from gpfl.io.provenance import current_commit; print(current_commit())"
    commit = subprocess.run(
        [sys.executable, "-c", describe], env=environment, capture_output=True, text=True, check=True
    ).stdout
    results: dict[str, Any] = {
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "torch": torch.__version__,
        "commit": commit.strip(),
        "command": " ".join(["python", *sys.argv]),
        "seconds": {},
    }
    for command in COMMANDS:
        times = [seconds(command, environment) for _ in range(args.repeats + 1)][1:]  # the first one reads files from disk
        results["seconds"][command] = statistics.median(times)
        print(f"gpfl {command}: {results['seconds'][command]:.2f} s")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1))


def seconds(command: str, environment: dict[str, str]) -> float:
    """Return the seconds until a command ends, or until `run` has recorded its first round."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["run", "--data", "digits", "--rounds", "40", "--device", "cpu", "--out", f"{folder}/run"]
        metrics = Path(folder, "run", "metrics.jsonl")
        start = time.perf_counter()
        arguments = [sys.executable, "-m", "gpfl", *(run if command == "run" else [command])]
        with subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.005)
            out = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f"gpfl {command} failed")
    return out


def page(results: list[dict[str, Any]]) -> str:
    """Return the table of all measurements, each with its commit."""
    lines = [
        "## Start-up",
        "",
        "Seconds from Enter to the end of a command, and of `gpfl run --data digits` (GPFL, 20 clients) to the end of the",
        "first round, the median of several processes.",
        "",
        "| commit | machine | `gpfl --version` | `gpfl --help` | `gpfl list` | `gpfl run` to the first round | command |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        cells = " | ".join(f"{result['seconds'][command]:.2f}" for command in COMMANDS)
        lines.append(f"| {result['commit']} | {result['machine']}, torch {result['torch']} | {cells} | `{result['command']}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
