"""FedAvg with local fine-tuning."""

from dataclasses import dataclass

from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(Method):
    """FedAvg, whose global model each client fine-tunes on its own samples before it is evaluated.

    Wang et al., Federated Evaluation of On-device Personalization, 2019. Training is FedAvg's. The personal model v_i starts
    from the global model w and takes k epochs over the training samples of client i, which move the whole net, the head or
    the base:

        v_i ← w
        v_i ← v_i − η_ft ∇CE(v_i; batch)

    v_i is neither sent nor trained further.
    """

    name = "fedavg-ft"

    ft_epochs: int = option(
        5,
        "epochs of fine-tuning before an evaluation",
        symbol="k",
        min=0,
        search=(1, 2, 5, 10, 20),
        disabled_by=(0, "the method would be FedAvg"),
    )
    ft_parts: str = option("all", "parts of the net that fine-tuning moves", choices=("all", "head", "base"))
    ft_lr: float = option(BY_NET, "learning rate of fine-tuning", symbol="η_ft", above=0.0, search=SearchRange(0.0005, 0.1))

    def final_phases(self) -> tuple[Phase, ...]:
        """Return the epochs of fine-tuning."""
        return (Phase(self.finetuning_step, self.ft_epochs),) if self.ft_epochs else ()

    def finetuning_step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train the parts that fine-tuning moves."""
        parts = NET_PARTS if self.ft_parts == "all" else (self.ft_parts,)
        return self.optimizer_step(shared, local_state, batch, client, parts=parts, lr=self.ft_lr)[:2]
