"""Nets: stateless base (features) and head (classifier), whose weights live in trees."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gpfl.core import module_checks as checks
from gpfl.core import precision, tree
from gpfl.core.module_checks import Parts, batch_norm_buffers, make_template, trainable_parameters
from gpfl.core.options import Value
from gpfl.core.randomness import fork_rng
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
    """The shape and kind of samples. They are stored in the smallest type that holds them, and converted batch by batch."""

    shape: Shape
    kind: str = "floats"
    pixel_max: int = 0  # for pixels
    vocabulary: int = 0  # number of tokens, for tokens

    def to_net(self, stored: Tensor) -> Tensor:
        """Return stored samples as net inputs."""
        if self.kind == "pixels":
            return stored.to(torch.float32) / (self.pixel_max / 2) - 1
        return stored.to(torch.int64 if self.kind == "tokens" else torch.float32)

    def example(self) -> Tensor:
        """Return two samples of zeros as net inputs."""
        return self.to_net(torch.zeros(2, *self.shape))

    def probe(self) -> Tensor:
        """Return two fixed samples of varied values as net inputs; their logits identify a model."""
        numbers = torch.arange(2 * math.prod(self.shape)).reshape(2, *self.shape)
        if self.kind == "floats":
            return torch.sin(numbers + 1.0)
        values = {"pixels": self.pixel_max + 1, "tokens": max(1, self.vocabulary)}.get(self.kind, 10)
        return self.to_net(numbers % values)


class Net:
    """Base and head without weights, with the width of the features and the number of classes.

    Parameters that require no gradient and buffers are constants of the parts: no tree holds them, so they are
    neither trained nor sent.
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
        """Check the modules on two samples. With `rebuild`, every seed draws new weights; without, all start with these."""
        for module in parts.values():
            checks.check_parameters(module)
        checks.check_layers(parts)
        checks.check_no_shared_weights(parts)
        self.name, self.classes, self.lr = name, classes, lr
        self.options = options or {}
        self._rebuild = rebuild
        self._initial = {part: copy.deepcopy(module) for part, module in parts.items()}
        self._training = {part: make_template(module).train() for part, module in parts.items()}
        self._eval = {part: make_template(module).eval() for part, module in parts.items()}
        self.width = self._measure_width(example)
        checks.check_deterministic(parts, example, name)
        checks.check_independent_samples(parts, example, name)
        self.min_batch = 1 if checks.trains_on_single_sample(parts, example) else 2
        if not any(True for module in parts.values() for _ in trainable_parameters(module)):
            raise GpflError(f"net '{name}' has no trainable weight: set requires_grad=True where training should change it")

    @property
    def has_batch_norm(self) -> bool:
        """Whether a part has BatchNorm running statistics."""
        return any(True for module in self._training.values() for _ in batch_norm_buffers(module))

    def init(self, seed: int) -> Tree:
        """Return the initial weights: {"base": …, "head": …}, and "batch_norm_stats" if there is BatchNorm."""
        if self._rebuild is None:
            return _weights_of(self._initial)
        with fork_rng(seed, "weights"):
            return _weights_of(self._rebuild())

    def describe_mismatch(self, weights: Tree) -> str:
        """Return the first difference between the names or shapes of `weights` and the net's, or ""."""
        expected = {path: tuple(t.shape) for path, t in tree.flatten(_weights_of(self._initial)).items()}
        actual = tree.flatten(tree.pick(weights, ("base", "head", "batch_norm_stats")))
        for path in sorted(expected.keys() | actual.keys()):
            if path not in expected:
                return f"the net has no '{path}'"
            if path not in actual:
                return f"the net's '{path}' is missing"
            if expected[path] != tuple(actual[path].shape):
                return f"'{path}' has shape {tuple(actual[path].shape)}, in the net {expected[path]}"
        return ""

    def module(self, part: str, *, training: bool) -> nn.Module:
        """Return the module that computes a part; its weights are placeholders."""
        return (self._training if training else self._eval)[part]

    def make_module(self, part: str) -> nn.Module:
        """Return a new module of a part, to be loaded with a client's weights."""
        return copy.deepcopy(self._initial[part])

    def with_parts(self, parts: Parts) -> Self:
        """Return the net with these modules as its parts."""
        out = copy.copy(self)
        out._initial = out._training = out._eval = parts
        out._rebuild = None
        return out

    def to(self, device: torch.device) -> Self:
        """Move the constants of the parts to `device` and return the net."""
        for module in (*self._training.values(), *self._eval.values()):
            module.to(device)
        return self

    def _measure_width(self, example: Tensor) -> int:
        """Return the width of the features; raise if base, head, samples and classes do not fit together."""
        name, head, shape = f"net '{self.name}'", f"the head of net '{self.name}'", tuple(example.shape[1:])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            features = checks.run_module(self._eval["base"], example, name, f"cannot take samples of shape {shape}")
            if features.dim() != 2:
                raise GpflError(
                    f"the base of {name} returns features of shape {tuple(features.shape[1:])}; "
                    "it must return one vector per sample: flatten or pool at its end"
                )
            logits = checks.run_module(self._eval["head"], features, head, f"cannot take {features.shape[1]} features")
        if tuple(logits.shape) != (len(example), self.classes):
            raise GpflError(f"{head} returns logits of shape {tuple(logits.shape[1:])}; the data has {self.classes} classes")
        return int(features.shape[1])


class Model:
    """A net with a tree of weights, for one pass; training passes collect new BatchNorm statistics."""

    def __init__(self, net: Net, weights: Tree, *, training: bool = False) -> None:
        self.net, self.weights, self.training = net, weights, training
        statistics = weights.get("batch_norm_stats", {})
        self.batch_norm_stats: Tree = dict(statistics) if isinstance(statistics, dict) else {}
        self.aux: Tree = {}  # what a loss returns besides its terms

    def __getitem__(self, part: str) -> Tree:
        return tree.branch(self.weights, part)

    def __call__(self, part: str, x: Tensor, weights: Tree | None = None) -> Tensor:
        """Return the output of a part of the net, with the model's weights for it or with others."""
        state: dict[str, Tensor] = dict(self[part] if weights is None else weights)  # type: ignore[arg-type]
        statistics = tree.branch(self.batch_norm_stats, part) if part in self.batch_norm_stats else {}
        if self.training and statistics:
            # BatchNorm updates its statistics in place. The sum copies them and, under vmap, adds the batch axis of x.
            zero = torch.zeros_like(x.reshape(-1)[0], dtype=torch.float32)
            statistics = tree.map_leaves(lambda value: value + zero, statistics)
            self.batch_norm_stats[part] = statistics
        state.update(statistics)  # type: ignore[arg-type]
        call = partial(functional_call, self.net.module(part, training=self.training), state, (x,))
        in_bf16 = precision.active[-1] == "bf16" and x.device.type == "cpu"
        return precision.call_in_bf16(call) if in_bf16 else call()


def _weights_of(parts: Parts) -> Tree:
    weights: Tree = {part: _copy(trainable_parameters(module)) for part, module in parts.items()}
    statistics: Tree = {part: _copy(batch_norm_buffers(module)) for part, module in parts.items()}
    return {**weights, "batch_norm_stats": statistics} if any(statistics.values()) else weights


def _copy(tensors: Iterator[tuple[str, Tensor]]) -> Tree:
    return {name: value.detach().clone() for name, value in tensors}
