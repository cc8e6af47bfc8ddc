from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import losses

MASK = torch.tensor([1.0, 1.0, 0.0])


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, generator=draw), torch.randn(3, 4, generator=draw)


def test_cross_entropy_is_the_mean_over_real_rows(rows: tuple[Tensor, Tensor]) -> None:
    logits, y = rows[0], torch.tensor([0, 3, 1])
    assert torch.allclose(losses.cross_entropy(logits, y, MASK), F.cross_entropy(logits[:2], y[:2]))
    assert not torch.allclose(losses.cross_entropy(logits, y, torch.ones(3)), F.cross_entropy(logits[:2], y[:2]))


def test_distances_are_those_of_real_rows_worked_out_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([[0.0, 0.0], [0.0, 12.0], [0.0, 0.0]])
    assert losses.batch_distance(a, b, MASK).item() == pytest.approx(13.0)
    assert losses.mean_distance(a, b, MASK).item() == pytest.approx((5 + 12) / 2)
    assert losses.batch_distance(a, b, torch.ones(3)).item() > 13.1
    assert losses.mean_distance(a, b, torch.ones(3)).item() > 8.6


def test_distance_over_a_batch_is_root_b_times_the_mean_where_all_rows_are_equally_far() -> None:
    a, b = torch.zeros(10, 4), torch.full((10, 4), 0.5)
    mask = torch.ones(10)
    assert losses.batch_distance(a, b, mask).item() == pytest.approx(math.sqrt(10) * losses.mean_distance(a, b, mask).item())


@pytest.mark.parametrize("loss", [losses.batch_distance, losses.mean_distance], ids=["batch", "mean"])
def test_padding_takes_no_gradient_and_zero_distance_gives_a_finite_one(loss, rows: tuple[Tensor, Tensor]) -> None:
    a = rows[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(a, rows[1], MASK), a)
    assert gradient[:2].abs().min() > 0
    assert torch.equal(gradient[2], torch.zeros(4))
    (at_zero,) = torch.autograd.grad(loss(a, a.detach(), MASK), a)
    assert torch.equal(at_zero, torch.zeros(3, 4))


def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient(rows: tuple[Tensor, Tensor]) -> None:
    a, nobody = rows[0].clone().requires_grad_(), torch.zeros(3)
    total = losses.cross_entropy(a, torch.zeros(3, dtype=torch.int64), nobody) + losses.batch_distance(a, rows[1], nobody)
    (gradient,) = torch.autograd.grad(total, a)
    assert total.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 4))


def test_cosines_do_not_know_the_scale_of_either_side(rows: tuple[Tensor, Tensor]) -> None:
    f, c = rows
    cosines = losses.cosine_logits(f, c)
    by_hand = [[float(x @ u / (x.norm() * u.norm())) for u in c] for x in f]
    assert torch.allclose(cosines, torch.tensor(by_hand), atol=1e-6)
    assert torch.allclose(losses.cosine_logits(7 * f, 0.1 * c), cosines, atol=1e-6)


def test_a_dead_feature_has_cosine_zero_and_a_finite_gradient(rows: tuple[Tensor, Tensor]) -> None:
    dead = torch.zeros(1, 4, requires_grad=True)
    cosines = losses.cosine_logits(F.relu(dead), rows[1])
    (gradient,) = torch.autograd.grad(cosines.sum(), dead)
    assert torch.equal(cosines, torch.zeros(1, 3))
    assert torch.equal(gradient, torch.zeros(1, 4))


def test_the_angle_loss_cannot_fall_below_the_ideal_simplex() -> None:
    classes = 10
    simplex = F.normalize(torch.eye(classes) - 1 / classes)
    loss = losses.cross_entropy(losses.cosine_logits(simplex, simplex), torch.arange(classes), torch.ones(classes))
    assert loss.item() == pytest.approx(math.log(1 + 9 * math.exp(-10 / 9)), abs=1e-5)


def test_the_distance_of_trees_goes_by_name() -> None:
    a = {"w": torch.tensor([3.0, 0.0]), "deep": {"b": torch.tensor([1.0, 1.0])}}
    b = {"deep": {"b": torch.tensor([1.0, 3.0])}, "w": torch.zeros(2)}
    assert losses.squared_distance(a, b).item() == 9.0 + 4.0
    assert losses.squared_distance(a, a).item() == 0.0


def test_equal_counts_leave_the_balanced_softmax_plain(rows: tuple[Tensor, Tensor]) -> None:
    logits, y = rows[0], torch.tensor([0, 3, 1])
    plain = F.cross_entropy(logits, y)
    assert torch.allclose(F.cross_entropy(losses.balanced_logits(logits, torch.full((4,), 7.0)), y), plain)
    assert not torch.allclose(F.cross_entropy(losses.balanced_logits(logits, torch.tensor([7.0, 1.0, 1.0, 1.0])), y), plain)


def test_the_balanced_softmax_weighs_classes_by_their_rows_and_stays_finite_without_any() -> None:
    shares = losses.balanced_logits(torch.zeros(1, 3), torch.tensor([1.0, 3.0, 0.0])).softmax(-1)
    assert torch.allclose(shares, torch.tensor([[0.25, 0.75, 0.0]]), atol=1e-6)
    assert torch.isfinite(losses.balanced_logits(torch.zeros(1, 3), torch.zeros(3))).all()


def test_the_discrepancy_is_that_of_real_rows_worked_out_pair_by_pair(rows: tuple[Tensor, Tensor]) -> None:
    def mean_kernel(x: Tensor, y: Tensor) -> float:
        squares = [float((u - v).square().sum()) for u in x for v in y]
        return sum(math.exp(-d / (2 * width)) for d in squares for width in (10, 15, 20, 50)) / len(squares)

    a, b = rows[0][:2], rows[1][:2]
    by_hand = mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)
    assert losses.squared_mmd(*rows, MASK).item() == pytest.approx(by_hand, abs=1e-5)
    assert losses.squared_mmd(*rows, torch.ones(3)).item() != pytest.approx(by_hand, abs=1e-3)
    assert losses.squared_mmd(rows[0], rows[0], MASK).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.squared_mmd(*rows, torch.zeros(3)).item() == 0.0
