"""Every random number of the project: a generator is a pure function of (seed, purpose, key…)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

PURPOSES = (
    *("split", "cut", "validation", "cohort", "batches", "weights", "embeddings", "valve", "contexts", "subset"),
    *("victims", "attack", "defence"),
)
LARGEST_SEED = 2**32 - 1
"""A larger number would run over into the words that hold purpose and key."""


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Gives numpy's generator for one purpose, for example (seed, "batches", round, client)."""
    if purpose not in PURPOSES:
        raise ValueError(f"'{purpose}' is not in PURPOSES")
    # numpy does not tell a trailing 0 from none, so the length of the key is part of it.
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(key), *key])


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """Gives a seed for torch, drawn from the generator of that purpose."""
    return int(generator(seed, purpose, *key).integers(2**63))


def torch_generator(seed: int, purpose: str, *key: int) -> torch.Generator:
    """Gives torch's CPU generator for one purpose."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *key))


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Lets code that draws from torch's global generator (the layers' own initialisers) draw from ours, and restores it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, purpose))
        yield


# Numbers drawn inside a client's round, where there are many clients on one axis and no generator can go: every number is a
# hash of its stream and its place. Whole numbers are exact, so engines and devices draw the same.

WORD = 0xFFFFFFFF
SALT_BITS = 24
"""Bits of a salt: a whole number that float32 holds exactly."""


def salt_of(seed: int) -> float:
    """Gives what tells the streams of one seed from those of another."""
    return float(generator(seed, "defence").integers(1 << SALT_BITS))


def mixed(word: Tensor) -> Tensor:
    """Gives 32-bit words (int64) scrambled, one to one; factors below 2^31 keep products within int64."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & WORD
    return word ^ (word >> 15)


def stream(first: Tensor, *words: Tensor | str | int) -> Tensor:
    """Gives the two words (2,) of the stream that a salt and further words name; texts are names too.

    Numbers must be whole and not negative, in tensors of any type.
    """
    lanes = torch.arange(1, 3, device=first.device)
    for word in (first, *words):
        number = number_of(word) if isinstance(word, str) else word.to(torch.int64) if isinstance(word, Tensor) else word
        lanes = below(lanes, number)
    return lanes


def number_of(name: str) -> int:
    """Gives the word that a name is."""
    return zlib.crc32(name.encode())


def below(key: Tensor, number: Tensor | int) -> Tensor:
    """Gives the stream that one more word names."""
    return mixed((key * 0x1E3779B1 + number) & WORD)


def uniforms(key: Tensor, shape: Sequence[int], first: int = 0, stride: int = 1) -> Tensor:
    """Gives numbers of streams (…, 2), uniform between 0 and 1: those at the places `first`, `first + stride` and so on."""
    places = torch.arange(math.prod(shape), device=key.device) * stride + first
    words = mixed(mixed((places + key[..., :1]) & WORD) ^ key[..., 1:])
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).reshape((*key.shape[:-1], *shape))


def normals(key: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    """Gives numbers from N(0, 1) of the stream that a name tells below another; none is beyond 6.8."""
    numbers: Tensor = drawn(key, number_of(name), math.prod(shape))
    return numbers.reshape(tuple(shape))


def box_muller(key: Tensor, number: int, count: int) -> Tensor:
    """Gives `count` numbers from N(0, 1) of each stream below (…, 2) ones, by Box and Muller's way."""
    own, half = below(key, number), (count + 1) // 2
    length = torch.sqrt(-2 * torch.log(uniforms(own, (half,), 0, 2)))
    angle = 2 * math.pi * uniforms(own, (half,), 1, 2)
    return torch.cat([length * torch.cos(angle), length * torch.sin(angle)], -1)[..., :count]


@torch.library.custom_op("gpfl::normals", mutates_args=())
def drawn(key: Tensor, number: int, count: int) -> Tensor:
    """Gives what `box_muller` gives, as one operation: its hundred steps would each be written down."""
    return box_muller(key, number, count).contiguous()


@drawn.register_fake
def _(key: Tensor, number: int, count: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], count), dtype=torch.float32)


@drawn.register_vmap
def _(info: object, axes: tuple[int | None, ...], key: Tensor, number: int, count: int) -> tuple[Tensor, int]:
    return drawn(key.movedim(axes[0] or 0, 0), number, count), 0
