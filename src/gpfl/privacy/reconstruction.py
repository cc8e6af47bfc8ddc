"""Reconstruction of images from uploads; a `ServerView` is all that an attack knows of the run."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.options import option
from gpfl.core.randomness import MAX_SEED
from gpfl.core.tree import Tree
from gpfl.errors import GpflError, did_you_mean
from gpfl.privacy import dlg, geiping, gradient_matching
from gpfl.privacy.gradient_matching import GradientMatching, Key, cotangent_product
from gpfl.privacy.gradient_targets import GradientTarget, select_target
from gpfl.privacy.label_inference import guess_labels
from gpfl.privacy.server_view import ServerView

ATTACKS = ("dlg", "geiping")

_CPU_CONCURRENCY = 16  # searches that run at once on a CPU
_GRADIENTS_PER_SEARCH = 16  # approximate number of gradients in memory per search on a GPU


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """Effort of an attack."""

    iterations: int = option(2000, "iterations of an attack", min=1)
    restarts: int = option(2, "random starts; the best match is kept", min=1)
    seed: int = option(0, "seed of images and random starts", min=0, max=MAX_SEED)
    graph: bool = option(False, "on a GPU, run attacks as a CUDA graph, which is faster")
    n_concurrent: int = 0  # searches (batches times restarts) that run at once; 0 = as many as fit in memory


class Reconstruction(NamedTuple):
    """Result of an attack for each upload."""

    images: Tensor  # (uploads, batch, channels, height, width)
    distances: Tensor  # (uploads,), cosine distance of the gradients
    initial_logits: Tensor  # of the images that the best restart began with


def reconstruct(
    views: Sequence[ServerView], target_name: str, attack: str, shape: Sequence[int], keys: Sequence[Key], config: AttackConfig
) -> Reconstruction:
    """Reconstruct the images of uploads that were sent the same weights, in batches of a shape.

    Of several restarts, whose random starts `keys` select, the one with the smallest gradient distance is returned; nothing of
    the true images enters the choice.
    """
    if attack not in ATTACKS:
        raise GpflError(f"unknown attack '{attack}'; {did_you_mean(attack, ATTACKS)}")
    target = select_target(views[0].method, target_name)
    gradients = gradient_matching.observed_gradients(views, target)
    matching = GradientMatching(views[0].method.net, target, views[0].weights, F.mse_loss)
    labels = _infer_labels(views, target) if attack == "geiping" else None
    starts = [(*keys[upload], restart) for upload in range(len(views)) for restart in range(config.restarts)]
    width = config.n_concurrent or _fitting_searches(gradients, matching.weights)
    device = next(tree.leaves(gradients)).device

    def search(chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        uploads, chunk_starts = chunk // config.restarts, [starts[index] for index in chunk.tolist()]
        logits = gradient_matching.initial_logits(shape, chunk_starts, config.seed).to(device)
        chunk_labels = None if labels is None else labels[uploads]
        return *_search(matching, attack, tree.take(gradients, uploads), logits, chunk_starts, chunk_labels, config), logits

    images, distances, logits = _in_chunks(search, torch.arange(len(starts), device=device), width)
    distances = torch.nan_to_num(distances, nan=torch.inf).reshape(len(views), config.restarts)
    best = distances.argmin(1)
    uploads = torch.arange(len(views), device=device)

    def select(values: Tensor) -> Tensor:
        return values.reshape(len(views), config.restarts, *shape)[uploads, best]

    images, distances = select(images), distances[uploads, best]
    if attack == "geiping" and labels is None and shape[0] == 1:  # in a larger batch each image has its own sign
        matching = dataclasses.replace(matching, loss=cotangent_product)

        def resolve(chunk: Tensor) -> tuple[Tensor, Tensor]:
            start = tree.take(gradients, chunk), images[chunk], distances[chunk]
            return geiping.resolve_sign(matching, *start, iterations=config.iterations, graph=config.graph)

        images, distances = _in_chunks(resolve, uploads, width)
    return Reconstruction(images, distances, select(logits))


def _infer_labels(views: Sequence[ServerView], target: GradientTarget) -> Tensor | None:
    """Return the labels that uploads reveal (uploads, batch), if the loss of the target's output uses them."""
    labels = [guess_labels(view) for view in views] if target.knows_loss else [None]
    known = [each for each in labels if each is not None]
    return torch.stack(known) if len(known) == len(labels) else None


def _search(
    matching: GradientMatching,
    attack: str,
    gradients: Tree,
    logits: Tensor,
    starts: Sequence[Key],
    labels: Tensor | None,
    config: AttackConfig,
) -> tuple[Tensor, Tensor]:
    images, iterations, graph = torch.sigmoid(logits), config.iterations, config.graph
    with torch.no_grad():
        outputs = torch.func.vmap(matching.output)(images)
    if attack == "dlg":
        dummies = gradient_matching.initial_outputs(outputs.shape[1:], starts, config.seed).to(logits.device)
        return dlg.reconstruct(matching, gradients, logits, dummies, iterations=iterations, graph=graph)
    if labels is None:
        matching = dataclasses.replace(matching, loss=cotangent_product)
        return geiping.reconstruct_with_cotangent(matching, gradients, images, iterations=iterations, graph=graph)
    matching = dataclasses.replace(matching, loss=gradient_matching.soft_cross_entropy)
    one_hot = (labels[..., None] == torch.arange(outputs.shape[-1], device=logits.device)).to(logits.dtype)
    return geiping.reconstruct(matching, gradients, images, one_hot, iterations=iterations, free_output=False, graph=graph)


def _in_chunks(search: Callable[[Tensor], tuple[Tensor, ...]], indices: Tensor, width: int) -> tuple[Tensor, ...]:
    results = [search(chunk) for chunk in torch.split(indices, width)]
    return tuple(torch.cat(values) for values in zip(*results, strict=True))


def _fitting_searches(gradients: Tree, weights: Tree) -> int:
    """Return how many searches to run at once: as many as half of a GPU's free memory holds."""
    device = tree.device_of(weights) or torch.device("cpu")
    if device.type != "cuda":
        return _CPU_CONCURRENCY
    per_search = tree.count_bytes(tree.take(gradients, 0)) * _GRADIENTS_PER_SEARCH + (64 << 20)
    free, _ = torch.cuda.mem_get_info(device)
    return int(max(1, min(1024, free // 2 // per_search)))
