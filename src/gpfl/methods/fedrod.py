"""FedRoD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedRoD(Method):
    """A shared model trained as if classes were balanced, and a client's head that adds what is its own.

    Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022. With
    r = φ(x): φ and the shared head G descend CE(G(r) + log n_c, y), the own head P descends CE(G(r) + P(r), y) with r and
    G(r) held constant. Deviation of the authors' code that is kept: P is a head like G, not made by a hypernetwork. Class
    counts are over all training rows.
    """

    name: ClassVar[str] = "fedrod"

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives the shared model; every client's own head starts as a copy of the shared one."""
        state = self.net.init(seed)
        return self.split_state({**state, "personal_head": tree.copy(tree.branch(state, "head"))})

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives φ, G and P after one step; both losses see r and G(r) from before it."""
        parts = ("base", "head", "personal_head")
        local_state, terms, _ = self.optimizer_step(shared, local_state, batch, client, parts=parts)
        return local_state, terms

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives the balanced softmax loss of φ and G, and the cross-entropy that moves P alone."""
        r = model("base", batch.x)  # (rows, width)
        generic = model("head", r)  # (rows, classes)
        balanced = losses.balanced(generic, client.label_counts)
        own = generic.detach() + model("head", r.detach(), model["personal_head"])
        return {
            "ce": losses.cross_entropy(own, batch.y, batch.mask),
            "balanced_ce": losses.cross_entropy(balanced, batch.y, batch.mask),
        }

    def logits(self, model: Model, x: Tensor) -> Tensor:
        """Gives G(r) + P(r)."""
        r = self.features(model, x)
        return model("head", r) + model("head", r, model["personal_head"])
