"""Deep Leakage from Gradients: the squared distance of gradients under a dummy output, minimised by L-BFGS.

Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019, in the paper's form: the loss is the mean squared error to a
dummy output that is rebuilt along with the image, so neither labels nor the client's loss are needed. Images are the
sigmoid of what is searched, so they stay between black and white. Unlike the authors' code it attacks at the weights that were
sent, with a gradient and not a difference of weights, in the range that nets are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.privacy import lbfgs
from gpfl.privacy.geiping import distances
from gpfl.privacy.matching import Matching, apart, dot
from gpfl.privacy.running import program


@dataclass(frozen=True, kw_only=True)
class DLG:
    """The numbers of the attack."""

    iterations: int = 2000  # evaluations, those of the line search included
    graph: bool = False  # on a GPU: the step as a captured graph


def invert(matching: Matching, wanted: Tree, logits: Tensor, output: Tensor, how: DLG) -> tuple[Tensor, Tensor]:
    """Gives the images (victims, rows, …) and how far their gradients are from those wanted, as one minus the cosine.

    `logits` are those of the images at the start. Distances are searched relative to the length of what is wanted.
    """
    shape, cut = logits.shape[1:], logits[0].numel()

    def unpacked(point: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(point[:cut].reshape(shape)), point[cut:].reshape(output.shape[1:])

    def objective(point: Tensor, wanted: Tree) -> Tensor:
        return apart(matching.gradient(*unpacked(point)), wanted) / dot(wanted, wanted).clamp_min(1e-30)

    def evaluate(points: Tensor, wanted: Tree) -> tuple[Tensor, Tensor]:
        slopes, values = torch.func.vmap(torch.func.grad_and_value(objective))(points, wanted)
        return slopes, values

    start = torch.cat([logits.flatten(1), output.flatten(1)], 1)
    state = lbfgs.begin(start, lambda points: evaluate(points, wanted))

    def advance(state: Tree, wanted: Tree) -> Tree:
        return lbfgs.advance(state, lambda points: evaluate(points, wanted))

    running = program(advance, state, wanted, how.iterations, how.graph)
    for _ in range(how.iterations):
        running()
    image, found = torch.func.vmap(unpacked)(tree.leaf(running.state, "point"))
    return image, distances(matching, {"image": image, "output": found}, wanted)
