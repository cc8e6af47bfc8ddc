"""Pooling as it is written for a compiler gives what torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from gpfl.engine.pooling import DECOMPOSITIONS


def traced(function: object, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, decomposition_table=DECOMPOSITIONS)(*inputs)  # type: ignore[arg-type]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pools(graph: fx.Graph) -> int:
    return sum("max_pool2d" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize(
    ("size", "kernel"), [((8, 8), 2), ((9, 7), 2), ((6, 9), 3), ((1, 11), (1, 2)), ((5, 4), (2, 1)), ((8, 8), 1)], ids=str
)
def test_windows_side_by_side(size: tuple[int, int], kernel: int | tuple[int, int]) -> None:
    x = random(3, 5, 4, *size)
    x[0, 0, 0] = x[0, 0, 0].round()  # equals
    x[1, 1, 1, 0, 0] = float("nan")
    x[2, 0, 0] = -torch.inf

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, kernel, return_indices=True)

    module = traced(vmap(both), x)
    assert pools(module.graph) == 0
    for found, expected in zip(module(x), vmap(both)(x), strict=True):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert found.dtype == expected.dtype

    def slope(x: Tensor) -> Tensor:
        return F.max_pool2d(x, kernel).nan_to_num(1.0).clamp(-9, 9).pow(2).sum()

    module = traced(vmap(grad(slope)), x)
    assert pools(module.graph) == 0
    assert torch.equal(module(x).nan_to_num(7.0), vmap(grad(slope))(x).nan_to_num(7.0))


@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 3, "stride": 2}, {"kernel_size": 2, "padding": 1}, {"kernel_size": 2, "dilation": 2}, {"kernel_size": 4}],
    ids=str,
)
def test_other_windows_are_left_to_torch(options: dict[str, int]) -> None:
    x = random(2, 3, 9, 9)
    module = traced(grad(lambda x: F.max_pool2d(x, **options).pow(2).sum()), x)
    assert pools(module.graph) == 2
    module = traced(lambda x: F.max_pool2d(x, 2, ceil_mode=True), x)
    assert pools(module.graph) == 1
