"""Run rounds in which few of many clients train, and record the memory after each evaluation.

    python benchmarks/memory.py --clients 10000 --clients-per-round 100 --out benchmarks/results/memory/NAME

Memory that grows with rounds would end a long run. Samples and net are those of the task `even` of speed.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import device_name, process_status
from tasks import TASKS

import gpfl
from gpfl.io.provenance import current_commit


class MemoryRecorder(gpfl.Callback):
    """Record the memory after every evaluated round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_evaluate(self, record: dict[str, Any]) -> None:
        """Record the memory in use."""
        gpu = {"gpu_bytes": torch.cuda.memory_reserved()} if torch.cuda.is_available() else {}
        host = process_status("VmRSS") or 0
        self.rounds.append({"round": record["round"], "time": time.perf_counter(), **gpu, "host_bytes": host})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--clients-per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--method", default="gpfl")
    parser.add_argument("--out", type=Path, default=Path("memory"))
    args = parser.parse_args()
    result = run(args)
    file = args.out.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))
    print(sentence(result))


def run(args: argparse.Namespace) -> dict[str, Any]:
    recorder, task = MemoryRecorder(), TASKS["even"]
    result = gpfl.fit(
        args.method,
        task.federation(args.clients),
        net=str(task.net["name"]),
        rounds=args.rounds,
        client_fraction=args.clients_per_round / args.clients,
        eval_every=max(1, args.rounds // 10),
        callbacks=[recorder],
    )
    return {
        "device": device_name(),
        "torch": torch.__version__,
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "method": args.method,
        "clients": args.clients,
        "join": args.clients_per_round,
        "engine": result.summary["engine"],
        "rounds": recorder.rounds,
    }


def sentence(result: dict[str, Any]) -> str:
    """Return the result as a sentence. Growth is that of the second half: the first rounds allocate what later ones reuse."""
    rounds = result["rounds"]
    half, last = rounds[len(rounds) // 2], rounds[-1]
    parts = []
    for key, name in (("gpu_bytes", "of GPU memory"), ("host_bytes", "of host memory")):
        if key in last:
            peak, growth = max(line[key] for line in rounds), last[key] - half[key]
            parts.append(f"{peak / 2**30:.2f} GiB {name} ({growth / 2**20:+.0f} MiB after round {half['round']})")
    first = rounds[1] if len(rounds) > 2 else rounds[0]  # steps were traced or compiled before it
    per_round = (last["time"] - first["time"]) / (last["round"] - first["round"])
    return (
        f"{result['clients']:,} clients, {result['join']} per round, {result['method']}, cnn4, {result['device']}, "
        f"engine {result['engine']}: {last['round']} rounds, {' and '.join(parts)}, {per_round:.2f} s per round including "
        f"{len(rounds)} evaluations of all clients. Commit {result['commit']}, `{result['command']}`."
    )


if __name__ == "__main__":
    main()
