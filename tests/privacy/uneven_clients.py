"""Clients of different sizes, for tests of attacks."""

from __future__ import annotations

import numpy as np

import gpfl


def uneven_federation(*sizes: int) -> gpfl.Federation:
    """Return clients with these numbers of samples, a quarter of them for testing."""
    rng = np.random.default_rng(0)
    return gpfl.federate([(rng.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 3) for n in sizes], test_fraction=0.25)
