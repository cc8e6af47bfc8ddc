"""Named architectures, and nets from users' modules."""

from gpfl.models.architecture import Architecture as Architecture
from gpfl.models.architecture import net_from_architecture as net_from_architecture
from gpfl.models.cnn4 import CNN4 as CNN4
from gpfl.models.fasttext import FastText as FastText
from gpfl.models.harcnn import HARCNN as HARCNN
from gpfl.models.mlp import MLP as MLP
from gpfl.models.resnet18 import ResNet18 as ResNet18
from gpfl.models.splitting import net_from_module as net_from_module

NETS: dict[str, type[Architecture]] = {
    "cnn4": CNN4,
    "resnet18": ResNet18,
    "fasttext": FastText,
    "harcnn": HARCNN,
    "mlp": MLP,
}
