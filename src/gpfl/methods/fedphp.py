"""FedPHP."""

from dataclasses import dataclass

from torch import Tensor

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedPHP(Method):
    """A personal model mixed from round to round, and a loss that keeps features close to those of a teacher.

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

    name = "fedphp"

    mu: float = option(
        0.9,
        "momentum of the personal model in the last round",
        symbol="μ",
        typical="0.5 to 0.9",
        min=0.0,
        max=1.0,
        search=SearchRange(0.5, 0.99, log=False),
    )
    lam: float = option(
        0.01,
        "weight of the distance between features",
        symbol="λ",
        typical="0.01 to 0.1",
        min=0.0,
        max=1.0,
        search=SearchRange(0.001, 0.5),
        disabled_by=(1.0, "the cross-entropy would have weight 0"),
    )
    variant: str = option(
        "mix", "'mix' = start from a mix of both models (authors' code), 'inherit' = original", choices=("mix", "inherit")
    )

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return the global model, and a personal model equal to it."""
        shared, private = super().init(seed)
        return shared, {**private, "personal": tree.clone(tree.pick(shared, NET_PARTS))}

    def momentum(self, client: ClientInfo) -> Tensor:
        """Return m of the round."""
        return self.mu * (client.round / client.total_rounds).clamp_max(1.0)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the model that training starts from, and the teacher of the round."""
        w, personal = tree.pick(shared, NET_PARTS), tree.branch(private, "personal")
        statistics = tree.pick({**shared, **private}, ("batch_norm_stats",))
        if self.variant == "mix":
            return {**tree.lerp(w, personal, self.momentum(client)), **statistics, "teacher": {**w, **statistics}}
        return {**w, **statistics, "teacher": {**personal, **statistics}}

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the weighted cross-entropy, and the distance to the distribution of the teacher's features."""
        f = model("base", batch.x)  # (batch, width)
        target = Model(self.net, model["teacher"])("base", batch.x)
        ce = batch.cross_entropy(model("head", f))
        return {"ce": (1 - self.lam) * ce, "mmd": self.lam * losses.squared_mmd(f, target, batch.mask)}

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return the trained model for the server, and the personal model."""
        trained = tree.pick(local_state, NET_PARTS)
        upload, new_private = self.split_state(tree.drop(local_state, ("teacher",)))
        if self.variant == "inherit":
            trained = tree.lerp(trained, tree.branch(private, "personal"), self.momentum(client))
        return upload, {**new_private, "personal": trained}

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return the personal model, mixed with the global one as at the start of the round."""
        personal = tree.branch(private, "personal")
        if self.variant == "mix":
            personal = tree.lerp(tree.pick(shared, NET_PARTS), personal, self.momentum(client))
        return {**personal, **tree.pick({**shared, **private}, ("batch_norm_stats",))}
