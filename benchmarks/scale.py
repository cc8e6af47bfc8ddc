"""Time and memory of rounds by the numbers of clients and of clients per round, with private state in memory and on disk.

    python benchmarks/scale.py --out benchmarks/results/scale/cpu-2-cores

Every client has 100 samples of 64 features; the net is an mlp, of which Ditto keeps a copy per client. Each case runs in a
process of its own. Memory is the peak of what no file backs: pages of files are dropped when the memory is needed otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import device_name, process_status

import gpfl
from gpfl.core import tree
from gpfl.federation import Shard
from gpfl.io.provenance import current_commit

SAMPLES_PER_CLIENT = 100
CASES = (
    *((10_000, cohort, state) for cohort in (10, 100, 1000) for state in ("memory", "disk")),
    *((1_000, cohort, "disk") for cohort in (10, 100)),
)
ROUNDS = 12


class StoppedError(Exception):
    """The end of the measurement, before the models of all clients are written."""


class RoundTimes(gpfl.Callback):
    """Record the duration of every round and, apart, of every evaluation."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self._last = time.perf_counter()

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        self._record(self.rounds)

    def on_evaluate(self, record: Mapping[str, object]) -> None:
        self._record(self.evaluations)
        if record["round"] == ROUNDS:
            raise StoppedError

    def _record(self, durations: list[float]) -> None:
        now = time.perf_counter()
        durations.append(now - self._last)
        self._last = now


class PeakMemory(threading.Thread):
    """Record the peak of the process's anonymous memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.peak = max(self.peak, process_status("RssAnon") or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("scale"))
    parser.add_argument("--method", default="ditto")
    parser.add_argument("--case", help="run one case in this process: CLIENTS,CLIENTS_PER_ROUND,memory|disk")
    args = parser.parse_args()
    if args.case:
        clients, cohort, state = args.case.split(",")
        print(json.dumps(measure(args.method, int(clients), int(cohort), state)))
        return
    results = []
    for case in CASES:
        command = [sys.executable, __file__, "--method", args.method, "--case", ",".join(map(str, case))]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(row(results[-1]), flush=True)
    origin = {
        "device": device_name(),
        "torch": torch.__version__,
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "method": args.method,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = {**origin, "cases": results}
    args.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(content))


def measure(method: str, clients: int, cohort: int, state: str) -> dict[str, object]:
    """Return the times and the memory of a run, up to its last evaluation."""
    small = gpfl.fit(method, make_federation(10), net="mlp", rounds=1, engine="vmap")  # imports and allocates what all runs do
    private = sum(t.numel() * t.element_size() for t in tree.leaves(small.outcome.last.private)) // 10
    federation, times, memory, before = make_federation(clients), RoundTimes(), PeakMemory(), process_status("RssAnon") or 0
    memory.start()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(StoppedError):
        gpfl.fit(
            method,
            federation,
            net="mlp",
            engine="vmap",
            lr=0.01,
            rounds=ROUNDS,
            eval_every=ROUNDS // 2,
            client_fraction=cohort / clients,
            checkpoint_every=10 * ROUNDS,
            select="last",
            private_state=state,
            out=Path(folder) / "run",
            callbacks=[times],
        )
    memory.ended.set()
    memory.join()
    return {
        "clients": clients,
        "clients_per_round": cohort,
        "private_state": state,
        "private_bytes": private * clients,
        "seconds_per_round": statistics.median(times.rounds[2:]),  # steps are traced in the first
        "seconds_per_evaluation": times.evaluations[-1],
        "peak_bytes": memory.peak - before,
    }


def make_federation(clients: int) -> gpfl.Federation:
    rng, n = np.random.default_rng(0), SAMPLES_PER_CLIENT * clients
    table = gpfl.Table(rng.random((n, 64), dtype=np.float32), np.arange(n) % 10, classes=10, name="scale")
    shards = (
        Shard(str(i), train=own[:75], validation=own[:0], test=own[75:])
        for i, own in enumerate(np.arange(n).reshape(clients, SAMPLES_PER_CLIENT))
    )
    return gpfl.Federation(table, tuple(shards))


def page(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['method']}, mlp, {SAMPLES_PER_CLIENT} samples per client; {result['device']}, torch {result['torch']}, "
        f"commit {result['commit']}, `{result['command']}`. Memory is the peak above that of a small run, without pages of "
        "files.",
        "",
        "| clients | per round | private state | its size | s per round | s per evaluation of all | peak memory |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*lines, *map(row, result["cases"])]) + "\n"


def row(result: Mapping[str, Any]) -> str:
    return (
        f"| {result['clients']:,} | {result['clients_per_round']:,} | {result['private_state']} | "
        f"{result['private_bytes'] / 2**20:,.0f} MiB | {result['seconds_per_round']:.3f} | "
        f"{result['seconds_per_evaluation']:.2f} | {result['peak_bytes'] / 2**20:,.0f} MiB |"
    )


if __name__ == "__main__":
    main()
