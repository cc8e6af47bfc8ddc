"""ResNet-18."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from gpfl.core.net import Shape
from gpfl.errors import GpflError
from gpfl.models.architecture import Architecture, Parts

WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class ResNet18(Architecture):
    """He et al.'s ResNet-18 with the ImageNet stem, randomly initialised; its last linear layer is the head.

    Deep Residual Learning for Image Recognition, CVPR 2016. 11,279,112 parameters for 200 classes, 512 features.
    """

    lr = 0.1

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for images of `shape` (channels, height, width)."""
        if len(shape) != 3:
            raise GpflError(f"net 'resnet18' takes images (channels, height, width); the data has shape {shape}: use 'mlp'")
        base = nn.Sequential()
        base.add_module("stem", _stem(shape[0]))
        channels = WIDTHS[0]
        for index, width in enumerate(WIDTHS, start=1):
            stride = 1 if index == 1 else 2
            base.add_module(f"stage{index}", nn.Sequential(_Block(channels, width, stride), _Block(width, width, 1)))
            channels = width
        base.add_module("pool", nn.AdaptiveAvgPool2d(1))
        base.add_module("flatten", nn.Flatten())
        for layer in base.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return {"base": base, "head": nn.Linear(channels, classes)}


class _Block(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


def _stem(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, WIDTHS[0], 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(WIDTHS[0]),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
