"""Results go into the memory of the state as if all of it had been read before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Step, count, random, run_in_place, ways
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

aten = torch.ops.aten


# Writing back.


@ways
@pytest.mark.parametrize(
    "step",
    [
        lambda a, b, c: [b, a],
        lambda a, b, c: [b.t(), a.t()],
        lambda a, b, c: [a.t(), b + a],
        lambda a, b, c: [b.split(1)[0].expand(3, 3), a * 2],
        lambda a, b, c: [c, a],
        lambda a, b, c: [a, b + c],
        lambda a, b, c: [c.t(), c],
        lambda a, b, c: [a + b, a + b],
        lambda a, b, c: [a + b, a - b],
        lambda a, b, c: [b, a - 0.5 * b],
        lambda a, b, c: [a - 0.5 * b, b - 0.5 * a],
        lambda a, b, c: [a - 0.5 * b.t(), b - 0.5 * c],
        lambda a, b, c: [a - 0.5 * c, (a - 0.5 * c) * 2],
        lambda a, b, c: [a - 0.1 * (c @ b), b - 0.1 * (a @ c)],
        lambda a, b, c: [torch.zeros_like(a), a],
    ],
    ids=[
        "swapped",
        "swapped and turned",
        "turned where it lies",
        "a part of another",
        "an input and another",
        "unchanged",
        "an input twice",
        "one result twice",
        "both read",
        "another and a step along it",
        "steps along each other",
        "step along a view",
        "step that is used again",
        "products of each other",
        "nothing of it",
    ],
)
def test_results_are_written_as_if_all_inputs_had_been_read_before(step: Step, compiled: bool) -> None:
    run_in_place(step, [random(3, 3), random(3, 3, seed=1)], [random(3, 3, seed=2)], compiled)


def test_state_that_does_not_change_is_not_written() -> None:
    graph = run_in_place(lambda a, b: [a, b + 1], [random(3), random(3)])
    assert count(graph, "copy_") == 1


def test_view_that_does_not_say_so_is_read_before_its_memory_is_overwritten() -> None:
    run_in_place(lambda a, b: [a * 2, aten._unsafe_view(a, [3, 3])], [random(9), random(3, 3)])


@ways
def test_step_of_sgd_is_subtracted_without_a_copy(compiled: bool) -> None:
    def step(weight: Tensor, x: Tensor) -> list[Tensor]:
        return [weight - 0.1 * grad(lambda w: (w * x).sin().sum())(weight)]

    graph = run_in_place(step, [random(4)], [random(4, seed=1)], compiled)
    assert (count(graph, "sub_"), count(graph, "copy_"), count(graph, "clone")) == (1, 0, 0)


@pytest.mark.parametrize(
    "step",
    [
        lambda w, g: [g - 0.1 * w],
        lambda w, g: [w - g],
        lambda w, g: [w - g * g],
        lambda w, g: [torch.sub(w, 0.1 * g, alpha=3)],
        lambda w, g: [w + 0.1 * g],
    ],
)
def test_what_only_looks_like_a_step_is_copied(step: Step) -> None:
    graph = run_in_place(step, [random(4)], [random(4, seed=1)])
    assert (count(graph, "sub_"), count(graph, "copy_")) == (0, 1)


# Embeddings.

TOKENS = torch.tensor([[1, 2, 2, 0], [5, 1, 0, 0], [6, 6, 6, 2]])


def embedding_loss(table: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    return F.embedding(tokens, table, padding_idx=padding).mean(-2).sin().square().sum()


def embed(padding: int | None, stacked: bool) -> Step:
    """A step of SGD on an embedding."""

    def gradient(table: Tensor, tokens: Tensor) -> Tensor:
        return grad(embedding_loss)(table, tokens, padding)

    many = vmap(gradient) if stacked else gradient
    return lambda table, tokens: [table - 0.1 * many(table, tokens)]


@ways
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "single"])
@pytest.mark.parametrize("padding", [None, 0, 2, -1])
def test_step_of_an_embedding_adds_the_rows_of_its_tokens_alone(padding: int | None, stacked: bool, compiled: bool) -> None:
    table = random(3, 7, 4) if stacked else random(7, 4)
    tokens = torch.stack([TOKENS, (TOKENS + 3) % 7, torch.zeros_like(TOKENS)]) if stacked else TOKENS
    graph = run_in_place(embed(padding, stacked), [table], [tokens], compiled)
    assert count(graph, "embedding_dense_backward") == 0
    assert count(graph, "add_rows_" if compiled else "index_put_") == 1
    assert count(graph, "fill_") == 0


def test_embedding_of_another_kind_is_left_as_it_is() -> None:
    def loss(table: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, table, scale_grad_by_freq=True).sin().sum()

    graph = run_in_place(lambda table, tokens: [table - 0.1 * grad(loss)(table, tokens)], [random(7, 4)], [TOKENS])
    assert count(graph, "embedding_dense_backward") == 1


@ways
@pytest.mark.parametrize(
    "also",
    [lambda g: g, lambda g: g * 2.0, lambda g: g.square(), lambda g: g[..., 0, :]],
    ids=["itself", "twice", "square", "row"],
)
def test_gradient_of_an_embedding_that_is_used_elsewhere_is_whole(also: Callable[[Tensor], Tensor], compiled: bool) -> None:
    many = vmap(lambda table, tokens: grad(embedding_loss)(table, tokens, 2))

    def step(other: Tensor, table: Tensor, tokens: Tensor) -> list[Tensor]:
        gradient = many(table, tokens)
        return [also(gradient), table - 0.1 * gradient]

    table, tokens = random(2, 7, 4), torch.stack([TOKENS, (TOKENS + 3) % 7])
    run_in_place(step, [also(table), table], [tokens], compiled)
    run_in_place(lambda table, other, tokens: step(other, table, tokens)[::-1], [table, also(table)], [tokens], compiled)


@ways
def test_gradient_of_an_embedding_that_lies_in_other_state_is_read_before_that_is_overwritten(compiled: bool) -> None:
    def step(other: Tensor, table: Tensor, tokens: Tensor) -> list[Tensor]:
        gradient = aten.embedding_dense_backward(other.view(3, 4, 2), tokens, 7, -1, False)
        return [other * 2, table - 0.1 * gradient]

    run_in_place(step, [random(3, 8), random(7, 2)], [TOKENS], compiled)


# Products.


def linear_loss(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias).sin().square().sum()


def linear(weight: Tensor, bias: Tensor, x: Tensor) -> list[Tensor]:
    down = grad(linear_loss, (0, 1))(weight, bias, x)
    return [weight - 0.1 * down[0], bias - 0.1 * down[1]]


@ways
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "single"])
def test_gradient_of_a_linear_layer_is_subtracted_as_it_is_made(stacked: bool, compiled: bool) -> None:
    more = (3,) if stacked else ()
    step = (lambda *given: list(vmap(lambda *one: tuple(linear(*one)))(*given))) if stacked else linear
    graph = run_in_place(step, [random(*more, 4, 5), random(*more, 4)], [random(*more, 6, 5)], compiled)
    assert count(graph, "addbmm_" if stacked else "addmm_") == (0 if compiled else 1)


@pytest.mark.parametrize(
    "turn",
    [
        lambda t: t,
        lambda t: t.transpose(-1, -2),
        lambda t: t.permute(0, 2, 1),
        lambda t: t.mT.mT,
        lambda t: t.view(2, 3, 3).transpose(1, 2),
    ],
    ids=["as it is", "turned", "permuted", "turned twice", "viewed and turned"],
)
def test_product_is_subtracted_turned_as_the_gradient_is(turn: Callable[[Tensor], Tensor]) -> None:
    graph = run_in_place(
        lambda w, x, y: [w - 0.1 * turn(torch.bmm(x, y))], [random(2, 3, 3)], [random(2, 3, 4), random(2, 4, 3, seed=1)]
    )
    assert (count(graph, "baddbmm_"), count(graph, "bmm.default"), count(graph, "sub_")) == (1, 0, 0)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.flip(0), lambda t: t.transpose(0, 1), lambda t: t.reshape(3, 2, 3).reshape(2, 3, 3), lambda t: t * 2],
    ids=["reversed", "clients turned", "laid out anew", "doubled"],
)
def test_product_that_is_changed_first_is_the_same_too(change: Callable[[Tensor], Tensor]) -> None:
    x, y = random(2, 3, 4), random(2, 4, 3, seed=1)
    first = change(torch.bmm(x, y))
    run_in_place(lambda w, x, y: [w - 0.1 * change(torch.bmm(x, y))], [random(*first.shape)], [x, y])


def test_product_that_is_used_twice_is_made_once() -> None:
    def step(w: Tensor, total: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        product = x @ y
        return [w - 0.1 * product, total + product]

    graph = run_in_place(step, [random(3, 3), random(3, 3)], [random(3, 4), random(4, 3, seed=1)])
    assert (count(graph, "mm.default"), count(graph, "addmm_")) == (1, 0)


@ways
@pytest.mark.parametrize(
    ("pull", "by_kernel"),
    [
        (lambda a, b, c: c, True),
        (lambda a, b, c: a - c, True),
        (lambda a, b, c: b, False),
        (lambda a, b, c: b.transpose(1, 2), False),
        (lambda a, b, c: a, False),
    ],
    ids=["an input", "own and an input", "other state", "a view of it", "own"],
)
def test_gradient_that_is_a_product_and_a_pull_is_subtracted_in_two_parts(
    pull: Callable[..., Tensor], by_kernel: bool, compiled: bool
) -> None:
    def step(b: Tensor, a: Tensor, c: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:  # b is overwritten before a
        return [b * 2, a - 0.1 * (torch.bmm(x, y) + pull(a, b, c))]

    state, fixed = [random(2, 3, 3), random(2, 3, 3, seed=1)], [random(2, 3, 3, seed=2), random(2, 3, 4), random(2, 4, 3)]
    graph = run_in_place(step, state, fixed, compiled, kernels=True)
    assert count(graph, "subtract_product_") == by_kernel


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3)], ids=["of a plain product", "of a product of many"])
def test_gradient_that_is_spread_over_clients_is_subtracted_from_each(shape: tuple[int, ...]) -> None:
    x, y = random(*shape), random(*shape, seed=1)
    for kernels in (True, False):
        run_in_place(lambda w, x, y: [w - 0.1 * (x @ y)], [random(2, 3, 3)], [x, y], kernels=kernels)


def test_kernels_take_no_products_of_other_types() -> None:
    x, y = random(2, 3, 4).double(), random(2, 4, 3).double()
    graph = run_in_place(lambda w, x, y: [w - 0.1 * torch.bmm(x, y)], [random(2, 3, 3).double()], [x, y], kernels=True)
    assert (count(graph, "subtract_product_"), count(graph, "baddbmm_")) == (0, 1)


def test_large_linear_layer_descends_the_same_for_a_compiler() -> None:
    graph = run_in_place(linear, [random(128, 130), random(128)], [random(6, 130) / 10], compiled=True)
    assert count(graph, "mm") == 1  # the forward pass
