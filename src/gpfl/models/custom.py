"""Nets that the user passes in Python: architectures and modules."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from gpfl.core.net import Net
from gpfl.errors import GpflError
from gpfl.models import NETS
from gpfl.models.architecture import Architecture, net_from_architecture
from gpfl.models.splitting import ModuleLike, net_from_module

CustomNet: TypeAlias = Architecture | ModuleLike
NetLike: TypeAlias = str | CustomNet


def net_name(architecture: Architecture) -> str:
    """Return the name of an architecture in NETS, or the name of its class."""
    return next((name for name, kind in NETS.items() if type(architecture) is kind), type(architecture).__name__)


def build_net(net: CustomNet, example: Tensor, classes: int, *, head: str | None = None) -> Net:
    """Return the net of an architecture or a module for inputs like `example`."""
    if isinstance(net, Architecture):
        return net_from_architecture(net, net_name(net), example, classes)
    return net_from_module(net, example, classes, head=head)


def check_head(net: NetLike | None, head: str | None) -> None:
    """Raise if `head` is set but the net is not a module."""
    if head is not None and (net is None or isinstance(net, (str, Architecture))):
        raise GpflError(f"head is '{head}', but net is not a module that could have it: leave head out, or pass net=…")


def check_custom_net(net: object, head: str | None) -> None:
    """Raise if `net` is a name: the config already has it."""
    if isinstance(net, str):
        raise GpflError(f"net is the name '{net}'; pass net only if it was given in Python: leave it out")
    check_head(net, head)  # type: ignore[arg-type]
