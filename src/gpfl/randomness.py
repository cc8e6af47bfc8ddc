"""Every random number of the project: a generator is a pure function of (seed, purpose, key…)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

PURPOSES = (
    *("split", "cut", "validation", "cohort", "batches", "weights", "embeddings", "valve", "contexts", "subset"),
    *("victims", "attack"),
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
