"""Steps of gradient descent for one client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpfl.core.method import Batch, loss_gradient, sgd_step, unshare
from gpfl.core.net import Model, Net

BATCH = Batch(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2))


class Sums(torch.nn.Module):
    """A base whose gradients share memory: two weights enter as their sum, and one of them also in a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.full((size,), float(size))) for size in (3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a + self.b) + torch.cat([x[0, :1] * 0, self.c])


def test_step_that_overwrites_gradients_in_shared_memory_is_right() -> None:
    net = Net({"base": Sums(), "head": torch.nn.Linear(3, 2)}, torch.ones(2, 3), 2)
    weights = net.init(0)

    def objective(model: Model, batch: Batch) -> dict[str, Tensor]:
        return {"ce": model("base", batch.x).sum()}

    with torch.no_grad():
        result = loss_gradient(net, {}, weights, objective, BATCH)
        gradient = dict(result.gradient["base"])
        expected = {name: weights["base"][name] - 0.5 * g.clone() for name, g in gradient.items()}
        for name, g in gradient.items():
            new = sgd_step(weights["base"][name], g, 0.5, overwrite=True)
            torch.testing.assert_close(new, expected[name])
    assert {float(g.sum()) for g in expected.values()} == {6.0, 2.0}


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t(), lambda t: t[1:]])
def test_shared_memory_is_copied(view: object) -> None:
    t = torch.arange(6.0).reshape(2, 3)
    first, second = unshare([t, view(t)])  # type: ignore[operator]
    assert first is t
    second.zero_()
    assert first.sum() == 15
    (expanded,) = unshare([torch.ones(1).expand(3)])
    assert expanded.stride() == (1,)
