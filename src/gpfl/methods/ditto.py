"""Ditto."""

from dataclasses import dataclass

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg, and for each client a personal model that is regularised towards the global one.

    Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021. A round trains the personal
    model v, then the global model w as FedAvg does; w^t are the weights as received:

        v ← v − η(∇CE(v) + λ(v − w^t))
        w ← w − η∇CE(w)

    No deviation in the updates.
    """

    name = "ditto"

    lam: float = option(
        0.1,
        "pull of the personal model to the global one",
        symbol="λ",
        min=0.0,
        search=SearchRange(0.01, 2),
        disabled_by=(0.0, "the personal models would be trained alone"),
    )
    personal_epochs: int = option(1, "epochs of the personal model per round", min=1, search=(1, 2, 5))

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return the global model, and a personal model equal to it."""
        state = self.net.init(seed)
        shared, private = self.split_state(state)
        return shared, {**private, "personal": tree.clone(state)}

    def phases(self) -> tuple[Phase, ...]:
        """Return the phase of the personal model, then that of the global one."""
        return (Phase(self.personal_step, self.personal_epochs), Phase(self.global_step, self.epochs))

    def personal_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train v."""
        v = tree.branch(local_state, "personal")
        v, terms, _ = self.optimizer_step(shared, v, batch, client, loss=self.personal_loss)
        return {**local_state, "personal": v}, terms

    def global_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train w."""
        local_state, terms = self.step(shared, local_state, batch, client)
        return local_state, {"global_ce": terms["ce"]}

    def personal_loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the cross-entropy of v and its distance to w^t."""
        terms = self.loss(model, shared, batch, client)
        terms["proximal"] = self.lam / 2 * losses.squared_distance(model.weights, tree.pick(shared, NET_PARTS))
        return terms

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return v."""
        return tree.branch(private, "personal")
