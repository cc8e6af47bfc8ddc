"""Nets: architectures as stateless named parts, base (features) and head (decision), whose weights live in trees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from gpfl import tree
from gpfl.errors import GpflError
from gpfl.form import Form
from gpfl.options import Value, values_of
from gpfl.randomness import seeded
from gpfl.tree import Tree

Parts = dict[str, nn.Module]
Shape = tuple[int, ...]

MISFITS = (RuntimeError, ValueError, IndexError)
"""What torch's layers raise for inputs of a shape that they cannot take."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named net as a record of its options; `parts` builds it for one shape of input and number of classes."""

    lr: ClassVar[float]

    def fitted(self, form: Form) -> Self:
        """Gives the net with the options filled in that depend on the form of the data."""
        return self

    def parts(self, shape: Shape, classes: int) -> Parts:
        """Gives freshly initialised modules {"base": …, "head": …}."""
        raise NotImplementedError


class Net:
    """Named parts without weights of their own, with the width of the features and the number of classes."""

    def __init__(
        self,
        parts: Parts,
        example: Tensor,
        classes: int,
        *,
        name: str = "custom",
        options: dict[str, Value] | None = None,
        rebuild: Callable[[], Parts] | None = None,
        lr: float = 0.005,
    ) -> None:
        """Takes modules and two example rows; with `rebuild` every seed draws new weights, without it they start as given."""
        check_parts(parts)
        self.name, self.classes, self.lr = name, classes, lr
        self.options = options or {}
        self._rebuild = rebuild
        self._initial = {part: copy.deepcopy(module) for part, module in parts.items()}
        self._training = {part: template(module).train() for part, module in parts.items()}
        self._frozen = {part: template(module).eval() for part, module in parts.items()}
        self.width = self._measure(example)

    @property
    def keeps_statistics(self) -> bool:
        """Tells whether a part has BatchNorm running statistics."""
        return any(True for module in self._training.values() for _ in statistics(module))

    def init(self, seed: int) -> Tree:
        """Gives the weights of a run: {"base": …, "head": …}, and "stats" where there is BatchNorm."""
        if self._rebuild is None:
            modules = self._initial
        else:
            with seeded(seed, "weights"):
                modules = self._rebuild()
        state: Tree = {}
        for part, module in modules.items():
            state[part] = {name: p.detach().clone() for name, p in module.named_parameters()}
        if self.keeps_statistics:
            state["stats"] = {
                part: {name: b.detach().clone() for name, b in statistics(module)} for part, module in modules.items()
            }
        return state

    def module(self, part: str, *, training: bool) -> nn.Module:
        """Gives the template of a part; its own weights are never used."""
        return (self._training if training else self._frozen)[part]

    def copy_of(self, part: str) -> nn.Module:
        """Gives a module of its own, to be loaded with a client's weights."""
        return copy.deepcopy(self._initial[part])

    def to(self, device: torch.device) -> Net:
        """Moves what the templates hold besides weights (constant buffers) to `device`, and gives the net back."""
        for module in (*self._training.values(), *self._frozen.values()):
            module.to(device)
        return self

    def _measure(self, example: Tensor) -> int:
        """Gives the width of the features, having checked that the parts fit together."""
        with torch.no_grad():
            try:
                features = self._frozen["base"](example)
            except MISFITS as problem:
                raise GpflError(
                    f"net '{self.name}' cannot take inputs of shape {tuple(example.shape[1:])}: {first_line(problem)}"
                ) from None
            if features.dim() != 2:
                raise GpflError(
                    f"the base of net '{self.name}' gives features of shape {tuple(features.shape[1:])}; "
                    "it must give one vector a row: flatten or pool at its end"
                )
            try:
                logits = self._frozen["head"](features)
            except MISFITS as problem:
                raise GpflError(
                    f"the head of net '{self.name}' cannot take {features.shape[1]} features: {first_line(problem)}"
                ) from None
        if tuple(logits.shape) != (len(example), self.classes):
            raise GpflError(
                f"the head of net '{self.name}' gives {tuple(logits.shape[1:])} scores; the data has {self.classes} classes"
            )
        return int(features.shape[1])


class Model:
    """A net's parts with one tree of weights, for the length of one pass; training passes collect new BatchNorm statistics."""

    def __init__(self, net: Net, weights: Tree, *, training: bool = False) -> None:
        self.net, self.weights, self.training = net, weights, training
        stats = weights.get("stats", {})
        self.stats: Tree = dict(stats) if isinstance(stats, dict) else {}
        self.kept: Tree = {}  # what an objective wants back besides its terms

    def __getitem__(self, part: str) -> Tree:
        return tree.branch(self.weights, part)

    def __call__(self, part: str, x: Tensor, weights: Tree | None = None) -> Tensor:
        """Gives the output of a part of the net, with the model's weights for it or with others."""
        state: dict[str, Tensor] = dict(self[part] if weights is None else weights)  # type: ignore[arg-type]
        stats = tree.branch(self.stats, part) if part in self.stats else {}
        if self.training and stats:
            stats = tree.map_leaves(torch.clone, stats)  # BatchNorm writes into what it is given
            self.stats[part] = stats
        state.update(stats)  # type: ignore[arg-type]
        out: Tensor = functional_call(self.net.module(part, training=self.training), state, (x,))
        return out


def template(module: nn.Module) -> nn.Module:
    """Gives a copy of the module that counts no batches: the counter is an integer that no method needs."""
    out = copy.deepcopy(module)
    for layer in out.modules():
        if isinstance(layer, _NormBase):
            layer.num_batches_tracked = None
    return out


def statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gives the running means and variances of a module by name."""
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            for name in ("running_mean", "running_var"):
                value = getattr(layer, name)
                if isinstance(value, Tensor):
                    yield (f"{prefix}.{name}" if prefix else name), value


def check_parts(parts: Parts) -> None:
    """Refuses layers whose result is not a function of weights and rows alone."""
    for part, module in parts.items():
        for name, layer in module.named_modules():
            where = f"{part}.{name}" if name else part
            rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0)
            if isinstance(rate, (int, float)) and rate > 0:
                raise GpflError(f"layer '{where}' has dropout {rate:g}; runs must be repeatable per client: set it to 0")
            if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
                raise GpflError(f"layer '{where}' has momentum None; give it a number such as 0.1")


def split_module(module: nn.Module, head: str | None, example: Tensor) -> Parts:
    """Gives a module cut into base and head: `head` names a submodule, by default the last linear layer."""
    name = head if head is not None else last_linear(module)
    submodules = dict(module.named_modules())
    if name not in submodules or name == "":
        raise GpflError(f"the net has no submodule '{name}' to be its head; it has: {', '.join(list(submodules)[1:])}")
    base = copy.deepcopy(module)
    *parents, attribute = name.split(".")
    owner = base.get_submodule(".".join(parents))
    setattr(owner, attribute, nn.Identity())
    parts: Parts = {"base": base, "head": copy.deepcopy(submodules[name])}
    with torch.no_grad():
        whole, base_, head_ = copy.deepcopy(module).eval(), copy.deepcopy(base).eval(), copy.deepcopy(parts["head"]).eval()
        try:
            same = torch.allclose(whole(example), head_(base_(example)), atol=1e-5)
        except MISFITS as problem:
            raise GpflError(f"the net cannot be cut at '{name}': {first_line(problem)}; name its head: head='…'") from None
    if not same:
        raise GpflError(f"'{name}' is not the last thing the net does, so it cannot be its head; name another: head='…'")
    return parts


def last_linear(module: nn.Module) -> str:
    """Gives the name of the last linear layer."""
    names: list[str] = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    if not names:
        raise GpflError("the net has no linear layer below its top; name the submodule that is its head: head='…'")
    return names[-1]


def first_line(problem: Exception) -> str:
    """Gives the first line of an exception's text."""
    return str(problem).strip().split("\n")[0]


def from_architecture(architecture: Architecture, name: str, example: Tensor, classes: int) -> Net:
    """Gives the net of a named architecture for inputs like `example`."""
    shape = tuple(example.shape[1:])

    def rebuild() -> Parts:
        return architecture.parts(shape, classes)

    with seeded(0, "weights"):
        parts = rebuild()
    return Net(parts, example, classes, name=name, options=values_of(architecture), rebuild=rebuild, lr=type(architecture).lr)


def from_module(module: nn.Module | Callable[[], nn.Module], example: Tensor, classes: int, *, head: str | None = None) -> Net:
    """Gives the net of any module. A module starts every run from its own weights; a function that builds one is
    called anew for each seed.
    """
    if isinstance(module, nn.Module):
        return Net(split_module(module, head, example), example, classes)

    def rebuild() -> Parts:
        built = module()
        if not isinstance(built, nn.Module):
            raise GpflError(f"the function given as net returned {type(built).__name__}; it must return an nn.Module")
        return split_module(built, head, example)

    with seeded(0, "weights"):
        parts = rebuild()
    return Net(parts, example, classes, rebuild=rebuild)
