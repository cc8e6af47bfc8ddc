"""Ghost clipping computes the function's own numbers, without per-example gradients where that saves memory."""

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
from gpfl.engine.compiler.ghost_clipping import apply_ghost_clipping
from gpfl.engine.compiler.program import Buffers, Program
from gpfl.engine.vmap import Vmap
from gpfl.methods import METHODS
from gpfl.models.architectures import CNN4

CLIENTS, EXAMPLES, WIDTH = 3, 4, 64
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


LOSSES: dict[str, tuple[int, Loss]] = {  # lines of an example, and the loss by what its gradient is a product of
    "each example": (1, lambda w, x, c: F.linear(x, w).relu().square().sum()),
    "a factor common to all examples": (1, lambda w, x, c: (F.linear(c[0], w).tanh() * x).square().sum()),
    "a sum of two": (1, lambda w, x, c: (F.linear(c[0], w).tanh() * F.linear(c[1], w) * x).square().sum()),
    "a sum of both kinds": (1, lambda w, x, c: (F.linear(c[0], w).tanh() * F.linear(x, w)).square().sum()),
    "two lines": (2, lambda w, x, c: F.linear(x, w).relu().square().sum()),
    "transposed": (1, lambda w, x, c: (x @ w).relu().square().sum()),
}
USES = {"norms and sum only": True, "another use": False}


def step_of(loss: Loss, only_clipped: bool) -> Callable[[Buffers, Buffers], Buffers]:
    def client(w: Tensor, x: Tensor, c: Tensor) -> Tensor:
        gradients = vmap(lambda example: grad(loss)(w, example, c))(x)
        norms = torch.linalg.vector_norm(gradients.reshape(len(gradients), -1), dim=1)
        factors = (1 / norms.clamp_min(1e-30)).clamp_max(1.0)
        return torch.tensordot(factors, gradients, dims=1) + (0 if only_clipped else gradients.amax(0))

    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"w": state["w"] - 0.1 * vmap(client)(state["w"], fixed["x"], fixed["c"])}

    return step


def buffers(lines: int = 1, width: int = WIDTH) -> tuple[Buffers, Buffers]:
    x, c = random(CLIENTS, EXAMPLES, lines, width, seed=1), random(CLIENTS, 2, width, seed=2)
    return {"w": random(CLIENTS, width, width) / 8}, {"x": x, "c": c}


def largest_value(program: Program) -> int:
    """Return the number of entries of the largest value that the program computes."""
    values = [node.meta["val"] for node in program._run.graph.nodes if node.op == "call_function" and "val" in node.meta]
    return max(value.numel() for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize("only_clipped", USES.values(), ids=USES)
@pytest.mark.parametrize("name", LOSSES)
def test_clipped_and_summed_gradients_match_the_function(name: str, only_clipped: bool) -> None:
    lines, loss = LOSSES[name]
    step, (state, fixed) = step_of(loss, only_clipped), buffers(lines)
    program, expected = Program(step, {"w": state["w"].clone()}, fixed), state
    assert program.traced
    for _ in range(3):
        program()
        expected = step(expected, fixed)
    torch.testing.assert_close(program.state["w"], expected["w"], rtol=1e-9, atol=1e-9)
    materialised = largest_value(program) >= CLIENTS * EXAMPLES * WIDTH * WIDTH
    assert materialised != only_clipped, "gradients are materialised only where something else uses them"


def test_zero_gradients_have_norm_zero() -> None:
    step, (state, fixed) = step_of(lambda w, x, c: 0 * (F.linear(c[0], w) * F.linear(c[1], w) * x).sum(), True), buffers()
    program = Program(step, {"w": state["w"].clone()}, fixed)
    program()
    assert torch.equal(program.state["w"], state["w"])


def test_small_gradients_are_left_unchanged() -> None:
    program = Program(step_of(LOSSES["each example"][1], True), *buffers(width=4))
    names = [str(node.target) for node in program._run.graph.nodes]
    assert any("linalg_vector_norm" in name for name in names)


def test_factors_that_are_mutated_are_read_before() -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        x = fixed["x"][:, :, 0].clone()
        left, right = x.unsqueeze(3).flatten(0, 1), x.unsqueeze(2).flatten(0, 1)
        gradients = torch.bmm(left, right).view(CLIENTS, EXAMPLES, WIDTH, WIDTH).view(CLIENTS, EXAMPLES, -1)
        x.zero_()
        norms = torch.linalg.vector_norm(gradients, 2, [2])
        return {"w": state["w"] - 0.1 * torch.bmm(1 / norms.unsqueeze(1), gradients).view_as(state["w"])}

    state, fixed = buffers()
    program = Program(step, {"w": state["w"].clone()}, fixed)
    program()
    torch.testing.assert_close(program.state["w"], step(state, fixed)["w"])


FAST_METHODS = ("gpfl", "perfedavg", "fedproto")  # three kinds of steps: of several losses, of a second order, of prototypes


@pytest.mark.parametrize(
    "method", [name if name in FAST_METHODS else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_steps_without_per_example_gradients_are_left_unchanged(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: traced, and stacked convolutions as matrix products."""
    graphs: list[tuple[str, str]] = []

    def recorded(graph: fx.Graph) -> None:
        before = str(graph)
        apply_ghost_clipping(graph)
        graphs.append((before, str(graph)))

    monkeypatch.setattr(programs, "apply_ghost_clipping", recorded)
    monkeypatch.setattr(Program, "matmul_devices", ("cpu",))
    monkeypatch.setattr(Vmap, "min_calls_to_trace", 1)
    rng = np.random.default_rng(0)
    table = gpfl.Table(rng.integers(0, 256, (48, 1, 16, 16)).astype(np.uint8), np.arange(48) % 3, name="noise")
    federation = gpfl.federate(table, partition="pathological", clients=2, classes_per_client=2, balanced=True)
    gpfl.fit(method, federation, net=CNN4(channels=(4, 8), hidden=64), rounds=1, engine="vmap", device="cpu", batch_size=4)
    assert graphs
    for before, after in graphs:
        assert before == after
