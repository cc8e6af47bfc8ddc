"""Named architectures, and nets from users' modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpfl.core.registry import Registry

if TYPE_CHECKING:
    from gpfl.models.architecture import Architecture

NETS: Registry[type[Architecture]] = Registry(
    "gpfl.models",
    {
        "cnn4": "cnn4:CNN4",
        "resnet18": "resnet18:ResNet18",
        "fasttext": "fasttext:FastText",
        "harcnn": "harcnn:HARCNN",
        "mlp": "mlp:MLP",
    },
)
