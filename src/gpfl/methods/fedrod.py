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
    """A global model trained with a balanced loss, and a personal head whose logits are added to its own.

    Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022. The global
    head G and the personal head P on features r = φ(x), with n_c training samples of each class c;
    r and G(r) are constants in the second term:

        L = CE(G(r) + log n_c, y) + CE(G(r) + P(r), y)

    Deviation from the paper, as in PFLlib: P is a head like G, not the output of a hypernetwork.
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
