"""A multilayer perceptron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gpfl.core.net import Shape
from gpfl.core.options import option
from gpfl.models.architecture import Architecture, Parts


@dataclass(frozen=True, kw_only=True)
class MLP(Architecture):
    """Linear layers with ReLU after each as base, one linear layer as head; rows of any shape are flattened."""

    lr: ClassVar[float] = 0.005

    hidden: tuple[int, ...] = option((64,), "widths of the hidden layers; the last is the width of the features", min=1)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Gives the modules for rows of `shape`."""
        base = nn.Sequential()
        base.add_module("flatten", nn.Flatten())
        width = math.prod(shape)
        for number, hidden in enumerate(self.hidden, start=1):
            base.add_module(f"fc{number}", nn.Sequential(nn.Linear(width, hidden), nn.ReLU()))
            width = hidden
        return {"base": base, "head": nn.Linear(width, classes)}
