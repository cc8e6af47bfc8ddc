"""Times dividing 60,000 labels among 500 clients, and opening a parsed table: python benchmarks/data.py."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

import gpfl
from gpfl.data.published import cache


def best(act: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    table = gpfl.Table(np.zeros((60_000, 1), dtype=np.uint8), np.arange(60_000) % 100)
    for split in ({"partition": "dirichlet", "beta": 0.1}, {"partition": "pathological", "classes_per_client": 10}):
        print(f"{split}: {best(lambda split=split: gpfl.federate(table, clients=500, **split)):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPFL_CACHE"] = folder
        images = gpfl.Table(np.zeros((60_000, 3, 32, 32), dtype=np.uint8), np.arange(60_000) % 100, name="toy")
        cache.save(images)
        print(f"opening 60,000 images: {best(lambda: cache.load('toy')):.4f} s")


if __name__ == "__main__":
    main()
