"""What is idle is left out, what repeats is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Step, assert_equal, clones, count, random
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from gpfl.engine.compiler.passes import drop_idle, share_equal

aten = torch.ops.aten


# What does nothing.


def idle(x: Tensor) -> list[Tensor]:
    turned = x.view(x.shape).transpose(0, 1).transpose(1, 0).permute(0, 1).expand(x.shape)
    return [torch.ops.aten.mul.Scalar(turned, 1) + turned.transpose(0, 1).transpose(0, 1)]


def written_copy(x: Tensor) -> list[Tensor]:
    copy = torch.ops.aten.mul.Scalar(x, 1)
    copy.add_(1.0)
    return [x * copy]


def test_operations_that_give_their_input_are_left_out() -> None:
    x = random(3, 3)
    module = make_fx(idle)(x)
    drop_idle(module.graph)
    module.recompile()
    assert_equal(module(x), idle(x))
    assert [str(node.target) for node in module.graph.nodes if node.op == "call_function"] == ["aten.add.Tensor"]


def test_a_copy_that_is_written_into_stays_a_copy() -> None:
    x = random(3, 3)
    module = make_fx(written_copy)(x)
    drop_idle(module.graph)
    module.recompile()
    before = x.clone()
    assert_equal(module(x), written_copy(before.clone()))
    assert_equal([x], [before])


# Sharing.


def shared(step: Step, *inputs: Tensor) -> fx.Graph:
    """The graph of a function whose equal operations are one, having checked its results."""
    module = make_fx(step)(*clones(inputs))
    share_equal(module.graph)
    module.graph.lint()
    module.recompile()
    assert_equal(module(*clones(inputs)), step(*clones(inputs)))
    return module.graph


def test_equal_operations_become_one() -> None:
    graph = shared(lambda x: [x.sin() + 1, x.sin() * x.transpose(0, 1).transpose(0, 1)], random(3, 3))
    assert count(graph, "sin") == 1


def test_numbers_of_another_type_are_not_equal() -> None:
    graph = shared(lambda x: [x * 1, x * 1.0, x * True], torch.arange(3))
    assert count(graph, "mul") == 3


def test_copy_that_is_written_into_is_not_shared() -> None:
    def step(x: Tensor) -> list[Tensor]:
        written, kept = x + 1, x + 1
        written.mul_(2)
        return [written, kept]

    assert count(shared(step, random(3)), "add") == 2


def test_copy_that_is_written_into_by_its_view_is_not_shared() -> None:
    def step(x: Tensor) -> list[Tensor]:
        written, kept = x.clone(), x.clone()
        written.view(-1)[1:].zero_()
        return [written, kept]

    assert count(shared(step, random(3, 2)), "clone") == 2


@pytest.mark.parametrize(
    "part",
    [lambda y: y, lambda y: y[0], lambda y: y.split(2)[1], lambda y: y.unbind(0)[2]],
    ids=["all", "row", "partition", "one"],
)
def test_reading_before_and_after_a_write_is_not_the_same(part: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor) -> list[Tensor]:
        y = x.clone()
        before = y.exp()
        part(y).add_(1)
        return [before, y.exp()]

    assert count(shared(step, random(4, 2)), "exp") == 2


def test_two_batch_norms_that_start_from_the_same_statistics_have_a_copy_each() -> None:
    def step(mean: Tensor, var: Tensor, x: Tensor) -> list[Tensor]:
        out = []
        for rows in (x, 2 * x):
            own = mean + 0, var + 0
            out += [F.batch_norm(rows, *own, training=True), *own]
        return out

    graph = shared(step, torch.zeros(4), torch.ones(4), random(5, 4))
    assert count(graph, "batch_norm") == 2


def test_random_numbers_are_drawn_anew() -> None:
    module = make_fx(lambda x: [torch.rand_like(x), torch.rand_like(x)])(random(3))
    share_equal(module.graph)
    assert count(module.graph, "rand_like") == 2
