"""Per-FedAvg."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.net import Net
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """A global model that one gradient step on a client's samples turns into its personal model.

    Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach,
    NeurIPS 2020, in its first-order form. A step takes two batches:

        w' = w − α∇CE(w; first batch)
        w ← w − β∇CE(w'; second batch)

    A client is evaluated after one step with rate α on its first training batch; the step is not kept. Deviations from the
    paper, as in PFLlib: β = η, and two passes over the samples per local epoch (`passes`), so that there are as many outer
    steps as FedAvg has steps.
    """

    name: ClassVar[str] = "perfedavg"

    alpha: float = option(
        BY_NET,
        "rate of the inner step, also of adaptation",
        symbol="α",
        typical="0.001 to 0.1",
        above=0.0,
        search=SearchRange(0.001, 0.1),
    )
    beta: float = option(
        BY_NET, "rate of the outer step", symbol="β", typical="0.001 to 0.1", above=0.0, search=SearchRange(0.001, 0.1)
    )
    passes: int = option(2, "passes over the rows in each local epoch", typical="1 or 2", min=1)

    def bind(self, net: Net, *, lr: float, epochs: int, batch_norm: str = "local") -> Self:
        """Gives the method for one net; α and β are the learning rate unless they were set."""
        alpha, beta = (lr if math.isnan(rate) else rate for rate in (self.alpha, self.beta))
        bound = super().bind(net, lr=lr, epochs=epochs, batch_norm=batch_norm)
        return bound.replace(alpha=alpha, beta=beta)

    def phases(self) -> tuple[Phase, ...]:
        """Gives passes whose steps take two batches; a client with fewer rows cannot take part."""
        return (Phase(self.step, self.epochs * self.passes, batches=2),)

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives w after the outer step, its gradient taken at w'."""
        first, second = halves(batch)
        inner, before, _ = self.optimizer_step(shared, local_state, first, client, lr=self.alpha)
        outer, after, _ = self.optimizer_step(shared, inner, second, client, lr=self.beta)

        def moved(w: Tensor, w_inner: Tensor, w_outer: Tensor) -> Tensor:
            return w + (w_outer - w_inner)

        weights = tree.map_leaves(moved, *(tree.pick(state, NET_PARTS) for state in (local_state, inner, outer)))
        return {**outer, **weights}, {"ce": before["ce"], "adapted_ce": after["ce"]}

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Gives the global model after one step on a batch of the client's training rows."""
        own, _, _ = self.optimizer_step(shared, {**shared, **private}, batch, client, lr=self.alpha)
        return own


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Gives the first and the second half of a batch's rows."""
    middle = batch.y.shape[0] // 2
    return Batch(*(field[:middle] for field in batch)), Batch(*(field[middle:] for field in batch))
