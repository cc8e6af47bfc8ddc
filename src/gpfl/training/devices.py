"""The device of a run."""

import re

import torch

from gpfl.engine.distributed import local_rank, process_group
from gpfl.errors import GpflError


def check_device_name(name: str) -> None:
    """Raise if `name` is not a device name; whether the device exists is not checked."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?|mps", name):
        raise GpflError(f"run.device is '{name}'; it must be auto, cpu, cuda, cuda:N or mps")


def find_device(name: str, precision: str = "float32") -> torch.device:
    """Return the device of a name; "auto" is the GPU if there is one. Raise if it cannot be used, or not in a precision."""
    check_device_name(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and process_group().world_size > 1:
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise GpflError(f"run.device is '{name}', which cannot be used here: {str(error).splitlines()[0]}") from None
    if precision == "bf16" and device.type == "cpu":
        if not cpu_has_bf16():
            raise GpflError("run.precision is 'bf16', which needs a GPU, or a CPU with AVX512-BF16 or AMX: leave it out")
    elif precision != "float32" and device.type != "cuda":
        raise GpflError(f"run.precision is '{precision}', which needs a GPU; run.device is '{device}': leave it out")
    return device


def cpu_has_bf16() -> bool:
    """Return whether the CPU computes with bf16; on others torch emulates it, slower than float32."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def device_name(device: torch.device) -> str:
    """Return the name of a device: the model of a GPU, else its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
