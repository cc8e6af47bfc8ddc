"""Kernels for the products of many clients at once, in Triton: convolutions that never write down what each place sees, and
linear layers over few rows.

Libraries' batched products are made for large matrices. A client's step is many small ones: its images as columns are
twenty-five times its images, and ten rows leave most of a tile empty.

Products run on tensor cores. Those of the highest precision take each entry as a sum of two with 11 bits and add three
products, a block of terms apart from the total: tensor cores cut what they add, so long sums there lose digits. Their error is
that of float32 (a relative 4e-7 at Cifar100's sizes, where the library's convolutions have 5e-7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpfl.engine.compiler.products import FEW

Ints = Sequence[int]
COUNTED = 1 << 30
"""Entries from which places are counted in 64 bits: half of what 32 bits hold, since tiles reach beyond the edges."""

SPARED = 0.1
"""Share of a convolution from which leaving it out is worth that a tile holds places of several rows."""


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Gives total + a b."""
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
def counted(number, LONG: tl.constexpr):
    """Gives a number that counts entries, in 64 bits where a tensor has more of them than 32 bits can count."""
    return number.to(tl.int64) if LONG else number


@triton.jit
def convolve_kernel(
    x, w, y, rows, inputs, channels, places, width, step, begin, end,
    x_client, x_row, x_down, x_right, down, right, w_client, w_tap, w_channel, w_input,
    TAPS: tl.constexpr, ACROSS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLIP: tl.constexpr, EVEN: tl.constexpr, EDGED: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Gives y[client, row, place, channel] = Σ x[client, row, what tap sees there, input] w[client, tap, channel, input].

    With EDGED, x has zeros in lines before `begin` and from `end` on: a tile then holds the same places of all rows, and leaves
    out the lines of the kernel that see nothing else there.
    """
    client = counted(tl.program_id(1), LONG)
    m = counted(tl.program_id(0) * BM + tl.arange(0, BM), LONG)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if EDGED:
        row, place = m % rows, m // rows
        top = tl.program_id(0) * BM // rows // width * step
        bottom = tl.minimum(tl.program_id(0) * BM + BM, rows * places) - 1
        low = tl.maximum(begin - bottom // rows // width * step, 0)
        high = tl.minimum(end - top, TAPS // ACROSS)
    else:
        row, place = m // places, m % places
        low, high = 0, TAPS // ACROSS
    at = x + client * x_client + row * x_row + (place // width) * x_down + (place % width) * x_right
    own = w + client * w_client + n * w_channel
    real_m, real_n = m < rows * places, n < channels
    blocks = (inputs + BK - 1) // BK
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for turn in range(low * ACROSS * blocks, high * ACROSS * blocks):
        tap, c = turn // blocks, turn % blocks * BK + k
        real = c < inputs
        seen = tap // ACROSS * down + tap % ACROSS * right + c
        of = TAPS - 1 - tap if FLIP else tap
        a_at, b_at = at[:, None] + seen[None, :], own[None, :] + (of * w_tap + c * w_input)[:, None]
        if EVEN:
            a, b = tl.load(a_at, mask=real_m[:, None], other=0.0), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=real_m[:, None] & real[None, :], other=0.0)
            b = tl.load(b_at, mask=real_n[None, :] & real[:, None], other=0.0)
        total = add_product(total, a, b, PRECISION)
    to = ((client * rows + row) * places + place)[:, None] * channels + n[None, :]
    tl.store(y + to, total, mask=real_m[:, None] & real_n[None, :])


@triton.jit
def weigh_kernel(
    x, dy, dw, rows, inputs, channels, places, width, part,
    x_client, x_row, x_down, x_right, down, right,
    TAPS: tl.constexpr, ACROSS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Gives dw[part of the sum, client, channel, tap, input] = Σ x[what tap sees at a place, input] dy[place, channel]."""
    client, split = counted(tl.program_id(1), LONG), tl.program_id(2)
    across, blocks = (channels + BN - 1) // BN, (inputs + BC - 1) // BC
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    c = tl.program_id(0) // across % blocks * BC + tl.arange(0, BC)
    tap = tl.program_id(0) // across // blocks
    seen = x + client * x_client + tap // ACROSS * down + tap % ACROSS * right + c
    out = dy + client * rows * places * channels + n
    real_n, real_c = n < channels, c < inputs
    first, last = split * part, tl.minimum(split * part + part, rows * places)
    total = tl.zeros((BC, BN), dtype=tl.float32)
    for start in range(first, last, BM):
        m = counted(start + tl.arange(0, BM), LONG)
        row, place = m // places, m % places
        real = m < last
        at = row * x_row + (place // width) * x_down + (place % width) * x_right
        a_at, b_at = seen[:, None] + at[None, :], out[None, :] + (m * channels)[:, None]
        if EVEN:
            a, b = tl.load(a_at, mask=real[None, :], other=0.0), tl.load(b_at, mask=real[:, None], other=0.0)
        else:
            a = tl.load(a_at, mask=real_c[:, None] & real[None, :], other=0.0)
            b = tl.load(b_at, mask=real[:, None] & real_n[None, :], other=0.0)
        total = add_product(total, a, b, PRECISION)
    to = (((split * tl.num_programs(1) + client) * channels + n[None, :]) * TAPS + tap) * inputs + c[:, None]
    tl.store(dw + to, total, mask=real_c[:, None] & real_n[None, :])


@triton.jit
def thin_kernel(
    a, b, y, rows, terms, columns,
    a_client, a_row, a_term, b_client, b_term, b_column,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Gives y[client, row, column] = Σ a[client, row, term] b[client, term, column] for at most BM rows."""
    client = counted(tl.program_id(1), LONG)
    m, n = counted(tl.arange(0, BM), LONG), counted(tl.program_id(0) * BN + tl.arange(0, BN), LONG)
    real_m, real_n = m < rows, n < columns
    left, right = a + client * a_client + m * a_row, b + client * b_client + n * b_column
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, terms, BK):
        k = counted(start + tl.arange(0, BK), LONG)
        real = k < terms
        a_at, b_at = left[:, None] + (k * a_term)[None, :], right[None, :] + (k * b_term)[:, None]
        if EVEN:
            one, other = tl.load(a_at, mask=real_m[:, None], other=0.0), tl.load(b_at)
        else:
            one = tl.load(a_at, mask=real_m[:, None] & real[None, :], other=0.0)
            other = tl.load(b_at, mask=real[:, None] & real_n[None, :], other=0.0)
        total = add_product(total, one, other, PRECISION)
    to = (client * rows + m[:, None]) * columns + n[None, :]
    tl.store(y + to, total, mask=real_m[:, None] & real_n[None, :])


@triton.jit
def subtract_product_kernel(
    w, left, right, rate, down, across, w_client, w_down, w_across,
    left_client, left_row, left_down, right_client, right_row, right_across,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Subtracts rate Σ left[client, row, i] right[client, row, j] from w[client, i, j]."""
    client = counted(tl.program_id(2), LONG)
    i = counted(tl.program_id(1) * BM + tl.arange(0, BM), LONG)
    j = counted(tl.program_id(0) * BN + tl.arange(0, BN), LONG)
    real_i, real_j = i < down, j < across
    at = w + client * w_client + (i * w_down)[:, None] + (j * w_across)[None, :]
    real = real_i[:, None] & real_j[None, :]
    before = tl.load(at, mask=real, other=0.0)  # first: it comes from afar
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for row in tl.static_range(ROWS):
        a = tl.load(left + client * left_client + row * left_row + i * left_down, mask=real_i, other=0.0)
        b = tl.load(right + client * right_client + row * right_row + j * right_across, mask=real_j, other=0.0)
        total += a[:, None] * b[None, :]
    tl.store(at, before - rate * total, mask=real)


@triton.jit
def mixed(word):
    """Gives 32-bit words scrambled, as `randomness.mixed` does."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0x735A2D97
    return word ^ (word >> 15)


@triton.jit
def uniform(place, first, second):
    """Gives the numbers of a stream's places, uniform between 0 and 1."""
    word = mixed(mixed(place.to(tl.uint32) + first) ^ second)
    return (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2⁻³²


@triton.jit(do_not_specialize=["number"])
def normals_kernel(keys, y, number, count, half, BLOCK: tl.constexpr):
    """Gives y[stream, place] from N(0, 1), of the streams that a number names below the keys (streams, 2)."""
    stream = tl.program_id(1).to(tl.int64)
    first = mixed(tl.load(keys + 2 * stream).to(tl.uint32) * 0x1E3779B1 + number.to(tl.uint32))
    second = mixed(tl.load(keys + 2 * stream + 1).to(tl.uint32) * 0x1E3779B1 + number.to(tl.uint32))
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.sqrt_rn(-2.0 * tl.log(uniform(2 * pair, first, second)))
    angle = 6.283185307179586 * uniform(2 * pair + 1, first, second)
    to = y + stream * count + pair
    tl.store(to, length * tl.cos(angle), mask=pair < half)
    tl.store(to + half, length * tl.sin(angle), mask=pair + half < count)


def precision() -> str:
    """Gives torch's word for the precision of products: highest, high (TF32) or medium (bf16)."""
    return torch.get_float32_matmul_precision()


def long(*tensors: Tensor) -> bool:
    """Tells whether one of some tensors has more entries, gaps between them counted, than 32 bits can count."""
    spans = (sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    return any(span >= COUNTED for span in spans)


def convolve(x: Tensor, w: Tensor, kernel: Ints, stride: Ints, flip: bool, edges: Ints = (0, 0)) -> Tensor:
    """Gives the convolutions (clients, rows, down, across, channels) of each client's rows with its own weights.

    x is (clients, rows, height, width, inputs), contiguous; w (clients, taps, channels, what a tap sees), whatever its strides,
    last tap first if `flip`. `edges` are lines of zeros above and below.
    """
    clients, rows, channels = x.shape[0], x.shape[1], w.shape[2]
    down, across = ((x.shape[2 + axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1))
    y = x.new_empty(clients, rows, down, across, channels)
    taps, lines, width, right = line_of(x, kernel)
    if width < 32:
        tile = {"BM": 32, "BN": 32, "BK": 16, "num_warps": 1, "num_stages": 3}
    elif w.stride(3) == 1:
        tile = {"BM": 64, "BN": 64 if channels > 32 else 32, "BK": 32, "num_warps": 4, "num_stages": 3}
    elif channels > 32:
        tile = {"BM": 32, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    else:
        tile = {"BM": 64, "BN": 32, "BK": 32, "num_warps": 2, "num_stages": 3}
    grid = (math.ceil(rows * down * across / tile["BM"]), clients, math.ceil(channels / tile["BN"]))
    strides = x.stride()
    convolve_kernel[grid](
        *(x, w, y, rows, width, channels, down * across, across, stride[0], edges[0], x.shape[2] - edges[1]),
        *(strides[0], strides[1], strides[2] * stride[0], strides[3] * stride[1], strides[2], right, *w.stride()),
        *(taps, lines),
        **tile,
        FLIP=flip,
        EVEN=width % tile["BK"] == 0 and channels % tile["BN"] == 0,
        EDGED=spared(down, kernel[0], stride[0], edges[0], x.shape[2] - edges[1]) >= SPARED,
        PRECISION=precision(),
        LONG=long(x, w, y),
    )
    return y


def spared(lines: int, kernel: int, step: int, begin: int, end: int) -> float:
    """Gives the share of lines of the kernel, over lines of the result, that see zeros alone."""
    seen = (place * step + tap for place in range(lines) for tap in range(kernel))
    return sum(not begin <= line < end for line in seen) / (lines * kernel)


def weigh(x: Tensor, dy: Tensor, kernel: Ints, stride: Ints, splits: int) -> Tensor:
    """Gives the gradients of the weights (parts, clients, channels, kernel down, kernel across, inputs); parts are to be added.

    x is (clients, rows, height, width, inputs), dy (clients, rows, down, across, channels), both contiguous.
    """
    clients, rows, inputs = x.shape[0], x.shape[1], x.shape[4]
    down, across, channels = dy.shape[2:]
    dw = x.new_empty(splits, clients, channels, *kernel, inputs)
    taps, lines, width, right = line_of(x, kernel)
    if inputs >= FEW:
        tile = {"BC": 32, "BN": 64 if channels > 32 else 32, "BM": 32, "num_warps": 2, "num_stages": 3}
    else:
        tile = {"BC": 16, "BN": 32, "BM": 64, "num_warps": 2, "num_stages": 3}
    part = math.ceil(rows * down * across / splits / tile["BM"]) * tile["BM"]
    grid = (math.ceil(channels / tile["BN"]) * math.ceil(width / tile["BC"]) * taps, clients, splits)
    strides = x.stride()
    weigh_kernel[grid](
        *(x, dy, dw, rows, width, channels, down * across, across, part),
        *(strides[0], strides[1], strides[2] * stride[0], strides[3] * stride[1], strides[2], right),
        *(taps, lines),
        **tile,
        EVEN=width % tile["BC"] == 0 and channels % tile["BN"] == 0,
        PRECISION=precision(),
        LONG=long(x, dy, dw),
    )
    return dw


def line_of(x: Tensor, kernel: Ints) -> tuple[int, int, int, int]:
    """Gives taps, taps in a line, entries a tap sees, and how far taps of a line are apart."""
    if x.shape[4] < FEW:
        return kernel[0], 1, kernel[1] * x.shape[4], 0
    return kernel[0] * kernel[1], kernel[1], x.shape[4], x.stride(3)


def thin(a: Tensor, b: Tensor) -> Tensor:
    """Gives the products of (clients, at most 16 rows, terms) with (clients, terms, columns), whatever their strides."""
    clients, rows, terms = a.shape
    columns = b.shape[2]
    y = a.new_empty(clients, rows, columns)
    along = b.stride(1) < b.stride(2)  # a column's terms lie side by side
    tile = (
        {"BM": 16, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 3}
        if along
        else {"BM": 16, "BN": 64, "BK": 32, "num_warps": 2, "num_stages": 4}
    )
    grid = (math.ceil(columns / tile["BN"]), clients)
    thin_kernel[grid](
        *(a, b, y, rows, terms, columns, *a.stride(), *b.stride()),
        **tile,
        EVEN=terms % tile["BK"] == 0 and columns % tile["BN"] == 0,
        PRECISION=precision(),
        LONG=long(a, b, y),
    )
    return y


def subtract_product(w: Tensor, left: Tensor, right: Tensor, rate: float) -> None:
    """Subtracts rate × (clients, down, few rows) times (clients, few rows, across) from (clients, down, across), in place."""
    clients, down, across = w.shape
    wide = w.stride(2) == 1
    tile = {"BM": 16, "BN": 256} if wide else {"BM": 256, "BN": 16}
    grid = (math.ceil(across / tile["BN"]), math.ceil(down / tile["BM"]), clients)
    subtract_product_kernel[grid](
        *(w, left, right, rate, down, across, *w.stride()),
        *(left.stride(0), left.stride(2), left.stride(1), *right.stride()),
        **tile,
        ROWS=left.shape[2],
        LONG=long(w, left, right),
    )


def normals(key: Tensor, number: int, count: int) -> Tensor:
    """Gives what `randomness.box_muller` gives: `count` numbers from N(0, 1) of each stream below (…, 2) ones."""
    y = key.new_empty((*key.shape[:-1], count), dtype=torch.float32)
    half, block = (count + 1) // 2, 512
    normals_kernel[(math.ceil(half / block), key.shape[:-1].numel())](
        *(key.contiguous(), y, number, count, half), BLOCK=block, num_warps=4
    )
    return y
