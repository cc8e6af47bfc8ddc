"""Ditto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg, and for each client a personal model that is kept near the global one.

    Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021. A round trains the personal
    model v, then the global model w as FedAvg does; w^t are the weights as received:

        v ← v − η(∇CE(v) + λ(v − w^t))
        w ← w − η∇CE(w)

    No deviation in the updates.
    """

    name: ClassVar[str] = "ditto"

    lam: float = option(
        0.1,
        "pull of the own model to the global one",
        symbol="λ",
        typical="0.01 to 2",
        min=0.0,
        search=SearchRange(0.01, 2),
        disabled_by=(0.0, "the personal models would be trained alone"),
    )
    personal_epochs: int = option(1, "epochs of the own model a round", typical="1 to 5", min=1, search=(1, 2, 5))

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives the global model; every client's own model starts equal to it."""
        state = self.net.init(seed)
        shared, private = self.split_state(state)
        return shared, {**private, "personal": tree.copy(state)}

    def phases(self) -> tuple[Phase, ...]:
        """Gives the passes on the own model, then those on the global one."""
        return (Phase(self.own_step, self.personal_epochs), Phase(self.global_step, self.epochs))

    def own_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives v after one step, the rest as it was."""
        own, terms, _ = self.optimizer_step(shared, tree.branch(local_state, "personal"), batch, client, loss=self.near)
        return {**local_state, "personal": own}, terms

    def global_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives w after one step, v as it was."""
        local_state, terms = self.step(shared, local_state, batch, client)
        return local_state, {"global_ce": terms["ce"]}

    def near(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives the objective of v: cross-entropy and its distance to the model received."""
        terms = self.loss(model, shared, batch, client)
        distance = losses.squared_distance(tree.pick(model.weights, NET_PARTS), tree.pick(shared, NET_PARTS))
        terms["proximal"] = self.lam / 2 * distance
        return terms

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Gives v."""
        return tree.branch(private, "personal")
