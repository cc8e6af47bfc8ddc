"""FedPHP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedPHP(Method):
    """A personal model that inherits from round to round, with features near those of a teacher.

    Li et al., FedPHP: Federated Personalization with Inherited Private Models, ECML PKDD 2021. The momentum m grows with the
    round t of T planned rounds:

        L = (1 − λ)CE + λ·MMD²(φ(x), φ_teacher(x))
        m = μ·t/T

    Two variants:

    - mix (default; PFLlib when the GPFL paper appeared, and what that paper describes): a client starts from
      (1 − m)·global + m·personal, its teacher is the global model as received, and it is evaluated after mixing.
    - inherit (the FedPHP paper): a client starts from the global model, its teacher is its personal model, which then
      becomes m·personal + (1 − m)·trained and is evaluated.

    The teacher is in eval mode; PFLlib leaves it in training mode, which makes a difference with BatchNorm only.
    """

    name: ClassVar[str] = "fedphp"

    mu: float = option(
        0.9,
        "momentum of the own model in the last round",
        symbol="μ",
        typical="0.5 to 0.9",
        min=0.0,
        max=1.0,
        search=SearchRange(0.5, 0.99, log=False),
    )
    lam: float = option(
        0.01,
        "weight of the features' distance",
        symbol="λ",
        typical="0.01 to 0.1",
        min=0.0,
        max=1.0,
        search=SearchRange(0.001, 0.5),
        disabled_by=(1.0, "the cross-entropy would have weight 0"),
    )
    variant: str = option(
        "mix", "'mix' = start from global and own mixed (authors' code), 'inherit' = original", choices=("mix", "inherit")
    )

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives the global model; every client's own model starts equal to it."""
        shared, private = super().init(seed)
        return shared, {**private, "personal": tree.copy(tree.pick(shared, NET_PARTS))}

    def momentum(self, client: ClientInfo) -> Tensor:
        """Gives m of the round."""
        return self.mu * (client.round / client.total_rounds).clamp_max(1.0)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives the model that training starts from, and the teacher of the round."""
        received, own = tree.pick(shared, NET_PARTS), tree.branch(private, "personal")
        rest = tree.pick({**shared, **private}, ("batch_norm_stats",))
        if self.variant == "mix":
            return {**tree.lerp(received, own, self.momentum(client)), **rest, "teacher": {**received, **rest}}
        return {**received, **rest, "teacher": {**own, **rest}}

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives weighted cross-entropy and the distance of feature distributions."""
        f = model("base", batch.x)
        taught = Model(self.net, model["teacher"])("base", batch.x)
        ce = losses.cross_entropy(model("head", f), batch.y, batch.mask)
        return {"ce": (1 - self.lam) * ce, "mmd": self.lam * losses.mmd2(f, taught, batch.mask)}

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Gives the trained model to the server; the own model becomes it, or takes it in."""
        trained = tree.pick(local_state, NET_PARTS)
        sent, kept = self.split_state(tree.drop(local_state, ("teacher",)))
        if self.variant == "inherit":
            trained = tree.lerp(trained, tree.branch(private, "personal"), self.momentum(client))
        return sent, {**kept, "personal": trained}

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Gives the own model, mixed with the global one as it would be at the start of this round."""
        own = tree.branch(private, "personal")
        if self.variant == "mix":
            own = tree.lerp(tree.pick(shared, NET_PARTS), own, self.momentum(client))
        return {**own, **tree.pick({**shared, **private}, ("batch_norm_stats",))}
