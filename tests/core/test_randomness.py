from __future__ import annotations

import numpy as np
import pytest
import torch

from gpfl.core.randomness import PURPOSES, fork_rng, generator, torch_generator, torch_seed


def test_a_generator_is_a_function_of_seed_purpose_and_key() -> None:
    def numbers(*key: object) -> tuple[int, ...]:
        return tuple(generator(*key).integers(2**32, size=4))  # type: ignore[arg-type]

    keys = [(0, purpose, 1, client) for purpose in PURPOSES for client in range(2)]
    keys += [(1, "batches", 1, 0), (0, "batches", 2, 0), (0, "batches", 0, 1)]
    assert [numbers(*key) for key in keys] == [numbers(*key) for key in keys]
    assert len({numbers(*key) for key in keys}) == len(keys)


def test_unknown_purpose_raises() -> None:
    with pytest.raises(ValueError, match="not in"):
        generator(0, "luck")


def test_fork_rng_repeats_and_restores_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with fork_rng(0, "weights"):
        first = torch.rand(2)
    with fork_rng(0, "weights"):
        again = torch.rand(2)
    with fork_rng(1, "weights"):
        other = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_torch_generator_uses_the_seed_of_its_purpose() -> None:
    numbers = torch.randn(3, generator=torch_generator(5, "embeddings", 2))
    by_hand = torch.randn(3, generator=torch.Generator().manual_seed(torch_seed(5, "embeddings", 2)))
    assert torch.equal(numbers, by_hand)
    assert not np.array_equal(numbers, torch.randn(3, generator=torch_generator(5, "embeddings", 3)))
