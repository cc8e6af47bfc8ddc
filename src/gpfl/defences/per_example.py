"""Per-example gradients: each sample's gradient is clipped, and their sum gets noise (DP-SGD, Abadi et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from gpfl.core import losses, tree
from gpfl.core.method import Batch, GradientResult, LossTerms, Objective, loss_gradient
from gpfl.core.net import Model, Net
from gpfl.core.randomness import random_key
from gpfl.core.tree import Tree
from gpfl.defences.uploads import noisy, shrink


@dataclass
class PerExampleGradient:
    """The gradient function of one step of local training: clips each sample's gradient and adds noise to their sum."""

    key: Tensor  # stream of the step's noise
    bound: float
    std: float
    calls: int = 0  # optimizer steps so far; each has its own noise
    coupling: dict[str, float] | None = (
        None  # by term: how far the batch's is from the mean of its samples'; None: not computed
    )

    def __call__(self, net: Net, state: Tree, weights: Tree, objective: Objective, batch: Batch) -> GradientResult:
        """Return the mean of the samples' gradients, each no longer than `bound`, with noise of `std` on their sum."""

        def gradient_of(x: Tensor, y: Tensor) -> tuple[Tree, LossTerms, Tree]:
            sample = Batch(x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(y, dtype=torch.float32).unsqueeze(0))
            result = loss_gradient(net, state, weights, objective, sample)
            return result.gradient, result.terms, result.aux

        gradients, terms, aux = vmap(gradient_of)(batch.x, batch.y)
        by_leaf = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in tree.leaves(gradients)]
        norms = torch.linalg.vector_norm(torch.stack(by_leaf), dim=0)  # (batch,)
        count = batch.mask.sum().clamp_min(1.0)
        factors = batch.mask * shrink(norms, self.bound) / count
        mean = tree.map_leaves(lambda leaf: torch.tensordot(factors, leaf, dims=1), gradients)
        if self.std:
            mean = noisy(mean, torch.full_like(count, self.std) / count, random_key(self.key[0], self.key[1], self.calls))
        self.calls += 1
        means = {name: losses.masked_mean(values, batch.mask) for name, values in terms.items()}
        if self.coupling is not None:
            model = Model(net, {**state, **weights}, training=True)
            self._record_coupling(objective(model, batch), means)
        return GradientResult(mean, means, {}, tree.map_leaves(lambda leaf: leaf.flatten(0, 1), aux))

    def _record_coupling(self, of_batch: LossTerms, means: LossTerms) -> None:
        assert self.coupling is not None
        for name, value in of_batch.items():
            difference = float((value - means[name]).abs() / (value.abs() + means[name].abs()).clamp_min(1e-12))
            self.coupling[name] = max(difference, self.coupling.get(name, 0.0))
