"""Products of many clients at once are those of each: the plain forms of our operations, and our kernels on a GPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

import gpfl
from gpfl.core import randomness, tree
from gpfl.engine.compiler import convolution, product_passes, products, program
from gpfl.engine.compiler.program import Buffers, Program
from gpfl.engine.vmap import Vmap

SHAPES = [  # kernel, stride, padding
    ((5, 5), (1, 1), (0, 0)),
    ((3, 3), (1, 1), (1, 1)),
    ((3, 3), (2, 2), (1, 1)),
    ((1, 1), (2, 2), (0, 0)),
    ((7, 4), (2, 1), (3, 0)),
    ((1, 9), (1, 1), (0, 0)),
    ((1, 1), (1, 1), (1, 2)),
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
    monkeypatch.setattr(convolution, "kernels_take", lambda x, dilation, groups: True)  # which else take float32 alone
    got = convolution.convolution(x, weight, bias, stride, padding, *rest)
    torch.testing.assert_close(got, expected)
    above = random(*expected.shape).double()
    grads = convolution.convolution_backward(
        above, x.detach(), weight.detach(), None, stride, padding, *rest, (True, True, True)
    )
    torch.testing.assert_close(grads, torch.autograd.grad(expected, known, above))


def test_kernels_are_for_nvidia_cards_with_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = products.has_kernels.__wrapped__
    monkeypatch.setattr(products, "can_build", lambda device: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, runs in (((8, 0), True), ((12, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, version=version: version)
        assert asked(torch.device("cuda")) == runs
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert not asked(torch.device("cpu"))
    assert not asked(torch.device("mps"))
    monkeypatch.setattr(torch.version, "cuda", None)  # as on AMD's cards
    assert not asked(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not asked(torch.device("cuda"))


def test_machine_that_cannot_build_kernels_says_so_and_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    broken = types.ModuleType("gpfl.engine.compiler.kernels")
    broken.subtract_product = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpfl.engine.compiler.kernels", broken)
    monkeypatch.setattr("gpfl.engine.compiler.kernels", broken, raising=False)
    with pytest.warns(UserWarning, match=r"Triton builds no kernels here \(Failed to find C compiler\.\): rounds take"):
        assert not products.can_build(torch.device("cpu"))
    broken.subtract_product = lambda *given: None  # type: ignore[attr-defined]
    assert products.can_build(torch.device("cpu"))


def test_kernels_take_float32_without_gaps_and_as_many_groups_as_a_launch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch)
    x = random(1, 4, 3, 3)
    assert convolution.kernels_take(x, (1, 1), 2)
    assert not convolution.kernels_take(x.double(), (1, 1), 2)
    assert not convolution.kernels_take(x, (1, 2), 2)
    assert not convolution.kernels_take(x, (1, 1), 1 << 16)


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


class Tied(nn.Module):
    """Layers that are used twice, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.wide = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Linear(72, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.kernel(self.kernel(x).relu()).flatten(1)
        return self.wide(self.wide(seen).relu())


def partly_frozen() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 20), nn.Linear(20, 3))
    layers[0].requires_grad_(False)
    layers[4].weight.requires_grad_(False)
    return layers


def flattened(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {  # by name: the shape of a row, and what builds the net
    "tied": ((2, 6, 6), lambda: nn.Sequential(Tied(), nn.Linear(72, 3))),
    "partly frozen": ((2, 6, 6), partly_frozen),
    "depthwise": ((2, 6, 6), lambda: flattened(nn.Conv2d(2, 20, 3), nn.Conv2d(20, 20, 3, groups=20), width=80)),
    "groups of its own": ((2, 6, 6), lambda: flattened(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 12, 3, groups=4), width=48)),
    "dilated": ((2, 6, 6), lambda: flattened(nn.Conv2d(2, 3, 3, dilation=2, padding=1), width=48)),
    "along a line": ((2, 12), lambda: flattened(nn.Conv1d(2, 3, 3, stride=2), width=15)),
    "in a volume": ((2, 4, 4, 4), lambda: flattened(nn.Conv3d(2, 3, 3), width=24)),
    "transposed": ((2, 6, 6), lambda: flattened(nn.ConvTranspose2d(2, 3, 3, stride=2), width=507)),
}


@pytest.mark.parametrize(("name", "method"), [*((name, "fedprox") for name in NETS), ("tied", "gpfl")])
def test_runs_with_our_operations_give_the_numbers_of_the_loop(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    force(monkeypatch)
    monkeypatch.setattr(Vmap, "trace_from", 0)
    monkeypatch.setattr(product_passes, "LEAST", 1)
    shape, build = NETS[name]
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(n, *shape)).astype(np.float32), np.arange(n) % 3) for n in (27, 41, 33)]
    module, found = build(), {}
    for engine in ("loop", "vmap"):
        result = gpfl.fit(method, gpfl.federate(clients), net=module, rounds=2, lr=0.02, batch_size=7, engine=engine)
        found[engine] = tree.flatten({"shared": result.outcome.selected.shared, "private": result.outcome.selected.private})
    for path, value in found["loop"].items():
        torch.testing.assert_close(found["vmap"][path], value, rtol=1e-5, atol=1e-5)


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
    (2, 1, 9, 1, 1, 3, 2),
    (2, 2, 8, 15, 16, 2, 3),
]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def count_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels count as they do in tensors of more than 2³⁰ entries."""
    from gpfl.engine.compiler import kernels

    monkeypatch.setattr(kernels, "COUNTED", 0)


@pytest.mark.gpu
def test_entries_beyond_32_bits_are_reached() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    clients, terms, columns = 5, 1 << 15, 1 << 14  # 2.7e9 entries, 10 GiB
    a, b = random(clients, 2, terms, device="cuda"), torch.zeros(clients, terms, columns, device="cuda")
    b[-1, -1, -1] = 1.0
    assert float(torch.ops.gpfl.thin(a, b)[-1, 1, -1]) == pytest.approx(float(a[-1, 1, -1]), rel=1e-6)
    left, right = torch.ones(clients, terms, 1, device="cuda"), torch.ones(clients, 1, columns, device="cuda")
    torch.ops.gpfl.subtract_product_(b, left, right, 1.0)
    assert b[-1, -1].tolist() == [-1.0] * (columns - 1) + [0.0]
    assert float(b[0, 0, 0]) == -1.0
    del b
    x = torch.zeros(2, 1100, 100, 100, 100, device="cuda")  # 2.2e9 entries: beyond 32 bits within clients and over them
    x[:, -1, -1, -1, -1] = torch.tensor([1.0, 2.0], device="cuda")
    w = random(2, 1, 32, 100, device="cuda")
    y = torch.ops.gpfl.convolve(x, w, [1, 1], [1, 1], False, [0, 0])
    torch.testing.assert_close(y[1, -1, -1, -1], 2 * w[1, 0, :, -1], rtol=1e-6, atol=1e-6)
    dw = torch.ops.gpfl.weigh(x, y, [1, 1], [1, 1]).sum(0)
    torch.testing.assert_close(dw[1, :, 0, 0, -1], 4 * w[1, 0, :, -1], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("innermost", [True, False])
@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize(("clients", "rows", "side", "inputs", "channels", "kernel", "stride"), CASES)
def test_kernels_convolve_to_the_digits_of_float32(
    monkeypatch: pytest.MonkeyPatch,
    clients: int,
    rows: int,
    side: int,
    inputs: int,
    channels: int,
    kernel: int,
    stride: int,
    innermost: bool,
    long: bool,
) -> None:
    if long:
        count_in_64_bits(monkeypatch)
    x = random(clients, rows, side, side, inputs, device="cuda")
    weight = random(clients, channels, inputs, kernel, kernel, device="cuda")
    if innermost:
        weight = program.inputs_innermost({"w": weight}, stacked=True)["w"]
    weight, size, step = weight.flatten(0, 1), [kernel, kernel], [stride, stride]
    turned, flip = products.turned_taps(weight, clients)
    back = random(clients, rows, side, side, channels, device="cuda")
    edged = back.clone()
    edged[:, :, : kernel - 1], edged[:, :, side - kernel + 2 :] = 0, 0
    asked = [
        (torch.ops.gpfl.convolve, (x, products.taps(weight, clients), size, step, False, [0, 0])),
        (torch.ops.gpfl.convolve, (back, turned, size, [1, 1], flip, [0, 0])),
        (torch.ops.gpfl.convolve, (edged, turned, size, [1, 1], flip, [kernel - 1, max(0, kernel - 2)])),
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


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 1001, 262144])
def test_a_gpu_draws_what_a_cpu_draws(count: int) -> None:
    keys = torch.stack([randomness.stream(torch.tensor(float(client)), "test") for client in range(5)])
    for number in (1, 7, 4171764338):  # the last is more than an int32 holds
        there = randomness.drawn(keys.cuda(), number, count)
        torch.testing.assert_close(there.cpu(), randomness.drawn(keys, number, count), rtol=0, atol=2e-6)
        assert torch.equal(there, randomness.drawn(keys.cuda(), number, count))
