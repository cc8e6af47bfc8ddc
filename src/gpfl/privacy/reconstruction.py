"""Reconstruction of images from uploads; a `ServerView` is all that an attack knows of the run."""

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
from gpfl.privacy import dlg, geiping
from gpfl.privacy.gradient_matching import (
    GradientMatching,
    Key,
    cotangent_product,
    initial_logits,
    initial_outputs,
    soft_cross_entropy,
)
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

    `keys` select the random starts. Of several restarts the one with the smallest gradient distance is returned, without
    looking at the true images.
    """
    if attack not in ATTACKS:
        raise GpflError(f"unknown attack '{attack}'; {did_you_mean(attack, ATTACKS)}")
    net, target = views[0].method.net, select_target(views[0].method, target_name)
    gradients = tree.stack([view.gradient(target.parts) for view in views])
    labels = _infer_labels(views, target) if attack == "geiping" else None
    loss = F.mse_loss if attack == "dlg" else cotangent_product if labels is None else soft_cross_entropy
    matching = GradientMatching(net, target, views[0].weights, loss, config.iterations, config.graph)
    starts = [(*keys[upload], restart) for upload in range(len(views)) for restart in range(config.restarts)]
    width = config.n_concurrent or _fitting_searches(gradients, matching.weights)
    device = next(tree.leaves(gradients)).device

    def search(chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        uploads, chunk_starts = chunk // config.restarts, [starts[index] for index in chunk.tolist()]
        logits = initial_logits(shape, chunk_starts, config.seed).to(device)
        observed, images = tree.take(gradients, uploads), torch.sigmoid(logits)
        output_shape = matching.output_shape(images[0])
        if attack == "dlg":
            outputs = initial_outputs(output_shape, chunk_starts, config.seed).to(device)
            return *dlg.reconstruct(matching, observed, logits, outputs), logits
        if labels is None:
            return *geiping.reconstruct_with_cotangent(matching, observed, images), logits
        one_hot = (labels[uploads][..., None] == torch.arange(output_shape[-1], device=device)).to(logits.dtype)
        return *geiping.reconstruct(matching, observed, images, one_hot, free_output=False), logits

    images, distances, logits = _in_chunks(search, torch.arange(len(starts), device=device), width)
    distances = torch.nan_to_num(distances, nan=torch.inf).reshape(len(views), config.restarts)
    best = distances.argmin(1)
    uploads = torch.arange(len(views), device=device)

    def select(values: Tensor) -> Tensor:
        return values.reshape(len(views), config.restarts, *shape)[uploads, best]

    images, distances = select(images), distances[uploads, best]
    if attack == "geiping" and labels is None and shape[0] == 1:  # in a larger batch each image has its own sign

        def resolve(chunk: Tensor) -> tuple[Tensor, Tensor]:
            return geiping.resolve_sign(matching, tree.take(gradients, chunk), images[chunk], distances[chunk])

        images, distances = _in_chunks(resolve, uploads, width)
    return Reconstruction(images, distances, select(logits))


def _infer_labels(views: Sequence[ServerView], target: GradientTarget) -> Tensor | None:
    """Return the labels that uploads reveal (uploads, batch), if the loss of the target's output uses them."""
    labels = [guess_labels(view) for view in views] if target.knows_loss else [None]
    known = [each for each in labels if each is not None]
    return torch.stack(known) if len(known) == len(labels) else None


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
