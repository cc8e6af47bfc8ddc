"""Engines by name, and the choice that `auto` makes."""

import math
import warnings
from contextlib import AbstractContextManager

import torch
from torch import nn

from gpfl.core.module_checks import error_line
from gpfl.engine import ENGINES
from gpfl.engine.base import Engine, RunSpec
from gpfl.engine.distributed import process_group
from gpfl.engine.sharded import Sharded
from gpfl.engine.vmap import Vmap
from gpfl.engine.workers import num_threads
from gpfl.errors import GpflError, did_you_mean
from gpfl.models import NETS

LARGE_IMAGE = 20 * 20
"""Pixels from which convolutions on a CPU are faster with `workers` than stacked: 1.7× and 1.5× the loop at 28×28."""
LARGE_NET = 1 << 20
"""Bytes of a client's weights, without embeddings, from which the same holds for any net: a stack does not fit the caches."""
SMALL_MATMUL = 10_000_000
"""Multiplications of the largest matrix product of a step below which a second thread gains nothing (measured on digits) and
loses time waiting for its core on a busy machine."""


def make_engine(name: str, spec: RunSpec) -> Engine:
    """Return the named engine; `auto` is the one measured to be fastest for the device and the net."""
    if name == "auto":
        name = select_engine(spec)
    elif name not in ENGINES:
        raise GpflError(f"unknown engine '{name}'; {did_you_mean(name, (*ENGINES, 'auto'))}")
    elif name == "workers" and spec.device.type != "cpu":
        raise GpflError(f"engine 'workers' runs on the cores of a CPU; run.device is '{spec.device}': use --engine vmap")
    elif name == "vmap" and (error := find_vmap_error(spec)):
        method = spec.method
        raise GpflError(
            f"engine 'vmap' cannot run {method.name} with net '{method.net.name}' ({error_line(error)}): use --engine loop"
        ) from error
    engine = ENGINES[name](spec)
    return engine if process_group().world_size == 1 else Sharded(spec, engine, process_group())


def select_engine(spec: RunSpec) -> str:
    """Return the name of the engine measured to be fastest.

    On a CPU `workers` for large images and large nets; `loop` for recurrent layers, for one client on a GPU and for what
    cannot be vmapped well; `vmap` for the rest.
    """
    if _has_layer(spec, nn.RNNBase):
        return "loop"
    if spec.device.type == "cpu" and (len(spec.federation) == 1 or saturates_core(spec)):
        return "workers"
    return "loop" if len(spec.federation) == 1 or find_vmap_error(spec, slow=True) else "vmap"


def saturates_core(spec: RunSpec) -> bool:
    """Return whether one client's step is large enough to keep a core busy."""
    if math.prod(spec.federation.table.shape[-2:]) > LARGE_IMAGE and _has_layer(spec, nn.modules.conv._ConvNd):
        return True
    layers = [layer for part in ("base", "head") for layer in spec.method.net.module(part, training=True).modules()]
    weights = [p for layer in layers if not isinstance(layer, nn.Embedding) for p in layer.parameters(recurse=False)]
    return sum(p.numel() * p.element_size() for p in weights) > LARGE_NET


def find_vmap_error(spec: RunSpec, slow: bool = False) -> Exception | None:
    """Return torch's error when it vmaps a user's net or method; with `slow`, also its warning of a loop over clients."""
    if spec.method.net.name in NETS and type(spec.method).__module__.startswith("gpfl.methods."):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if slow:
            warnings.filterwarnings("error", "There is a performance drop")
        try:
            Vmap(spec).check_vmappable()
        except Exception as error:  # a user's forward may raise anything
            return error
    return None


def _has_layer(spec: RunSpec, kind: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) for layer in spec.method.net.module("base", training=True).modules())


def limit_threads(spec: RunSpec) -> AbstractContextManager[None]:
    """Run small matrix products on a CPU with one thread, and restore the number of threads after."""
    widest = max((p.numel() for p in spec.method.net.module("base", training=True).parameters()), default=0)
    largest = widest * spec.schedule.batch_size * len(spec.federation)
    small = spec.device.type == "cpu" and largest < SMALL_MATMUL and not _has_layer(spec, nn.modules.conv._ConvNd)
    return num_threads(1 if small else torch.get_num_threads())
