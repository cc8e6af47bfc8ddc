"""Named architectures: the interface, and the nets of the paper."""

import dataclasses
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional as F

from gpfl.core.module_checks import Parts as Parts
from gpfl.core.net import InputSpec, Net, Shape
from gpfl.core.options import option, option_values
from gpfl.core.randomness import fork_rng
from gpfl.errors import GpflError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named net as a record of its options."""

    lr: ClassVar[float]

    def fit_input(self, spec: InputSpec) -> Self:
        """Return the architecture with the options set that depend on the input."""
        return self

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return freshly initialised modules {"base": …, "head": …} for samples of `shape`."""
        raise NotImplementedError


def net_from_architecture(architecture: Architecture, name: str, example: Tensor, classes: int) -> Net:
    """Return the net of a named architecture for inputs like `example`; every seed draws new weights."""
    rebuild = partial(architecture.build, tuple(example.shape[1:]), classes)
    with fork_rng(0, "weights"):
        parts = rebuild()
    return Net(
        parts, example, classes, name=name, options=option_values(architecture), rebuild=rebuild, lr=type(architecture).lr
    )


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
        padding = 2 if min(shape[1:]) < 16 else 0  # without it, 16×16 is the least that two such convolutions can take
        first, second = self.channels
        height, width = (((side + 2 * padding - 4) // 2 + 2 * padding - 4) // 2 for side in shape[1:])

        def convolution(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2))

        layers = OrderedDict(
            conv1=convolution(shape[0], first),
            conv2=convolution(first, second),
            flatten=nn.Flatten(),
            fc1=nn.Sequential(nn.Linear(second * height * width, self.hidden), nn.ReLU()),
        )
        return {"base": nn.Sequential(layers), "head": nn.Linear(self.hidden, classes)}


@dataclass(frozen=True, kw_only=True)
class MLP(Architecture):
    """Linear layers with ReLU after each as base, one linear layer as head; samples of any shape are flattened."""

    lr = 0.005

    hidden: tuple[int, ...] = option((64,), "widths of the hidden layers; the last one is the width of the features", min=1)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for samples of `shape`."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        width = math.prod(shape)
        for index, hidden in enumerate(self.hidden, start=1):
            layers[f"fc{index}"] = nn.Sequential(nn.Linear(width, hidden), nn.ReLU())
            width = hidden
        return {"base": nn.Sequential(layers), "head": nn.Linear(width, classes)}


@dataclass(frozen=True, kw_only=True)
class HARCNN(Architecture):
    """Two convolutions along time as base, a three-layer perceptron as head, as in the authors' code.

    Samples are signals (channels, 1, steps). For 9 channels of 128 steps the features have width 1,664.
    """

    lr = 0.01

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for signals of `shape` (channels, 1, steps)."""
        if len(shape) != 3 or shape[1] != 1 or shape[2] < 28:  # the shortest signal that the convolutions can take
            raise GpflError(f"net 'harcnn' takes signals (channels, 1, steps ≥ 28); the data has shape {shape}: use 'mlp'")

        def convolution(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, (1, 9)), nn.ReLU(), nn.MaxPool2d((1, 2), stride=2))

        layers = OrderedDict(conv1=convolution(shape[0], 32), conv2=convolution(32, 64), flatten=nn.Flatten())
        width = 64 * (((shape[2] - 8) // 2 - 8) // 2)
        head = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, classes))
        return {"base": nn.Sequential(layers), "head": head}


@dataclass(frozen=True, kw_only=True)
class FastText(Architecture):
    """The mean of word embeddings and one linear layer without activation as base, one linear layer as head.

    Joulin et al., Bag of Tricks for Efficient Text Classification, EACL 2017, on words alone. Token 0, used for
    padding and unknown words, is a zero vector; the mean is over all positions, as in the authors' code.
    """

    lr = 0.1

    hidden: int = option(32, "width of the embeddings and of the features", symbol="K", min=1)
    vocabulary: int = option(0, "number of tokens; 0 = that of the data", min=0)

    def fit_input(self, spec: InputSpec) -> Self:
        """Return the architecture with the size of the data's vocabulary."""
        return self if self.vocabulary else dataclasses.replace(self, vocabulary=spec.vocabulary)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for texts of `shape` (positions,)."""
        if len(shape) != 1 or not self.vocabulary:
            raise GpflError(f"net 'fasttext' takes texts as tokens; the data has samples of shape {shape} that are not tokens")
        layers = OrderedDict(
            embedding=nn.Embedding(self.vocabulary, self.hidden, padding_idx=0),
            mean=_MeanOverPositions(),
            fc1=nn.Linear(self.hidden, self.hidden),
        )
        return {"base": nn.Sequential(layers), "head": nn.Linear(self.hidden, classes)}


class _MeanOverPositions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Return the mean (batch, width) of (batch, positions, width)."""
        return x.mean(-2)


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
        stem = (
            nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        base = nn.Sequential(
            OrderedDict(
                stem=nn.Sequential(*stem),
                stage1=nn.Sequential(_Block(64, 64, 1), _Block(64, 64, 1)),
                stage2=nn.Sequential(_Block(64, 128, 2), _Block(128, 128, 1)),
                stage3=nn.Sequential(_Block(128, 256, 2), _Block(256, 256, 1)),
                stage4=nn.Sequential(_Block(256, 512, 2), _Block(512, 512, 1)),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
            )
        )
        for layer in base.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return {"base": base, "head": nn.Linear(512, classes)}


class _Block(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))
