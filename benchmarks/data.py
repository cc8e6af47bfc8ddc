"""Time partitioning 60,000 samples among 500 clients, and opening a cached table: python benchmarks/data.py."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

import gpfl
from gpfl.data.published import cache


def min_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    table = gpfl.Table(np.zeros((60_000, 1), dtype=np.uint8), np.arange(60_000) % 100)
    for options in ({"partition": "dirichlet", "beta": 0.1}, {"partition": "pathological", "classes_per_client": 10}):
        print(f"{options}: {min_seconds(lambda options=options: gpfl.federate(table, clients=500, **options)):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPFL_CACHE"] = folder
        images = gpfl.Table(np.zeros((60_000, 3, 32, 32), dtype=np.uint8), np.arange(60_000) % 100, name="toy")
        cache.save(images)
        print(f"opening 60,000 images: {min_seconds(lambda: cache.load('toy')):.4f} s")


if __name__ == "__main__":
    main()
