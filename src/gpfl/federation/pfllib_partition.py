"""The divisions of the authors' code, number by number: numpy's legacy generator, drawn from in the order of their code.

With seed 1 and the published files these are the divisions that their scripts make. All draws of a division come from one
stream: first the clients' rows, then each client's cut into test and training rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpfl.core.local_round import Indices
from gpfl.errors import GpflError

Labels = npt.NDArray[np.int64]
FEWEST = 40
"""Rows that a Dirichlet draw must give every client: a batch of 10 for testing."""
SHUFFLED = ("amazon",)
"""Data whose groups are shuffled before they are divided."""


def by_shares(
    labels: Labels, classes: int, clients: int, beta: float, fewest: int, tries: int, draw: np.random.RandomState
) -> list[Indices]:
    """Gives clients' rows by Dirichlet shares, class after class, none for clients that are full; anew while one has few."""
    full = len(labels) / clients
    for _ in range(tries):
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        held = np.zeros(clients, dtype=np.int64)
        for label in range(classes):
            members = np.flatnonzero(labels == label)
            draw.shuffle(members)
            shares = draw.dirichlet(np.full(clients, beta)) * (held < full)
            if not shares.sum():
                raise GpflError(
                    f"the authors' code fails here: all of class {label} would go to clients that are full; "
                    "use --partition-rng gpfl"
                )
            cuts = (np.cumsum(shares / shares.sum()) * len(members)).astype(int)[:-1]
            for client, part in enumerate(np.split(members, cuts)):
                parts[client].append(part)
                held[client] += len(part)
        if held.min() >= fewest:
            return [np.concatenate(part) for part in parts]
    raise GpflError(
        f"none of {tries} draws with beta {beta:g} gave each of {clients} clients {fewest} rows: raise --beta, lower --clients"
    )


def by_classes(
    labels: Labels, classes: int, takers: Sequence[Sequence[int]], clients: int, balanced: bool, draw: np.random.RandomState
) -> list[Indices]:
    """Gives clients' rows where each class goes to its takers, in the order of the table; the last takes what is left."""
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(classes):
        members, count = np.flatnonzero(labels == label), len(takers[label])
        mean = len(members) / count
        low, high = int(max(mean / 10, FEWEST / classes)), int(mean)
        if not balanced and count > 1 and low >= high:
            raise GpflError(
                f"class {label} has {len(members)} rows for {count} clients, {mean:.1f} each; unequal shares need more than "
                f"{low}: lower --clients or --classes-per-client, or use --balanced"
            )
        sizes = np.full(count - 1, high) if balanced else draw.randint(low, high, count - 1)
        for client, part in zip(takers[label], np.split(members, np.cumsum(sizes)), strict=True):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def shuffled(rows: Indices, draw: np.random.RandomState) -> Indices:
    """Gives the rows in another order."""
    order = np.arange(len(rows))
    draw.shuffle(order)
    return rows[order]


def cut(rows: Indices, test: float, draw: np.random.RandomState) -> tuple[Indices, Indices]:
    """Gives a client's training and test rows: of a permutation the test rows come first."""
    kept = int((1 - test) * len(rows) + 1e-9)
    order = draw.permutation(len(rows))
    return rows[order[len(rows) - kept :]], rows[order[: len(rows) - kept]]
