"""Products of many clients at once are those of each: the plain forms of our operations, and our kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from gpfl.engine import convolution, products, program
from gpfl.engine.program import Buffers, Program

SHAPES = [  # kernel, stride, padding
    ((5, 5), (1, 1), (0, 0)),
    ((3, 3), (1, 1), (1, 1)),
    ((3, 3), (2, 2), (1, 1)),
    ((1, 1), (2, 2), (0, 0)),
    ((7, 4), (2, 1), (3, 0)),
    ((1, 9), (1, 1), (0, 0)),
]


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the way of our kernels on a CPU, where their operations are computed plainly."""
    monkeypatch.setattr(Program, "products_on", ("cpu",))
    for module in (products, program):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


@pytest.mark.parametrize(("inputs", "channels"), [(5, 6), (20, 17), (17, 3)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), SHAPES)
def test_convolutions_of_many_clients_are_those_of_each(
    monkeypatch: pytest.MonkeyPatch,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    inputs: int,
    channels: int,
) -> None:
    force(monkeypatch)
    clients, rest = 3, ((1, 1), False, (0, 0), 3)
    x, weight = random(4, clients * inputs, 12, 13).double(), random(clients * channels, inputs, *kernel).double()
    bias = random(clients * channels).double()
    known = [part.requires_grad_() for part in (x, weight, bias)]
    expected = F.conv2d(x, weight, bias, stride, padding, groups=clients)
    monkeypatch.setattr(convolution, "kernels_take", lambda x, dilation: True)  # which else take float32 alone
    got = convolution.convolution(x, weight, bias, stride, padding, *rest)
    torch.testing.assert_close(got, expected)
    above = random(*expected.shape).double()
    grads = convolution.convolution_backward(
        above, x.detach(), weight.detach(), None, stride, padding, *rest, (True, True, True)
    )
    torch.testing.assert_close(grads, torch.autograd.grad(expected, known, above))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("pull", [0.0, 100.0])
def test_traced_step_uses_our_operations_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, pull: float
) -> None:
    def loss(state: Buffers, x: Tensor) -> Tensor:
        seen = F.relu(F.conv2d(x, state["kernel"], state["bias"])).flatten(1)
        fit = F.linear(seen, state["wide"]).square().mean()
        return fit + pull * (state["wide"] - 1).square().sum() if pull else fit

    def step(state: Buffers, fixed: Buffers) -> Buffers:
        slopes = vmap(grad(loss))(state["work"], fixed["x"])
        return {"work": {name: value - 1e-4 * slopes[name] for name, value in state["work"].items()}}

    force(monkeypatch)
    work = {"kernel": random(2, 20, 3, 3, 3), "bias": random(2, 20), "wide": random(2, 300, 720)}
    given = {"x": random(2, 4, 3, 8, 8)}
    own = {name: value.clone() for name, value in work.items()}
    made = Program(step, {"work": own}, given, compiled=compiled, weights={"work": True})
    assert made.state["work"]["kernel"].stride(2) == 1
    expected = {"work": work}
    for _ in range(2):
        made()
        expected = step(expected, given)
    torch.testing.assert_close(made.state["work"], expected["work"])
    names = [str(node.target) for node in made._run.graph.nodes]
    for name in ("convolve", "weigh", "thin", "subtract_product_"):
        assert f"gpfl.{name}.default" in names
    assert not any("convolution" in name for name in names)
    assert not any(node.target is torch.ops.aten.bmm.default for node in made._run.graph.nodes)  # no gradient is written down


def test_step_that_cannot_be_traced_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"work": {"kernel": state["work"]["kernel"] + float(state["work"]["kernel"].sum() > 0)}}

    force(monkeypatch)
    kernel = torch.ones(2, 4, 3, 3, 3)
    made = Program(step, {"work": {"kernel": kernel}}, {}, weights={"work": True})
    made()
    assert not made.traced
    assert made.state["work"]["kernel"] is kernel
    assert kernel.eq(2).all()


# On a GPU.

CASES = [  # clients, rows, side, inputs, channels, kernel, stride
    (3, 10, 14, 32, 64, 5, 1),
    (3, 10, 32, 3, 32, 5, 1),
    (2, 10, 18, 64, 32, 5, 1),
    (2, 4, 16, 64, 128, 3, 2),
    (2, 4, 9, 1, 16, 5, 1),
    (2, 3, 8, 96, 20, 1, 1),
    (2, 3, 7, 33, 20, 3, 2),
]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("innermost", [True, False])
@pytest.mark.parametrize(("clients", "rows", "side", "inputs", "channels", "kernel", "stride"), CASES)
def test_kernels_convolve_to_the_digits_of_float32(
    clients: int, rows: int, side: int, inputs: int, channels: int, kernel: int, stride: int, innermost: bool
) -> None:
    x = random(clients, rows, side, side, inputs, device="cuda")
    weight = random(clients, channels, inputs, kernel, kernel, device="cuda")
    if innermost:
        weight = program.inputs_innermost({"w": weight}, stacked=True)["w"]
    weight, size, step = weight.flatten(0, 1), [kernel, kernel], [stride, stride]
    turned, flip = products.turned_taps(weight, clients)
    back = random(clients, rows, side, side, channels, device="cuda")
    asked = [
        (torch.ops.gpfl.convolve, (x, products.taps(weight, clients), size, step, False)),
        (torch.ops.gpfl.convolve, (back, turned, size, [1, 1], flip)),
    ]
    for operation, given in asked:
        exact = operation(*(part.double().cpu() if isinstance(part, Tensor) else part for part in given)).cuda()
        assert error(operation(*given), exact) < 1e-6
    dy = random(*torch.ops.gpfl.convolve(*asked[0][1]).shape, device="cuda")
    exact = torch.ops.gpfl.weigh(x.double().cpu(), dy.double().cpu(), size, step).sum(0).cuda()
    assert error(torch.ops.gpfl.weigh(x, dy, size, step).sum(0), exact) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(10, 1600, 512), (2, 512, 512), (16, 300, 700), (3, 37, 29)])
def test_kernels_of_few_rows_have_the_digits_of_float32(rows: int, terms: int, columns: int, turned: bool) -> None:
    a = random(3, rows, terms, device="cuda")
    b = random(3, columns, terms, device="cuda").transpose(1, 2) if turned else random(3, terms, columns, device="cuda")
    assert error(torch.ops.gpfl.thin(a, b), a.double() @ b.double()) < 1e-6
    left, right, before = a.transpose(1, 2), random(3, rows, columns, device="cuda"), b.clone()
    torch.ops.gpfl.subtract_product_(b, left, right, 0.1)
    assert error(b, before.double() - 0.1 * left.double() @ right.double()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "least", "most"), [("highest", 0, 1e-6), ("high", 1e-5, 1e-3), ("medium", 1e-3, 1e-2)])
def test_products_have_the_digits_that_were_asked_for(precision: str, least: float, most: float) -> None:
    a, b = random(3, 10, 1600, device="cuda"), random(3, 1600, 512, device="cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert least <= error(torch.ops.gpfl.thin(a, b), a.double() @ b.double()) < most
    finally:
        torch.set_float32_matmul_precision(before)
