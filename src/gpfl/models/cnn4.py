"""The 4-layer CNN of the paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gpfl.core.net import Shape
from gpfl.core.options import option
from gpfl.errors import GpflError
from gpfl.models.architecture import Architecture, Parts

KERNEL = 5
MIN_UNPADDED = 16  # the smallest side that two unpadded 5×5 convolutions with pooling can take


@dataclass(frozen=True, kw_only=True)
class CNN4(Architecture):
    """Two 5×5 convolutions with pooling and one hidden layer as base, one linear layer as head.

    It is the paper's net for images of at least 16×16; smaller ones are padded so that convolutions keep their size.
    """

    lr = 0.005

    channels: tuple[int, int] = option((32, 64), "channels of the two convolutions", min=1)
    hidden: int = option(512, "width of the features", symbol="K", min=1)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for images of `shape` (channels, height, width)."""
        if len(shape) != 3:
            raise GpflError(f"net 'cnn4' takes images (channels, height, width); the data has shape {shape}: use 'mlp'")
        if min(shape[1:]) < 4:
            raise GpflError(f"net 'cnn4' takes images of at least 4×4; the data has {shape[1]}×{shape[2]}: use 'mlp'")
        padding = KERNEL // 2 if min(shape[1:]) < MIN_UNPADDED else 0
        first, second = self.channels
        flat = second * _pooled_size(shape[1], padding) * _pooled_size(shape[2], padding)
        base = nn.Sequential()
        base.add_module("conv1", _convolution(shape[0], first, padding))
        base.add_module("conv2", _convolution(first, second, padding))
        base.add_module("flatten", nn.Flatten())
        base.add_module("fc1", nn.Sequential(nn.Linear(flat, self.hidden), nn.ReLU()))
        return {"base": base, "head": nn.Linear(self.hidden, classes)}


def _convolution(inputs: int, outputs: int, padding: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, KERNEL, padding=padding), nn.ReLU(), nn.MaxPool2d(2))


def _pooled_size(size: int, padding: int) -> int:
    for _ in range(2):
        size = (size + 2 * padding - KERNEL + 1) // 2
    return size
