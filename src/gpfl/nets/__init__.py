"""The named nets."""

from gpfl.net import Architecture
from gpfl.nets.cnn4 import CNN4
from gpfl.nets.mlp import MLP

NETS: dict[str, type[Architecture]] = {"cnn4": CNN4, "mlp": MLP}
