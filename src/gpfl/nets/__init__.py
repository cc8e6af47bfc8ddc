"""The named nets."""

from gpfl.net import Architecture
from gpfl.nets.cnn4 import CNN4
from gpfl.nets.fasttext import FastText
from gpfl.nets.harcnn import HARCNN
from gpfl.nets.mlp import MLP
from gpfl.nets.resnet18 import ResNet18

NETS: dict[str, type[Architecture]] = {
    "cnn4": CNN4,
    "resnet18": ResNet18,
    "fasttext": FastText,
    "harcnn": HARCNN,
    "mlp": MLP,
}
