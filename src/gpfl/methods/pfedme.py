"""pFedMe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model, Net
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree
from gpfl.errors import GpflError


@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """A personal model θ_i near a local copy w_i of the global model, by a Moreau envelope.

    T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020. For every batch, K steps on θ_i,
    then one on w_i; at the end of the round, the server's step:

        θ_i ← θ_i − η_p(∇CE(θ_i) + λ(θ_i − w_i))
        w_i ← w_i − ηλ(w_i − θ_i)
        w ← (1 − β)w + β·mean(w_i)

    Deviations from the paper, as in PFLlib: θ_i decays by 0.001 (`theta_decay`) and is carried from batch to batch. PFLlib
    evaluates w_i by mistake (`eval_model="local_w"`); the default here is θ_i.
    """

    name: ClassVar[str] = "pfedme"

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
    p_lr: float = option(
        0.01,
        "learning rate of the personal model",
        symbol="η_p",
        typical="0.005 to 0.1",
        above=0.0,
        search=SearchRange(0.005, 0.1),
    )
    beta: float = option(
        1.0,
        "share of the mean in the new global model",
        symbol="β",
        typical="1 to 4",
        min=0.0,
        search=SearchRange(1, 4, log=False),
        disabled_by=(0.0, "the server would keep its first model"),
    )
    theta_decay: float = option(0.001, "weight decay of the personal model (authors' code)", typical="0 or 0.001", min=0.0)
    eval_model: str = option(
        "theta",
        "the client's model: 'theta' = θ_i, 'local_w' = w_i after training (authors' code)",
        choices=("theta", "local_w"),
    )

    def bind(self, net: Net, *, lr: float, epochs: int, batch_norm: str = "local") -> Self:
        """Gives the method for one net; rates under which its pull diverges are refused."""
        for name, rate in (("the learning rate", lr), ("method.p_lr", self.p_lr)):
            if rate * self.lam >= 2:
                raise GpflError(
                    f"method.lam is {self.lam:g} and {name} {rate:g}: their product {rate * self.lam:g} must stay below 2, "
                    "or the pull overshoots more each step: lower one of them"
                )
        return super().bind(net, lr=lr, epochs=epochs, batch_norm=batch_norm)

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives the global model; every client's own model starts equal to it."""
        shared, private = super().init(seed)
        return shared, {**private, "personal": tree.copy(tree.pick(shared, NET_PARTS))}

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives w_i and θ, both the received model."""
        received = tree.pick(shared, NET_PARTS)
        return {**shared, **tree.drop(private, ("personal",)), "local": received}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives θ after K steps on the batch, and w_i after one towards it."""
        local = tree.branch(local_state, "local")
        seen: list[LossTerms] = []
        for _ in range(self.steps):
            local_state, terms, _ = self.optimizer_step(
                shared,
                local_state,
                batch,
                client,
                loss=self.near,
                lr=self.p_lr,
                weight_decay=dict.fromkeys(NET_PARTS, self.theta_decay),
            )
            seen.append(terms)
        theta = tree.pick(local_state, NET_PARTS)
        local = tree.map_leaves(lambda w, t: w - self.lr * self.lam * (w - t), local, theta)
        means = {name: losses.mean_of([terms[name] for terms in seen]) for name in seen[0]}
        return {**local_state, "local": local}, means

    def near(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives the objective of θ: cross-entropy and its distance to w_i."""
        terms = self.loss(model, shared, batch, client)
        terms["proximal"] = self.lam / 2 * losses.squared_distance(tree.pick(model.weights, NET_PARTS), model["local"])
        return terms

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Gives w_i to the server; the client keeps the model it would use."""
        local, theta = tree.branch(local_state, "local"), tree.pick(local_state, NET_PARTS)
        sent, kept = self.split_state({**tree.drop(local_state, ("local",)), **local})
        return sent, {**kept, "personal": theta if self.eval_model == "theta" else local}

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Gives (1 − β)w + β·mean; averaged BatchNorm statistics are the mean, since β > 1 could turn a variance negative."""
        old, new = tree.pick(shared, NET_PARTS), tree.pick(mean, NET_PARTS)
        return {**mean, **tree.map_leaves(lambda a, b: (1 - self.beta) * a + self.beta * b, old, new)}

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Gives the client's own model."""
        return {**tree.branch(private, "personal"), **tree.pick({**shared, **private}, ("batch_norm_stats",))}
