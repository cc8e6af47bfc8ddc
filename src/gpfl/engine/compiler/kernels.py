"""Triton kernels for the products of many clients at once: implicit convolutions and linear layers over few samples.

Libraries' batched products are made for large matrices, but a client's step is many small ones: im2col makes its images
twenty-five times larger, and ten samples leave most of a tile empty.

Products run on tensor cores. For float32 each factor is split into a sum of two with 11 bits, and three products are added.
Each block of terms has an accumulator of its own, because tensor cores truncate what they add and long sums lose digits.
The error is that of float32: a relative 4e-7 at Cifar100's sizes, where the library's convolutions have 5e-7.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpfl.engine.compiler.operators import FEW_CHANNELS

Ints = Sequence[int]
INT32_ENTRIES = 1 << 30
"""Entries from which indices need 64 bits: half of what 32 bits hold, since tiles reach beyond the edges."""
MIN_SKIPPED = 0.1
"""Fraction of a convolution over zeros from which skipping it pays, although a tile then holds pixels of several samples."""


@triton.jit
def add_dot(total, a, b, PRECISION: tl.constexpr):
    """Return total + a b."""
    if PRECISION == "highest":
        high_a = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        high_b = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        block = tl.dot(a - high_a, high_b, input_precision="tf32")
        block = tl.dot(high_a, b - high_b, block, input_precision="tf32")
        total += tl.dot(high_a, high_b, block, input_precision="tf32")
    elif PRECISION == "medium":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        total = tl.dot(a, b, total, input_precision="tf32")
    return total


@triton.jit
def to_index(index, INT64: tl.constexpr):
    """Return an index, in 64 bits where a tensor has more entries than 32 bits can index."""
    return index.to(tl.int64) if INT64 else index


@triton.jit
def convolve_kernel(
    x, w, y, samples, inputs, channels, pixels, out_width, stride, begin, end,
    x_client, x_sample, x_out_line, x_out_column, x_line, x_column, w_client, w_tap, w_channel, w_input,
    TAPS: tl.constexpr, TAPS_PER_LINE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLIP: tl.constexpr, EVEN: tl.constexpr, SKIP_EDGES: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Compute y[client, sample, pixel, channel] = Σ x[client, sample, pixel + tap, input] w[client, tap, channel, input].

    With SKIP_EDGES, x is zero in lines before `begin` and from `end` on: a tile then holds the same pixels of all samples and
    skips the lines of the kernel that cover only zeros.
    """
    client = to_index(tl.program_id(1), INT64)
    m = to_index(tl.program_id(0) * BM + tl.arange(0, BM), INT64)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if SKIP_EDGES:
        sample, pixel = m % samples, m // samples
        top = tl.program_id(0) * BM // samples // out_width * stride
        bottom = tl.minimum(tl.program_id(0) * BM + BM, samples * pixels) - 1
        low = tl.maximum(begin - bottom // samples // out_width * stride, 0)
        high = tl.minimum(end - top, TAPS // TAPS_PER_LINE)
    else:
        sample, pixel = m // pixels, m % pixels
        low, high = 0, TAPS // TAPS_PER_LINE
    x_ptr = x + client * x_client + sample * x_sample + (pixel // out_width) * x_out_line + (pixel % out_width) * x_out_column
    w_ptr = w + client * w_client + n * w_channel
    mask_m, mask_n = m < samples * pixels, n < channels
    blocks = (inputs + BK - 1) // BK
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(low * TAPS_PER_LINE * blocks, high * TAPS_PER_LINE * blocks):
        tap, c = i // blocks, i % blocks * BK + k
        mask_k = c < inputs
        x_offset = tap // TAPS_PER_LINE * x_line + tap % TAPS_PER_LINE * x_column + c
        w_index = TAPS - 1 - tap if FLIP else tap
        a_ptr, b_ptr = x_ptr[:, None] + x_offset[None, :], w_ptr[None, :] + (w_index * w_tap + c * w_input)[:, None]
        if EVEN:
            a, b = tl.load(a_ptr, mask=mask_m[:, None], other=0.0), tl.load(b_ptr)
        else:
            a = tl.load(a_ptr, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(b_ptr, mask=mask_n[None, :] & mask_k[:, None], other=0.0)
        total = add_dot(total, a, b, PRECISION)
    y_offset = ((client * samples + sample) * pixels + pixel)[:, None] * channels + n[None, :]
    tl.store(y + y_offset, total, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def conv_grad_weight_kernel(
    x, grad, dw, samples, inputs, channels, pixels, out_width, split_size,
    x_client, x_sample, x_out_line, x_out_column, x_line, x_column,
    TAPS: tl.constexpr, TAPS_PER_LINE: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Compute dw[split, client, channel, tap, input] = Σ x[pixel + tap, input] grad[pixel, channel] over a split's pixels."""
    client, split = to_index(tl.program_id(1), INT64), tl.program_id(2)
    channel_blocks, input_blocks = (channels + BN - 1) // BN, (inputs + BC - 1) // BC
    n = tl.program_id(0) % channel_blocks * BN + tl.arange(0, BN)
    c = tl.program_id(0) // channel_blocks % input_blocks * BC + tl.arange(0, BC)
    tap = tl.program_id(0) // channel_blocks // input_blocks
    x_ptr = x + client * x_client + tap // TAPS_PER_LINE * x_line + tap % TAPS_PER_LINE * x_column + c
    grad_ptr = grad + client * samples * pixels * channels + n
    mask_n, mask_c = n < channels, c < inputs
    first, last = split * split_size, tl.minimum(split * split_size + split_size, samples * pixels)
    total = tl.zeros((BC, BN), dtype=tl.float32)
    for start in range(first, last, BM):
        m = to_index(start + tl.arange(0, BM), INT64)
        sample, pixel = m // pixels, m % pixels
        mask_m = m < last
        x_offset = sample * x_sample + (pixel // out_width) * x_out_line + (pixel % out_width) * x_out_column
        a_ptr, b_ptr = x_ptr[:, None] + x_offset[None, :], grad_ptr[None, :] + (m * channels)[:, None]
        if EVEN:
            a, b = tl.load(a_ptr, mask=mask_m[None, :], other=0.0), tl.load(b_ptr, mask=mask_m[:, None], other=0.0)
        else:
            a = tl.load(a_ptr, mask=mask_c[:, None] & mask_m[None, :], other=0.0)
            b = tl.load(b_ptr, mask=mask_m[:, None] & mask_n[None, :], other=0.0)
        total = add_dot(total, a, b, PRECISION)
    dw_offset = (((split * tl.num_programs(1) + client) * channels + n[None, :]) * TAPS + tap) * inputs + c[:, None]
    tl.store(dw + dw_offset, total, mask=mask_c[:, None] & mask_n[None, :])


@triton.jit
def skinny_bmm_kernel(
    a, b, y, rows, terms, columns,
    a_client, a_row, a_term, b_client, b_term, b_column,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Compute y[client, row, column] = Σ a[client, row, term] b[client, term, column] for at most BM rows."""
    client = to_index(tl.program_id(1), INT64)
    m, n = to_index(tl.arange(0, BM), INT64), to_index(tl.program_id(0) * BN + tl.arange(0, BN), INT64)
    mask_m, mask_n = m < rows, n < columns
    a_base, b_base = a + client * a_client + m * a_row, b + client * b_client + n * b_column
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, terms, BK):
        k = to_index(start + tl.arange(0, BK), INT64)
        mask_k = k < terms
        a_ptr, b_ptr = a_base[:, None] + (k * a_term)[None, :], b_base[None, :] + (k * b_term)[:, None]
        if EVEN:
            a_tile, b_tile = tl.load(a_ptr, mask=mask_m[:, None], other=0.0), tl.load(b_ptr)
        else:
            a_tile = tl.load(a_ptr, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            b_tile = tl.load(b_ptr, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        total = add_dot(total, a_tile, b_tile, PRECISION)
    y_offset = (client * rows + m[:, None]) * columns + n[None, :]
    tl.store(y + y_offset, total, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def sub_bmm_kernel(
    w, left, right, rate, rows, columns, w_client, w_row, w_column,
    left_client, left_term, left_row, right_client, right_term, right_column,
    TERMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Subtract rate Σ left[client, i, term] right[client, term, j] from w[client, i, j]."""
    client = to_index(tl.program_id(2), INT64)
    i = to_index(tl.program_id(1) * BM + tl.arange(0, BM), INT64)
    j = to_index(tl.program_id(0) * BN + tl.arange(0, BN), INT64)
    mask_i, mask_j = i < rows, j < columns
    w_ptr = w + client * w_client + (i * w_row)[:, None] + (j * w_column)[None, :]
    mask = mask_i[:, None] & mask_j[None, :]
    before = tl.load(w_ptr, mask=mask, other=0.0)  # first: it takes longest
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for term in tl.static_range(TERMS):
        a = tl.load(left + client * left_client + term * left_term + i * left_row, mask=mask_i, other=0.0)
        b = tl.load(right + client * right_client + term * right_term + j * right_column, mask=mask_j, other=0.0)
        total += a[:, None] * b[None, :]
    tl.store(w_ptr, before - rate * total, mask=mask)


@triton.jit
def mix_bits(word):
    """Return 32-bit words scrambled as by `randomness.mix_bits`."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def uniform(index, first, second):
    """Return uniform numbers between 0 and 1, as `randomness.uniform` does."""
    word = mix_bits(mix_bits(index.to(tl.uint32) + first) ^ second)
    return (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2⁻³²


@triton.jit(do_not_specialize=["word"])
def normal_kernel(keys, y, word, count, half, BLOCK: tl.constexpr):
    """Compute y[key, index] from N(0, 1) for keys (n, 2) and a word."""
    key = tl.program_id(1).to(tl.int64)
    first = mix_bits(tl.load(keys + 2 * key).to(tl.uint32) * 0x1E3779B1 + word.to(tl.uint32))
    second = mix_bits(tl.load(keys + 2 * key + 1).to(tl.uint32) * 0x1E3779B1 + word.to(tl.uint32))
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.sqrt_rn(-2.0 * tl.log(uniform(2 * pair, first, second)))
    angle = 6.283185307179586 * uniform(2 * pair + 1, first, second)
    y_ptr = y + key * count + pair
    tl.store(y_ptr, length * tl.cos(angle), mask=pair < half)
    tl.store(y_ptr + half, length * tl.sin(angle), mask=pair + half < count)


def precision() -> str:
    """Return torch's precision of matrix products: highest, high (TF32) or medium (bf16)."""
    return torch.get_float32_matmul_precision()


def needs_int64(*tensors: Tensor) -> bool:
    """Return whether one of the tensors spans more entries, gaps included, than 32 bits can index."""
    spans = (sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    return any(span >= INT32_ENTRIES for span in spans)


def convolve(x: Tensor, w: Tensor, kernel: Ints, stride: Ints, flip: bool, edges: Ints = (0, 0)) -> Tensor:
    """Compute `operators.convolve` for a contiguous x and w of any strides."""
    clients, samples, channels = x.shape[0], x.shape[1], w.shape[2]
    out_height, out_width = ((x.shape[2 + axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1))
    y = x.new_empty(clients, samples, out_height, out_width, channels)
    taps, taps_per_line, width, tap_stride = tap_layout(x, kernel)
    if width < 32:
        tile = {"BM": 32, "BN": 32, "BK": 16, "num_warps": 1, "num_stages": 3}
    elif w.stride(3) == 1:
        tile = {"BM": 64, "BN": 64 if channels > 32 else 32, "BK": 32, "num_warps": 4, "num_stages": 3}
    elif channels > 32:
        tile = {"BM": 32, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    else:
        tile = {"BM": 64, "BN": 32, "BK": 32, "num_warps": 2, "num_stages": 3}
    grid = (math.ceil(samples * out_height * out_width / tile["BM"]), clients, math.ceil(channels / tile["BN"]))
    strides = x.stride()
    convolve_kernel[grid](
        *(x, w, y, samples, width, channels, out_height * out_width, out_width, stride[0], edges[0], x.shape[2] - edges[1]),
        *(strides[0], strides[1], strides[2] * stride[0], strides[3] * stride[1], strides[2], tap_stride, *w.stride()),
        *(taps, taps_per_line),
        **tile,
        FLIP=flip,
        EVEN=width % tile["BK"] == 0 and channels % tile["BN"] == 0,
        SKIP_EDGES=skipped_fraction(out_height, kernel[0], stride[0], edges[0], x.shape[2] - edges[1]) >= MIN_SKIPPED,
        PRECISION=precision(),
        INT64=needs_int64(x, w, y),
    )
    return y


def skipped_fraction(out_height: int, kernel: int, stride: int, begin: int, end: int) -> float:
    """Return the fraction of the kernel's lines, over the lines of the result, that cover only zeros."""
    lines = (out_line * stride + tap for out_line in range(out_height) for tap in range(kernel))
    return sum(not begin <= line < end for line in lines) / (out_height * kernel)


def conv_grad_weight(x: Tensor, grad: Tensor, kernel: Ints, stride: Ints, splits: int) -> Tensor:
    """Compute `operators.conv_grad_weight` for contiguous inputs."""
    clients, samples, inputs = x.shape[0], x.shape[1], x.shape[4]
    out_height, out_width, channels = grad.shape[2:]
    dw = x.new_empty(splits, clients, channels, *kernel, inputs)
    taps, taps_per_line, width, tap_stride = tap_layout(x, kernel)
    if inputs >= FEW_CHANNELS:
        tile = {"BC": 32, "BN": 64 if channels > 32 else 32, "BM": 32, "num_warps": 2, "num_stages": 3}
    else:
        tile = {"BC": 16, "BN": 32, "BM": 64, "num_warps": 2, "num_stages": 3}
    split_size = math.ceil(samples * out_height * out_width / splits / tile["BM"]) * tile["BM"]
    grid = (math.ceil(channels / tile["BN"]) * math.ceil(width / tile["BC"]) * taps, clients, splits)
    strides = x.stride()
    conv_grad_weight_kernel[grid](
        *(x, grad, dw, samples, width, channels, out_height * out_width, out_width, split_size),
        *(strides[0], strides[1], strides[2] * stride[0], strides[3] * stride[1], strides[2], tap_stride),
        *(taps, taps_per_line),
        **tile,
        EVEN=width % tile["BC"] == 0 and channels % tile["BN"] == 0,
        PRECISION=precision(),
        INT64=needs_int64(x, grad, dw),
    )
    return dw


def tap_layout(x: Tensor, kernel: Ints) -> tuple[int, int, int, int]:
    """Return the numbers of taps, of taps per line and of inputs per tap, and the stride between the taps of a line."""
    if x.shape[4] < FEW_CHANNELS:
        return kernel[0], 1, kernel[1] * x.shape[4], 0
    return kernel[0] * kernel[1], kernel[1], x.shape[4], x.stride(3)


def skinny_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Compute `operators.skinny_bmm` for any strides and at most 16 rows."""
    clients, rows, terms = a.shape
    columns = b.shape[2]
    y = a.new_empty(clients, rows, columns)
    columns_contiguous = b.stride(1) < b.stride(2)
    tile = (
        {"BM": 16, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 3}
        if columns_contiguous
        else {"BM": 16, "BN": 64, "BK": 32, "num_warps": 2, "num_stages": 4}
    )
    grid = (math.ceil(columns / tile["BN"]), clients)
    skinny_bmm_kernel[grid](
        *(a, b, y, rows, terms, columns, *a.stride(), *b.stride()),
        **tile,
        EVEN=terms % tile["BK"] == 0 and columns % tile["BN"] == 0,
        PRECISION=precision(),
        INT64=needs_int64(a, b, y),
    )
    return y


def sub_bmm(w: Tensor, left: Tensor, right: Tensor, rate: float) -> None:
    """Compute `operators.sub_bmm_` for any strides."""
    clients, rows, columns = w.shape
    rows_contiguous = w.stride(2) == 1
    tile = {"BM": 16, "BN": 256} if rows_contiguous else {"BM": 256, "BN": 16}
    grid = (math.ceil(columns / tile["BN"]), math.ceil(rows / tile["BM"]), clients)
    sub_bmm_kernel[grid](
        *(w, left, right, rate, rows, columns, *w.stride()),
        *(left.stride(0), left.stride(2), left.stride(1), *right.stride()),
        **tile,
        TERMS=left.shape[2],
        INT64=needs_int64(w, left, right),
    )


def normal(key: Tensor, word: int, count: int) -> Tensor:
    """Compute `randomness.box_muller`."""
    y = key.new_empty((*key.shape[:-1], count), dtype=torch.float32)
    half, block = (count + 1) // 2, 512
    normal_kernel[(math.ceil(half / block), key.shape[:-1].numel())](
        *(key.contiguous(), y, word, count, half), BLOCK=block, num_warps=4
    )
    return y
