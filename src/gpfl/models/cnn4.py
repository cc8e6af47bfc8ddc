"""The 4-layer CNN of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gpfl.core.net import Shape
from gpfl.core.options import option
from gpfl.errors import GpflError
from gpfl.models.architecture import Architecture, Parts

KERNEL = 5
SMALLEST_UNPADDED = 16
"""The smallest image that two unpadded 5×5 convolutions, each halved by pooling, leave a pixel of."""


@dataclass(frozen=True, kw_only=True)
class CNN4(Architecture):
    """Two 5×5 convolutions with pooling and one hidden layer as base, one linear layer as head.

    Images under 16 pixels a side are padded so that a convolution keeps their size; from 16 on it is the paper's net.
    """

    lr: ClassVar[float] = 0.005

    channels: tuple[int, int] = option((32, 64), "channels of the two convolutions", min=1)
    hidden: int = option(512, "width of the features", symbol="K", min=1)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Gives the modules for images of `shape` (channels, height, width)."""
        if len(shape) != 3:
            raise GpflError(f"net 'cnn4' takes images (channels, height, width); the data has rows of shape {shape}: use 'mlp'")
        if min(shape[1:]) < 4:
            raise GpflError(f"net 'cnn4' takes images of at least 4×4; the data has {shape[1]}×{shape[2]}: use 'mlp'")
        padding = KERNEL // 2 if min(shape[1:]) < SMALLEST_UNPADDED else 0
        first, second = self.channels
        flat = second * pooled(shape[1], padding) * pooled(shape[2], padding)
        base = nn.Sequential()
        base.add_module("conv1", convolution(shape[0], first, padding))
        base.add_module("conv2", convolution(first, second, padding))
        base.add_module("flatten", nn.Flatten())
        base.add_module("fc1", nn.Sequential(nn.Linear(flat, self.hidden), nn.ReLU()))
        return {"base": base, "head": nn.Linear(self.hidden, classes)}


def convolution(inputs: int, outputs: int, padding: int) -> nn.Sequential:
    """Gives one convolution with its activation and pooling."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, KERNEL, padding=padding), nn.ReLU(), nn.MaxPool2d(2))


def pooled(size: int, padding: int) -> int:
    """Gives the side of the image after both convolutions."""
    for _ in range(2):
        size = (size + 2 * padding - KERNEL + 1) // 2
    return size
