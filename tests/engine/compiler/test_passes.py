"""No-ops and repeated operations are eliminated, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Step, assert_equal, clone_all, count, random
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from gpfl.engine.compiler.passes import eliminate_common_subexpressions, eliminate_no_ops

aten = torch.ops.aten


# No-ops.


def no_ops(x: Tensor) -> list[Tensor]:
    same = x.view(x.shape).transpose(0, 1).transpose(1, 0).permute(0, 1).expand(x.shape)
    return [torch.ops.aten.mul.Scalar(same, 1) + same.transpose(0, 1).transpose(0, 1)]


def mutated_copy(x: Tensor) -> list[Tensor]:
    copy = torch.ops.aten.mul.Scalar(x, 1)
    copy.add_(1.0)
    return [x * copy]


def test_operations_that_return_their_input_are_removed() -> None:
    x = random(3, 3)
    module = make_fx(no_ops)(x)
    eliminate_no_ops(module.graph)
    module.recompile()
    assert_equal(module(x), no_ops(x))
    assert [str(node.target) for node in module.graph.nodes if node.op == "call_function"] == ["aten.add.Tensor"]


def test_copy_that_is_mutated_stays_a_copy() -> None:
    x = random(3, 3)
    module = make_fx(mutated_copy)(x)
    eliminate_no_ops(module.graph)
    module.recompile()
    before = x.clone()
    assert_equal(module(x), mutated_copy(before.clone()))
    assert_equal([x], [before])


# Common subexpressions.


def without_repeats(step: Step, *inputs: Tensor) -> fx.Graph:
    """Return the graph of a function without repeated operations, after checking its results."""
    module = make_fx(step)(*clone_all(inputs))
    eliminate_common_subexpressions(module.graph)
    module.graph.lint()
    module.recompile()
    assert_equal(module(*clone_all(inputs)), step(*clone_all(inputs)))
    return module.graph


def test_equal_operations_become_one() -> None:
    graph = without_repeats(lambda x: [x.sin() + 1, x.sin() * x.transpose(0, 1).transpose(0, 1)], random(3, 3))
    assert count(graph, "sin") == 1


def test_scalars_of_another_type_are_not_equal() -> None:
    graph = without_repeats(lambda x: [x * 1, x * 1.0, x * True], torch.arange(3))
    assert count(graph, "mul") == 3


def test_mutated_copies_are_not_merged() -> None:
    def step(x: Tensor) -> list[Tensor]:
        mutated, other = x + 1, x + 1
        mutated.mul_(2)
        return [mutated, other]

    assert count(without_repeats(step, random(3)), "add") == 2


def test_copies_mutated_through_a_view_are_not_merged() -> None:
    def step(x: Tensor) -> list[Tensor]:
        mutated, other = x.clone(), x.clone()
        mutated.view(-1)[1:].zero_()
        return [mutated, other]

    assert count(without_repeats(step, random(3, 2)), "clone") == 2


@pytest.mark.parametrize(
    "part",
    [lambda y: y, lambda y: y[0], lambda y: y.split(2)[1], lambda y: y.unbind(0)[2]],
    ids=["all", "row", "split", "unbind"],
)
def test_reads_before_and_after_a_mutation_are_not_merged(part: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor) -> list[Tensor]:
        y = x.clone()
        before = y.exp()
        part(y).add_(1)
        return [before, y.exp()]

    assert count(without_repeats(step, random(4, 2)), "exp") == 2


def test_batch_norms_with_equal_statistics_have_a_copy_each() -> None:
    def step(mean: Tensor, var: Tensor, x: Tensor) -> list[Tensor]:
        out = []
        for batch in (x, 2 * x):
            stats = mean + 0, var + 0
            out += [F.batch_norm(batch, *stats, training=True), *stats]
        return out

    graph = without_repeats(step, torch.zeros(4), torch.ones(4), random(5, 4))
    assert count(graph, "batch_norm") == 2


def test_random_operations_are_not_merged() -> None:
    module = make_fx(lambda x: [torch.rand_like(x), torch.rand_like(x)])(random(3))
    eliminate_common_subexpressions(module.graph)
    assert count(module.graph, "rand_like") == 2
