"""The method interface: what a client shares, what it keeps private, and the pure functions of one client's round.

A method is written for one client. Engines run it for many: one client after the other, or vmapped over stacked clients.
The defaults of `Method` are FedAvg; a method overrides only where it differs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.net import Model, Net
from gpfl.core.options import is_unset, options_of
from gpfl.core.tree import Tree

LossTerms = dict[str, Tensor]
"""The terms of an objective by name; training minimises their sum. "ce" is the cross-entropy, with its weight in the sum."""

NET_PARTS = ("base", "head")  # the parts of a net: feature extractor and classifier


class Batch(NamedTuple):
    """Samples of one client; batches are padded to a fixed size."""

    x: Tensor
    y: Tensor
    mask: Tensor  # 1 for a sample, 0 for padding

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` (batch,) over samples, or 0 if there are none."""
        return (values * self.mask).sum() / self.mask.sum().clamp_min(1.0)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy over samples."""
        return self.mean(F.cross_entropy(logits, self.y, reduction="none"))


class ClientInfo(NamedTuple):
    """What a client knows about itself and the run besides its samples."""

    n_samples: Tensor  # training samples, as a float
    label_counts: Tensor  # (classes,) training samples of each class
    round: Tensor  # counted from 0
    total_rounds: Tensor
    index: Tensor = torch.zeros(())  # type: ignore[assignment]  # position in the federation; hides tuple.index

    def select(self, index: int | slice | Tensor) -> Self:
        """Return the entries `index` of stacked clients."""
        return type(self)(*(field[index] for field in self))


Objective = Callable[[Model, Batch], LossTerms]


class GradientResult(NamedTuple):
    """The gradient of an objective, with the outputs of the pass that computed it."""

    gradient: Tree
    terms: LossTerms
    batch_norm_stats: Tree
    aux: Tree


GradientFunction: TypeAlias = Callable[[Net, Tree, Tree, Objective, Batch], GradientResult]
"""A function of a net, a state, weights that replace those of the same name in it, an objective and a batch. It returns the
gradient with respect to the weights. `loss_gradient` is the default; defences pass their own."""


class StepResult(NamedTuple):
    """The state after an optimizer step, the terms before it, and what the objective put into `model.aux`."""

    state: Tree
    terms: LossTerms
    aux: Tree


Step: TypeAlias = Callable[[Tree, Tree, Batch, ClientInfo], tuple[Tree, LossTerms]]
"""A function of the shared and the local state, a batch and a client. It returns the local state after a step, and the terms
of the objective before it."""

Loss: TypeAlias = Callable[[Model, Tree, Batch, ClientInfo], LossTerms]
"""A function of a model, the shared state, a batch and a client. It returns the terms of the loss. Defences that clip the
gradient of each sample call it with batches of one."""


class Phase(NamedTuple):
    """Epochs over a client's training samples; each step takes `batches` batches."""

    step: Step
    epochs: int = 1
    batches: int = 1


def loss_gradient(net: Net, state: Tree, weights: Tree, objective: Objective, batch: Batch) -> GradientResult:
    """Return the gradient of the sum of the objective's terms with respect to `weights`."""

    def total(weights: Tree) -> tuple[Tensor, tuple[LossTerms, Tree, Tree]]:
        model = Model(net, {**state, **weights}, training=True)
        terms = objective(model, batch)
        return total_loss(terms), (terms, model.batch_norm_stats, model.aux)

    if not runs_eagerly():
        gradient, (terms, batch_norm_stats, aux) = torch.func.grad(total, has_aux=True)(weights)
        return GradientResult(gradient, terms, batch_norm_stats, aux)
    with torch.enable_grad():  # less overhead than torch.func.grad, which takes longer than a small net
        inputs = tree.map_leaves(lambda w: w.detach().requires_grad_(), weights)
        value, outputs = total(inputs)
    if value.requires_grad:
        gradients = iter(unshare(torch.autograd.grad(value, list(tree.leaves(inputs)), materialize_grads=True)))
        gradient = tree.map_leaves(lambda _: next(gradients), inputs)
    else:  # no weight has an effect
        gradient = tree.map_leaves(torch.zeros_like, weights)
    terms, batch_norm_stats, aux = (tree.map_leaves(torch.detach, output) for output in outputs)  # type: ignore[arg-type]
    return GradientResult(gradient, terms, batch_norm_stats, aux)  # type: ignore[arg-type]


def unshare(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that can be overwritten: those that share memory with another one, or among their entries, are copied."""
    memory: set[int] = set()
    out = []
    for t in tensors:
        shared = 0 in t.stride() or t.untyped_storage().data_ptr() in memory
        out.append(t.clone(memory_format=torch.contiguous_format) if shared else t)
        memory.add(t.untyped_storage().data_ptr())
    return out


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A net and the training options that all methods have; `Method.bind` attaches them to a method."""

    net: Net = field(repr=False, compare=False)
    lr: float
    epochs: int = 1
    batch_norm: str = "local"  # running statistics: "local" or "average"
    gradient: GradientFunction = loss_gradient


@dataclass(frozen=True, kw_only=True)
class Method:
    """The interface of methods; its defaults are FedAvg. Fields declared with `option` are hyperparameters.

    Every function is pure and written for one client. Its arguments:

    - `shared`: the state that the server holds and sends. It stays as received during a local round, so it serves as an
      anchor or frozen copy.
    - `private`: the state that never leaves the client.
    - `local_state`: the state of one local round, from `download` through the steps to `upload`.
    - `client`: label counts, number of samples and the round.

    `self.net` is available after `bind`, which the library calls.
    """

    name: ClassVar[str]
    shares: ClassVar[tuple[str, ...]] = NET_PARTS  # the parts that clients upload

    setup: Setup | None = field(default=None, repr=False)

    # Initial state.

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return the shared state and the private state that every client starts with."""
        return self.split_state(self.net.init(seed))

    def split_state(self, state: Tree) -> tuple[Tree, Tree]:
        """Return the shared and the private parts of a state."""
        return tree.pick(state, self.shared_parts), tree.drop(state, self.shared_parts)

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The parts that clients upload, with BatchNorm's running statistics if the server averages them."""
        return (*self.shares, "batch_norm_stats") if self.batch_norm == "average" and self.shares else self.shares

    # One client's round: download, the steps of each phase, upload.

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of a local round."""
        return (Phase(self.step, self.epochs),)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the state in which local training starts."""
        return {**shared, **private}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Return the state after one SGD step on all parts of the net, and the terms of the loss before it."""
        local_state, terms, _ = self.optimizer_step(shared, local_state, batch, client)
        return local_state, terms

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the terms of the local objective."""
        return {"ce": batch.cross_entropy(self.logits(model, batch.x))}

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return the client's upload and its new private state."""
        return self.split_state(local_state)

    # The server. It sees nothing but a weighted mean of uploads, so the result of a round does not depend on whether it
    # runs in chunks, across machines or under secure aggregation.

    def aggregation_weight(self, client: ClientInfo) -> Tensor:
        """Return the client's weight in the mean of uploads, by default its number of training samples."""
        return client.n_samples

    def decode_upload(self, shared: Tree, upload: Tree) -> Tree:
        """Return an upload, or a mean of uploads, in the form of the shared state; by default it has that form.

        The result is a linear function of `upload`, so means can be taken before decoding.
        """
        return upload

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Return the shared state after aggregation, from the old one and the mean of uploads."""
        return {**shared, **self.decode_upload(shared, mean)}

    # The personal model. Evaluation, export and deployment all use this one.

    def final_phases(self) -> tuple[Phase, ...]:
        """Return the phases between a client's state and its personal model, such as fine-tuning; by default none.

        They run before every evaluation and for the models that are saved. Training never continues from their result.
        """
        return ()

    def start_final_phases(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the state in which the final phases start, by default that of a local round."""
        return self.download(shared, private, client)

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return the weights of the client's personal model, which may adapt to `batch`, one of its training batches.

        If the method has final phases, `private` is the state after them.
        """
        return {**shared, **private}

    def features(self, model: Model, x: Tensor) -> Tensor:
        """Return the features that the classifier sees, (batch, width)."""
        return model("base", x)

    def logits(self, model: Model, x: Tensor) -> Tensor:
        """Return the logits of the personal model, (batch, classes)."""
        return model("head", self.features(model, x))

    # Helpers for subclasses.

    def optimizer_step(
        self,
        shared: Tree,
        state: Tree,
        batch: Batch,
        client: ClientInfo,
        *,
        parts: tuple[str, ...] = NET_PARTS,
        loss: Loss | None = None,
        lr: float | None = None,
        weight_decay: Mapping[str, float] | None = None,
    ) -> StepResult:
        """Return `state` after one SGD step on `parts` down the sum of the loss terms.

        Args:
            shared: Passed to the loss.
            state: Weights of the net, and any other state that the loss reads.
            batch: The batch of the step.
            client: Passed to the loss.
            parts: Names of the parts to train; all others stay as they are.
            loss: Function with the signature of `loss`, which is the default.
            lr: Learning rate, by default that of the run.
            weight_decay: Weight decay of parts by name.

        """
        rate, loss = self.lr if lr is None else lr, loss or self.loss

        def objective(model: Model, batch: Batch) -> LossTerms:
            return loss(model, shared, batch, client)

        weights = tree.pick(state, parts)
        gradient, terms, batch_norm_stats, aux = self._setup.gradient(self.net, state, weights, objective, batch)
        owned = self._setup.gradient is loss_gradient  # a defence may keep its gradient
        updated: Tree = {}
        for part in weights:
            decay = (weight_decay or {}).get(part)
            updated[part] = tree.map_leaves(
                lambda w, g, decay=decay: sgd_step(w, g, rate, decay, overwrite=owned),
                tree.branch(weights, part),
                tree.branch(gradient, part),
            )
        stats: Tree = {"batch_norm_stats": batch_norm_stats} if batch_norm_stats else {}
        return StepResult({**state, **updated, **stats}, terms, aux)

    # Binding to a net and to training options.

    def bind(self, net: Net, *, lr: float, epochs: int, batch_norm: str = "local") -> Self:
        """Return the method bound to a net; unset options get their default for the net, or else the learning rate."""
        values = {
            name: option.by_net.get(net.name, option.by_net["*"]) if option.by_net else lr
            for name, option in options_of(type(self)).items()
            if is_unset(getattr(self, name))
        }
        return dataclasses.replace(self, setup=Setup(net=net, lr=lr, epochs=epochs, batch_norm=batch_norm), **values)

    def replace(self, **values: object) -> Self:
        """Return the method with other values of its options or of its setup, such as `lr`."""
        names = {each.name for each in dataclasses.fields(Setup)} & values.keys()
        setup = dataclasses.replace(self._setup, **{name: values.pop(name) for name in names}) if names else self.setup  # type: ignore[arg-type]
        return dataclasses.replace(self, **{"setup": setup, **values})  # type: ignore[arg-type]

    def values(self) -> dict[str, object]:
        """Return the options and the setup without the net, by name: what `replace` can change."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "setup"]
        return {name: getattr(self, name) for name in ("lr", "epochs", "batch_norm", *names)}

    @property
    def _setup(self) -> Setup:
        if self.setup is None:
            raise RuntimeError(f"method '{self.name}' has no net yet: call bind() first")
        return self.setup

    @property
    def net(self) -> Net:
        """The net that the method is bound to."""
        return self._setup.net

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._setup.lr

    @property
    def epochs(self) -> int:
        """Number of local epochs per round."""
        return self._setup.epochs

    @property
    def batch_norm(self) -> str:
        """Whether BatchNorm's running statistics stay "local" or the server averages them ("average")."""
        return self._setup.batch_norm


def sgd_step(weights: Tensor, gradient: Tensor, rate: float, decay: float | None = None, *, overwrite: bool = False) -> Tensor:
    """Return weights − rate × (gradient + decay × weights), which may overwrite the gradient."""
    if runs_eagerly():  # in one pass each, and over two tensors in memory instead of three
        out = gradient if overwrite else None
        gradient = gradient if decay is None else torch.add(gradient, weights, alpha=decay, out=out)
        return torch.sub(weights, gradient, alpha=rate, out=out)
    gradient = gradient if decay is None else gradient + decay * weights
    return weights - rate * gradient  # traced steps are recognised by this form, and the rate may be a tensor


def runs_eagerly() -> bool:
    """Return whether operations run eagerly for one client, neither traced nor under vmap."""
    return not torch.is_grad_enabled() and torch._C._functorch.maybe_current_level() is None


def total_loss(terms: LossTerms) -> Tensor:
    """Return the sum of an objective's terms."""
    return reduce(torch.add, terms.values())
