"""FedRoD."""

from dataclasses import dataclass

from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedRoD(Method):
    """A global model trained with a balanced loss, and a personal head whose logits are added to the global ones.

    Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022. The global
    head G and the personal head P on features r = φ(x), with n_c training samples of each class c;
    r and G(r) are constants in the second term:

        L = CE(G(r) + log n_c, y) + CE(G(r) + P(r), y)

    Deviation from the paper, as in PFLlib: P is a head like G, not the output of a hypernetwork.
    """

    name = "fedrod"

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return the shared model, and P as a copy of G."""
        state = self.net.init(seed)
        return self.split_state({**state, "personal_head": tree.clone(tree.branch(state, "head"))})

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train φ, G and P together."""
        parts = ("base", "head", "personal_head")
        return self.optimizer_step(shared, local_state, batch, client, parts=parts)[:2]

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the cross-entropy of the personal logits, which trains P alone, and the balanced softmax loss of φ and G."""
        r = model("base", batch.x)  # (batch, width)
        generic = model("head", r)  # (batch, classes)
        personal = generic.detach() + model("head", r.detach(), model["personal_head"])
        balanced = losses.balanced_logits(generic, client.label_counts)
        return {
            "ce": batch.cross_entropy(personal),
            "balanced_ce": batch.cross_entropy(balanced),
        }

    def logits(self, model: Model, x: Tensor) -> Tensor:
        """Return G(r) + P(r)."""
        r = self.features(model, x)
        return model("head", r) + model("head", r, model["personal_head"])
