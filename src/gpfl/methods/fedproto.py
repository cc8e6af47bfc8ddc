"""FedProto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree

UNSEEN = 20.0
"""How far below the lowest seen class a class without a prototype scores; nothing is decided for it."""


@dataclass(frozen=True, kw_only=True)
class FedProto(Method):
    """Local models whose features are pulled towards shared prototypes of the classes.

    Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022. Clients share the mean
    feature of each class; c_y is the server's mean for class y, and the
    second term applies to classes that have one:

        L = CE + λ·MSE(f, c_y)

    The nearest prototype is the prediction; before there are any, the head predicts. Deviations from the paper, as in
    PFLlib: prototypes are means of features seen during training (`prototypes`), and all clients weigh the same in the
    server's mean. A class that no client sent in a round keeps its prototype.
    """

    name: ClassVar[str] = "fedproto"
    shares: ClassVar[tuple[str, ...]] = ("prototypes",)

    lam: float = option(
        1.0,
        "weight of the distance to the prototypes",
        symbol="λ",
        typical="0.1 to 10",
        min=0.0,
        search=SearchRange(0.1, 10),
        disabled_by=(0.0, "every model would be trained alone"),
    )
    prototypes: str = option(
        "running",
        "features behind a client's prototypes: 'running' = as training sees them (authors' code), 'after' = when trained",
        choices=("running", "after"),
    )

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives no prototypes yet; every client's model starts alike."""
        empty: Tree = {"mean": torch.zeros(self.net.classes, self.net.width), "seen": torch.zeros(self.net.classes)}
        return {"prototypes": empty}, self.net.init(seed)

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """Prototypes alone: no weights travel, so there are no statistics to average."""
        return self.shares

    def phases(self) -> tuple[Phase, ...]:
        """Gives training, and a pass that collects features where they are wanted of the trained model."""
        train = Phase(self.step, self.epochs)
        return (train, Phase(self.collect, 1)) if self.prototypes == "after" else (train,)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives the own model and empty sums of features."""
        empty = tree.map_leaves(torch.zeros_like, tree.branch(shared, "prototypes"))
        return {**private, "sums": empty}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives the model after one step; the features before it join the sums."""
        local_state, terms, kept = self.optimizer_step(shared, local_state, batch, client)
        if self.prototypes == "running":
            local_state = self.add(local_state, tree.leaf(kept, "features"), batch)
        return local_state, terms

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives cross-entropy and the mean squared distance to the prototype of each row's class."""
        f = model("base", batch.x)  # (rows, width)
        model.aux["features"] = f.detach()
        known = tree.branch(shared, "prototypes")
        mean, seen = tree.leaf(known, "mean"), tree.leaf(known, "seen")
        distance = (f - mean[batch.y]).square().mean(-1) * seen[batch.y]  # (rows,)
        return {
            "ce": losses.cross_entropy(model("head", f), batch.y, batch.mask),
            "prototype": self.lam * losses.masked_mean(distance, batch.mask),
        }

    def collect(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives the sums with a batch's features of the model as it is."""
        return self.add(local_state, Model(self.net, local_state)("base", batch.x), batch), {}

    def add(self, local_state: Tree, features: Tensor, batch: Batch) -> Tree:
        """Gives `local_state` with features added to the sum of their class."""
        chosen = losses.one_hot(batch.y, self.net.classes) * batch.mask.unsqueeze(-1)  # (rows, classes)
        sums = tree.branch(local_state, "sums")
        more: Tree = {"mean": chosen.T @ features, "seen": chosen.sum(0)}
        return {**local_state, "sums": tree.map_leaves(torch.add, sums, more)}

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Gives the client's prototypes, zero for classes it has not seen, and keeps the model."""
        sums = tree.branch(local_state, "sums")
        counts = tree.leaf(sums, "seen")
        mean = tree.leaf(sums, "mean") / counts.clamp_min(1.0).unsqueeze(-1)
        return {"prototypes": {"mean": mean, "seen": (counts > 0).to(mean.dtype)}}, tree.drop(local_state, ("sums",))

    def aggregation_weight(self, client: ClientInfo) -> Tensor:
        """Gives every client the same weight."""
        return torch.ones_like(client.n_samples)

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Gives the mean prototype over the clients that hold the class; a class nobody sent stays as it was."""
        old, new = tree.branch(shared, "prototypes"), tree.branch(mean, "prototypes")
        holders = tree.leaf(new, "seen")  # share of clients that hold the class
        fresh = tree.leaf(new, "mean") / holders.clamp_min(1e-12).unsqueeze(-1)
        kept = torch.where((holders > 0).unsqueeze(-1), fresh, tree.leaf(old, "mean"))
        return {"prototypes": {"mean": kept, "seen": torch.maximum(tree.leaf(old, "seen"), (holders > 0).to(kept.dtype))}}

    def logits(self, model: Model, x: Tensor) -> Tensor:
        """Gives minus the mean squared distance to each prototype, or the head's scores while there are none."""
        f = self.features(model, x)
        known = model["prototypes"]
        mean, seen = tree.leaf(known, "mean"), tree.leaf(known, "seen") > 0
        scores = -(f.unsqueeze(-2) - mean).square().mean(-1)  # (rows, classes)
        lowest = torch.where(seen, scores, torch.inf).amin(-1, keepdim=True)
        nearest = torch.where(seen, scores, lowest - UNSEEN)
        return torch.where(seen.any(), nearest, model("head", f))
