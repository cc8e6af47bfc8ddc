"""Machines: how fast the one at hand multiplies and copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from gpfl.core.precision import matmul_precision

REPEATS = 5


class Limits(NamedTuple):
    """What a device does in a second at its best."""

    operations: float  # of products in float32
    bytes: float  # read or written in a copy

    def times_as_fast_as(self, other: Limits) -> float:
        """Gives how many times as fast as another it is, in products and copies alike."""
        return math.sqrt(self.operations / other.operations * self.bytes / other.bytes)


@cache
def limits_at_hand(device: torch.device) -> Limits | None:
    """Gives what a device does now, measured once; None where it has no memory for that."""
    try:
        return limits(device)
    except RuntimeError:  # of which torch's OutOfMemoryError is one
        return None


def limits(device: torch.device) -> Limits:
    """Gives what a device does, measured in a second or two; others that use it slow it down."""
    side, length = (2048, 1 << 27) if device.type == "cpu" else (8192, 1 << 30)
    square = torch.linspace(0, 1, side * side, device=device).view(side, side)
    block = torch.empty(length, dtype=torch.uint8, device=device)
    other = torch.empty_like(block)
    with matmul_precision("float32"):
        operations = 2 * side**3 / best(lambda: square @ square, device)
    return Limits(operations, 2 * length / best(lambda: other.copy_(block), device))


def best(work: Callable[[], object], device: torch.device) -> float:
    """Gives the least seconds of several times, the first of which does not count."""
    return min([timed(work, device) for _ in range(1 + REPEATS)][1:])


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Gives the seconds that work takes."""
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
