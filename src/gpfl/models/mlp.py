"""A multilayer perceptron."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from gpfl.core.net import Shape
from gpfl.core.options import option
from gpfl.models.architecture import Architecture, Parts


@dataclass(frozen=True, kw_only=True)
class MLP(Architecture):
    """Linear layers with ReLU after each as base, one linear layer as head; samples of any shape are flattened."""

    lr = 0.005

    hidden: tuple[int, ...] = option((64,), "widths of the hidden layers; the last one is the width of the features", min=1)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for samples of `shape`."""
        base = nn.Sequential()
        base.add_module("flatten", nn.Flatten())
        width = math.prod(shape)
        for index, hidden in enumerate(self.hidden, start=1):
            base.add_module(f"fc{index}", nn.Sequential(nn.Linear(width, hidden), nn.ReLU()))
            width = hidden
        return {"base": base, "head": nn.Linear(width, classes)}
