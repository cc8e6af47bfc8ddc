"""The tasks of the benchmarks: tables with the shapes of published data and random content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

import gpfl

VOCABULARY = 98_635


@dataclass(frozen=True)
class Task:
    """A table with its partition and net."""

    table: Callable[[], gpfl.Table]
    net: Mapping[str, object]
    partition: Mapping[str, object]
    note: str = ""
    samples_per_client: int = 0  # the table grows with the number of clients

    def federation(self, clients: int) -> gpfl.Federation:
        size = self.samples_per_client * clients
        table = images(size, (3, 32, 32), 100, "even") if size else self.table()
        return gpfl.federate(table, clients=clients, **self.partition)  # type: ignore[arg-type]


def images(n: int, shape: tuple[int, int, int], classes: int, name: str) -> gpfl.Table:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    return gpfl.Table(x, np.arange(n) % classes, classes=classes, name=name)


@cache
def cifar100() -> gpfl.Table:
    return images(60_000, (3, 32, 32), 100, "cifar100-like")


@cache
def fmnist() -> gpfl.Table:
    return images(70_000, (1, 28, 28), 10, "fmnist-like")


@cache
def har() -> gpfl.Table:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10_299, 9, 1, 128)).astype(np.float32)
    return gpfl.Table(x, np.arange(10_299) % 6, classes=6, name="har-like")


@cache
def tiny() -> gpfl.Table:
    return images(20_000, (3, 64, 64), 200, "tiny-like")


@cache
def agnews(n: int = 127_600) -> gpfl.Table:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 80, n)
    words = np.minimum(rng.zipf(1.2, (n, 200)), VOCABULARY - 1).astype(np.int32)
    words[np.arange(200) >= lengths[:, None]] = 0
    return gpfl.Table(words, np.arange(n) % 4, classes=4, name="agnews-like", kind="tokens", vocabulary=VOCABULARY)


@cache
def amazon() -> gpfl.Table:
    rng = np.random.default_rng(0)
    x = rng.poisson(0.02, (8_000, 5000)).astype(np.uint8)
    return gpfl.Table(x, np.arange(8_000) % 2, classes=2, name="amazon-like", kind="counts")


@cache
def digits() -> gpfl.Table:
    return gpfl.federate("digits").table


DIRICHLET = {"partition": "dirichlet", "beta": 0.1}
EVEN = {"partition": "pathological", "classes_per_client": 10, "balanced": True}
TASKS = {
    "cifar100": Task(cifar100, {"name": "cnn4"}, DIRICHLET),
    "fmnist": Task(fmnist, {"name": "cnn4"}, DIRICHLET),
    "even": Task(cifar100, {"name": "cnn4"}, EVEN, "40 samples of 3 × 32 × 32 per client", samples_per_client=40),
    "har": Task(har, {"name": "harcnn"}, {"partition": "dirichlet", "beta": 1.0}),
    "tiny": Task(tiny, {"name": "cnn4"}, DIRICHLET, "20,000 samples"),
    "tiny-resnet18": Task(tiny, {"name": "resnet18"}, DIRICHLET, "20,000 samples"),
    "agnews": Task(agnews, {"name": "fasttext"}, {"partition": "dirichlet", "beta": 1.0}),
    "amazon": Task(
        amazon, {"name": "mlp", "hidden": [1000, 500, 100]}, {"partition": "dirichlet", "beta": 100.0}, "8,000 samples"
    ),
    "digits": Task(digits, {"name": "mlp"}, {"partition": "pathological", "classes_per_client": 4}),
}
