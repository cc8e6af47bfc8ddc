"""Convolutions of many clients as batched matrix products: a grouped convolution would run them one after another.

With our kernels they are operations of their own; without, what each place sees is written down as columns and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.engine.compiler import products

Ints = Sequence[int]
ALIGNED = 4
SMALL = 1 << 13
"""Entries of a weight gradient under which the sum over rows is split by rows: one long sum would keep few processors busy."""
DEPTHWISE = 4
"""Channels from one input from which a group is a client's."""
MOST = (1 << 16) - 1
"""Groups that a launch on a GPU can count."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Tensor:
    """Gives a convolution with a group for each client; all others as they are."""
    if not taken(x, weight, transposed, groups):
        return NotImplemented  # type: ignore[no-any-return]
    if kernels_take(x, dilation, groups):
        seen = inner(padded(x, padding), groups)
        own = products.taps(weight, groups)
        edges = [padding[0], padding[0]]
        return laid_out(torch.ops.gpfl.convolve(seen, own, list(weight.shape[2:]), list(stride), False, edges), bias)
    columns, size = unfold(x, weight, stride, padding, dilation, groups)
    out = torch.bmm(columns, aligned(flat(weight, groups)).transpose(1, 2))  # (clients, rows × places, channels)
    if bias is not None:
        out = out + bias.reshape(groups, 1, -1)
    return folded(out, len(x), size)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Ints | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gives the gradients of x, weight and bias, as far as they are wanted."""
    if not taken(x, weight, transposed, groups):
        return NotImplemented  # type: ignore[no-any-return]
    if kernels_take(x, dilation, groups):
        return kernels_backward(grad, x, weight, stride, padding, groups, wanted)
    rows, size = len(x), grad.shape[2:]
    # (clients, rows × places, channels)
    dy = grad.reshape(rows, groups, -1, *size).movedim(2, -1).transpose(0, 1).reshape(groups, rows * size[0] * size[1], -1)
    dx = dw = db = None
    if wanted[0]:
        columns = torch.bmm(dy, flat(weight, groups))
        dx = unfold_backward(columns, x, weight, stride, padding, dilation, groups, (size[0], size[1]))
    if wanted[1]:
        columns, _ = unfold(x, weight, stride, padding, dilation, groups)
        split = rows if weight[0].numel() * (len(weight) // groups) < SMALL else 1
        parts = torch.bmm(
            dy.reshape(groups * split, -1, dy.shape[-1]).transpose(1, 2), columns.reshape(groups * split, -1, columns.shape[-1])
        )
        if split > 1:
            parts = parts.reshape(groups, split, *parts.shape[1:]).sum(1)
        dw = parts[..., : weight[0].numel()].reshape(weight.shape)
    if wanted[2]:
        db = dy.sum(1).reshape(-1)
    return dx, dw, db


def taken(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    """Tells whether a convolution is of many clients in the plane, and a product in each group is worth its while.

    Groups may also be a client's own. With one input and few channels each, as in depthwise convolutions, libraries have
    kernels for them, and a product would be mostly empty.
    """
    if groups == 1 or transposed or x.dim() != 4:
        return False
    return weight.shape[1] > 1 or len(weight) >= DEPTHWISE * groups


def kernels_take(x: Tensor, dilation: Ints, groups: int) -> bool:
    """Tells whether our kernels take a convolution."""
    if x.dtype != torch.float32 or any(step != 1 for step in dilation) or groups > MOST:
        return False
    return products.has_kernels(x.device)


def kernels_backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Ints, padding: Ints, groups: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gives what `convolution_backward` gives, by our kernels."""
    kernel = weight.shape[2:]
    dx = dw = None
    if wanted[0]:
        # Every pixel sees the places that saw it: a convolution of the gradient, spread where places were apart.
        edges = []
        for axis in (1, 0):
            reach = (grad.shape[2 + axis] - 1) * stride[axis] + 1
            before = kernel[axis] - 1 - padding[axis]
            edges += [before, x.shape[2 + axis] + kernel[axis] - 1 - reach - before]
        spread_out = F.pad(spread(grad, stride), edges)
        own, flip = products.turned_taps(weight, groups)
        empty = [max(0, edge) for edge in edges[2:]]  # a pad of less than nothing cuts lines off
        dx = laid_out(torch.ops.gpfl.convolve(inner(spread_out, groups), own, list(kernel), [1, 1], flip, empty), None)
    dy = inner(grad, groups)
    if wanted[1]:
        parts = torch.ops.gpfl.weigh(inner(padded(x, padding), groups), dy, list(kernel), list(stride))
        whole = parts.sum(0) if len(parts) > 1 else parts[0]
        dw = whole.permute(0, 1, 4, 2, 3).reshape(weight.shape)
    db = dy.sum((1, 2, 3)).reshape(-1) if wanted[2] else None
    return dx, dw, db


def padded(x: Tensor, padding: Ints) -> Tensor:
    """Gives images with zeros around them."""
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x


def inner(x: Tensor, groups: int) -> Tensor:
    """Gives images (rows, clients × channels, height, width) as (clients, rows, height, width, channels)."""
    return x.reshape(len(x), groups, -1, *x.shape[2:]).permute(1, 0, 3, 4, 2).contiguous()


def laid_out(y: Tensor, bias: Tensor | None) -> Tensor:
    """Gives (clients, rows, height, width, channels) as images (rows, clients × channels, height, width), a bias added."""
    if bias is not None:
        y = y + bias.reshape(len(y), 1, 1, 1, -1)
    return y.permute(1, 0, 4, 2, 3).reshape(y.shape[1], -1, *y.shape[2:4])


def flat(weight: Tensor, groups: int) -> Tensor:
    """Gives the weights of each client as a matrix (clients, channels, inputs × kernel)."""
    return weight.reshape(groups, len(weight) // groups, -1)


def out_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Gives the side of a convolution's result."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def unfold(
    x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> tuple[Tensor, tuple[int, int]]:
    """Gives what the kernel sees at every place, (clients, rows × places, inputs × kernel), and the size of the result."""
    kernel = weight.shape[2:]
    size = (
        out_size(x.shape[2], kernel[0], stride[0], padding[0], dilation[0]),
        out_size(x.shape[3], kernel[1], stride[1], padding[1], dilation[1]),
    )
    x = padded(x, padding)
    rows, inputs = len(x), x.shape[1] // groups
    x = x.reshape(rows, groups, inputs, *x.shape[2:]).contiguous()
    row, client, channel, down, right = x.stride()
    seen = x.as_strided(
        (groups, rows, *size, inputs, *kernel),
        (client, row, down * stride[0], right * stride[1], channel, down * dilation[0], right * dilation[1]),
    )
    return aligned(seen.reshape(groups, rows * size[0] * size[1], -1)), size


def aligned(matrix: Tensor) -> Tensor:
    """Gives a matrix with columns of zeros added, up to a number at which products load four at once."""
    return F.pad(matrix, (0, -matrix.shape[-1] % ALIGNED)) if matrix.shape[-1] % ALIGNED else matrix


def unfold_backward(
    columns: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    size: tuple[int, int],
) -> Tensor:
    """Gives the sum at every pixel over all places that saw it."""
    rows, kernel = len(x), weight.shape[2:]
    seen = columns.reshape(groups, rows, *size, weight.shape[1], *kernel).permute(1, 0, 4, 2, 3, 5, 6)
    height, width = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]
    total: Tensor | None = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            part = spread(seen[..., i, j], stride)
            top, left = i * dilation[0], j * dilation[1]
            part = F.pad(part, (left, width - part.shape[-1] - left, top, height - part.shape[-2] - top))
            total = part if total is None else total + part
    if total is None:
        raise ValueError("a kernel without places")
    inner = total[..., padding[0] : height - padding[0], padding[1] : width - padding[1]]
    return inner.reshape(x.shape)


def spread(part: Tensor, stride: Ints) -> Tensor:
    """Gives places `stride` apart, zeros between."""
    for step in reversed(stride):  # the last axis, then the one before it
        if step > 1:
            part = F.pad(part.unsqueeze(-1), (0, step - 1)).flatten(-2)[..., : (part.shape[-1] - 1) * step + 1]
        part = part.transpose(-1, -2)
    return part


def folded(out: Tensor, rows: int, size: tuple[int, int]) -> Tensor:
    """Gives (clients, rows × places, channels) as images (rows, clients × channels, height, width)."""
    clients = len(out)
    return out.reshape(clients, rows, *size, -1).permute(1, 0, 4, 2, 3).reshape(rows, -1, *size)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: convolution,
    torch.ops.aten.convolution_backward.default: convolution_backward,
}
