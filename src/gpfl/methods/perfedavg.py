"""Per-FedAvg."""

from dataclasses import dataclass

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """A global model that becomes a client's personal model by one gradient step on its samples.

    Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach,
    NeurIPS 2020, in its first-order form. A step takes two batches:

        w' = w − α∇CE(w; first batch)
        w ← w − β∇CE(w'; second batch)

    A client is evaluated after one step with rate α on its first training batch; the step is not kept. Deviations from the
    paper, as in PFLlib: β = η, and two passes over the samples per local epoch (`passes`), so that there are as many outer
    steps as FedAvg has steps.
    """

    name = "perfedavg"

    alpha: float = option(
        BY_NET, "learning rate of the inner step and of adaptation", symbol="α", above=0.0, search=SearchRange(0.001, 0.1)
    )
    beta: float = option(BY_NET, "learning rate of the outer step", symbol="β", above=0.0, search=SearchRange(0.001, 0.1))
    passes: int = option(2, "passes over the samples in each local epoch", typical="1 or 2", min=1)

    def phases(self) -> tuple[Phase, ...]:
        """Return one phase whose steps take two batches; a client with fewer samples cannot train."""
        return (Phase(self.step, self.epochs * self.passes, batches=2),)

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Update w with the gradient at w'."""
        middle = batch.y.shape[0] // 2
        first, second = Batch(*(field[:middle] for field in batch)), Batch(*(field[middle:] for field in batch))
        inner, before, _ = self.optimizer_step(shared, local_state, first, client, lr=self.alpha)
        outer, after, _ = self.optimizer_step(shared, inner, second, client, lr=self.beta)
        states = (tree.pick(state, NET_PARTS) for state in (local_state, inner, outer))
        weights = tree.map_leaves(lambda w, w_inner, w_outer: w + (w_outer - w_inner), *states)
        return {**outer, **weights}, {"ce": before["ce"], "adapted_ce": after["ce"]}

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return the global model after one step on a training batch of the client."""
        return self.optimizer_step(shared, {**shared, **private}, batch, client, lr=self.alpha).state
