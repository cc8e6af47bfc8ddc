"""The named nets."""

from gpfl.models.architecture import Architecture
from gpfl.models.cnn4 import CNN4
from gpfl.models.fasttext import FastText
from gpfl.models.harcnn import HARCNN
from gpfl.models.mlp import MLP
from gpfl.models.resnet18 import ResNet18

NETS: dict[str, type[Architecture]] = {
    "cnn4": CNN4,
    "resnet18": ResNet18,
    "fasttext": FastText,
    "harcnn": HARCNN,
    "mlp": MLP,
}
