"""Products of many clients at once as custom operators of torch: our kernels on a GPU, torch's own operations elsewhere."""

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

MAX_SKINNY_ROWS = 16  # rows up to which a matrix product is skinny
FEW_CHANNELS = 16  # input channels below which a whole line of a convolution's kernel is one tap
MIN_BLOCKS = 512  # blocks of work that keep a GPU busy; a sum over samples that has fewer is split


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether our kernels run on a device: they need Triton and an NVIDIA GPU of compute capability 8 or higher."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False  # torch calls AMD GPUs cuda too
    return torch.cuda.get_device_capability(device)[0] >= 8 and _can_build_kernels(device)


def _can_build_kernels(device: torch.device) -> bool:
    """Return whether Triton can build a kernel: it needs a C compiler, which not every machine has."""
    w, left, right = (torch.ones(1, 1, 1, device=device) for _ in range(3))
    try:
        from gpfl.engine.compiler import kernels

        kernels.sub_bmm(w, left, right, 1.0)
    except Exception as error:  # a compiler may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"Triton cannot build kernels ({reason}): rounds take several times as long", stacklevel=2)
        return False
    return True


@torch.library.custom_op("gpfl::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor, kernel: Sequence[int], stride: Sequence[int], flip: bool, edges: Sequence[int]) -> Tensor:
    """Return the convolutions (clients, samples, out_h, out_w, channels) of each client's samples with its own weights.

    x is (clients, samples, height, width, inputs), padded; w is from `to_taps` or `to_transposed_taps`, to be used in reverse
    order with `flip`. `edges` are the numbers of lines of zeros at the top and bottom of x, which the kernel may skip.
    """
    if x.is_cuda:
        from gpfl.engine.compiler import kernels

        return kernels.convolve(x.contiguous(), w, kernel, stride, flip, edges)
    width = 1 if w.shape[1] == kernel[0] * kernel[1] else kernel[1]
    w = w.flip(1) if flip else w
    by_line = w.reshape(len(w), kernel[0], -1, w.shape[2], width, x.shape[4])
    weight = by_line.permute(0, 3, 5, 1, 2, 4).reshape(-1, x.shape[4], *kernel)
    out = F.conv2d(_to_nchw(x), weight, stride=tuple(stride), groups=len(x))
    return out.reshape(x.shape[1], len(x), -1, *out.shape[2:]).permute(1, 0, 3, 4, 2).contiguous()


@convolve.register_fake
def _(x: Tensor, w: Tensor, kernel: Sequence[int], stride: Sequence[int], flip: bool, edges: Sequence[int]) -> Tensor:
    size = [(x.shape[2 + axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1)]
    return x.new_empty(len(x), x.shape[1], *size, w.shape[2])


def to_taps(weight: Tensor, groups: int) -> Tensor:
    """Return weights (clients × channels, inputs, height, width) as taps (clients, taps, channels, inputs per tap).

    A tap is one position of the kernel or, with few input channels, a whole line of it. Nothing is copied if the input
    channels are innermost in memory.
    """
    by_client = weight.reshape(groups, -1, *weight.shape[1:])  # (clients, channels, inputs, height, width)
    if weight.shape[1] < FEW_CHANNELS:
        return by_client.permute(0, 3, 1, 4, 2).reshape(groups, weight.shape[2], by_client.shape[1], -1)
    return by_client.permute(0, 3, 4, 1, 2).reshape(groups, -1, by_client.shape[1], weight.shape[1])


def to_transposed_taps(weight: Tensor, groups: int) -> tuple[Tensor, bool]:
    """Return the taps of the gradient with respect to the input, and whether to use them in reverse order."""
    by_client = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    if by_client.shape[2] < FEW_CHANNELS:
        return to_taps(by_client.flip(3, 4).flatten(0, 1), groups), False
    return by_client.permute(0, 3, 4, 1, 2).reshape(groups, -1, *by_client.shape[1:3]), True


@torch.library.custom_op("gpfl::conv_grad_weight", mutates_args=())
def conv_grad_weight(x: Tensor, grad: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the gradient of `convolve`'s weights as summands (splits, clients, channels, height, width, inputs)."""
    splits = _n_splits(x, grad, kernel)
    if x.is_cuda:
        from gpfl.engine.compiler import kernels

        return kernels.conv_grad_weight(x.contiguous(), grad.contiguous(), kernel, stride, splits)
    shape = (len(x) * grad.shape[4], x.shape[4], *kernel)
    total = conv2d_weight(_to_nchw(x), shape, _to_nchw(grad), stride=tuple(stride), groups=len(x))  # type: ignore[no-untyped-call]
    total = total.reshape(len(x), grad.shape[4], x.shape[4], *kernel).permute(0, 1, 3, 4, 2)
    return torch.stack([total / splits] * splits)


@conv_grad_weight.register_fake
def _(x: Tensor, grad: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    return x.new_empty(_n_splits(x, grad, kernel), len(x), grad.shape[4], *kernel, x.shape[4])


def _n_splits(x: Tensor, grad: Tensor, kernel: Sequence[int]) -> int:
    """Return the number of summands of a weight gradient: one block per tile of few weights would leave a GPU idle."""
    blocks = len(x) * math.ceil(math.prod(kernel) * x.shape[4] / 32) * math.ceil(grad.shape[4] / 64)
    return min(x.shape[1], math.ceil(MIN_BLOCKS / blocks)) if blocks < MIN_BLOCKS // 2 else 1


@torch.library.custom_op("gpfl::skinny_bmm", mutates_args=())
def skinny_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of (clients, few rows, terms) with (clients, terms, columns)."""
    if a.is_cuda:
        from gpfl.engine.compiler import kernels

        return kernels.skinny_bmm(a, b)
    return torch.bmm(a, b).contiguous()


@skinny_bmm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), a.shape[1], b.shape[2])


@torch.library.custom_op("gpfl::sub_bmm_", mutates_args={"w"})
def sub_bmm_(w: Tensor, left: Tensor, right: Tensor, rate: float) -> None:
    """Subtract rate × (clients, rows, few terms) times (clients, few terms, columns) from w, in place."""
    if w.is_cuda:
        from gpfl.engine.compiler import kernels

        kernels.sub_bmm(w, left, right, rate)
    else:
        w.baddbmm_(left, right, alpha=-rate)


@sub_bmm_.register_fake
def _(w: Tensor, left: Tensor, right: Tensor, rate: float) -> None:
    return None


@torch.library.custom_op("gpfl::materialize", mutates_args=())
def materialize(x: Tensor) -> Tensor:
    """Return a copy in memory: a compiler would recompute a cheap value wherever it is read."""
    return x.clone(memory_format=torch.contiguous_format)


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@randomness.normal_op.register_kernel("cuda")
def _normal(key: Tensor, word: int, count: int) -> Tensor:
    if not has_kernels(key.device):
        return randomness.box_muller(key, word, count).contiguous()
    from gpfl.engine.compiler import kernels

    return kernels.normal(key, word, count)


def _to_nchw(x: Tensor) -> Tensor:
    """Return (clients, samples, height, width, channels) as (samples, clients × channels, height, width)."""
    return x.permute(1, 0, 4, 2, 3).reshape(x.shape[1], -1, *x.shape[2:4])
