"""The CNN for signals of wearable sensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gpfl.core.net import Shape
from gpfl.errors import GpflError
from gpfl.models.architecture import Architecture, Parts

KERNEL = 9
SMALLEST = 2 * (2 + KERNEL - 1) + KERNEL - 1
"""The shortest signal that two convolutions, each halved by pooling, leave a step of."""


@dataclass(frozen=True, kw_only=True)
class HARCNN(Architecture):
    """Two convolutions along time as base; the whole three-layer perceptron behind them is the head, as in the authors' code.

    Rows are signals (channels, 1, steps); for 9 channels of 128 steps the features are 1,664 wide.
    """

    lr: ClassVar[float] = 0.01

    def build(self, shape: Shape, classes: int) -> Parts:
        """Gives the modules for signals of `shape` (channels, 1, steps)."""
        if len(shape) != 3 or shape[1] != 1 or shape[2] < SMALLEST:
            raise GpflError(
                f"net 'harcnn' takes signals (channels, 1, steps ≥ {SMALLEST}); the data has rows of shape {shape}: use 'mlp'"
            )
        steps = ((shape[2] - KERNEL + 1) // 2 - KERNEL + 1) // 2
        base = nn.Sequential()
        base.add_module("conv1", convolution(shape[0], 32))
        base.add_module("conv2", convolution(32, 64))
        base.add_module("flatten", nn.Flatten())
        head = nn.Sequential(nn.Linear(64 * steps, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, classes))
        return {"base": base, "head": head}


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Gives one convolution along time with its activation and pooling."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, (1, KERNEL)), nn.ReLU(), nn.MaxPool2d((1, 2), stride=2))
