"""Products are written out or joined where that helps, and give the same."""

from __future__ import annotations

import pytest
import torch
from graphs import Step, assert_equal, count, random
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpfl.engine.compiler import product_passes
from gpfl.engine.compiler.passes import share_equal
from gpfl.engine.compiler.product_passes import LARGE, join_products, write_out


@pytest.mark.parametrize(
    ("inner", "written", "shape"),
    [(10, True, (2,)), (16, True, ()), (1, True, (2,)), (17, False, (2,))],
    ids=["stacked", "single", "one term", "many terms"],
)
def test_products_of_few_terms_are_written_out_as_sums(inner: int, written: bool, shape: tuple[int, ...]) -> None:
    side = int(LARGE**0.5)
    x, y = random(*shape, side, inner), random(*shape, inner, side, seed=1)
    module = make_fx(lambda x, y: [(x @ y) * 2])(x, y)
    write_out(module.graph)
    module.graph.lint()
    module.recompile()
    assert count(module.graph, "mm.default") == (0 if written else 1)
    assert_equal(module(x, y), [(x @ y) * 2])


def test_factors_that_are_worked_out_are_stored_once_before_they_are_written_out() -> None:
    x, y = random(2, 128, 4), random(2, 4, 128)
    module = make_fx(lambda x, y: [torch.bmm(x.sin(), y.transpose(1, 2).transpose(1, 2)) * 2])(x, y)
    write_out(module.graph)
    module.graph.lint()
    module.recompile()
    assert (count(module.graph, "stored"), count(module.graph, "bmm")) == (1, 0)  # y lies in memory already
    assert_equal(module(x, y), [x.sin() @ y * 2])


def test_small_products_and_those_used_twice_are_not_written_out() -> None:
    x, y = random(128, 4), random(4, 128)
    for step, inputs in ((lambda x, y: [x @ y * 2], (x[:-1], y)), (lambda x, y: [(x @ y).sin() + (x @ y).cos()], (x, y))):
        module = make_fx(step)(*inputs)
        share_equal(module.graph)
        write_out(module.graph)
        assert count(module.graph, "mm.default") == 1


def joined(step: Step, *inputs: Tensor) -> tuple[fx.Graph, bool]:
    """The graph with its products joined, and whether it gives what the step gives."""
    module = make_fx(step)(*inputs)
    share_equal(module.graph)
    join_products(module.graph)
    module.graph.lint()
    module.recompile()
    return module.graph, all(map(torch.allclose, module(*inputs), step(*inputs)))


def test_products_of_few_rows_with_one_large_matrix_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_passes, "LEAST", 30)
    a, b, w = random(3, 1, 5), random(3, 2, 5, seed=1), random(3, 6, 5)

    def step(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        turned = w.transpose(1, 2)
        first = torch.bmm(a, turned).relu()
        return [first, torch.bmm(b * 2, turned) + first]

    graph, same = joined(step, a, b, w)
    assert same
    assert count(graph, "bmm") == 1
    assert [tuple(node.meta["val"].shape) for node in graph.nodes if "bmm" in str(node.target)] == [(3, 3, 6)]


@pytest.mark.parametrize(
    ("step", "least"),
    [
        (lambda a, b, w: [torch.bmm(torch.bmm(a, w), w)], 20),  # one is made of the other
        (lambda a, b, w: [torch.bmm(a, w), torch.bmm(b, w.relu())], 20),  # other matrices
        (lambda a, b, w: [torch.bmm(a, w), torch.bmm(b, w)], 26),  # small ones
        (lambda a, b, w: [torch.bmm(a, w), torch.bmm(torch.cat([b] * 8, 1), w)], 20),  # many rows
    ],
    ids=["in turn", "two matrices", "small", "many rows"],
)
def test_other_products_stay_apart(step: Step, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_passes, "LEAST", least)
    graph, same = joined(step, random(3, 1, 5), random(3, 2, 5, seed=1), random(3, 5, 5))
    assert same
    assert count(graph, "bmm") == 2
