"""Nets that the user passes in Python.

A module is split into base and head at its last linear layer or at a named submodule.
"""

import copy
import inspect
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gpfl.core import module_checks
from gpfl.core.module_checks import Parts, error_line
from gpfl.core.net import Net
from gpfl.core.randomness import fork_rng
from gpfl.errors import GpflError
from gpfl.models import NETS
from gpfl.models.architectures import Architecture, net_from_architecture

ModuleLike = nn.Module | Callable[[], nn.Module]
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


def net_from_module(module: ModuleLike, example: Tensor, classes: int, *, head: str | None = None) -> Net:
    """Return the net of a module, or of a function that builds one. `example` holds two samples as the net takes them.

    A module starts every run with its own weights. A function is called again for each seed; its constants come from
    seed 0. The submodule `head` becomes the head, by default the last linear layer.
    """

    def build() -> Parts:
        return _split(_build(module), head, example)

    with fork_rng(0, "weights"):
        parts = build()
    return Net(parts, example, classes, rebuild=None if isinstance(module, nn.Module) else build)


def _build(module: ModuleLike) -> nn.Module:
    """Return a CPU copy of the module, or of the module that the function builds."""
    built = module if isinstance(module, nn.Module) else _call(module)
    module_checks.check_parameters(built)
    try:
        return copy.deepcopy(built).cpu()
    except RuntimeError as error:
        raise GpflError(f"the net cannot be copied: {error_line(error)}") from error


def _call(function: Callable[[], nn.Module]) -> nn.Module:
    if not callable(function):
        raise GpflError(f"net is {function!r}; it must be the name of a net, an nn.Module, or a function that builds one")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise GpflError(
            f"net is {name}, which cannot be called without arguments ({error}): "
            f"pass a module, net={name}(…), or a function, net=lambda: {name}(…)"
        ) from None
    built = function()
    if not isinstance(built, nn.Module):
        raise GpflError(f"the function passed as net returned {type(built).__name__}; it must return an nn.Module")
    return built


def _split(module: nn.Module, head: str | None, example: Tensor) -> Parts:
    """Return the base, which is the module with its head replaced by the identity, and the head."""
    submodules = dict(module.named_modules())
    linear = [path for path, layer in submodules.items() if isinstance(layer, nn.Linear) and path]
    if head is None and not linear:
        raise GpflError("the net has no linear layer below its top level; name the submodule that is its head: head='…'")
    name = linear[-1] if head is None else head
    if name not in submodules or name == "":
        raise GpflError(f"the net has no submodule '{name}'; choose head from: {', '.join(list(submodules)[1:])}")
    expected = _logits(module, example)
    *parents, attribute = name.split(".")
    setattr(module.get_submodule(".".join(parents)), attribute, nn.Identity())
    parts: Parts = {"base": module, "head": submodules[name]}
    module_checks.check_no_shared_weights(parts)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = module_checks.run_eval(parts["head"], module_checks.run_eval(module, example))
    except Exception as error:
        hint = " (its forward must call it and use nothing else of it)" if isinstance(error, AttributeError) else ""
        raise GpflError(f"the net cannot be split at '{name}': {error_line(error)}{hint}; name its head: head='…'") from error
    if not module_checks.equal_logits(expected, logits):
        raise GpflError(f"'{name}' is not the last layer that the net calls, so it cannot be its head; name another: head='…'")
    return parts


def _logits(module: nn.Module, example: Tensor) -> Tensor:
    failure = f"cannot take samples of shape {tuple(example.shape[1:])}, which the data has"
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, second = (module_checks.run_module(copy.deepcopy(module).eval(), example, "the net", failure) for _ in range(2))
    if not module_checks.equal_logits(first, second):
        raise GpflError("the net returns different logits when called twice; runs must be repeatable: remove F.dropout")
    return first
