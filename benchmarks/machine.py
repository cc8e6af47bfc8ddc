"""What the device can do: peak speed of matrix products and copies, and memory in use."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from gpfl.engine import matmul_precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPEATS = 5


class PeakSpeed(NamedTuple):
    """Peak speeds of a device, per second."""

    operations: float  # of float32 matrix products
    bytes: float  # read or written by a copy


def measure_peak_speed() -> PeakSpeed:
    side, length = (2048, 1 << 27) if DEVICE.type == "cpu" else (8192, 1 << 30)
    square = torch.linspace(0, 1, side * side, device=DEVICE).view(side, side)
    block = torch.empty(length, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(block)
    with matmul_precision("float32"):
        operations = 2 * side**3 / min_seconds(lambda: square @ square)
    return PeakSpeed(operations, 2 * length / min_seconds(lambda: target.copy_(block)))


def min_seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of several calls after a first one."""
    work()
    return min(seconds(work) for _ in range(REPEATS))


def seconds(work: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize(DEVICE)


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else cpu_name()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def reset_peak_memory() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Return the peak memory of the GPU, or of this process without its parent's."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_reserved()
    if (peak := process_status("VmHWM")) is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_status(key: str) -> int | None:
    """Return a field of this process's status in bytes, such as VmRSS; None where the system has none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)
