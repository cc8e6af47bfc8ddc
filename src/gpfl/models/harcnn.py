"""The CNN for signals of wearable sensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gpfl.core.net import Shape
from gpfl.errors import GpflError
from gpfl.models.architecture import Architecture, Parts

KERNEL = 9
MIN_STEPS = 2 * (2 + KERNEL - 1) + KERNEL - 1  # the shortest signal that two convolutions with pooling can take


@dataclass(frozen=True, kw_only=True)
class HARCNN(Architecture):
    """Two convolutions along time as base, a three-layer perceptron as head, as in the authors' code.

    Samples are signals (channels, 1, steps). For 9 channels of 128 steps the features have width 1,664.
    """

    lr = 0.01

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for signals of `shape` (channels, 1, steps)."""
        if len(shape) != 3 or shape[1] != 1 or shape[2] < MIN_STEPS:
            raise GpflError(
                f"net 'harcnn' takes signals (channels, 1, steps ≥ {MIN_STEPS}); the data has shape {shape}: use 'mlp'"
            )
        steps = ((shape[2] - KERNEL + 1) // 2 - KERNEL + 1) // 2
        base = nn.Sequential()
        base.add_module("conv1", _convolution(shape[0], 32))
        base.add_module("conv2", _convolution(32, 64))
        base.add_module("flatten", nn.Flatten())
        head = nn.Sequential(nn.Linear(64 * steps, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, classes))
        return {"base": base, "head": head}


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, (1, KERNEL)), nn.ReLU(), nn.MaxPool2d((1, 2), stride=2))
