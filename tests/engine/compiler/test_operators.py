"""Operators on many clients compute what torch does for each: in plain torch, and by our kernels on a GPU."""

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
from gpfl.engine.compiler import convolution, matmul_passes, operators, program
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


def use_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as on a GPU with our kernels; the operators are computed in plain torch."""
    monkeypatch.setattr(Program, "matmul_devices", ("cpu",))
    for module in (operators, program):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


@pytest.mark.parametrize(("inputs", "channels"), [(5, 6), (20, 17), (17, 3)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), SHAPES)
def test_convolutions_of_many_clients_match_those_of_each(
    monkeypatch: pytest.MonkeyPatch,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    inputs: int,
    channels: int,
) -> None:
    use_operators(monkeypatch)
    clients, options = 3, ((1, 1), False, (0, 0), 3)
    x, weight = random(4, clients * inputs, 12, 13).double(), random(clients * channels, inputs, *kernel).double()
    bias = random(clients * channels).double()
    inputs_and_weights = [t.requires_grad_() for t in (x, weight, bias)]
    expected = F.conv2d(x, weight, bias, stride, padding, groups=clients)
    monkeypatch.setattr(convolution, "_has_kernel", lambda x, dilation, groups: True)  # otherwise float32 only
    found = convolution.convolution(x, weight, bias, stride, padding, *options)
    torch.testing.assert_close(found, expected)
    grad_output = random(*expected.shape).double()
    grads = convolution.convolution_backward(
        grad_output, x.detach(), weight.detach(), None, stride, padding, *options, (True, True, True)
    )
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs_and_weights, grad_output))


def test_kernels_are_for_nvidia_gpus_with_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernels = operators.has_kernels.__wrapped__
    monkeypatch.setattr(operators, "_can_build_kernels", lambda device: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, runs in (((8, 0), True), ((12, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, version=version: version)
        assert has_kernels(torch.device("cuda")) == runs
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert not has_kernels(torch.device("cpu"))
    assert not has_kernels(torch.device("mps"))
    monkeypatch.setattr(torch.version, "cuda", None)  # as on AMD GPUs
    assert not has_kernels(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_kernels(torch.device("cuda"))


def test_machine_that_cannot_build_kernels_warns_and_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    broken = types.ModuleType("gpfl.engine.compiler.kernels")
    broken.sub_bmm = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpfl.engine.compiler.kernels", broken)
    monkeypatch.setattr("gpfl.engine.compiler.kernels", broken, raising=False)
    with pytest.warns(UserWarning, match=r"Triton cannot build kernels \(Failed to find C compiler\.\): rounds take"):
        assert not operators._can_build_kernels(torch.device("cpu"))
    broken.sub_bmm = lambda *args: None  # type: ignore[attr-defined]
    assert operators._can_build_kernels(torch.device("cpu"))


def test_kernels_are_for_undilated_float32_and_as_many_groups_as_a_launch_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_operators(monkeypatch)
    x = random(1, 4, 3, 3)
    assert convolution._has_kernel(x, (1, 1), 2)
    assert not convolution._has_kernel(x.double(), (1, 1), 2)
    assert not convolution._has_kernel(x, (1, 2), 2)
    assert not convolution._has_kernel(x, (1, 1), 1 << 16)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 100.0])
def test_traced_step_uses_our_operators_and_matches_the_function(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, decay: float
) -> None:
    def loss(state: Buffers, x: Tensor) -> Tensor:
        features = F.relu(F.conv2d(x, state["kernel"], state["bias"])).flatten(1)
        fit = F.linear(features, state["wide"]).square().mean()
        return fit + decay * (state["wide"] - 1).square().sum() if decay else fit

    def step(state: Buffers, fixed: Buffers) -> Buffers:
        gradients = vmap(grad(loss))(state["weights"], fixed["x"])
        return {"weights": {name: value - 1e-4 * gradients[name] for name, value in state["weights"].items()}}

    use_operators(monkeypatch)
    weights = {"kernel": random(2, 20, 3, 3, 3), "bias": random(2, 20), "wide": random(2, 300, 720)}
    fixed = {"x": random(2, 4, 3, 8, 8)}
    state = {"weights": {name: value.clone() for name, value in weights.items()}}
    made = Program(step, state, fixed, compiled=compiled, weights={"weights": True})
    assert made.state["weights"]["kernel"].stride(2) == 1
    expected = {"weights": weights}
    for _ in range(2):
        made()
        expected = step(expected, fixed)
    torch.testing.assert_close(made.state["weights"], expected["weights"])
    names = [str(node.target) for node in made._run.graph.nodes]
    for name in ("convolve", "conv_grad_weight", "skinny_bmm", "sub_bmm_"):
        assert f"gpfl.{name}.default" in names
    assert not any("convolution" in name for name in names)
    assert not any(node.target is torch.ops.aten.bmm.default for node in made._run.graph.nodes)  # no gradient is materialised


class Tied(nn.Module):
    """Two layers without biases, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.wide = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Linear(72, 72, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        features = self.kernel(self.kernel(x).relu()).flatten(1)
        return self.wide(self.wide(features).relu())


def partly_frozen() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 20), nn.Linear(20, 3))
    layers[0].requires_grad_(False)
    layers[4].weight.requires_grad_(False)
    return layers


def classifier(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {  # shape of a sample, and a function that builds the net
    "tied": ((2, 6, 6), lambda: nn.Sequential(Tied(), nn.Linear(72, 3))),
    "partly frozen": ((2, 6, 6), partly_frozen),
    "depthwise": ((2, 6, 6), lambda: classifier(nn.Conv2d(2, 20, 3), nn.Conv2d(20, 20, 3, groups=20), width=80)),
    "grouped": ((2, 6, 6), lambda: classifier(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 12, 3, groups=4), width=48)),
    "dilated": ((2, 6, 6), lambda: classifier(nn.Conv2d(2, 3, 3, dilation=2, padding=1), width=48)),
    "1d": ((2, 12), lambda: classifier(nn.Conv1d(2, 3, 3, stride=2), width=15)),
    "3d": ((2, 4, 4, 4), lambda: classifier(nn.Conv3d(2, 3, 3), width=24)),
    "transposed": ((2, 6, 6), lambda: classifier(nn.ConvTranspose2d(2, 3, 3, stride=2), width=507)),
}


@pytest.mark.parametrize(("name", "method"), [*((name, "fedprox") for name in NETS), ("tied", "gpfl")])
def test_runs_with_our_operators_match_the_loop(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    use_operators(monkeypatch)
    monkeypatch.setattr(Vmap, "min_calls_to_trace", 0)
    monkeypatch.setattr(matmul_passes, "MIN_MATRIX_SIZE", 1)
    shape, build = NETS[name]
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, *shape)).astype(np.float32), np.arange(n) % 3) for n in (27, 41, 33)]
    module, states = build(), {}
    for engine in ("loop", "vmap"):
        result = gpfl.fit(method, gpfl.federate(clients), net=module, rounds=2, lr=0.02, batch_size=7, engine=engine)
        states[engine] = tree.flatten({"shared": result.outcome.selected.shared, "private": result.outcome.selected.private})
    for path, value in states["loop"].items():
        torch.testing.assert_close(states["vmap"][path], value, rtol=1e-5, atol=1e-5)


def test_step_that_cannot_be_traced_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"weights": {"kernel": state["weights"]["kernel"] + float(state["weights"]["kernel"].sum() > 0)}}

    use_operators(monkeypatch)
    kernel = torch.ones(2, 4, 3, 3, 3)
    made = Program(step, {"weights": {"kernel": kernel}}, {}, weights={"weights": True})
    made()
    assert not made.traced
    assert made.state["weights"]["kernel"] is kernel
    assert kernel.eq(2).all()


# On a GPU.

CASES = [  # clients, samples, side, inputs, channels, kernel, stride
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


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def use_64_bit_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels index as in tensors of more than 2³⁰ entries."""
    from gpfl.engine.compiler import kernels

    monkeypatch.setattr(kernels, "INT32_ENTRIES", 0)


@pytest.mark.gpu
def test_kernels_reach_entries_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of GPU memory")
    clients, terms, columns = 5, 1 << 15, 1 << 14  # 2.7e9 entries, 10 GiB
    a, b = random(clients, 2, terms, device="cuda"), torch.zeros(clients, terms, columns, device="cuda")
    b[-1, -1, -1] = 1.0
    assert float(torch.ops.gpfl.skinny_bmm(a, b)[-1, 1, -1]) == pytest.approx(float(a[-1, 1, -1]), rel=1e-6)
    left, right = torch.ones(clients, terms, 1, device="cuda"), torch.ones(clients, 1, columns, device="cuda")
    torch.ops.gpfl.sub_bmm_(b, left, right, 1.0)
    assert b[-1, -1].tolist() == [-1.0] * (columns - 1) + [0.0]
    assert float(b[0, 0, 0]) == -1.0
    del b
    x = torch.zeros(2, 1100, 100, 100, 100, device="cuda")  # 2.2e9 entries: beyond 32 bits within clients and over them
    x[:, -1, -1, -1, -1] = torch.tensor([1.0, 2.0], device="cuda")
    w = random(2, 1, 32, 100, device="cuda")
    y = torch.ops.gpfl.convolve(x, w, [1, 1], [1, 1], False, [0, 0])
    torch.testing.assert_close(y[1, -1, -1, -1], 2 * w[1, 0, :, -1], rtol=1e-6, atol=1e-6)
    dw = torch.ops.gpfl.conv_grad_weight(x, y, [1, 1], [1, 1]).sum(0)
    torch.testing.assert_close(dw[1, :, 0, 0, -1], 4 * w[1, 0, :, -1], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("int64", [True, False])
@pytest.mark.parametrize(("clients", "samples", "side", "inputs", "channels", "kernel", "stride"), CASES)
def test_convolution_kernels_are_as_exact_as_float32(
    monkeypatch: pytest.MonkeyPatch,
    clients: int,
    samples: int,
    side: int,
    inputs: int,
    channels: int,
    kernel: int,
    stride: int,
    channels_last: bool,
    int64: bool,
) -> None:
    if int64:
        use_64_bit_indices(monkeypatch)
    x = random(clients, samples, side, side, inputs, device="cuda")
    weight = random(clients, channels, inputs, kernel, kernel, device="cuda")
    if channels_last:
        weight = program.to_channels_last({"w": weight}, stacked=True)["w"]
    weight, size, step = weight.flatten(0, 1), [kernel, kernel], [stride, stride]
    transposed, flip = operators.to_transposed_taps(weight, clients)
    grad_output = random(clients, samples, side, side, channels, device="cuda")
    padded = grad_output.clone()
    padded[:, :, : kernel - 1], padded[:, :, side - kernel + 2 :] = 0, 0
    calls = [
        (torch.ops.gpfl.convolve, (x, operators.to_taps(weight, clients), size, step, False, [0, 0])),
        (torch.ops.gpfl.convolve, (grad_output, transposed, size, [1, 1], flip, [0, 0])),
        (torch.ops.gpfl.convolve, (padded, transposed, size, [1, 1], flip, [kernel - 1, max(0, kernel - 2)])),
    ]
    for operator, args in calls:
        exact = operator(*(arg.double().cpu() if isinstance(arg, Tensor) else arg for arg in args)).cuda()
        assert relative_error(operator(*args), exact) < 1e-6
    dy = random(*torch.ops.gpfl.convolve(*calls[0][1]).shape, device="cuda")
    exact = torch.ops.gpfl.conv_grad_weight(x.double().cpu(), dy.double().cpu(), size, step).sum(0).cuda()
    assert relative_error(torch.ops.gpfl.conv_grad_weight(x, dy, size, step).sum(0), exact) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(10, 1600, 512), (2, 512, 512), (16, 300, 700), (3, 37, 29)])
def test_skinny_kernels_are_as_exact_as_float32(rows: int, terms: int, columns: int, transposed: bool) -> None:
    a = random(3, rows, terms, device="cuda")
    b = random(3, columns, terms, device="cuda").transpose(1, 2) if transposed else random(3, terms, columns, device="cuda")
    assert relative_error(torch.ops.gpfl.skinny_bmm(a, b), a.double() @ b.double()) < 1e-6
    left, right, before = a.transpose(1, 2), random(3, rows, columns, device="cuda"), b.clone()
    torch.ops.gpfl.sub_bmm_(b, left, right, 0.1)
    assert relative_error(b, before.double() - 0.1 * left.double() @ right.double()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "least", "most"), [("highest", 0, 1e-6), ("high", 1e-5, 1e-3), ("medium", 1e-3, 1e-2)])
def test_products_have_the_precision_that_torch_is_set_to(precision: str, least: float, most: float) -> None:
    a, b = random(3, 10, 1600, device="cuda"), random(3, 1600, 512, device="cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert least <= relative_error(torch.ops.gpfl.skinny_bmm(a, b), a.double() @ b.double()) < most
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 1001, 262144])
def test_gpu_and_cpu_draw_the_same_normal_numbers(count: int) -> None:
    keys = torch.stack([randomness.random_key(torch.tensor(float(client)), "test") for client in range(5)])
    for word in (1, 7, 4171764338):  # the last does not fit an int32
        found = randomness.normal_op(keys.cuda(), word, count)
        torch.testing.assert_close(found.cpu(), randomness.normal_op(keys, word, count), rtol=0, atol=2e-6)
        assert torch.equal(found, randomness.normal_op(keys.cuda(), word, count))
