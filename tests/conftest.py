"""Small federations that tests share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpfl

torch.set_num_threads(1)


def toy_table(rows: int = 120, classes: int = 3, width: int = 6, seed: int = 0) -> gpfl.Table:
    """Gaussian blobs, one a class: a problem that a few steps solve."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(classes, width)) * 2
    y = np.arange(rows) % classes
    x = centres[y] + draw.normal(size=(rows, width))
    return gpfl.Table(x.astype(np.float32), y, classes=classes, name="toy")


def toy_federation(sizes: tuple[int, ...] = (41, 27, 33, 19), **settings: int) -> gpfl.Federation:
    """Clients of unequal sizes, the smallest with fewer rows than a batch of 10 and one partial batch each."""
    table = toy_table(sum(sizes), **settings)
    ends = np.cumsum(sizes)
    x, y = table.x.numpy(), table.y.numpy()
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return gpfl.federate([(x[p], y[p]) for p in parts])


@pytest.fixture
def federation() -> gpfl.Federation:
    return toy_federation()
