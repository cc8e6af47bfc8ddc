"""Convolutions of many clients as batched matrix products: libraries run the groups of a grouped convolution one by one.

With our kernels they are operators of their own; otherwise im2col and a matrix product.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.engine.compiler import operators

Ints = Sequence[int]
ALIGNMENT = 4  # columns that a matrix product loads at once
SMALL_WEIGHT = 1 << 13
"""Entries of a weight gradient below which the sum over samples is split by sample: one long sum keeps few processors busy."""
MIN_CHANNELS = 4
"""Output channels per group from which a group of one input channel is a client's convolution, not a depthwise one."""
MAX_GROUPS = (1 << 16) - 1  # groups that one launch on a GPU can index


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    stride: Ints, padding: Ints, dilation: Ints, transposed: bool, output_padding: Ints, groups: int,
) -> Tensor:  # fmt: skip
    """Decompose a convolution with one group per client; others return NotImplemented and stay as they are."""
    if not _is_decomposed(x, weight, transposed, groups):
        return NotImplemented  # type: ignore[no-any-return]
    if _has_kernel(x, dilation, groups):
        by_client = _to_channels_last(_pad(x, padding), groups)
        taps = operators.to_taps(weight, groups)
        edges = [padding[0], padding[0]]
        y = torch.ops.gpfl.convolve(by_client, taps, list(weight.shape[2:]), list(stride), False, edges)
        return _from_channels_last(y, bias)
    columns, size = _im2col(x, weight, stride, padding, dilation, groups)
    out = torch.bmm(columns, _align(_weight_matrices(weight, groups)).transpose(1, 2))  # (clients, samples × pixels, channels)
    if bias is not None:
        out = out + bias.reshape(groups, 1, -1)
    return _to_images(out, len(x), size)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Ints | None,
    stride: Ints, padding: Ints, dilation: Ints, transposed: bool, output_padding: Ints, groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Decompose the gradients with respect to x, weight and bias that `output_mask` selects."""
    if not _is_decomposed(x, weight, transposed, groups):
        return NotImplemented  # type: ignore[no-any-return]
    if _has_kernel(x, dilation, groups):
        return _backward_by_kernels(grad, x, weight, stride, padding, groups, output_mask)
    samples, size = len(x), grad.shape[2:]
    # (clients, samples × pixels, channels)
    dy = grad.reshape(samples, groups, -1, *size).movedim(2, -1).transpose(0, 1)
    dy = dy.reshape(groups, samples * size[0] * size[1], -1)
    dx = dw = db = None
    if output_mask[0]:
        columns = torch.bmm(dy, _weight_matrices(weight, groups))
        dx = _col2im(columns, x, weight, stride, padding, dilation, groups, (size[0], size[1]))
    if output_mask[1]:
        columns, _ = _im2col(x, weight, stride, padding, dilation, groups)
        splits = samples if weight[0].numel() * (len(weight) // groups) < SMALL_WEIGHT else 1
        left = dy.reshape(groups * splits, -1, dy.shape[-1]).transpose(1, 2)
        parts = torch.bmm(left, columns.reshape(groups * splits, -1, columns.shape[-1]))
        if splits > 1:
            parts = parts.reshape(groups, splits, *parts.shape[1:]).sum(1)
        dw = parts[..., : weight[0].numel()].reshape(weight.shape)
    if output_mask[2]:
        db = dy.sum(1).reshape(-1)
    return dx, dw, db


def _is_decomposed(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    """Return whether a convolution is two-dimensional, of many clients, and worth a matrix product per group.

    Groups may also be a client's own. Libraries have kernels for depthwise convolutions, with one input and few output
    channels per group; a matrix product would be mostly empty.
    """
    if groups == 1 or transposed or x.dim() != 4:
        return False
    return weight.shape[1] > 1 or len(weight) >= MIN_CHANNELS * groups


def _has_kernel(x: Tensor, dilation: Ints, groups: int) -> bool:
    if x.dtype != torch.float32 or any(step != 1 for step in dilation) or groups > MAX_GROUPS:
        return False
    return operators.has_kernels(x.device)


def _backward_by_kernels(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Ints, padding: Ints, groups: int, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    kernel = weight.shape[2:]
    dx = dw = None
    if output_mask[0]:
        # The gradient of the input is a convolution of the gradient of the output, dilated by the stride.
        edges = []
        for axis in (1, 0):
            reach = (grad.shape[2 + axis] - 1) * stride[axis] + 1
            before = kernel[axis] - 1 - padding[axis]
            edges += [before, x.shape[2 + axis] + kernel[axis] - 1 - reach - before]
        dilated = F.pad(_dilate(grad, stride), edges)
        taps, flip = operators.to_transposed_taps(weight, groups)
        zeros = [max(0, edge) for edge in edges[2:]]  # negative padding crops
        by_client = _to_channels_last(dilated, groups)
        dx = _from_channels_last(torch.ops.gpfl.convolve(by_client, taps, list(kernel), [1, 1], flip, zeros), None)
    dy = _to_channels_last(grad, groups)
    if output_mask[1]:
        padded = _to_channels_last(_pad(x, padding), groups)
        parts = torch.ops.gpfl.conv_grad_weight(padded, dy, list(kernel), list(stride))
        total = parts.sum(0) if len(parts) > 1 else parts[0]
        dw = total.permute(0, 1, 4, 2, 3).reshape(weight.shape)
    db = dy.sum((1, 2, 3)).reshape(-1) if output_mask[2] else None
    return dx, dw, db


def _pad(x: Tensor, padding: Ints) -> Tensor:
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x


def _to_channels_last(x: Tensor, groups: int) -> Tensor:
    """Return images (samples, clients × channels, height, width) as (clients, samples, height, width, channels)."""
    return x.reshape(len(x), groups, -1, *x.shape[2:]).permute(1, 0, 3, 4, 2).contiguous()


def _from_channels_last(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return (clients, samples, height, width, channels) plus bias as (samples, clients × channels, height, width)."""
    if bias is not None:
        y = y + bias.reshape(len(y), 1, 1, 1, -1)
    return y.permute(1, 0, 4, 2, 3).reshape(y.shape[1], -1, *y.shape[2:4])


def _weight_matrices(weight: Tensor, groups: int) -> Tensor:
    """Return the weights of each client as a matrix (clients, channels, inputs × kernel)."""
    return weight.reshape(groups, len(weight) // groups, -1)


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _im2col(
    x: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> tuple[Tensor, tuple[int, int]]:
    """Return the patches (clients, samples × pixels, inputs × kernel) under the kernel, and the size of the output."""
    kernel = weight.shape[2:]
    size = (
        _output_size(x.shape[2], kernel[0], stride[0], padding[0], dilation[0]),
        _output_size(x.shape[3], kernel[1], stride[1], padding[1], dilation[1]),
    )
    x = _pad(x, padding)
    samples, inputs = len(x), x.shape[1] // groups
    x = x.reshape(samples, groups, inputs, *x.shape[2:]).contiguous()
    sample, client, channel, down, right = x.stride()
    patches = x.as_strided(
        (groups, samples, *size, inputs, *kernel),
        (client, sample, down * stride[0], right * stride[1], channel, down * dilation[0], right * dilation[1]),
    )
    return _align(patches.reshape(groups, samples * size[0] * size[1], -1)), size


def _align(matrix: Tensor) -> Tensor:
    """Return a matrix with columns of zeros added, up to a multiple of the alignment."""
    return F.pad(matrix, (0, -matrix.shape[-1] % ALIGNMENT)) if matrix.shape[-1] % ALIGNMENT else matrix


def _col2im(
    columns: Tensor, x: Tensor, weight: Tensor,
    stride: Ints, padding: Ints, dilation: Ints, groups: int, size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Return for every pixel of x the sum over the patches that contain it."""
    samples, kernel = len(x), weight.shape[2:]
    patches = columns.reshape(groups, samples, *size, weight.shape[1], *kernel).permute(1, 0, 4, 2, 3, 5, 6)
    height, width = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]

    def at_tap(i: int, j: int) -> Tensor:
        part = _dilate(patches[..., i, j], stride)
        top, left = i * dilation[0], j * dilation[1]
        return F.pad(part, (left, width - part.shape[-1] - left, top, height - part.shape[-2] - top))

    total = reduce(torch.add, (at_tap(i, j) for i in range(kernel[0]) for j in range(kernel[1])))
    return total[..., padding[0] : height - padding[0], padding[1] : width - padding[1]].reshape(x.shape)


def _dilate(x: Tensor, stride: Ints) -> Tensor:
    """Return x with `stride` - 1 zeros between neighbouring pixels."""
    for step in reversed(stride):  # the last axis, then the one before it
        if step > 1:
            x = F.pad(x.unsqueeze(-1), (0, step - 1)).flatten(-2)[..., : (x.shape[-1] - 1) * step + 1]
        x = x.transpose(-1, -2)
    return x


def _to_images(out: Tensor, samples: int, size: tuple[int, int]) -> Tensor:
    """Return (clients, samples × pixels, channels) as images (samples, clients × channels, height, width)."""
    clients = len(out)
    return out.reshape(clients, samples, *size, -1).permute(1, 0, 4, 2, 3).reshape(samples, -1, *size)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: convolution,
    torch.ops.aten.convolution_backward.default: convolution_backward,
}
