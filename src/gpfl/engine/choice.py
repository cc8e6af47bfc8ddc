"""Which engine to run."""

from __future__ import annotations

from torch import nn

from gpfl.engine.base import Engine, Setting
from gpfl.engine.loop import Loop
from gpfl.engine.vmap import Vmap
from gpfl.errors import GpflError, did_you_mean

ENGINES: dict[str, type[Engine]] = {"loop": Loop, "vmap": Vmap}


def choose(name: str, setting: Setting) -> Engine:
    """Gives the named engine; `auto` takes the one measured to be faster for the device and the net."""
    if name == "auto":
        name = fastest(setting)
    if name not in ENGINES:
        raise GpflError(f"unknown engine '{name}'; {did_you_mean(name, (*ENGINES, 'auto'))}")
    return ENGINES[name](setting)


def fastest(setting: Setting) -> str:
    """Gives `loop` for one client, and for convolutions on a CPU, where stacked clients gain nothing; else `vmap`."""
    if len(setting.federation) == 1:
        return "loop"
    if setting.device.type == "cpu" and has_layer(setting, nn.modules.conv._ConvNd):
        return "loop"
    return "loop" if has_layer(setting, nn.RNNBase) else "vmap"


def has_layer(setting: Setting, kind: type[nn.Module]) -> bool:
    """Tells whether the base has a layer of that kind."""
    return any(isinstance(layer, kind) for layer in setting.method.net.module("base", training=True).modules())
