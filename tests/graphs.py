"""Traced steps, what they give and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpfl.engine.compiler.in_place import write_back
from gpfl.engine.compiler.passes import drop_idle, share_equal
from gpfl.engine.compiler.product_passes import write_out

Step = Callable[..., list[Tensor]]
ways = pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "for a compiler"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def count(graph: fx.Graph, word: str) -> int:
    """How many operations of a graph have a name with the word in it."""
    return sum(word in str(node.target) for node in graph.nodes if node.op == "call_function")


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def run_in_place(
    step: Step, state: Sequence[Tensor], fixed: Sequence[Tensor] = (), compiled: bool = False, kernels: bool = False
) -> fx.Graph:
    """The graph of a step that updates its state, having checked three calls of it against the step itself."""
    module = make_fx(step)(*clones(state), *fixed)
    drop_idle(module.graph)
    share_equal(module.graph)
    if compiled:
        write_out(module.graph)
    write_back(module.graph, len(state), compiled, kernels)
    module.graph.lint()
    module.recompile()
    mine, theirs, untouched = clones(state), clones(state), clones(fixed)
    for _ in range(3):
        assert module(*mine, *fixed) == ()
        theirs = clones(step(*theirs, *fixed))
        assert_equal(mine, theirs)
    assert_equal(fixed, untouched)
    return module.graph
