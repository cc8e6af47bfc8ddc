"""Which engine to run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gpfl.core.module_checks import error_line
from gpfl.engine.base import Engine, RunSpec
from gpfl.engine.distributed import process_group
from gpfl.engine.loop import Loop
from gpfl.engine.sharded import Sharded
from gpfl.engine.vmap import Vmap
from gpfl.engine.workers import Workers
from gpfl.errors import GpflError, did_you_mean
from gpfl.methods import METHODS
from gpfl.models import NETS

ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vmap": Vmap, "workers": Workers}


def make_engine(name: str, spec: RunSpec) -> Engine:
    """Gives the named engine; `auto` takes the one measured to be faster for the device and the net."""
    if name == "auto":
        name = select_engine(spec)
    elif name not in ENGINES:
        raise GpflError(f"unknown engine '{name}'; {did_you_mean(name, (*ENGINES, 'auto'))}")
    elif name == "workers" and spec.device.type != "cpu":
        raise GpflError(f"engine 'workers' runs on the cores of a CPU; run.device is '{spec.device}': use --engine vmap")
    elif name == "vmap" and (problem := find_vmap_error(spec)):
        method = spec.method
        raise GpflError(
            f"engine 'vmap' cannot run {method.name} with net '{method.net.name}' ({error_line(problem)}): use --engine loop"
        ) from problem
    engine = ENGINES[name](spec)
    return engine if process_group().world_size == 1 else Sharded(spec, engine, process_group())


LARGE_IMAGE = 20 * 20
"""Pixels from which convolutions on a CPU are faster side by side on all cores than stacked: 1.7 and 1.5× the loop at 28×28."""
HEAVY = 1 << 20
"""Bytes of a client's weights from which the same holds for any net: a stack of them leaves the caches. Embeddings do not
count, since a step touches few of their rows."""


def select_engine(spec: RunSpec) -> str:
    """Gives `workers` for large images and heavy nets on a CPU, `loop` for recurrent layers, one client on a GPU and what
    cannot be vmapped well; else `vmap`.
    """
    if has_layer(spec, nn.RNNBase):
        return "loop"
    if spec.device.type == "cpu" and (len(spec.federation) == 1 or saturates_core(spec)):
        return "workers"
    return "loop" if len(spec.federation) == 1 or find_vmap_error(spec, slow=True) else "vmap"


def saturates_core(spec: RunSpec) -> bool:
    """Tells whether a client's own step fills a core."""
    large = math.prod(spec.federation.table.shape[-2:]) > LARGE_IMAGE
    if large and has_layer(spec, nn.modules.conv._ConvNd):
        return True
    layers = [layer for part in ("base", "head") for layer in spec.method.net.module(part, training=True).modules()]
    weights = [p for layer in layers if not isinstance(layer, nn.Embedding) for p in layer.parameters(recurse=False)]
    return sum(p.numel() * p.element_size() for p in weights) > HEAVY


def find_vmap_error(spec: RunSpec, slow: bool = False) -> Exception | None:
    """Gives what torch raises when a user's net or method is vmapped; with `slow` also where it would loop inside."""
    if spec.method.net.name in NETS and type(spec.method) in METHODS.values():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if slow:
            warnings.filterwarnings("error", "There is a performance drop")
        try:
            Vmap(spec).check_vmappable()
        except Exception as problem:  # anything may go wrong in a user's forward
            return problem
    return None


def has_layer(spec: RunSpec, kind: type[nn.Module]) -> bool:
    """Tells whether the base has a layer of that kind."""
    return any(isinstance(layer, kind) for layer in spec.method.net.module("base", training=True).modules())


SMALL_PRODUCT = 10_000_000
"""Multiplications of the largest matrix product of a step below which a second thread gains nothing (measured on the digits)
and, on a busy machine, waits for its core most of the time."""


@contextmanager
def limit_threads(spec: RunSpec) -> Iterator[None]:
    """Runs small products on a CPU with one thread, and restores the number of threads after."""
    before = torch.get_num_threads()
    widest = max((p.numel() for p in spec.method.net.module("base", training=True).parameters()), default=0)
    largest = widest * spec.schedule.batch_size * len(spec.federation)
    small = spec.device.type == "cpu" and largest < SMALL_PRODUCT and not has_layer(spec, nn.modules.conv._ConvNd)
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
