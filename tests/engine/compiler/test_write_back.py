"""Results are written into the memory of the state as if all of it had been read first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import Step, compile_modes, count, random, run_in_place
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

aten = torch.ops.aten


# Writing back.


@compile_modes
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
        "swapped and transposed",
        "transposed in place",
        "a slice of another",
        "an input and a sum",
        "unchanged",
        "an input twice",
        "a result twice",
        "both read",
        "another and a step along it",
        "steps along each other",
        "step along a view",
        "step that is used again",
        "matrix products of each other",
        "independent of the state",
    ],
)
def test_results_are_written_as_if_all_inputs_had_been_read_before(step: Step, compiled: bool) -> None:
    run_in_place(step, [random(3, 3), random(3, 3, seed=1)], [random(3, 3, seed=2)], compiled)


def test_state_that_does_not_change_is_not_written() -> None:
    graph = run_in_place(lambda a, b: [a, b + 1], [random(3), random(3)])
    assert count(graph, "copy_") == 1


def test_undeclared_view_is_read_before_its_memory_is_overwritten() -> None:
    run_in_place(lambda a, b: [a * 2, aten._unsafe_view(a, [3, 3])], [random(9), random(3, 3)])


@compile_modes
def test_sgd_step_is_subtracted_without_a_copy(compiled: bool) -> None:
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
def test_results_that_are_no_sgd_step_are_copied(step: Step) -> None:
    graph = run_in_place(step, [random(4)], [random(4, seed=1)])
    assert (count(graph, "sub_"), count(graph, "copy_")) == (0, 1)


# Embeddings.

TOKENS = torch.tensor([[1, 2, 2, 0], [5, 1, 0, 0], [6, 6, 6, 2]])


def embedding_loss(table: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    return F.embedding(tokens, table, padding_idx=padding).mean(-2).sin().square().sum()


def embedding_step(padding: int | None, stacked: bool) -> Step:
    """Return a step of SGD on an embedding."""

    def gradient(table: Tensor, tokens: Tensor) -> Tensor:
        return grad(embedding_loss)(table, tokens, padding)

    run = vmap(gradient) if stacked else gradient
    return lambda table, tokens: [table - 0.1 * run(table, tokens)]


@compile_modes
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "single"])
@pytest.mark.parametrize("padding", [None, 0, 2, -1])
def test_embedding_step_adds_only_the_rows_of_its_tokens(padding: int | None, stacked: bool, compiled: bool) -> None:
    table = random(3, 7, 4) if stacked else random(7, 4)
    tokens = torch.stack([TOKENS, (TOKENS + 3) % 7, torch.zeros_like(TOKENS)]) if stacked else TOKENS
    graph = run_in_place(embedding_step(padding, stacked), [table], [tokens], compiled)
    assert count(graph, "embedding_dense_backward") == 0
    assert count(graph, "add_rows_" if compiled else "index_put_") == 1
    assert count(graph, "fill_") == 0


def test_embedding_scaled_by_frequency_is_left_unchanged() -> None:
    def loss(table: Tensor, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, table, scale_grad_by_freq=True).sin().sum()

    graph = run_in_place(lambda table, tokens: [table - 0.1 * grad(loss)(table, tokens)], [random(7, 4)], [TOKENS])
    assert count(graph, "embedding_dense_backward") == 1


@compile_modes
@pytest.mark.parametrize(
    "also",
    [lambda g: g, lambda g: g * 2.0, lambda g: g.square(), lambda g: g[..., 0, :]],
    ids=["itself", "twice", "square", "row"],
)
def test_embedding_gradient_with_another_use_is_computed_in_full(also: Callable[[Tensor], Tensor], compiled: bool) -> None:
    gradient_of = vmap(lambda table, tokens: grad(embedding_loss)(table, tokens, 2))

    def step(other: Tensor, table: Tensor, tokens: Tensor) -> list[Tensor]:
        gradient = gradient_of(table, tokens)
        return [also(gradient), table - 0.1 * gradient]

    table, tokens = random(2, 7, 4), torch.stack([TOKENS, (TOKENS + 3) % 7])
    run_in_place(step, [also(table), table], [tokens], compiled)
    run_in_place(lambda table, other, tokens: step(other, table, tokens)[::-1], [table, also(table)], [tokens], compiled)


@compile_modes
def test_embedding_gradient_in_the_memory_of_other_state_is_read_before_it_is_overwritten(compiled: bool) -> None:
    def step(other: Tensor, table: Tensor, tokens: Tensor) -> list[Tensor]:
        gradient = aten.embedding_dense_backward(other.view(3, 4, 2), tokens, 7, -1, False)
        return [other * 2, table - 0.1 * gradient]

    run_in_place(step, [random(3, 8), random(7, 2)], [TOKENS], compiled)


# Matrix products.


def linear_loss(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias).sin().square().sum()


def linear(weight: Tensor, bias: Tensor, x: Tensor) -> list[Tensor]:
    gradient = grad(linear_loss, (0, 1))(weight, bias, x)
    return [weight - 0.1 * gradient[0], bias - 0.1 * gradient[1]]


@compile_modes
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "single"])
def test_linear_layers_gradient_is_subtracted_as_it_is_computed(stacked: bool, compiled: bool) -> None:
    batch = (3,) if stacked else ()
    step = (lambda *tensors: list(vmap(lambda *args: tuple(linear(*args)))(*tensors))) if stacked else linear
    graph = run_in_place(step, [random(*batch, 4, 5), random(*batch, 4)], [random(*batch, 6, 5)], compiled)
    assert count(graph, "addbmm_" if stacked else "addmm_") == (0 if compiled else 1)


@pytest.mark.parametrize(
    "transpose",
    [
        lambda t: t,
        lambda t: t.transpose(-1, -2),
        lambda t: t.permute(0, 2, 1),
        lambda t: t.mT.mT,
        lambda t: t.view(2, 3, 3).transpose(1, 2),
    ],
    ids=["unchanged", "transposed", "permuted", "transposed twice", "viewed and transposed"],
)
def test_product_is_subtracted_transposed_as_the_gradient_is(transpose: Callable[[Tensor], Tensor]) -> None:
    graph = run_in_place(
        lambda w, x, y: [w - 0.1 * transpose(torch.bmm(x, y))], [random(2, 3, 3)], [random(2, 3, 4), random(2, 4, 3, seed=1)]
    )
    assert (count(graph, "baddbmm_"), count(graph, "bmm.default"), count(graph, "sub_")) == (1, 0, 0)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.flip(0), lambda t: t.transpose(0, 1), lambda t: t.reshape(3, 2, 3).reshape(2, 3, 3), lambda t: t * 2],
    ids=["reversed", "clients transposed", "reshaped", "doubled"],
)
def test_product_that_is_changed_first_gives_the_same(change: Callable[[Tensor], Tensor]) -> None:
    x, y = random(2, 3, 4), random(2, 4, 3, seed=1)
    first = change(torch.bmm(x, y))
    run_in_place(lambda w, x, y: [w - 0.1 * change(torch.bmm(x, y))], [random(*first.shape)], [x, y])


def test_product_that_is_used_twice_is_computed_once() -> None:
    def step(w: Tensor, total: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        product = x @ y
        return [w - 0.1 * product, total + product]

    graph = run_in_place(step, [random(3, 3), random(3, 3)], [random(3, 4), random(4, 3, seed=1)])
    assert (count(graph, "mm.default"), count(graph, "addmm_")) == (1, 0)


@compile_modes
@pytest.mark.parametrize(
    ("decay", "by_kernel"),
    [
        (lambda a, b, c: c, True),
        (lambda a, b, c: a - c, True),
        (lambda a, b, c: b, False),
        (lambda a, b, c: b.transpose(1, 2), False),
        (lambda a, b, c: a, False),
    ],
    ids=["an input", "the state and an input", "other state", "a view of other state", "the state"],
)
def test_sum_of_a_product_and_a_decay_is_subtracted_in_two_parts(
    decay: Callable[..., Tensor], by_kernel: bool, compiled: bool
) -> None:
    def step(b: Tensor, a: Tensor, c: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:  # b is overwritten before a
        return [b * 2, a - 0.1 * (torch.bmm(x, y) + decay(a, b, c))]

    state, fixed = [random(2, 3, 3), random(2, 3, 3, seed=1)], [random(2, 3, 3, seed=2), random(2, 3, 4), random(2, 4, 3)]
    graph = run_in_place(step, state, fixed, compiled, kernels=True)
    assert count(graph, "sub_bmm_") == by_kernel


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3)], ids=["single product", "batched product"])
def test_gradient_that_is_broadcast_over_clients_is_subtracted_from_each(shape: tuple[int, ...]) -> None:
    x, y = random(*shape), random(*shape, seed=1)
    for kernels in (True, False):
        run_in_place(lambda w, x, y: [w - 0.1 * (x @ y)], [random(2, 3, 3)], [x, y], kernels=kernels)


def test_kernels_are_for_float32_only() -> None:
    x, y = random(2, 3, 4).double(), random(2, 4, 3).double()
    graph = run_in_place(lambda w, x, y: [w - 0.1 * torch.bmm(x, y)], [random(2, 3, 3).double()], [x, y], kernels=True)
    assert (count(graph, "sub_bmm_"), count(graph, "baddbmm_")) == (0, 1)


def test_large_linear_layer_takes_the_same_step_when_compiled() -> None:
    graph = run_in_place(linear, [random(128, 130), random(128)], [random(6, 130) / 10], compiled=True)
    assert count(graph, "mm") == 1  # the forward pass
