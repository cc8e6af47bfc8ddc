"""The tasks that are timed: tables of the published shapes with made-up content; time depends on shapes and sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

import gpfl

VOCABULARY = 98_635


@dataclass(frozen=True)
class Task:
    """A table, and the split and net that it is run with."""

    table: Callable[[], gpfl.Table]
    net: Mapping[str, object]
    split: Mapping[str, object]
    note: str = ""
    rows_each: int = 0

    def federation(self, clients: int) -> gpfl.Federation:
        table = self.table() if not self.rows_each else images(self.rows_each * clients, (3, 32, 32), 100, "even")
        return gpfl.federate(table, clients=clients, **self.split)  # type: ignore[arg-type]


def images(rows: int, shape: tuple[int, int, int], classes: int, name: str) -> gpfl.Table:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (rows, *shape), dtype=np.uint8)
    return gpfl.Table(x, np.arange(rows) % classes, classes=classes, name=name)


@cache
def cifar100() -> gpfl.Table:
    return images(60_000, (3, 32, 32), 100, "cifar100-like")


@cache
def fmnist() -> gpfl.Table:
    return images(70_000, (1, 28, 28), 10, "fmnist-like")


@cache
def har() -> gpfl.Table:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(10_299, 9, 1, 128)).astype(np.float32)
    return gpfl.Table(x, np.arange(10_299) % 6, classes=6, name="har-like")


@cache
def tiny() -> gpfl.Table:
    return images(20_000, (3, 64, 64), 200, "tiny-like")


@cache
def agnews() -> gpfl.Table:
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 80, 127_600)
    words = np.minimum(draw.zipf(1.2, (127_600, 200)), VOCABULARY - 1).astype(np.int32)
    words[np.arange(200) >= lengths[:, None]] = 0
    return gpfl.Table(words, np.arange(127_600) % 4, classes=4, name="agnews-like", kind="tokens", vocabulary=VOCABULARY)


@cache
def amazon() -> gpfl.Table:
    draw = np.random.default_rng(0)
    x = draw.poisson(0.02, (8_000, 5000)).astype(np.uint8)
    return gpfl.Table(x, np.arange(8_000) % 2, classes=2, name="amazon-like", kind="counts")


@cache
def digits() -> gpfl.Table:
    return gpfl.federate("digits").table


DIRICHLET = {"partition": "dirichlet", "beta": 0.1}
EVEN = {"partition": "pathological", "classes_per_client": 10, "balanced": True}
TASKS = {
    "cifar100": Task(cifar100, {"name": "cnn4"}, DIRICHLET),
    "fmnist": Task(fmnist, {"name": "cnn4"}, DIRICHLET),
    "even": Task(cifar100, {"name": "cnn4"}, EVEN, "40 rows of 3 × 32 × 32 a client", rows_each=40),
    "har": Task(har, {"name": "harcnn"}, {"partition": "dirichlet", "beta": 1.0}),
    "tiny": Task(tiny, {"name": "cnn4"}, DIRICHLET, "20,000 rows"),
    "tiny-resnet18": Task(tiny, {"name": "resnet18"}, DIRICHLET, "20,000 rows"),
    "agnews": Task(agnews, {"name": "fasttext"}, {"partition": "dirichlet", "beta": 1.0}),
    "amazon": Task(
        amazon, {"name": "mlp", "hidden": [1000, 500, 100]}, {"partition": "dirichlet", "beta": 100.0}, "8,000 rows"
    ),
    "digits": Task(digits, {"name": "mlp"}, {"partition": "pathological", "classes_per_client": 4}),
}
