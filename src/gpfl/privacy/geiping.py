"""Inverting Gradients: cosine distance of gradients with total variation, minimised by signed Adam.

Geiping et al., Inverting Gradients – How easy is it to break privacy in federated learning?, NeurIPS 2020. If the loss of
the target's output is cross-entropy, the labels are inferred from the upload; otherwise the cotangent of the output is
searched along with the image. Pixels stay between 0 and 1.

Sign ambiguity: to a first layer, an image under a cotangent and the negative of both are nearly the same, so a search with
a free cotangent may end at the negative (nets with odd activations, such as tanh, are prone to it). Layers above and biases
do tell them apart, but no small step leads from one to the other: both are tried, and the smaller gradient distance
decides.
"""

import dataclasses

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.privacy.gradient_matching import GradientMatching, cosine_distance

IMAGE_STEP = 0.1  # step size in pixels, from 0 (black) to 1 (white)
OUTPUT_STEP = 0.05  # step size in units of the initial cotangent's root mean square
TV_WEIGHT = 1e-2  # weight of the total variation
STEP_DECAYS = (3 / 8, 5 / 8, 7 / 8)  # fractions of the iterations after which the step sizes shrink tenfold
BETAS = (0.9, 0.999)  # decay rates of Adam's moments
NEGATIVE_ITERATIONS = 1 / 4  # fraction of the iterations for which the search from the negative of an image runs


def reconstruct(
    matching: GradientMatching, gradients: Tree, image: Tensor, output: Tensor, *, free_output: bool
) -> tuple[Tensor, Tensor]:
    """Return the images (uploads, batch, …) and the cosine distances of their gradients from those observed.

    `image` and `output` are the start; the output changes only if it is free.
    """
    dummy: Tree = {"image": image.clone(), "output": output.clone()}
    variables = tuple(dummy) if free_output else ("image",)
    zeros: Tree = tree.map_leaves(torch.zeros_like, tree.pick(dummy, variables))
    state: Tree = {"dummy": dummy, "mean": zeros, "square": tree.clone(zeros), "done": torch.zeros((), device=image.device)}

    def objective(dummy: Tree, gradient: Tree) -> Tensor:
        x = tree.leaf(dummy, "image")
        distance = cosine_distance(matching.gradient(x, tree.leaf(dummy, "output")), gradient)
        total_variation = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
        return distance + TV_WEIGHT * total_variation

    def step(state: Tree, gradients: Tree) -> Tree:
        grads = torch.func.vmap(torch.func.grad(objective))(tree.branch(state, "dummy"), gradients)
        return _adam_step(state, tree.pick(grads, variables), matching.iterations)

    dummy = tree.branch(matching.run(step, state, gradients), "dummy")
    return tree.leaf(dummy, "image"), matching.distances(dummy, gradients)


def reconstruct_with_cotangent(matching: GradientMatching, gradients: Tree, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and distances, searching the cotangent of the output too, from J·gradient at the initial images."""
    zeros = torch.zeros(len(image), *matching.output_shape(image[0]), device=image.device)
    cotangent = torch.func.vmap(matching.project)(image, zeros, gradients).detach()
    size = cotangent.square().flatten(1).mean(1).sqrt().clamp_min(1e-30)
    output = cotangent / size.reshape(-1, *[1] * (cotangent.dim() - 1))
    return reconstruct(matching, gradients, image, output, free_output=True)


def resolve_sign(matching: GradientMatching, gradients: Tree, image: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return each image or the one that a search from its negative finds, whichever gradient is closer, with its distance."""
    shorter = dataclasses.replace(matching, iterations=max(1, round(NEGATIVE_ITERATIONS * matching.iterations)))
    other, its_distance = reconstruct_with_cotangent(shorter, gradients, 1 - image)
    closer = its_distance < distance
    return torch.where(closer.reshape(-1, *[1] * (image.dim() - 1)), other, image), torch.where(closer, its_distance, distance)


def _adam_step(state: Tree, grads: Tree, iterations: int) -> Tree:
    """Return the state after a step of Adam, on the signs of the image's gradient and on the output's gradient as it is."""
    done = tree.leaf(state, "done")
    decays = torch.stack([done >= share * iterations for share in STEP_DECAYS]).sum()
    rate = torch.pow(torch.full_like(done, 0.1), decays)
    dummy, mean, square = (dict(tree.branch(state, name)) for name in ("dummy", "mean", "square"))
    first, second = BETAS
    for name in grads:
        grad = tree.leaf(grads, name)
        grad = grad.sign() if name == "image" else grad
        m = first * tree.leaf(mean, name) + (1 - first) * grad
        v = second * tree.leaf(square, name) + (1 - second) * grad.square()
        size = (v / (1 - second ** (done + 1))).sqrt() + 1e-12
        step = IMAGE_STEP if name == "image" else OUTPUT_STEP
        moved = tree.leaf(dummy, name) - rate * step * m / (1 - first ** (done + 1)) / size
        dummy[name] = moved.clamp(0, 1) if name == "image" else moved
        mean[name], square[name] = m, v
    return {"dummy": dummy, "mean": mean, "square": square, "done": done + 1}
