"""Schedules: who joins a round and which rows they train on in which order, pure functions of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpfl.core.method import Method, Phase
from gpfl.core.randomness import generator
from gpfl.data.table import Indices
from gpfl.errors import GpflError

Plan = list[Indices]
"""For each phase the row numbers of every step, (steps, width); -1 pads a short batch."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who trains when on what."""

    seed: int
    rounds: int
    batch_size: int = 10
    client_fraction: float | tuple[float, float] = 1.0
    shuffle: bool = True
    drop_last: bool = True

    def sample_clients(self, round: int, clients: int) -> list[int]:
        """Gives the clients of a round in ascending order: a fixed share, or a number drawn from the range of shares."""
        draw = generator(self.seed, "cohort", round)
        if isinstance(self.client_fraction, tuple):
            low, high = (part_of(share, clients) for share in self.client_fraction)
            size = int(draw.integers(low, high, endpoint=True))
        else:
            size = part_of(self.client_fraction, clients)
        if size == clients:
            return list(range(clients))
        return sorted(int(c) for c in draw.choice(clients, size, replace=False))

    def plan(self, phases: Sequence[Phase], rows: Indices, round: int, client: int) -> Plan:
        """Gives a client's steps. Every phase sees the same orders, so that phases added to a method leave the others alone."""
        epochs = max(phase.epochs for phase in phases)
        draw = generator(self.seed, "batches", round, client)
        orders = [draw.permutation(rows) if self.shuffle else rows for _ in range(epochs)]
        return [np.concatenate([self.batches(order, phase.batches) for order in orders[: phase.epochs]]) for phase in phases]

    def batches(self, rows: Indices, per_step: int = 1) -> Indices:
        """Gives rows in steps of `per_step` batches, (steps, width).

        A last partial step is dropped, but a client's only batch is kept: it would never train otherwise. Steps of
        several batches are never short.
        """
        width = self.batch_size * per_step
        whole = len(rows) // width
        steps = rows[: whole * width].reshape(whole, width)
        short = rows[whole * width :]
        if per_step > 1 or len(short) == 0 or (self.drop_last and whole):
            return steps
        padded = np.full((1, width), -1, dtype=np.int64)
        padded[0, : len(short)] = short
        return np.concatenate([steps, padded])

    def min_samples(self, phases: Sequence[Phase]) -> int:
        """Gives the fewest training rows with which a client has a step in every phase."""
        return max(self.batch_size * phase.batches if phase.batches > 1 else 1 for phase in phases)

    def fewest_rows(self, rows: int, phases: Sequence[Phase]) -> int:
        """Gives the rows of the smallest batch that a client with `rows` training rows is ever given."""
        left = rows % self.batch_size
        short = rows < self.batch_size or (not self.drop_last and any(phase.batches == 1 for phase in phases))
        return left if left and short else min(rows, self.batch_size)

    def refuse_single_rows(self, method: Method, rows: int, client: str) -> None:
        """Refuses a client that comes to a batch of one row where the net's training pass cannot take one."""
        if self.fewest_rows(rows, method.phases()) >= method.net.min_batch:
            return
        way = "raise --batch-size" if self.batch_size == 1 else "set drop_last or another --batch-size"
        raise GpflError(
            f"client {client} has {rows} training rows, which makes a batch of 1 at batch size {self.batch_size}; "
            f"the BatchNorm of net '{method.net.name}' needs 2: {way if rows > 1 else 'give it more rows or leave it out'}"
        )

    def used(self, rows: Indices) -> Indices:
        """Gives the rows that an unshuffled pass trains on."""
        steps = self.batches(rows).ravel()
        return steps[steps >= 0]


def part_of(share: float, clients: int) -> int:
    """Gives the whole part of share × clients, at least one client; 0.29 × 100 is 29 though binary fractions say 28.99…."""
    return max(1, int(share * clients + 1e-9))
