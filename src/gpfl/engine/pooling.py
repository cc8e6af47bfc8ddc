"""Pooling for a compiler: which entry of a window is the largest is kept in a byte, not worked out again on the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Ints = Sequence[int]
LARGEST = 9
"""Entries of a window up to which they are compared one by one."""


def max_pool(
    x: Tensor, kernel: Ints, stride: Ints = (), padding: Ints = (0, 0), dilation: Ints = (1, 1), ceil: bool = False
) -> tuple[Tensor, Tensor]:
    """Gives the largest entry of every window and its place in the plane; windows that overlap are left to torch."""
    if not taken(x, kernel, stride, padding, dilation, ceil):
        return NotImplemented  # type: ignore[no-any-return]
    (down, across), (high, wide) = kernel, windows(x, kernel)
    cut = x[..., : high * down, : wide * across].reshape(*x.shape[:-2], high, down, wide, across)
    entries = [cut[..., i, :, j] for i in range(down) for j in range(across)]
    best, which = entries[0], torch.zeros_like(entries[0], dtype=torch.int8)
    for number, entry in enumerate(entries[1:], 1):
        better = (entry > best) | (entry != entry)  # as in torch, NaN is the largest and the first of equals is taken
        best, which = torch.where(better, entry, best), torch.where(better, number, which)
    which = torch.ops.gpfl.stored(which).long()
    corners = positions(x, kernel)[:, 0, :, 0]
    return best, corners + which // across * x.shape[-1] + which % across


def max_pool_backward(
    grad: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil: bool, indices: Tensor
) -> Tensor:
    """Gives the gradient of x: that of a window at the place of its largest entry."""
    if not taken(x, kernel, stride, padding, dilation, ceil):
        return NotImplemented  # type: ignore[no-any-return]
    (down, across), (high, wide) = kernel, windows(x, kernel)
    chosen = indices[..., :, None, :, None] == positions(x, kernel)
    whole = torch.where(chosen, grad[..., :, None, :, None], 0.0).reshape(*x.shape[:-2], high * down, wide * across)
    left = x.shape[-2] - high * down, x.shape[-1] - wide * across
    return F.pad(whole, (0, left[1], 0, left[0])) if any(left) else whole


def taken(x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil: bool) -> bool:
    """Tells whether windows are small, lie side by side and hold nothing from beyond the edges."""
    if len(kernel) != 2 or kernel[0] * kernel[1] > LARGEST or list(stride) not in ([], list(kernel)) or ceil:
        return False
    return not any(padding) and all(step == 1 for step in dilation) and min(windows(x, kernel)) > 0


def windows(x: Tensor, kernel: Ints) -> tuple[int, int]:
    """Gives the number of windows down and across."""
    return x.shape[-2] // kernel[0], x.shape[-1] // kernel[1]


def positions(x: Tensor, kernel: Ints) -> Tensor:
    """Gives the place in the plane of every entry: (windows down, kernel down, windows across, kernel across)."""
    (down, across), (high, wide) = kernel, windows(x, kernel)
    lines = torch.arange(high * down, device=x.device).reshape(high, down, 1, 1)
    return lines * x.shape[-1] + torch.arange(wide * across, device=x.device).reshape(1, 1, wide, across)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.max_pool2d_with_indices.default: max_pool,
    torch.ops.aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
