"""Gradients of rows that are clipped and summed: the function's own numbers, without writing them down where that is spared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap
from torch.nn import functional as F

import gpfl
from gpfl.engine.compiler import program as programs
from gpfl.engine.compiler.per_example_passes import fold_rows
from gpfl.engine.compiler.program import Buffers, Program
from gpfl.engine.vmap import Vmap
from gpfl.methods import METHODS
from gpfl.models.cnn4 import CNN4

CLIENTS, ROWS, WIDTH = 3, 4, 64
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


LOSSES: dict[str, tuple[int, Loss]] = {  # lines of a row, and what its gradient is a product of
    "of each row": (1, lambda w, x, c: F.linear(x, w).relu().square().sum()),
    "the same for all rows": (1, lambda w, x, c: (F.linear(c[0], w).tanh() * x).square().sum()),
    "a sum of two": (1, lambda w, x, c: (F.linear(c[0], w).tanh() * F.linear(c[1], w) * x).square().sum()),
    "a sum of both kinds": (1, lambda w, x, c: (F.linear(c[0], w).tanh() * F.linear(x, w)).square().sum()),
    "of two lines": (2, lambda w, x, c: F.linear(x, w).relu().square().sum()),
    "turned": (1, lambda w, x, c: (x @ w).relu().square().sum()),
}
USES = {"lengths and sum": True, "something else besides": False}


def step_of(loss: Loss, alone: bool) -> Callable[[Buffers, Buffers], Buffers]:
    def client(w: Tensor, x: Tensor, c: Tensor) -> Tensor:
        rows = vmap(lambda row: grad(loss)(w, row, c))(x)
        norms = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1)
        factors = (1 / norms.clamp_min(1e-30)).clamp_max(1.0)
        return torch.tensordot(factors, rows, dims=1) + (0 if alone else rows.amax(0))

    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"w": state["w"] - 0.1 * vmap(client)(state["w"], fixed["x"], fixed["c"])}

    return step


def buffers(lines: int = 1, width: int = WIDTH) -> tuple[Buffers, Buffers]:
    x, c = random(CLIENTS, ROWS, lines, width, seed=1), random(CLIENTS, 2, width, seed=2)
    return {"w": random(CLIENTS, width, width) / 8}, {"x": x, "c": c}


def largest(program: Program) -> int:
    """The entries of the largest value that the program writes down."""
    values = [node.meta["val"] for node in program._run.graph.nodes if node.op == "call_function" and "val" in node.meta]
    return max(value.numel() for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize("alone", USES.values(), ids=USES)
@pytest.mark.parametrize("name", LOSSES)
def test_rows_that_are_clipped_and_summed_give_the_functions_numbers(name: str, alone: bool) -> None:
    lines, loss = LOSSES[name]
    step, (state, fixed) = step_of(loss, alone), buffers(lines)
    program, expected = Program(step, {"w": state["w"].clone()}, fixed), state
    assert program.traced
    for _ in range(3):
        program()
        expected = step(expected, fixed)
    torch.testing.assert_close(program.state["w"], expected["w"], rtol=1e-9, atol=1e-9)
    written = largest(program) >= CLIENTS * ROWS * WIDTH * WIDTH
    assert written != alone, "gradients are written down only where something else uses them"


def test_gradients_of_zero_have_no_length() -> None:
    step, (state, fixed) = step_of(lambda w, x, c: 0 * (F.linear(c[0], w) * F.linear(c[1], w) * x).sum(), True), buffers()
    program = Program(step, {"w": state["w"].clone()}, fixed)
    program()
    assert torch.equal(program.state["w"], state["w"])


def test_small_gradients_are_left_as_they_are() -> None:
    program = Program(step_of(LOSSES["of each row"][1], True), *buffers(width=4))
    names = [str(node.target) for node in program._run.graph.nodes]
    assert any("linalg_vector_norm" in name for name in names)


def test_factors_that_are_written_into_are_used_before() -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        x = fixed["x"][:, :, 0].clone()
        left, right = x.unsqueeze(3).flatten(0, 1), x.unsqueeze(2).flatten(0, 1)
        rows = torch.bmm(left, right).view(CLIENTS, ROWS, WIDTH, WIDTH).view(CLIENTS, ROWS, -1)
        x.zero_()
        norms = torch.linalg.vector_norm(rows, 2, [2])
        return {"w": state["w"] - 0.1 * torch.bmm(1 / norms.unsqueeze(1), rows).view_as(state["w"])}

    state, fixed = buffers()
    program = Program(step, {"w": state["w"].clone()}, fixed)
    program()
    torch.testing.assert_close(program.state["w"], step(state, fixed)["w"])


@pytest.mark.parametrize("method", METHODS)
def test_steps_without_gradients_of_rows_are_left_as_they_are(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs them: traced, and stacked convolutions as products."""
    seen: list[tuple[str, str]] = []

    def watched(graph: fx.Graph) -> None:
        before = str(graph)
        fold_rows(graph)
        seen.append((before, str(graph)))

    monkeypatch.setattr(programs, "fold_rows", watched)
    monkeypatch.setattr(Program, "products_on", ("cpu",))
    monkeypatch.setattr(Vmap, "trace_from", 1)
    draw = np.random.default_rng(0)
    table = gpfl.Table(draw.integers(0, 256, (48, 1, 16, 16)).astype(np.uint8), np.arange(48) % 3, name="noise")
    federation = gpfl.federate(table, partition="pathological", clients=2, classes_per_client=2, balanced=True)
    gpfl.fit(method, federation, net=CNN4(channels=(4, 8), hidden=64), rounds=1, engine="vmap", device="cpu", batch_size=4)
    assert seen
    for before, after in seen:
        assert before == after
