"""Convolutions of many clients as matrix products match torch's grouped convolution and its gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from gpfl.engine.compiler.convolution import DECOMPOSITIONS, SMALL_WEIGHT, convolution, convolution_backward


class Case(NamedTuple):
    """A convolution of three clients."""

    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    image: tuple[int, int] = (9, 10)
    inputs: int = 2
    channels: int = 5


CASES = {
    "plain": Case(),
    "one pixel": Case(kernel=(1, 1)),
    "even kernel": Case(kernel=(2, 4)),
    "aligned": Case(kernel=(2, 2)),
    "padded": Case(kernel=(5, 5), padding=(2, 2)),
    "padded in one direction": Case(padding=(0, 1)),
    "strided": Case(stride=(2, 2), padding=(1, 1)),
    "strided past the edge": Case(stride=(3, 2)),
    "stride beyond the kernel": Case(kernel=(2, 1), stride=(3, 4)),
    "dilated": Case(dilation=(2, 3)),
    "all combined": Case(kernel=(3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
    "signals 1×9": Case(kernel=(1, 9), image=(1, 30)),
    "signals 1×9 strided": Case(kernel=(1, 9), image=(1, 30), stride=(1, 2), padding=(0, 4)),
    "whole image": Case(kernel=(9, 10)),
    "many weights": Case(inputs=32, channels=32, image=(4, 4)),
    "one input": Case(inputs=1),
    "padded more than the kernel": Case(kernel=(1, 1), padding=(1, 2)),
}
CLIENTS, SAMPLES = 3, 4
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = (
        (SAMPLES, CLIENTS * case.inputs, *case.image),
        (CLIENTS * case.channels, case.inputs, *case.kernel),
        (CLIENTS * case.channels,),
    )
    x, weight, bias = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    return x, weight, bias


def settings(case: Case) -> tuple:
    return (case.stride, case.padding, case.dilation, False, (0, 0), CLIENTS)


@cases
def test_result_and_gradients_match_a_grouped_convolution(case: Case) -> None:
    x, weight, bias = (t.requires_grad_() for t in tensors(case))
    expected = F.conv2d(x, weight, bias, case.stride, case.padding, case.dilation, CLIENTS)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_grads = torch.autograd.grad(expected, (x, weight, bias), grad)
    with torch.no_grad():
        torch.testing.assert_close(convolution(x, weight, bias, *settings(case)), expected)
        without_bias = F.conv2d(x, weight, None, case.stride, case.padding, case.dilation, CLIENTS)
        torch.testing.assert_close(convolution(x, weight, None, *settings(case)), without_bias)
        grads = convolution_backward(grad, x, weight, list(bias.shape), *settings(case), [True, True, True])
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted)


def test_cases_cover_split_and_unsplit_weight_gradients() -> None:
    per_client = {name: case.channels * case.inputs * case.kernel[0] * case.kernel[1] for name, case in CASES.items()}
    assert per_client["plain"] < SMALL_WEIGHT <= per_client["many weights"]


def test_only_selected_gradients_are_computed() -> None:
    case = Case()
    x, weight, bias = tensors(case)
    grad = torch.ones_like(convolution(x, weight, bias, *settings(case)))
    for mask in ([True, False, False], [False, True, False], [False, False, True]):
        grads = convolution_backward(grad, x, weight, list(bias.shape), *settings(case), mask)
        assert [found is not None for found in grads] == mask


def other_convolutions() -> dict[str, tuple]:
    x, weight = torch.zeros(2, 4, 6, 6), torch.zeros(4, 2, 3, 3)
    options = ((1, 1), (0, 0), (1, 1))
    return {
        "one client": (x, torch.zeros(4, 4, 3, 3), *options, False, 1),
        "transposed": (x, weight, *options, True, 2),
        "depthwise": (x, torch.zeros(4, 1, 3, 3), *options, False, 4),
        "depthwise, two channels each": (x, torch.zeros(8, 1, 3, 3), *options, False, 4),
        "1d": (torch.zeros(2, 4, 6), torch.zeros(4, 2, 3), (1,), (0,), (1,), False, 2),
        "3d": (torch.zeros(2, 4, 6, 6, 6), torch.zeros(4, 2, 3, 3, 3), (1,) * 3, (0,) * 3, (1,) * 3, False, 2),
    }


@pytest.mark.parametrize("name", other_convolutions())
def test_other_convolutions_are_left_to_torch(name: str) -> None:
    x, weight, stride, padding, dilation, transposed, groups = other_convolutions()[name]
    output_padding = [0] * len(stride)
    assert convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups) is NotImplemented
    grads = convolution_backward(
        x, x, weight, None, stride, padding, dilation, transposed, output_padding, groups, [True, True, False]
    )
    assert grads is NotImplemented


def gradients(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, stride=2, padding=1).square().mean()

    return torch.func.grad(loss, (0, 1))(weight, bias)


@pytest.mark.parametrize("stacked", [True, False])
def test_traced_step_of_stacked_clients_has_no_convolution(stacked: bool) -> None:
    shapes = [(5, 2, 3, 3), (5,), (4, 2, 8, 8)]
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn((CLIENTS, *shape) if stacked else shape, generator=rng, dtype=torch.float64) for shape in shapes]
    step = torch.func.vmap(gradients) if stacked else gradients
    module = make_fx(step, decomposition_table=DECOMPOSITIONS)(*inputs)
    assert any("convolution" in str(node.target) for node in module.graph.nodes) != stacked
    for found, wanted in zip(module(*inputs), step(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)
