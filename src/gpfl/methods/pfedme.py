"""pFedMe."""

from dataclasses import dataclass
from typing import Self

import torch

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model, Net
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree
from gpfl.errors import GpflError


@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """A personal model θ_i that is regularised towards a local copy w_i of the global model (Moreau envelope).

    T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020. For every batch, K steps on θ_i,
    then one on w_i; at the end of the round, the server's step:

        θ_i ← θ_i − η_p(∇CE(θ_i) + λ(θ_i − w_i))
        w_i ← w_i − ηλ(w_i − θ_i)
        w ← (1 − β)w + β·mean(w_i)

    Deviations from the paper, as in PFLlib: θ_i decays by 0.001 (`theta_decay`) and is carried from batch to batch. PFLlib
    evaluates w_i by mistake (`eval_model="local_w"`); here the default is θ_i.
    """

    name = "pfedme"

    steps: int = option(5, "steps on each batch", symbol="K", typical="1 to 10", min=1, search=(1, 3, 5, 7))
    lam: float = option(
        15.0,
        "pull of the personal model to the local one",
        symbol="λ",
        typical="5 to 30",
        min=0.0,
        search=SearchRange(1, 30),
        disabled_by=(0.0, "the local model would never move"),
    )
    p_lr: float = option(0.01, "learning rate of the personal model", symbol="η_p", above=0.0, search=SearchRange(0.005, 0.1))
    beta: float = option(
        1.0,
        "weight of the mean in the new global model",
        symbol="β",
        min=0.0,
        search=SearchRange(1, 4, log=False),
        disabled_by=(0.0, "the server would keep its first model"),
    )
    theta_decay: float = option(0.001, "weight decay of the personal model (authors' code)", typical="0 or 0.001", min=0.0)
    eval_model: str = option(
        "theta",
        "the personal model: 'theta' = θ_i, 'local_w' = w_i after training (authors' code)",
        choices=("theta", "local_w"),
    )

    def bind(self, net: Net, *, lr: float, epochs: int, batch_norm: str = "local") -> Self:
        """Return the method bound to a net; raise if the pull would diverge."""
        for name, rate in (("the learning rate", lr), ("method.p_lr", self.p_lr)):
            if rate * self.lam >= 2:
                raise GpflError(
                    f"method.lam is {self.lam:g} and {name} {rate:g}: their product {rate * self.lam:g} must stay below 2, "
                    "or every step overshoots more: lower one of them"
                )
        return super().bind(net, lr=lr, epochs=epochs, batch_norm=batch_norm)

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return the global model, and a personal model equal to it."""
        shared, private = super().init(seed)
        return shared, {**private, "personal": tree.clone(tree.pick(shared, NET_PARTS))}

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return θ and w_i, both the received model."""
        return {**shared, **tree.drop(private, ("personal",)), "local": tree.pick(shared, NET_PARTS)}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train θ for K steps on the batch, then move w_i towards it."""
        decay, history = dict.fromkeys(NET_PARTS, self.theta_decay), []
        for _ in range(self.steps):
            local_state, terms, _ = self.optimizer_step(
                shared, local_state, batch, client, loss=self.personal_loss, lr=self.p_lr, weight_decay=decay
            )
            history.append(terms)
        w, theta = tree.branch(local_state, "local"), tree.pick(local_state, NET_PARTS)
        w = tree.map_leaves(lambda w, t: w - self.lr * self.lam * (w - t), w, theta)
        means = {name: torch.stack([terms[name] for terms in history]).mean(0) for name in history[0]}
        return {**local_state, "local": w}, means

    def personal_loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the cross-entropy of θ and its distance to w_i."""
        terms = self.loss(model, shared, batch, client)
        terms["proximal"] = self.lam / 2 * losses.squared_distance(model.weights, model["local"])
        return terms

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return w_i for the server, and the personal model."""
        w, theta = tree.branch(local_state, "local"), tree.pick(local_state, NET_PARTS)
        upload, new_private = self.split_state({**tree.drop(local_state, ("local",)), **w})
        return upload, {**new_private, "personal": theta if self.eval_model == "theta" else w}

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Return (1 − β)w + β·mean. BatchNorm statistics are averaged, since β > 1 could make a variance negative."""
        old, new = tree.pick(shared, NET_PARTS), tree.pick(mean, NET_PARTS)
        return {**mean, **tree.lerp(old, new, self.beta)}

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return the personal model."""
        return {**tree.branch(private, "personal"), **tree.pick({**shared, **private}, ("batch_norm_stats",))}
