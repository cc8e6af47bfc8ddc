"""Transforms of a client's update, the difference between what it uploads and what it downloaded: clip, noise, compress."""

import math

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.randomness import normal, random_key, uniform
from gpfl.core.tree import Tree
from gpfl.defences.config import FULL_BITS, DefenceConfig

_MARGIN = 1 - 1e-6  # factor between clipped norms and the bound, so that rounding does not exceed it
_INDEX_BYTES = 4  # bytes of the index of an entry, and of the scale of a tensor


def clip_factor(norm: Tensor, bound: float) -> Tensor:
    """Return the factor that scales a norm to at most `bound`; 1 for a smaller norm."""
    return torch.where(norm > bound * _MARGIN, bound * _MARGIN / norm.clamp_min(1e-30), torch.ones_like(norm))


def l2_norm(update: Tree) -> Tensor:
    """Return the L2 norm over all leaves."""
    return torch.stack([leaf.square().sum() for leaf in tree.leaves(update)]).sum().sqrt()


def clip(update: Tree, bound: float) -> Tree:
    """Return the update scaled to an L2 norm of at most `bound`."""
    factor = clip_factor(l2_norm(update), bound)
    return tree.map_leaves(lambda leaf: factor * leaf, update)


def add_noise(update: Tree, std: float | Tensor, key: Tensor) -> Tree:
    """Return the update with N(0, std²) added to each entry; the noise of a leaf does not depend on the order of leaves."""
    flat, key = tree.flatten(update), random_key(key[0], key[1])
    return tree.unflatten_like(
        update, {path: leaf + std * normal(key, _seed_name(path), leaf.shape) for path, leaf in flat.items()}
    )


def keep_largest(update: Tree, fraction: float) -> Tree:
    """Return the update with all but the largest entries over all leaves set to 0."""
    flat = tree.flatten(update)
    entries = torch.cat([leaf.flatten() for leaf in flat.values()])
    count = _count_sent(len(entries), fraction)
    indices = torch.topk(entries.abs(), count, sorted=False).indices
    chosen = torch.zeros_like(entries).scatter(0, indices, torch.ones_like(entries[:count]))
    parts = torch.split(entries * chosen, [leaf.numel() for leaf in flat.values()])
    return tree.unflatten_like(update, {path: part.reshape(flat[path].shape) for path, part in zip(flat, parts, strict=True)})


def quantise(update: Tree, bits: int, key: Tensor | None) -> Tree:
    """Return the update with each entry on one of 2^bits − 1 even levels between ± the largest entry of its leaf.

    With a key entries are rounded up or down at random, so that they are unbiased; without one to the nearest level.
    """
    levels = float(2 ** (bits - 1) - 1)

    def quantise_leaf(path: str, leaf: Tensor) -> Tensor:
        largest = leaf.abs().max()
        scaled = leaf / largest.clamp_min(1e-30) * levels
        level = scaled.round() if key is None else (scaled + uniform(random_key(key[0], key[1], path), leaf.shape)).floor()
        return level.clamp(-levels, levels) / levels * largest

    return tree.unflatten_like(update, {path: quantise_leaf(path, leaf) for path, leaf in tree.flatten(update).items()})


def transform_upload(shared: Tree, upload: Tree, defence: DefenceConfig, std: float, key: Tensor) -> Tree:
    """Return an upload whose difference from `shared` is clipped, gets noise of `std`, and is compressed."""
    update = tree.map_leaves(torch.sub, upload, shared)
    if defence.clip:
        update = clip(update, defence.clip)
    if std:
        update = add_noise(update, std, random_key(key[0], key[1], "noise"))
    if defence.top_k < 1:
        update = keep_largest(update, defence.top_k)
    if defence.bits < FULL_BITS:
        update = quantise(
            update, defence.bits, random_key(key[0], key[1], "rounding") if defence.rounding == "stochastic" else None
        )
    return tree.map_leaves(torch.add, shared, update)


def compressed_bytes(upload: Tree, defence: DefenceConfig) -> int:
    """Return the bytes of an upload on the wire.

    A sparse update also sends the positions of its entries, as numbers of four bytes or as one bit for every entry,
    whichever is smaller. A quantised tensor also sends its scale.
    """
    sizes = [leaf.numel() for leaf in tree.leaves(upload)]
    if not defence.compresses or not sizes:
        return tree.count_bytes(upload)
    count = _count_sent(sum(sizes), defence.top_k)
    positions = min(_INDEX_BYTES * count, math.ceil(sum(sizes) / 8)) if defence.top_k < 1 else 0
    scales = _INDEX_BYTES * len(sizes) if defence.bits < FULL_BITS else 0
    return math.ceil(count * defence.bits / 8) + positions + scales


def _seed_name(path: str) -> str:
    """Return the name that selects the noise of a leaf; it stays the same when a part is renamed."""
    return path.replace("personal_head", "own_head")


def _count_sent(entries: int, fraction: float) -> int:
    return max(1, math.ceil(fraction * entries - 1e-9))
