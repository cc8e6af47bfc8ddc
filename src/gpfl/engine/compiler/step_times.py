"""Times of a step with and without compiling, measured once per machine and stored in the user's cache folder."""

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, fx

from gpfl.data.published.cache import cache_dir
from gpfl.errors import GpflError
from gpfl.io import files


class StepTimes(NamedTuple):
    """Seconds of a call of each form, and of compiling."""

    uncompiled: float
    compiled: float
    compiling: float

    def compiling_pays(self, calls: int) -> bool:
        """Return whether so many calls save more time than compiling takes."""
        return calls * (self.uncompiled - self.compiled) > self.compiling


def path_of(graph: fx.Graph) -> Path:
    """Return the file for the times of a step: one for each list of operations and shapes, processor, torch and threads."""
    operations = [(str(node.target), describe_value(node.meta.get("val"))) for node in graph.nodes]
    key = repr((operations, cpu_model(), torch.__version__, torch.get_num_threads()))
    return cache_dir() / "step-times" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def describe_value(value: object) -> object:
    """Return the type, shape and strides of a tensor; hyperparameters such as the learning rate do not matter."""
    return (str(value.dtype), tuple(value.shape), value.stride()) if isinstance(value, Tensor) else None


def cpu_model() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return platform.processor() or platform.machine()


def load(path: Path) -> StepTimes | None:
    """Return stored times, or None if there are none that can be read."""
    try:
        return StepTimes(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def store(path: Path, times: StepTimes) -> StepTimes | None:
    """Store times and return them, or those that another process stored first; None if the folder cannot be written."""
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        files.write_text(draft, json.dumps(times._asdict()))
        with suppress(FileExistsError):
            path.hardlink_to(draft)  # unlike a rename, it does not replace the file of another process
    except (GpflError, OSError):
        return None
    finally:
        with suppress(OSError):
            draft.unlink()
    return load(path)
