"""The interface of named architectures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from torch import Tensor

from gpfl.core.module_checks import Parts as Parts
from gpfl.core.net import InputSpec, Net, Shape
from gpfl.core.options import option_values
from gpfl.core.randomness import fork_rng


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A named net as a record of its options."""

    lr: ClassVar[float]

    def fit_input(self, spec: InputSpec) -> Self:
        """Return the architecture with the options set that depend on the input."""
        return self

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return freshly initialised modules {"base": …, "head": …} for samples of `shape`."""
        raise NotImplementedError


def net_from_architecture(architecture: Architecture, name: str, example: Tensor, classes: int) -> Net:
    """Return the net of a named architecture for inputs like `example`; every seed draws new weights."""
    rebuild = partial(architecture.build, tuple(example.shape[1:]), classes)
    with fork_rng(0, "weights"):
        parts = rebuild()
    return Net(
        parts, example, classes, name=name, options=option_values(architecture), rebuild=rebuild, lr=type(architecture).lr
    )
