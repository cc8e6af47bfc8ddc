"""Random number generators, each a pure function of (seed, purpose, key…)."""

import hmac
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

PURPOSES = (
    *("split", "cut", "validation", "cohort", "batches", "weights", "embeddings", "valve", "contexts", "subset"),
    *("victims", "attack", "defence", "bootstrap", "final_batches", "repetition"),
)
MAX_SEED = 2**32 - 1
"""numpy splits a larger seed into several words, which could equal those of another seed and purpose."""


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return numpy's generator for one purpose, for example (seed, "batches", round, client)."""
    if purpose not in PURPOSES:
        raise ValueError(f"'{purpose}' is not in PURPOSES")
    # numpy ignores trailing zeros of a seed, so the length of the key is part of it.
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), len(key), *key])


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """Return a seed for torch, from the generator of that purpose."""
    return int(generator(seed, purpose, *key).integers(2**63))


def torch_generator(seed: int, purpose: str, *key: int) -> torch.Generator:
    """Return torch's CPU generator for one purpose."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *key))


@contextmanager
def fork_rng(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's global generator, from which layers draw their initial weights, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, purpose))
        yield


# Random numbers inside a client's round. Under vmap many clients share one axis and no generator can be used, so every
# number is a hash of its key and its index. Integer arithmetic is exact: all engines and devices draw the same numbers.
# A key is a pair of 32-bit words, (…, 2).

_WORD = 0xFFFFFFFF
_SALT_BITS = 24  # a float32 holds such an integer exactly


def make_salt(seed: int) -> float:
    """Return a number from which the random keys of a seed are derived."""
    return float(generator(seed, "defence").integers(1 << _SALT_BITS))


def random_key(first: Tensor, *names: Tensor | str | int) -> Tensor:
    """Return the key (2,) derived from a salt or key and further names: texts or non-negative integers."""
    key = torch.arange(1, 3, device=first.device)
    for name in (first, *names):
        word = zlib.crc32(name.encode()) if isinstance(name, str) else name
        key = _fold_in(key, word.to(torch.int64) if isinstance(word, Tensor) else word)
    return key


def secret_key(secret: bytes, purpose: str, *numbers: int) -> Tensor:
    """Return the key (2,) derived from a secret, a purpose and numbers by HMAC-SHA-256; it is unknown without the secret."""
    digest = hmac.digest(secret, f"{purpose} {' '.join(map(str, numbers))}".encode(), "sha256")
    return torch.tensor([int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")])


def uniform(key: Tensor, shape: Sequence[int], start: int = 0, stride: int = 1) -> Tensor:
    """Return uniform numbers between 0 and 1 for each key: those with index `start`, `start + stride` and so on."""
    indices = torch.arange(math.prod(shape), device=key.device) * stride + start
    words = mix_bits(mix_bits((indices + key[..., :1]) & _WORD) ^ key[..., 1:])
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).reshape((*key.shape[:-1], *shape))


def normal(key: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    """Return numbers from N(0, 1) for a key and a name, none larger than 6.8 in magnitude."""
    numbers: Tensor = normal_op(key, zlib.crc32(name.encode()), math.prod(shape))
    return numbers.reshape(tuple(shape))


def box_muller(key: Tensor, word: int, count: int) -> Tensor:
    """Return `count` numbers from N(0, 1) for each key (…, 2) and a word, by the Box-Muller transform."""
    key, half = _fold_in(key, word), (count + 1) // 2
    radius = torch.sqrt(-2 * torch.log(uniform(key, (half,), 0, 2)))
    angle = 2 * math.pi * uniform(key, (half,), 1, 2)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], -1)[..., :count]


def mix_bits(word: Tensor) -> Tensor:
    """Return 32-bit words (int64) mixed by a bijection; the factors are below 2^31 to keep products within int64."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _WORD
    return word ^ (word >> 15)


def _fold_in(key: Tensor, word: Tensor | int) -> Tensor:
    return mix_bits((key * 0x1E3779B1 + word) & _WORD)


# One operation, so that a traced step holds one node instead of the hundred of `box_muller`.
@torch.library.custom_op("gpfl::normals", mutates_args=())
def normal_op(key: Tensor, word: int, count: int) -> Tensor:
    """Compute `box_muller` as one operation."""
    return box_muller(key, word, count).contiguous()


@normal_op.register_fake
def _(key: Tensor, word: int, count: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], count), dtype=torch.float32)


@normal_op.register_vmap
def _(info: object, axes: tuple[int | None, ...], key: Tensor, word: int, count: int) -> tuple[Tensor, int]:
    return normal_op(key.movedim(axes[0] or 0, 0), word, count), 0
