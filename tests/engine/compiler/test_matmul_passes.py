"""Matrix products are expanded where that helps, with the same results."""

from __future__ import annotations

import pytest
import torch
from graphs import assert_equal, count, random
from torch.fx.experimental.proxy_tensor import make_fx

from gpfl.engine.compiler.matmul_passes import MIN_EXPANDED_SIZE, expand_outer_products
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
