"""The method interface: what a client shares, what it keeps, and the pure functions of one client's round.

A method is written for one client. Engines run it for many: client after client, or vmapped over a stack of clients.
The defaults of `Method` are FedAvg; a method says only where it differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.net import Model, Net
from gpfl.core.tree import Tree
from gpfl.errors import GpflError

LossTerms = dict[str, Tensor]
"""The terms of an objective by name; their sum is what a step descends. "ce" is the client's own cross-entropy, as weighted."""


NET_PARTS = ("base", "head")
"""The parts of a net."""


class Batch(NamedTuple):
    """Rows of one client: fixed width, mask 1 for a real row."""

    x: Tensor
    y: Tensor
    mask: Tensor


class ClientInfo(NamedTuple):
    """What a client knows about itself and the run besides its samples."""

    n_samples: Tensor  # training samples, as a float
    label_counts: Tensor  # (classes,) training samples of each class
    round: Tensor  # counted from 0
    total_rounds: Tensor
    index: Tensor = torch.zeros(())  # type: ignore[assignment]  # position in the federation; hides tuple.index


class GradientResult(NamedTuple):
    """The gradient of an objective: with it come the terms, new BatchNorm statistics, and what the objective kept."""

    gradient: Tree
    terms: LossTerms
    batch_norm_stats: Tree
    aux: Tree


class StepResult(NamedTuple):
    """A step of SGD: the new state, the terms before the step, and what the objective kept."""

    local_state: Tree
    terms: LossTerms
    aux: Tree


class Step(Protocol):
    """One step of local training."""

    def __call__(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives the new state of the local round and the terms of the objective before the step."""


class Phase(NamedTuple):
    """Passes over a client's training rows; `batches` batches of rows make one step."""

    step: Step
    epochs: int = 1
    batches: int = 1


class View(NamedTuple):
    """A function of the input that a curious server can take a client's training for: of parts that it sent and has back."""

    parts: tuple[str, ...]  # the parts whose gradient it matches
    output: Callable[[Model, Tensor], Tensor]  # (rows, …), under what the server knows alone
    knows_loss: bool = False  # the loss on the output is cross-entropy; where it is not, any cotangent may be guessed
    counts_in_loss: bool = False  # the loss on the output has the client's label counts in it


@dataclass(frozen=True, kw_only=True)
class Method:
    """FedAvg's behaviour, and the interface of every method. Fields declared with `option` are its hyperparameters.

    `shared` is what the server holds and sends: every function sees it as received, so anchors and frozen copies are
    simply `shared`. `private` never leaves the client. `local_state` is the state of one local round.
    """

    name: ClassVar[str]
    shares: ClassVar[tuple[str, ...]] = NET_PARTS  # the parts that travel
    by_net: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    protocols: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    switched_off_by: ClassVar[Mapping[str, tuple[float, str]]] = {}  # option: the value, and what the method then is

    net: Net = dataclasses.field(default=cast(Net, None), repr=False, compare=False)
    lr: float = 0.005
    epochs: int = 1
    batch_norm: str = "local"

    def bind(self, net: Net, *, lr: float, epochs: int, batch_norm: str = "local") -> Self:
        """Gives the method for one net, options that depend on the net filled in."""
        filled = {
            name: values.get(net.name, values["*"]) for name, values in self.by_net.items() if math.isnan(getattr(self, name))
        }
        return dataclasses.replace(self, net=net, lr=lr, epochs=epochs, batch_norm=batch_norm, **filled)

    def check(self, allow_noop: bool = False) -> None:
        """Refuses a value that silently switches the method off, unless the person says that it is meant."""
        for name, (value, reason) in self.switched_off_by.items():
            if getattr(self, name) == value and not allow_noop:
                raise GpflError(
                    f"method.{name} is {value:g}: {reason}; choose another, or say --allow-noop (allow_noop=True) to mean it"
                )

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The parts that travel, BatchNorm statistics among them if they are averaged."""
        return (*self.shares, "batch_norm_stats") if self.batch_norm == "average" and self.shares else self.shares

    # The server's and the client's state before round 0.

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives the shared state and the private state that every client starts from."""
        return self.split_state(self.net.init(seed))

    def split_state(self, state: Tree) -> tuple[Tree, Tree]:
        """Gives the parts of a state that travel and those that stay."""
        return tree.pick(state, self.shared_parts), tree.drop(state, self.shared_parts)

    # One client's round: download, steps of each phase, upload.

    def phases(self) -> tuple[Phase, ...]:
        """Gives the passes of a local round."""
        return (Phase(self.step, self.epochs),)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives the state in which local training starts."""
        return {**shared, **private}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives the state after one batch: a step of SGD on all parts of the net."""
        local_state, terms, _ = self.optimizer_step(
            local_state, NET_PARTS, lambda model: self.loss(model, shared, batch, client)
        )
        return local_state, terms

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives the terms of the local objective."""
        return {"ce": losses.cross_entropy(self.logits(model, batch.x), batch.y, batch.mask)}

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Gives what the client sends and what it keeps."""
        return self.split_state(local_state)

    # The server's part. It sees a weighted mean of uploads and nothing else, so that a round may be run in chunks,
    # across machines or under secure summation, and give the same.

    def aggregation_weight(self, client: ClientInfo) -> Tensor:
        """Gives the weight of a client in the mean of uploads: its number of training rows."""
        return client.n_samples

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Gives the new shared state from the old one and the mean of uploads."""
        return {**shared, **mean}

    def bytes_sent(self, upload: Tree) -> int:
        """Gives the bytes that an upload takes on the wire; `upload` is one, or a mean of some."""
        return tree.count_bytes(upload)

    def views(self) -> dict[str, View]:
        """Gives the functions that an attack on uploads may take training for by name: "fe" the base, "model" all."""
        views = {}
        if "base" in self.shares:
            views["fe"] = View(("base",), lambda model, x: model("base", x))
        if set(NET_PARTS) <= set(self.shares):
            views["model"] = View(NET_PARTS, lambda model, x: model("head", model("base", x)), knows_loss=True)
        return views

    def decays(self) -> dict[str, float]:
        """Gives the weight decay of parts by name, which a server knows and can take out of an update."""
        return {}

    def decay_at(self, part: str, weights: Tree) -> float:
        """Gives the weight decay that the known terms of the objective are at these weights of a part."""
        return self.decays().get(part, 0.0)

    # The model a client would use. Accuracy, fairness, pictures, export and deployment all judge this one.

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Gives the weights of the client's own model; `batch` is one of its training batches."""
        return {**shared, **private}

    def features(self, model: Model, x: Tensor) -> Tensor:
        """Gives the features (rows, width) the decision is made from."""
        return model("base", x)

    def logits(self, model: Model, x: Tensor) -> Tensor:
        """Gives the scores (rows, classes); the largest is the decision."""
        return model("head", self.features(model, x))

    # For subclasses.

    def optimizer_step(
        self,
        local_state: Tree,
        parts: tuple[str, ...],
        objective: Callable[[Model], LossTerms],
        *,
        lr: float | None = None,
        decay: Mapping[str, float] | None = None,
    ) -> StepResult:
        """Gives `local_state` after one step of SGD on `parts` down the sum of the objective's terms.

        `decay` adds weight decay to parts by name, on every tensor of them. What the objective puts into `model.aux`
        comes back with the terms.
        """
        rate = self.lr if lr is None else lr
        moving = tree.pick(local_state, parts)
        gradient, terms, stats, kept = self.loss_gradient(local_state, moving, objective)
        moved: Tree = {}
        for part in moving:
            pull = (decay or {}).get(part)
            moved[part] = tree.map_leaves(
                lambda w, g, pull=pull: w - rate * (g if pull is None else g + pull * w),
                tree.branch(moving, part),
                tree.branch(gradient, part),
            )
        return StepResult({**local_state, **moved, **({"batch_norm_stats": stats} if stats else {})}, terms, kept)

    def loss_gradient(self, local_state: Tree, moving: Tree, objective: Callable[[Model], LossTerms]) -> GradientResult:
        """Gives the gradient of the sum of the objective's terms by the weights `moving`, which are parts of `local_state`."""

        def total(moving: Tree) -> tuple[Tensor, tuple[LossTerms, Tree, Tree]]:
            model = Model(self.net, {**local_state, **moving}, training=True)
            terms = objective(model)
            return total_loss(terms), (terms, model.batch_norm_stats, model.aux)

        gradient, (terms, stats, kept) = torch.func.grad(total, has_aux=True)(moving)
        return GradientResult(gradient, terms, stats, kept)


def total_loss(terms: LossTerms) -> Tensor:
    """Gives the objective: the sum of its terms."""
    values = list(terms.values())
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
