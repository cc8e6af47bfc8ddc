"""The strong attack: cosine gradient matching with total variation, signed Adam, and restarts.

Geiping et al., Inverting Gradients – How easy is it to break privacy in federated learning?, NeurIPS 2020. Where the loss
on the view's output is cross-entropy, labels are those that the upload tells (see `labels`), else the cotangent of the
output is guessed along with the image. Images stay between black and white. Of the restarts the one whose gradient is
nearest is kept; nothing of the victim's image enters the choice.

To a first layer an image under a cotangent and the negative of both are nearly the same, so a search with a free cotangent
may end at the negative (nets with odd activations, such as tanh, are prone to it). Layers above and biases do tell, but no
small step leads from one to the other: both are tried, and the nearer gradient decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.privacy.matching import Matching, cosine_distance, total_variation
from gpfl.privacy.running import program

DECAYS = (3 / 8, 5 / 8, 7 / 8)
"""The shares of the iterations after which steps become ten times smaller."""
MOMENTS = (0.9, 0.999)
AFTER = 1 / 4
"""The share of the iterations for which the negative of a found image is searched."""


@dataclass(frozen=True, kw_only=True)
class Geiping:
    """The numbers of the attack."""

    iterations: int = 2000
    step: float = 0.1  # in pixels, white being 1
    output_step: float = 0.05  # in units of the guessed cotangent's length an entry
    smooth: float = 1e-2  # weight of the total variation
    graph: bool = False  # on a GPU: the step as a captured graph


def invert(matching: Matching, wanted: Tree, image: Tensor, output: Tensor, free: bool, how: Geiping) -> tuple[Tensor, Tensor]:
    """Gives the images (victims, rows, …) and how far their gradients are from those wanted, as one minus the cosine.

    `image` and `output` are where it starts; the output moves only where it is `free`.
    """
    guess: Tree = {"image": image.clone(), "output": output.clone()}
    moving = tuple(guess) if free else ("image",)
    zeros: Tree = tree.map_leaves(torch.zeros_like, tree.pick(guess, moving))
    done = torch.zeros((), device=image.device)
    state: Tree = {"guess": guess, "mean": zeros, "square": tree.clone(zeros), "done": done}

    def advance(state: Tree, fixed: Tree) -> Tree:
        slopes = torch.func.vmap(torch.func.grad(objective))(tree.branch(state, "guess"), fixed)
        return adam(state, tree.pick(slopes, moving), how)

    def objective(guess: Tree, wanted: Tree) -> Tensor:
        x = tree.leaf(guess, "image")
        far = cosine_distance(matching.gradient(x, tree.leaf(guess, "output")), wanted)
        return far + how.smooth * total_variation(x)

    running = program(advance, state, wanted, how.iterations, how.graph)
    for _ in range(how.iterations):
        running()
    found = tree.branch(running.state, "guess")
    return tree.leaf(found, "image"), distances(matching, found, wanted)


def invert_freely(matching: Matching, wanted: Tree, image: Tensor, how: Geiping) -> tuple[Tensor, Tensor]:
    """Gives images and distances where the cotangent of the output is searched too, from J·Δ at the start."""
    with torch.no_grad():
        zeros = torch.zeros_like(torch.func.vmap(matching.output_like)(image))
    pull = torch.func.vmap(matching.pull)(image, zeros, wanted).detach()
    size = pull.square().flatten(1).mean(1).sqrt().clamp_min(1e-30)
    return invert(matching, wanted, image, pull / size.reshape(-1, *[1] * (pull.dim() - 1)), True, how)


def settle_sign(matching: Matching, wanted: Tree, image: Tensor, far: Tensor, how: Geiping) -> tuple[Tensor, Tensor]:
    """Gives each found image, or what its negative leads to where the gradient is nearer there, and the distances."""
    shorter = replace(how, iterations=max(1, round(AFTER * how.iterations)))
    other, away = invert_freely(matching, wanted, 1 - image, shorter)
    nearer = away < far
    return torch.where(nearer.reshape(-1, *[1] * (image.dim() - 1)), other, image), torch.where(nearer, away, far)


def adam(state: Tree, slopes: Tree, how: Geiping) -> Tree:
    """Gives the state after one step of Adam: on the signs of an image's slopes, on an output's slopes as they are."""
    done = tree.leaf(state, "done")
    passed = torch.stack([done >= share * how.iterations for share in DECAYS]).sum()
    rate = torch.pow(torch.full_like(done, 0.1), passed)
    guess, mean, square = (dict(tree.branch(state, name)) for name in ("guess", "mean", "square"))
    first, second = MOMENTS
    for name in slopes:
        slope = tree.leaf(slopes, name)
        slope = slope.sign() if name == "image" else slope
        m = first * tree.leaf(mean, name) + (1 - first) * slope
        v = second * tree.leaf(square, name) + (1 - second) * slope.square()
        size = (v / (1 - second ** (done + 1))).sqrt() + 1e-12
        pace = how.step if name == "image" else how.output_step
        moved = tree.leaf(guess, name) - rate * pace * m / (1 - first ** (done + 1)) / size
        guess[name] = moved.clamp(0, 1) if name == "image" else moved
        mean[name], square[name] = m, v
    return {"guess": guess, "mean": mean, "square": square, "done": done + 1}


def distances(matching: Matching, guess: Tree, wanted: Tree) -> Tensor:
    """Gives how far the gradients of guesses are from those wanted, (victims,)."""

    def one(guess: Tree, wanted: Tree) -> Tensor:
        return cosine_distance(matching.gradient(tree.leaf(guess, "image"), tree.leaf(guess, "output")), wanted)

    with torch.no_grad():
        return torch.func.vmap(one)(guess, wanted)
