"""Gradient matching: the gradient of dummy images as a function of the images.

A dummy is an image with pixels from 0 to 1, and an output of the target function. The functions here are for the images of
one upload, (batch, channels, height, width); `torch.func.vmap` runs them for many uploads that share the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.net import Model, Net
from gpfl.core.randomness import torch_generator
from gpfl.core.tree import Tree
from gpfl.engine.compiler.program import Function, Program
from gpfl.privacy.gradient_targets import GradientTarget

Key = tuple[int, ...]  # what selects the random start of an attack; the last number is the restart

_TRACE_FROM = 50  # iterations above which tracing a step saves time


def cotangent_product(output: Tensor, cotangent: Tensor) -> Tensor:
    """Return the product with a dummy cotangent, which replaces any loss for the weights below the output."""
    return (output * cotangent).sum() / len(output)


def soft_cross_entropy(output: Tensor, probabilities: Tensor) -> Tensor:
    """Return the cross-entropy to label distributions, (batch, classes)."""
    return -(probabilities * F.log_softmax(output, -1)).sum(-1).mean()


@dataclass(frozen=True)
class GradientMatching:
    """A search for dummies whose gradient of a target, at the weights that the server sent, is the observed one."""

    net: Net
    target: GradientTarget
    weights: Tree
    loss: Callable[[Tensor, Tensor], Tensor]  # of the target's output for a dummy image, and the dummy output
    iterations: int = 1
    graph: bool = False  # whether steps run as a CUDA graph on a GPU

    def output(self, image: Tensor, parts: Tree | None = None) -> Tensor:
        """Return the target's output for images, with other weights of its parts if they are given."""
        return self.target.output(Model(self.net, {**self.weights, **(parts or {})}), 2 * image - 1)

    def output_shape(self, image: Tensor) -> torch.Size:
        """Return the shape of the target's output for the images of one upload."""
        with torch.no_grad():
            return self.output(image).shape

    def gradient(self, image: Tensor, output: Tensor) -> Tree:
        """Return the gradient of the target's parts for dummy images and outputs."""

        def loss(parts: Tree) -> Tensor:
            return self.loss(self.output(image, parts), output)

        gradient: Tree = torch.func.grad(loss)(tree.pick(self.weights, self.target.parts))
        return gradient

    def project(self, image: Tensor, output: Tensor, gradient: Tree) -> Tensor:
        """Return the direction in output space that a gradient points to for these images: J·gradient."""
        projected: Tensor = torch.func.grad(lambda output: dot(self.gradient(image, output), gradient))(output)
        return projected

    def distances(self, dummies: Tree, gradients: Tree) -> Tensor:
        """Return the cosine distance between the gradients of dummies and those observed, (uploads,)."""

        def distance(dummy: Tree, gradient: Tree) -> Tensor:
            return cosine_distance(self.gradient(tree.leaf(dummy, "image"), tree.leaf(dummy, "output")), gradient)

        with torch.no_grad():
            return torch.func.vmap(distance)(dummies, gradients)

    def run(self, step: Function, state: Tree, gradients: Tree) -> Tree:
        """Return the state after all iterations, traced on a CPU, and on a GPU if they run as a CUDA graph."""
        device = tree.device_of(state)
        on_gpu = device is not None and device.type == "cuda"
        program = Program(step, state, gradients, traced=self.iterations > _TRACE_FROM and (self.graph or not on_gpu))
        for _ in range(self.iterations):
            program()
        result: Tree = program.state
        return result


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product of two trees."""
    return torch.stack([(x * y).sum() for x, y in tree.zip_leaves(a, b)]).sum()


def cosine_distance(a: Tree, b: Tree) -> Tensor:
    """Return one minus the cosine similarity of two trees; 1 if one of them is zero."""
    lengths = dot(a, a).clamp_min(1e-30).sqrt() * dot(b, b).clamp_min(1e-30).sqrt()
    return 1 - dot(a, b) / lengths


def initial_logits(shape: Sequence[int], keys: Sequence[Key], seed: int) -> Tensor:
    """Return the logits of the images that an attack starts from, N(0, 1), which depend on seed and key alone.

    Every second restart begins at the negative of the one before: where one search ends at the negative of an image, the
    other then ends at the image.
    """
    rngs = [torch_generator(seed, "attack", *key[:-1], key[-1] // 2 * 2) for key in keys]
    signs = [-1 if key[-1] % 2 else 1 for key in keys]
    return torch.stack([sign * torch.randn(*shape, generator=rng) for sign, rng in zip(signs, rngs, strict=True)])


def initial_outputs(shape: Sequence[int], keys: Sequence[Key], seed: int) -> Tensor:
    """Return the outputs that an attack starts from, N(0, 1)."""
    return torch.stack([torch.randn(*shape, generator=torch_generator(seed, "attack", *key, 1)) for key in keys])
