"""FedRep."""

from dataclasses import dataclass

from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.options import option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedRep(Method):
    """FedPer with head and base trained one after the other.

    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021. First the head ψ_i on
    the base φ as received, then the base under the new head:

        ψ_i ← ψ_i − η∇CE(ψ_i(φ(x)), y)
        φ ← φ − η∇CE(ψ_i(φ(x)), y)

    Deviation from the paper, as in PFLlib: one head epoch instead of ten (`head_epochs`).
    """

    name = "fedrep"
    shares = ("base",)

    head_epochs: int = option(1, "epochs of the head before the base", min=1, search=(1, 2, 5, 10))

    def phases(self) -> tuple[Phase, ...]:
        """Return the phase of the head, then that of the base."""
        return (Phase(self.head_step, self.head_epochs), Phase(self.base_step, self.epochs))

    def head_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train the head."""
        local_state, terms, _ = self.optimizer_step(shared, local_state, batch, client, parts=("head",))
        return local_state, {"head_ce": terms["ce"]}

    def base_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train the base."""
        return self.optimizer_step(shared, local_state, batch, client, parts=("base",))[:2]
