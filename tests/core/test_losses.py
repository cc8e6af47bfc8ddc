from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import losses
from gpfl.core.method import Batch

MASK = torch.tensor([1.0, 1.0, 0.0])


@pytest.fixture
def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def test_cross_entropy_ignores_padding(features: tuple[Tensor, Tensor]) -> None:
    logits, y = features[0], torch.tensor([0, 3, 1])
    assert torch.allclose(Batch(logits, y, MASK).cross_entropy(logits), F.cross_entropy(logits[:2], y[:2]))
    assert not torch.allclose(Batch(logits, y, torch.ones(3)).cross_entropy(logits), F.cross_entropy(logits[:2], y[:2]))


def test_squared_distance_matches_parts_by_name() -> None:
    a = {"w": torch.tensor([3.0, 0.0]), "deep": {"b": torch.tensor([1.0, 1.0])}}
    b = {"deep": {"b": torch.tensor([1.0, 3.0])}, "w": torch.zeros(2)}
    assert losses.squared_distance(a, b).item() == 9.0 + 4.0
    assert losses.squared_distance(a, a).item() == 0.0


def test_balanced_softmax_with_equal_counts_is_softmax(features: tuple[Tensor, Tensor]) -> None:
    logits, y = features[0], torch.tensor([0, 3, 1])
    plain = F.cross_entropy(logits, y)
    assert torch.allclose(F.cross_entropy(losses.balanced_logits(logits, torch.full((4,), 7.0)), y), plain)
    assert not torch.allclose(F.cross_entropy(losses.balanced_logits(logits, torch.tensor([7.0, 1.0, 1.0, 1.0])), y), plain)


def test_balanced_softmax_weighs_classes_by_counts_and_stays_finite_at_zero() -> None:
    probabilities = losses.balanced_logits(torch.zeros(1, 3), torch.tensor([1.0, 3.0, 0.0])).softmax(-1)
    assert torch.allclose(probabilities, torch.tensor([[0.25, 0.75, 0.0]]), atol=1e-6)
    assert torch.isfinite(losses.balanced_logits(torch.zeros(1, 3), torch.zeros(3))).all()


def test_squared_mmd_agrees_with_a_computation_by_hand(features: tuple[Tensor, Tensor]) -> None:
    def mean_kernel(x: Tensor, y: Tensor) -> float:
        squares = [float((u - v).square().sum()) for u in x for v in y]
        return sum(math.exp(-d / (2 * width)) for d in squares for width in (10, 15, 20, 50)) / len(squares)

    a, b = features[0][:2], features[1][:2]
    by_hand = mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)
    assert losses.squared_mmd(*features, MASK).item() == pytest.approx(by_hand, abs=1e-5)
    assert losses.squared_mmd(*features, torch.ones(3)).item() != pytest.approx(by_hand, abs=1e-3)
    assert losses.squared_mmd(features[0], features[0], MASK).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.squared_mmd(*features, torch.zeros(3)).item() == 0.0
