"""Named architectures, and nets from users' modules."""

from typing import TYPE_CHECKING

from gpfl.core.registry import Registry

if TYPE_CHECKING:
    from gpfl.models.architectures import Architecture

_CLASSES = {"cnn4": "CNN4", "resnet18": "ResNet18", "fasttext": "FastText", "harcnn": "HARCNN", "mlp": "MLP"}

NETS: Registry[type["Architecture"]] = Registry(
    "gpfl.models", {name: f"architectures:{kind}" for name, kind in _CLASSES.items()}
)
