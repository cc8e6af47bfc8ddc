"""Runs rounds in which few of many clients join, and writes the memory after each evaluated one.

    python benchmarks/memory.py --clients 10000 --join 100 --out benchmarks/results/memory/NAME

Memory that grows with rounds would end a long run. Rows and net are those of the task `even` of speed.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from speed import cpu_name
from tasks import TASKS

import gpfl
from gpfl.io.provenance import commit


class Memory(gpfl.Callback):
    """Notes the memory whenever a round has been evaluated."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_evaluate(self, record: dict[str, Any]) -> None:
        """Notes a line."""
        taken = {"gpu_bytes": torch.cuda.memory_reserved()} if torch.cuda.is_available() else {}
        self.rounds.append({"round": record["round"], "time": time.perf_counter(), **taken, "host_bytes": resident()})


def resident() -> int:
    """Bytes of the host's memory that this process holds now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--join", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--method", default="gpfl")
    parser.add_argument("--out", type=Path, default=Path("memory"))
    given = parser.parse_args()
    found = run(given)
    file = given.out.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1))
    print(sentence(found))


def run(given: argparse.Namespace) -> dict[str, Any]:
    memory, task = Memory(), TASKS["even"]
    result = gpfl.fit(
        given.method,
        task.federation(given.clients),
        net=str(task.net["name"]),
        rounds=given.rounds,
        client_fraction=given.join / given.clients,
        eval_every=max(1, given.rounds // 10),
        callbacks=[memory],
    )
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "method": given.method,
        "clients": given.clients,
        "join": given.join,
        "engine": result.summary["engine"],
        "rounds": memory.rounds,
    }


def sentence(found: dict[str, Any]) -> str:
    """What was found, for the page. The first rounds fill what later ones use again, so growth is that of the second half."""
    rounds = found["rounds"]
    half, last = rounds[len(rounds) // 2], rounds[-1]
    words = []
    for key, name in (("gpu_bytes", "of the GPU"), ("host_bytes", "of the host")):
        if key in last:
            most, grown = max(line[key] for line in rounds), last[key] - half[key]
            words.append(f"{most / 2**30:.2f} GiB {name} ({grown / 2**20:+.0f} MiB from round {half['round']} on)")
    first = rounds[1] if len(rounds) > 2 else rounds[0]  # before it, steps were traced or compiled
    each = (last["time"] - first["time"]) / (last["round"] - first["round"])
    return (
        f"{found['clients']:,} clients, {found['join']} of them in a round, {found['method']}, cnn4, {found['device']}, "
        f"engine {found['engine']}: {last['round']} rounds, {' and '.join(words)}, {each:.2f} s a round with its share of "
        f"{len(rounds)} evaluations of all clients. commit {found['commit']}, `{found['command']}`."
    )


if __name__ == "__main__":
    main()
