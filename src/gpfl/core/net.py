"""Nets: architectures as stateless named parts, base (features) and head (decision), whose weights live in trees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gpfl.core import modules, tree
from gpfl.core.modules import Parts as Parts
from gpfl.core.modules import statistics, template, trainable
from gpfl.core.options import Value, values_of
from gpfl.core.randomness import seeded
from gpfl.core.tree import Tree
from gpfl.errors import GpflError

Shape = tuple[int, ...]

INPUT_KINDS = {
    "floats": "floats, unchanged",
    "pixels": "integers from 0 to pixel_max, scaled to [-1, 1]",
    "counts": "integers, unchanged",
    "tokens": "integers from 0 to vocabulary - 1",
}


@dataclass(frozen=True)
class InputSpec:
    """The shape and kind of samples as stored. They stay in the smallest type that holds them until a batch is made."""

    shape: Shape
    kind: str = "floats"
    pixel_max: int = 0  # for pixels
    vocabulary: int = 0  # number of tokens, for tokens

    def to_net(self, stored: Tensor) -> Tensor:
        """Return stored samples as a net takes them."""
        if self.kind == "pixels":
            return stored.to(torch.float32) / (self.pixel_max / 2) - 1
        return stored.to(torch.int64 if self.kind == "tokens" else torch.float32)

    def example(self) -> Tensor:
        """Return two samples of zeros as a net takes them."""
        return self.to_net(torch.zeros(2, *self.shape))

    def probe(self) -> Tensor:
        """Return two fixed samples of varied values as a net takes them; their scores identify a model."""
        numbers = torch.arange(2 * math.prod(self.shape)).reshape(2, *self.shape)
        if self.kind == "floats":
            return torch.sin(numbers + 1.0)
        values = {"pixels": self.pixel_max + 1, "tokens": max(1, self.vocabulary)}.get(self.kind, 10)
        return self.to_net(numbers % values)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named net as a record of its options; `parts` builds it for one shape of input and number of classes."""

    lr: ClassVar[float]

    def fitted(self, form: InputSpec) -> Self:
        """Gives the net with the options filled in that depend on the form of the data."""
        return self

    def parts(self, shape: Shape, classes: int) -> Parts:
        """Gives freshly initialised modules {"base": …, "head": …}."""
        raise NotImplementedError


class Net:
    """Named parts without weights of their own, with the width of the features and the number of classes.

    Weights that do not train (requires_grad=False) and buffers are constants of the parts: no tree holds them, so they
    neither move nor travel.
    """

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
        for module in parts.values():
            modules.refuse_unready(module)
        modules.refuse_layers(parts)
        modules.refuse_shared(parts)
        self.name, self.classes, self.lr = name, classes, lr
        self.options = options or {}
        self._rebuild = rebuild
        self._initial = {part: copy.deepcopy(module) for part, module in parts.items()}
        self._training = {part: template(module).train() for part, module in parts.items()}
        self._frozen = {part: template(module).eval() for part, module in parts.items()}
        self.width = self._measure(example)
        modules.refuse_state(parts, example, name)
        modules.refuse_mixing(parts, example, name)
        self.min_batch = 1 if modules.trains_on_one_row(parts, example) else 2  # in a training batch
        if not any(True for module in parts.values() for _ in trainable(module)):
            raise GpflError(f"net '{name}' has no weight that trains: set requires_grad=True where training should change it")

    @property
    def has_batch_norm(self) -> bool:
        """Tells whether a part has BatchNorm running statistics."""
        return any(True for module in self._training.values() for _ in statistics(module))

    def init(self, seed: int) -> Tree:
        """Gives the weights of a run: {"base": …, "head": …}, and "batch_norm_stats" where there is BatchNorm."""
        if self._rebuild is None:
            return weights_of(self._initial)
        with seeded(seed, "weights"):
            return weights_of(self._rebuild())

    def mismatch(self, weights: Tree) -> str:
        """Gives in words where the names or shapes of `weights` are not the net's own; nothing where they are."""
        own = {path: tuple(t.shape) for path, t in tree.flatten(weights_of(self._initial)).items()}
        given = tree.flatten(tree.pick(weights, ("base", "head", "batch_norm_stats")))
        for path in sorted(own.keys() | given.keys()):
            if path not in own:
                return f"the net has no '{path}'"
            if path not in given:
                return f"the net's '{path}' is missing"
            if own[path] != tuple(given[path].shape):
                return f"'{path}' has shape {tuple(given[path].shape)}, in the net {own[path]}"
        return ""

    def module(self, part: str, *, training: bool) -> nn.Module:
        """Gives the template of a part; its own weights are never used."""
        return (self._training if training else self._frozen)[part]

    def make_module(self, part: str) -> nn.Module:
        """Gives a module of its own, to be loaded with a client's weights."""
        return copy.deepcopy(self._initial[part])

    def with_parts(self, parts: Parts) -> Net:
        """Gives the net with modules that have weights of their own as its parts: what one client's module is made of."""
        out = copy.copy(self)
        out._initial = out._training = out._frozen = parts
        out._rebuild = None
        return out

    def to(self, device: torch.device) -> Net:
        """Moves what the templates hold besides weights (their constants) to `device`, and gives the net back."""
        for module in (*self._training.values(), *self._frozen.values()):
            module.to(device)
        return self

    def _measure(self, example: Tensor) -> int:
        """Gives the width of the features, having checked that the parts fit together."""
        who, head, shape = f"net '{self.name}'", f"the head of net '{self.name}'", tuple(example.shape[1:])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            features = modules.attempt(self._frozen["base"], example, who, f"cannot take inputs of shape {shape}")
            if features.dim() != 2:
                raise GpflError(
                    f"the base of {who} gives features of shape {tuple(features.shape[1:])}; "
                    "it must give one vector a row: flatten or pool at its end"
                )
            logits = modules.attempt(self._frozen["head"], features, head, f"cannot take {features.shape[1]} features")
        if tuple(logits.shape) != (len(example), self.classes):
            raise GpflError(f"{head} gives {tuple(logits.shape[1:])} scores; the data has {self.classes} classes")
        return int(features.shape[1])


class Model:
    """A net's parts with one tree of weights, for the length of one pass; training passes collect new BatchNorm statistics."""

    def __init__(self, net: Net, weights: Tree, *, training: bool = False) -> None:
        self.net, self.weights, self.training = net, weights, training
        stats = weights.get("batch_norm_stats", {})
        self.batch_norm_stats: Tree = dict(stats) if isinstance(stats, dict) else {}
        self.aux: Tree = {}  # what an objective wants back besides its terms

    def __getitem__(self, part: str) -> Tree:
        return tree.branch(self.weights, part)

    def __call__(self, part: str, x: Tensor, weights: Tree | None = None) -> Tensor:
        """Gives the output of a part of the net, with the model's weights for it or with others."""
        state: dict[str, Tensor] = dict(self[part] if weights is None else weights)  # type: ignore[arg-type]
        stats = tree.branch(self.batch_norm_stats, part) if part in self.batch_norm_stats else {}
        if self.training and stats:
            # BatchNorm writes into what it is given: into copies, which under vmap belong to one client each like its rows.
            nothing = torch.zeros_like(x.reshape(-1)[0], dtype=torch.float32)
            stats = tree.map_leaves(lambda value: value + nothing, stats)
            self.batch_norm_stats[part] = stats
        state.update(stats)  # type: ignore[arg-type]
        out: Tensor = functional_call(self.net.module(part, training=self.training), state, (x,))
        return out


def weights_of(parts: Parts) -> Tree:
    """Gives the weights of modules that train: {"base": …, "head": …}, and "batch_norm_stats" where there is BatchNorm."""
    state: Tree = {part: {name: p.detach().clone() for name, p in trainable(module)} for part, module in parts.items()}
    stats: Tree = {part: {name: b.detach().clone() for name, b in statistics(module)} for part, module in parts.items()}
    return {**state, "batch_norm_stats": stats} if any(True for _ in tree.leaves(stats)) else state


def from_architecture(architecture: Architecture, name: str, example: Tensor, classes: int) -> Net:
    """Gives the net of a named architecture for inputs like `example`."""
    rebuild = partial(architecture.parts, tuple(example.shape[1:]), classes)
    with seeded(0, "weights"):
        parts = rebuild()
    return Net(parts, example, classes, name=name, options=values_of(architecture), rebuild=rebuild, lr=type(architecture).lr)


def from_module(module: nn.Module | Callable[[], nn.Module], example: Tensor, classes: int, *, head: str | None = None) -> Net:
    """Gives the net of any module. A module starts every run from its own weights; a function that builds one is
    called anew for each seed, its constants are those of seed 0.
    """
    rebuild = partial(build_parts, module, head, example)
    with seeded(0, "weights"):
        parts = rebuild()
    return Net(parts, example, classes, rebuild=None if isinstance(module, nn.Module) else rebuild)


def build_parts(given: nn.Module | Callable[[], nn.Module], head: str | None, example: Tensor) -> Parts:
    """Gives the parts of a user's module."""
    return modules.split_module(modules.build_module(given), head, example)
