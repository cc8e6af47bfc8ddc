"""Matrix products are expanded or merged where that helps, with the same results."""

from __future__ import annotations

import pytest
import torch
from graphs import Step, assert_equal, count, random
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpfl.engine.compiler import matmul_passes
from gpfl.engine.compiler.matmul_passes import MIN_EXPANDED_SIZE, expand_outer_products, merge_skinny_matmuls
from gpfl.engine.compiler.passes import eliminate_common_subexpressions


@pytest.mark.parametrize(
    ("terms", "expanded", "shape"),
    [(10, True, (2,)), (16, True, ()), (1, True, (2,)), (17, False, (2,))],
    ids=["stacked", "single", "one term", "many terms"],
)
def test_products_of_few_terms_are_expanded(terms: int, expanded: bool, shape: tuple[int, ...]) -> None:
    side = int(MIN_EXPANDED_SIZE**0.5)
    x, y = random(*shape, side, terms), random(*shape, terms, side, seed=1)
    module = make_fx(lambda x, y: [(x @ y) * 2])(x, y)
    expand_outer_products(module.graph)
    module.graph.lint()
    module.recompile()
    assert count(module.graph, "mm.default") == (0 if expanded else 1)
    assert_equal(module(x, y), [(x @ y) * 2])


def test_computed_factors_are_materialised_once_before_they_are_expanded() -> None:
    x, y = random(2, 128, 4), random(2, 4, 128)
    module = make_fx(lambda x, y: [torch.bmm(x.sin(), y.transpose(1, 2).transpose(1, 2)) * 2])(x, y)
    expand_outer_products(module.graph)
    module.graph.lint()
    module.recompile()
    assert (count(module.graph, "materialize"), count(module.graph, "bmm")) == (1, 0)  # y is in memory already
    assert_equal(module(x, y), [x.sin() @ y * 2])


def test_small_products_and_those_used_twice_are_not_expanded() -> None:
    x, y = random(128, 4), random(4, 128)
    for step, inputs in ((lambda x, y: [x @ y * 2], (x[:-1], y)), (lambda x, y: [(x @ y).sin() + (x @ y).cos()], (x, y))):
        module = make_fx(step)(*inputs)
        eliminate_common_subexpressions(module.graph)
        expand_outer_products(module.graph)
        assert count(module.graph, "mm.default") == 1


def merged(step: Step, *inputs: Tensor) -> tuple[fx.Graph, bool]:
    """Return the graph with its products merged, and whether it computes what the step does."""
    module = make_fx(step)(*inputs)
    eliminate_common_subexpressions(module.graph)
    merge_skinny_matmuls(module.graph)
    module.graph.lint()
    module.recompile()
    return module.graph, all(map(torch.allclose, module(*inputs), step(*inputs)))


def test_products_of_few_rows_with_the_same_large_matrix_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_passes, "MIN_MATRIX_SIZE", 30)
    a, b, w = random(3, 1, 5), random(3, 2, 5, seed=1), random(3, 6, 5)

    def step(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        transposed = w.transpose(1, 2)
        first = torch.bmm(a, transposed).relu()
        return [first, torch.bmm(b * 2, transposed) + first]

    graph, same = merged(step, a, b, w)
    assert same
    assert count(graph, "bmm") == 1
    assert [tuple(node.meta["val"].shape) for node in graph.nodes if "bmm" in str(node.target)] == [(3, 3, 6)]


@pytest.mark.parametrize(
    ("step", "min_size"),
    [
        (lambda a, b, w: [torch.bmm(torch.bmm(a, w), w)], 20),  # the second depends on the first
        (lambda a, b, w: [torch.bmm(a, w), torch.bmm(b, w.relu())], 20),  # different matrices
        (lambda a, b, w: [torch.bmm(a, w), torch.bmm(b, w)], 26),  # a small matrix
        (lambda a, b, w: [torch.bmm(a, w), torch.bmm(torch.cat([b] * 8, 1), w)], 20),  # many rows
    ],
    ids=["dependent", "two matrices", "small", "many rows"],
)
def test_other_products_are_not_merged(step: Step, min_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_passes, "MIN_MATRIX_SIZE", min_size)
    graph, same = merged(step, random(3, 1, 5), random(3, 2, 5, seed=1), random(3, 5, 5))
    assert same
    assert count(graph, "bmm") == 2
