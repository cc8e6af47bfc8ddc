"""Traced graphs for the tests of compiler passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpfl.engine.compiler.matmul_passes import expand_outer_products
from gpfl.engine.compiler.passes import eliminate_common_subexpressions, eliminate_no_ops
from gpfl.engine.compiler.write_back import write_back

Step = Callable[..., list[Tensor]]
compile_modes = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def count(graph: fx.Graph, name: str) -> int:
    """Return how many operations of a graph have this text in their name."""
    return sum(name in str(node.target) for node in graph.nodes if node.op == "call_function")


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted)


def run_in_place(
    step: Step, state: Sequence[Tensor], fixed: Sequence[Tensor] = (), compiled: bool = False, kernels: bool = False
) -> fx.Graph:
    """Return the optimized graph of a step, after three calls of it have matched the step itself."""
    module = make_fx(step)(*clone_all(state), *fixed)
    eliminate_no_ops(module.graph)
    eliminate_common_subexpressions(module.graph)
    if compiled:
        expand_outer_products(module.graph)
    write_back(module.graph, len(state), compiled, kernels)
    module.graph.lint()
    module.recompile()
    found, expected, fixed_before = clone_all(state), clone_all(state), clone_all(fixed)
    for _ in range(3):
        assert module(*found, *fixed) == ()
        expected = clone_all(step(*expected, *fixed))
        assert_equal(found, expected)
    assert_equal(fixed, fixed_before)
    return module.graph
