"""FedProto."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree

MARGIN = 20.0
"""How far the logit of a class without a prototype lies below the lowest other, so that it is never predicted."""


@dataclass(frozen=True, kw_only=True)
class FedProto(Method):
    """Local models whose features are pulled towards shared prototypes of the classes.

    Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022. Clients share the mean
    feature of each class; c_y is the server's mean for class y, and the second term applies to classes that have one:

        L = CE + λ·MSE(f, c_y)

    The nearest prototype is the prediction; before there are any, the head predicts. Deviations from the paper, as in
    PFLlib: prototypes are means of features seen during training (`prototypes`), and all clients have the same weight in
    the server's mean. A class that no client sent in a round keeps its prototype.
    """

    name = "fedproto"
    shares = ("prototypes",)

    lam: float = option(
        1.0,
        "weight of the distance to the prototypes",
        symbol="λ",
        min=0.0,
        search=SearchRange(0.1, 10),
        disabled_by=(0.0, "every model would be trained alone"),
    )
    prototypes: str = option(
        "running",
        "features of the prototypes: 'running' = those during training (authors' code), 'after' = of the trained model",
        choices=("running", "after"),
    )

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return empty prototypes, and the net."""
        empty: Tree = {"mean": torch.zeros(self.net.classes, self.net.width), "seen": torch.zeros(self.net.classes)}
        return {"prototypes": empty}, self.net.init(seed)

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The prototypes alone: no weights are averaged, so BatchNorm statistics are not either."""
        return self.shares

    def phases(self) -> tuple[Phase, ...]:
        """Return the training phase, and under "after" one that collects features."""
        train = Phase(self.step, self.epochs)
        return (train, Phase(self.collect, 1)) if self.prototypes == "after" else (train,)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the client's model and empty sums of features."""
        return {**private, "sums": tree.map_leaves(torch.zeros_like, tree.branch(shared, "prototypes"))}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train the model; under "running", add the features before the step to the sums."""
        local_state, terms, aux = self.optimizer_step(shared, local_state, batch, client)
        if self.prototypes == "running":
            local_state = self.add_features(local_state, tree.leaf(aux, "features"), batch)
        return local_state, terms

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the cross-entropy, and the mean squared distance to the prototype of each sample's class."""
        f = model("base", batch.x)  # (batch, width)
        model.aux["features"] = f.detach()
        mean, seen = prototypes_of(shared)
        distance = (f - mean[batch.y]).square().mean(-1) * seen[batch.y]  # (batch,)
        return {
            "ce": batch.cross_entropy(model("head", f)),
            "prototype": self.lam * batch.mean(distance),
        }

    def collect(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Add the features of the trained model to the sums."""
        return self.add_features(local_state, Model(self.net, local_state)("base", batch.x), batch), {}

    def add_features(self, local_state: Tree, features: Tensor, batch: Batch) -> Tree:
        """Return the state with features added to the sum of their class."""
        one_hot = losses.one_hot(batch.y, self.net.classes) * batch.mask.unsqueeze(-1)  # (batch, classes)
        batch_sums: Tree = {"mean": one_hot.T @ features, "seen": one_hot.sum(0)}
        return {**local_state, "sums": tree.map_leaves(torch.add, tree.branch(local_state, "sums"), batch_sums)}

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return the client's prototypes, zero for classes without samples, and its model."""
        total, counts = prototypes_of(local_state, "sums")
        mean = total / counts.clamp_min(1.0).unsqueeze(-1)
        return {"prototypes": {"mean": mean, "seen": (counts > 0).to(mean.dtype)}}, tree.drop(local_state, ("sums",))

    def aggregation_weight(self, client: ClientInfo) -> Tensor:
        """Return the same weight for all clients."""
        return torch.ones_like(client.n_samples)

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Return the mean of each class over the clients that have it; a class that no client sent stays as it was."""
        old_mean, old_seen = prototypes_of(shared)
        total, fraction = prototypes_of(mean)  # fraction of clients that have the class
        sent = fraction > 0
        new_mean = torch.where(sent.unsqueeze(-1), total / fraction.clamp_min(1e-12).unsqueeze(-1), old_mean)
        return {"prototypes": {"mean": new_mean, "seen": torch.maximum(old_seen, sent.to(new_mean.dtype))}}

    def logits(self, model: Model, x: Tensor) -> Tensor:
        """Return minus the mean squared distance to each prototype, or the head's logits while there are none."""
        f = self.features(model, x)
        mean, known = prototypes_of(model.weights)
        seen = known > 0
        logits = -(f.unsqueeze(-2) - mean).square().mean(-1)  # (batch, classes)
        lowest = torch.where(seen, logits, torch.inf).amin(-1, keepdim=True)
        return torch.where(seen.any(), torch.where(seen, logits, lowest - MARGIN), model("head", f))


def prototypes_of(state: Tree, part: str = "prototypes") -> tuple[Tensor, Tensor]:
    """Return the prototypes (classes, width), and for each class "seen": a flag, a count or a fraction of clients."""
    prototypes = tree.branch(state, part)
    return tree.leaf(prototypes, "mean"), tree.leaf(prototypes, "seen")
