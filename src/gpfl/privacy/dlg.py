"""Deep Leakage from Gradients: the squared distance of gradients under a dummy output, minimised by L-BFGS.

Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019, in the form of the GPFL paper: the loss is the mean squared
error to a dummy output that is reconstructed with the image, so the attack needs neither labels nor the client's loss.
Images are the sigmoid of logits, which keeps pixels between 0 and 1. Unlike the authors' code the attack uses the weights
that were sent, a gradient instead of a difference of weights, and the input range of the net.
"""

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.losses import squared_distance
from gpfl.core.tree import Tree
from gpfl.privacy import lbfgs
from gpfl.privacy.gradient_matching import GradientMatching, dot


def reconstruct(matching: GradientMatching, gradients: Tree, logits: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images (uploads, batch, …) and the cosine distances of their gradients from those observed.

    `logits` and `output` are the start. An iteration is one evaluation, line searches included. The squared distance is
    minimised relative to the squared norm of the observed gradient.
    """
    shape, pixels = logits.shape[1:], logits[0].numel()

    def unpack(point: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(point[:pixels].reshape(shape)), point[pixels:].reshape(output.shape[1:])

    def objective(point: Tensor, gradient: Tree) -> Tensor:
        return squared_distance(matching.gradient(*unpack(point)), gradient) / dot(gradient, gradient).clamp_min(1e-30)

    def evaluate(points: Tensor, gradients: Tree) -> tuple[Tensor, Tensor]:
        grads, values = torch.func.vmap(torch.func.grad_and_value(objective))(points, gradients)
        return grads, values

    def step(state: Tree, gradients: Tree) -> Tree:
        return lbfgs.step(state, lambda points: evaluate(points, gradients))

    start = torch.cat([logits.flatten(1), output.flatten(1)], 1)
    state = matching.run(step, lbfgs.init(start, lambda points: evaluate(points, gradients)), gradients)
    image, output = torch.func.vmap(unpack)(tree.leaf(state, "point"))
    return image, matching.distances({"image": image, "output": output}, gradients)
