"""Gradient matching: the gradient that dummy images would have given, as a function of the dummies, for many victims at once.

A dummy is an image in pixels from 0 to 1 and an output. Victims share the weights they are attacked at; each has a
gradient of its own to match. Functions here are for one victim; `torch.func.vmap` makes them many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.net import Model, Net
from gpfl.core.randomness import torch_generator
from gpfl.core.tree import Tree
from gpfl.privacy.gradient_targets import GradientTarget
from gpfl.privacy.server_view import ServerView

Pairing = Callable[[Tensor, Tensor], Tensor]


def squares(out: Tensor, wanted: Tensor) -> Tensor:
    """Gives the mean squared error to a guessed output: the paper's loss."""
    return F.mse_loss(out, wanted)


def cotangent(out: Tensor, direction: Tensor) -> Tensor:
    """Gives the product with a guessed cotangent: what any loss is to the weights below it."""
    return (out * direction).sum() / len(out)


def cross_entropy(out: Tensor, shares: Tensor) -> Tensor:
    """Gives the cross-entropy to labels given as shares of classes (rows, classes)."""
    return -(shares * F.log_softmax(out, -1)).sum(-1).mean()


@dataclass(frozen=True)
class Matching:
    """The function that maps a dummy to the gradient it would have given, at the weights that were sent."""

    net: Net
    view: GradientTarget
    known: Tree
    pairing: Pairing

    def gradient(self, image: Tensor, output: Tensor) -> Tree:
        """Gives the gradient of the view's parts for dummy images (rows, …) and outputs."""

        def loss(moving: Tree) -> Tensor:
            model = Model(self.net, {**self.known, **moving})
            return self.pairing(self.view.output(model, to_net(image)), output)

        moving = tree.pick(self.known, self.view.parts)
        gradient: Tree = torch.func.grad(loss)(moving)
        return gradient

    def output_like(self, image: Tensor) -> Tensor:
        """Gives the view's output for images of one victim."""
        return self.view.output(Model(self.net, self.known), to_net(image))

    def pull(self, image: Tensor, output: Tensor, gradient: Tree) -> Tensor:
        """Gives the direction in outputs that a gradient points to at some images: J·gradient."""
        pulled: Tensor = torch.func.grad(lambda output: dot(self.gradient(image, output), gradient))(output)
        return pulled


def to_net(image: Tensor) -> Tensor:
    """Gives pixels from 0 to 1 as nets take them, from -1 to 1."""
    return 2 * image - 1


def dot(a: Tree, b: Tree) -> Tensor:
    """Gives the inner product of two trees."""
    return torch.stack([(x * y).sum() for x, y in tree.zip_leaves(a, b)]).sum()


def apart(a: Tree, b: Tree) -> Tensor:
    """Gives the squared distance of two trees."""
    return torch.stack([(x - y).square().sum() for x, y in tree.zip_leaves(a, b)]).sum()


def cosine_distance(a: Tree, b: Tree) -> Tensor:
    """Gives one minus the cosine between two trees; 1 where one of them is zero."""
    lengths = dot(a, a).clamp_min(1e-30).sqrt() * dot(b, b).clamp_min(1e-30).sqrt()
    return 1 - dot(a, b) / lengths


def gradients_of(seen: Sequence[ServerView], view: GradientTarget) -> Tree:
    """Gives the gradients that are to be matched, stacked over victims."""
    return tree.stack([one.gradient(view.parts) for one in seen])


Key = tuple[int, ...]


def start_images(shape: Sequence[int], keys: Sequence[Key], seed: int) -> Tensor:
    """Gives the logits of the images an attack starts from, N(0, 1): a function of seed and key alone.

    A key ends with the number of the restart. Every second one starts from the negative of the one before: a search may end
    at the negative of an image, and from the negative of its start it then ends at the image.
    """
    drawn = [torch_generator(seed, "attack", *key[:-1], key[-1] // 2 * 2) for key in keys]
    signs = [-1 if key[-1] % 2 else 1 for key in keys]
    return torch.stack([sign * torch.randn(*shape, generator=one) for sign, one in zip(signs, drawn, strict=True)])


def start_outputs(shape: Sequence[int], keys: Sequence[Key], seed: int) -> Tensor:
    """Gives the outputs an attack starts from, N(0, 1)."""
    return torch.stack([torch.randn(*shape, generator=torch_generator(seed, "attack", *key, 1)) for key in keys])


def total_variation(image: Tensor) -> Tensor:
    """Gives the mean step between neighbouring pixels of images (rows, channels, height, width)."""
    across, down = image.diff(dim=-1).abs().mean(), image.diff(dim=-2).abs().mean()
    return across + down
