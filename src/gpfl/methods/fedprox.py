"""FedProx."""

from dataclasses import dataclass

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.options import SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """FedAvg with a proximal term that keeps local training near the global model.

    Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. With w^t, the weights as received:

        L = CE(w) + μ/2 ‖w − w^t‖²

    Every client is evaluated with the global model. Deviation from the paper, as in PFLlib: slow clients are not simulated, so
    all train the same number of epochs.
    """

    name = "fedprox"

    mu: float = option(
        0.001,
        "weight of the proximal term",
        symbol="μ",
        min=0.0,
        search=SearchRange(0.001, 1),
        disabled_by=(0.0, "FedProx without its proximal term is FedAvg"),
    )

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return the cross-entropy and the proximal term."""
        terms = super().loss(model, shared, batch, client)
        terms["proximal"] = self.mu / 2 * losses.squared_distance(model.weights, tree.pick(shared, NET_PARTS))
        return terms
