"""Products of many clients at once, as operations of torch that can be traced: by our kernels on a GPU, plainly elsewhere."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from gpfl.core import randomness

THIN = 16
"""Rows up to which a product is thin."""
FEW = 16
"""Inputs below which the taps of a line are taken as one."""
BUSY = 512
"""Blocks of work that keep a card busy: a sum over rows that gives fewer is split."""


@cache
def has_kernels(device: torch.device) -> bool:
    """Tells whether our kernels run on a device: they need Triton and NVIDIA's tensor cores of compute capability 8."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False  # torch calls AMD's cards cuda too
    return torch.cuda.get_device_capability(device)[0] >= 8 and can_build(device)


def can_build(device: torch.device) -> bool:
    """Tells whether Triton can build and run a kernel on a device: it needs a C compiler, which not every machine has."""
    w, left, right = (torch.ones(1, 1, 1, device=device) for _ in range(3))
    try:
        from gpfl.engine.compiler import kernels

        kernels.subtract_product(w, left, right, 1.0)
    except Exception as problem:  # whatever a compiler says
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        warnings.warn(f"Triton builds no kernels here ({reason}): rounds take several times as long", stacklevel=2)
        return False
    return True


@torch.library.custom_op("gpfl::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, kernel: Sequence[int], stride: Sequence[int], flip: bool, edges: Sequence[int]) -> Tensor:
    """Gives (clients, rows, down, across, channels) from x (clients, rows, height, width, inputs) and own weights.

    Weights are as `taps` and `turned_taps` give them: (clients, taps, channels, what a tap sees), last tap first if `flip`.
    x has `edges` lines of zeros above and below, which need not be looked at.
    """
    if x.is_cuda:
        from gpfl.engine.compiler import kernels

        return kernels.convolve(x.contiguous(), w, kernel, stride, flip, edges)
    across = 1 if w.shape[1] == kernel[0] * kernel[1] else kernel[1]
    w = w.flip(1) if flip else w
    whole = w.reshape(len(w), kernel[0], -1, w.shape[2], across, x.shape[4])
    weight = whole.permute(0, 3, 5, 1, 2, 4).reshape(-1, x.shape[4], *kernel)
    out = F.conv2d(images(x), weight, stride=tuple(stride), groups=len(x))
    return out.reshape(x.shape[1], len(x), -1, *out.shape[2:]).permute(1, 0, 3, 4, 2).contiguous()


@convolve.register_fake
def _(x: Tensor, w: Tensor, kernel: Sequence[int], stride: Sequence[int], flip: bool, edges: Sequence[int]) -> Tensor:
    size = [(x.shape[2 + axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1)]
    return x.new_empty(len(x), x.shape[1], *size, w.shape[2])


def taps(weight: Tensor, groups: int) -> Tensor:
    """Gives the weights of each client, (clients × channels, inputs, kernel …), as (clients, taps, channels, what a tap sees).

    With few inputs a whole line of the kernel is one tap: what it sees lies side by side. Nothing is copied where inputs are
    innermost in memory.
    """
    own = weight.reshape(groups, -1, *weight.shape[1:])  # (clients, channels, inputs, down, across)
    if weight.shape[1] < FEW:
        return own.permute(0, 3, 1, 4, 2).reshape(groups, weight.shape[2], own.shape[1], -1)
    return own.permute(0, 3, 4, 1, 2).reshape(groups, -1, own.shape[1], weight.shape[1])


def turned_taps(weight: Tensor, groups: int) -> tuple[Tensor, bool]:
    """Gives the taps by which inputs get their gradients from channels, and whether they are to be taken last first."""
    own = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    if own.shape[2] < FEW:
        return taps(own.flip(3, 4).flatten(0, 1), groups), False
    return own.permute(0, 3, 4, 1, 2).reshape(groups, -1, *own.shape[1:3]), True


@torch.library.custom_op("gpfl::weigh", mutates_args=())
def weigh(x: Tensor, dy: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Gives the gradient of `convolve`'s weights, (parts, clients, channels, kernel …, inputs); parts are to be added."""
    splits = parts_of(x, dy, kernel)
    if x.is_cuda:
        from gpfl.engine.compiler import kernels

        return kernels.weigh(x.contiguous(), dy.contiguous(), kernel, stride, splits)
    shape = (len(x) * dy.shape[4], x.shape[4], *kernel)
    whole = conv2d_weight(images(x), shape, images(dy), stride=tuple(stride), groups=len(x))  # type: ignore[no-untyped-call]
    whole = whole.reshape(len(x), dy.shape[4], x.shape[4], *kernel).permute(0, 1, 3, 4, 2)
    return torch.stack([whole / splits] * splits)


@weigh.register_fake
def _(x: Tensor, dy: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    return x.new_empty(parts_of(x, dy, kernel), len(x), dy.shape[4], *kernel, x.shape[4])


def parts_of(x: Tensor, dy: Tensor, kernel: Sequence[int]) -> int:
    """Gives the number of parts in which the gradient of the weights is summed: few weights alone would leave a card idle."""
    blocks = len(x) * math.ceil(math.prod(kernel) * x.shape[4] / 32) * math.ceil(dy.shape[4] / 64)
    return min(x.shape[1], math.ceil(BUSY / blocks)) if blocks < BUSY // 2 else 1


@torch.library.custom_op("gpfl::thin", mutates_args=())
def thin(a: Tensor, b: Tensor) -> Tensor:
    """Gives the products of (clients, few rows, terms) with (clients, terms, columns)."""
    if a.is_cuda:
        from gpfl.engine.compiler import kernels

        return kernels.thin(a, b)
    return torch.bmm(a, b).contiguous()


@thin.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), a.shape[1], b.shape[2])


@torch.library.custom_op("gpfl::subtract_product_", mutates_args={"w"})
def subtract_product_(w: Tensor, left: Tensor, right: Tensor, rate: float) -> None:
    """Subtracts rate × (clients, down, few terms) times (clients, few terms, across) from (clients, down, across)."""
    if w.is_cuda:
        from gpfl.engine.compiler import kernels

        kernels.subtract_product(w, left, right, rate)
    else:
        w.baddbmm_(left, right, alpha=-rate)


@subtract_product_.register_fake
def _(w: Tensor, left: Tensor, right: Tensor, rate: float) -> None:
    return None


@torch.library.custom_op("gpfl::stored", mutates_args=())
def stored(x: Tensor) -> Tensor:
    """Gives a copy that lies in memory: a compiler would work out anew, wherever it is read, what costs little to work out."""
    return x.clone(memory_format=torch.contiguous_format)


@stored.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@randomness.normal_op.register_kernel("cuda")
def normals(key: Tensor, number: int, count: int) -> Tensor:
    """Gives numbers from N(0, 1) by our kernel, where it runs."""
    if not has_kernels(key.device):
        return randomness.box_muller(key, number, count).contiguous()
    from gpfl.engine.compiler import kernels

    return kernels.normals(key, number, count)


def images(x: Tensor) -> Tensor:
    """Gives (clients, rows, height, width, channels) as (rows, clients × channels, height, width)."""
    return x.permute(1, 0, 4, 2, 3).reshape(x.shape[1], -1, *x.shape[2:4])
