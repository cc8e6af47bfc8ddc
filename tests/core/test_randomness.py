from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from gpfl.core.randomness import (
    PURPOSES,
    fork_rng,
    generator,
    make_salt,
    mix_bits,
    normal,
    random_key,
    torch_generator,
    torch_seed,
    uniform,
)


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


# Random numbers from hashed keys: distribution, independence, and equality under vmap.

COUNT = 200_000


def key(*words: float) -> torch.Tensor:
    return random_key(torch.tensor(5.0), "test", *(torch.tensor(float(word)) for word in words))


def test_normal_has_the_moments_and_the_distribution_of_the_normal() -> None:
    drawn = normal(key(0), "noise", (COUNT,)).double().numpy()
    assert abs(drawn.mean()) < 4 / np.sqrt(COUNT)
    assert abs(drawn.var() - 1) < 4 * np.sqrt(2 / COUNT)
    assert abs(stats.skew(drawn)) < 4 * np.sqrt(6 / COUNT)
    assert abs(stats.kurtosis(drawn)) < 4 * np.sqrt(24 / COUNT)
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    tails = (np.abs(drawn) > 3).mean()
    assert tails == pytest.approx(2 * stats.norm.sf(3), rel=0.1)


def test_uniform_is_uniform_between_0_and_1() -> None:
    drawn = uniform(key(1), (COUNT,))
    assert 0 < float(drawn.min()) < float(drawn.max()) <= 1
    assert stats.kstest(drawn.double().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 3, COUNT // 2])
def test_neighbouring_numbers_of_a_key_are_not_correlated(lag: int) -> None:
    drawn = normal(key(2), "noise", (COUNT,)).double().numpy()
    assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / np.sqrt(COUNT - lag)


def test_keys_that_differ_in_one_word_are_not_correlated() -> None:
    several = ((0, 0), (0, 1), (1, 0), (1, 1), (2**20, 0), (0, 2**20))
    samples = [normal(key(*words), "noise", (COUNT // 4,)) for words in several]
    samples.append(normal(key(0, 0), "other", (COUNT // 4,)))
    samples.append(normal(random_key(torch.tensor(6.0), "test", torch.tensor(0.0), torch.tensor(0.0)), "noise", (COUNT // 4,)))
    samples.append(normal(random_key(torch.tensor(5.0), "other", torch.tensor(0.0), torch.tensor(0.0)), "noise", (COUNT // 4,)))
    table = np.corrcoef(torch.stack(samples).double().numpy())
    assert np.abs(table - np.eye(len(samples))).max() < 5 / np.sqrt(COUNT // 4)


def test_sums_over_keys_have_the_variance_of_a_sum() -> None:
    samples = torch.stack([normal(key(client), "noise", (2000,)) for client in range(50)]).double()
    assert float(samples.sum(0).var()) == pytest.approx(50, rel=0.15)


def test_stacked_clients_draw_what_each_draws_alone() -> None:
    clients = torch.arange(4.0)
    stacked = torch.func.vmap(lambda client: normal(random_key(torch.tensor(1.0), "x", client), "noise", (3, 5)))(clients)
    alone = torch.stack([normal(random_key(torch.tensor(1.0), "x", client), "noise", (3, 5)) for client in clients])
    assert torch.allclose(stacked, alone, atol=1e-6)


def test_mix_bits_is_one_to_one_on_32_bit_words() -> None:
    words = mix_bits(torch.arange(1 << 16))
    assert len(words.unique()) == 1 << 16
    assert int(words.min()) >= 0
    assert int(words.max()) < 1 << 32


def test_salts_are_exact_in_float32_and_differ_by_seed() -> None:
    salts = [make_salt(seed) for seed in range(200)]
    assert len(set(salts)) == 200
    assert all(float(torch.tensor(salt)) == salt for salt in salts)
