"""Per-example gradients: each example's gradient is clipped, and their sum gets noise (DP-SGD, Abadi et al. 2016)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from gpfl.core import tree
from gpfl.core.method import Batch, GradientResult, LossTerms, Objective, loss_gradient
from gpfl.core.net import Net
from gpfl.core.randomness import random_key
from gpfl.core.tree import Tree
from gpfl.defences.uploads import add_noise, clip_factor


@dataclass
class PerExampleGradient:
    """The gradient function of one step of local training under a defence of examples."""

    key: Tensor  # stream of the step's noise
    bound: float
    std: float
    calls: int = 0  # optimizer steps so far; each gets its own noise

    def __call__(self, net: Net, state: Tree, weights: Tree, objective: Objective, batch: Batch) -> GradientResult:
        """Return the mean of the examples' gradients, each clipped to `bound`, with noise of `std` on their sum."""

        def example_gradient(x: Tensor, y: Tensor) -> tuple[Tree, LossTerms, Tree]:
            example = Batch(x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(y, dtype=torch.float32).unsqueeze(0))
            result = loss_gradient(net, state, weights, objective, example)
            return result.gradient, result.terms, result.aux

        gradients, terms, aux = vmap(example_gradient)(batch.x, batch.y)
        # The compiler's ghost clipping pass knows this pattern: norms and weighted sums of flattened gradients.
        by_leaf = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in tree.leaves(gradients)]
        norms = torch.linalg.vector_norm(torch.stack(by_leaf), dim=0)  # (batch,)
        count = batch.mask.sum().clamp_min(1.0)
        factors = batch.mask * clip_factor(norms, self.bound) / count
        mean = tree.map_leaves(lambda leaf: torch.tensordot(factors, leaf, dims=1), gradients)
        if self.std:
            mean = add_noise(mean, torch.full_like(count, self.std) / count, random_key(self.key[0], self.key[1], self.calls))
        self.calls += 1
        means = {name: batch.mean(values) for name, values in terms.items()}
        return GradientResult(mean, means, {}, tree.map_leaves(lambda leaf: leaf.flatten(0, 1), aux))
