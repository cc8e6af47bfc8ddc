from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import losses

MASK = torch.tensor([1.0, 1.0, 0.0])


@pytest.fixture
def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def test_cross_entropy_ignores_padding(features: tuple[Tensor, Tensor]) -> None:
    logits, y = features[0], torch.tensor([0, 3, 1])
    assert torch.allclose(losses.cross_entropy(logits, y, MASK), F.cross_entropy(logits[:2], y[:2]))
    assert not torch.allclose(losses.cross_entropy(logits, y, torch.ones(3)), F.cross_entropy(logits[:2], y[:2]))


def test_distances_agree_with_a_computation_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([[0.0, 0.0], [0.0, 12.0], [0.0, 0.0]])
    assert losses.batch_distance(a, b, MASK).item() == pytest.approx(13.0)
    assert losses.mean_distance(a, b, MASK).item() == pytest.approx((5 + 12) / 2)
    assert losses.batch_distance(a, b, torch.ones(3)).item() > 13.1
    assert losses.mean_distance(a, b, torch.ones(3)).item() > 8.6


def test_batch_distance_is_root_b_times_the_mean_at_equal_distances() -> None:
    a, b = torch.zeros(10, 4), torch.full((10, 4), 0.5)
    mask = torch.ones(10)
    assert losses.batch_distance(a, b, mask).item() == pytest.approx(math.sqrt(10) * losses.mean_distance(a, b, mask).item())


@pytest.mark.parametrize("loss", [losses.batch_distance, losses.mean_distance], ids=["batch", "mean"])
def test_padding_has_no_gradient_and_distance_zero_a_finite_one(loss, features: tuple[Tensor, Tensor]) -> None:
    a = features[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(a, features[1], MASK), a)
    assert gradient[:2].abs().min() > 0
    assert torch.equal(gradient[2], torch.zeros(4))
    (at_zero,) = torch.autograd.grad(loss(a, a.detach(), MASK), a)
    assert torch.equal(at_zero, torch.zeros(3, 4))


def test_batch_of_padding_has_no_loss_and_no_gradient(features: tuple[Tensor, Tensor]) -> None:
    a, nothing = features[0].clone().requires_grad_(), torch.zeros(3)
    total = losses.cross_entropy(a, torch.zeros(3, dtype=torch.int64), nothing) + losses.batch_distance(a, features[1], nothing)
    (gradient,) = torch.autograd.grad(total, a)
    assert total.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 4))


def test_cosines_do_not_depend_on_scale(features: tuple[Tensor, Tensor]) -> None:
    f, c = features
    cosines = losses.cosine_logits(f, c)
    by_hand = [[float(x @ u / (x.norm() * u.norm())) for u in c] for x in f]
    assert torch.allclose(cosines, torch.tensor(by_hand), atol=1e-6)
    assert torch.allclose(losses.cosine_logits(7 * f, 0.1 * c), cosines, atol=1e-6)


def test_a_dead_feature_has_cosine_zero_and_a_finite_gradient(features: tuple[Tensor, Tensor]) -> None:
    dead = torch.zeros(1, 4, requires_grad=True)
    cosines = losses.cosine_logits(F.relu(dead), features[1])
    (gradient,) = torch.autograd.grad(cosines.sum(), dead)
    assert torch.equal(cosines, torch.zeros(1, 3))
    assert torch.equal(gradient, torch.zeros(1, 4))


def test_angle_loss_of_the_ideal_simplex_is_its_minimum() -> None:
    classes = 10
    simplex = F.normalize(torch.eye(classes) - 1 / classes)
    loss = losses.cross_entropy(losses.cosine_logits(simplex, simplex), torch.arange(classes), torch.ones(classes))
    assert loss.item() == pytest.approx(math.log(1 + 9 * math.exp(-10 / 9)), abs=1e-5)


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
