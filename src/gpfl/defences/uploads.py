"""What is done to one client's update, the difference of what it sends from what it was sent: clip, noise, fewer bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.randomness import normal, random_key, uniform
from gpfl.core.tree import Tree
from gpfl.defences.config import WHOLE, DefenceConfig

INSIDE = 1 - 1e-6
"""What is clipped ends this much within the bound, so that rounding does not carry it out."""
INDEX = 4
"""Bytes of an entry's place, and of the scale of a tensor."""


def length(update: Tree) -> Tensor:
    """Gives the L2 norm of all leaves together."""
    return torch.stack([leaf.square().sum() for leaf in tree.leaves(update)]).sum().sqrt()


def shrink(norm: Tensor, bound: float) -> Tensor:
    """Gives the factor that brings a length to at most `bound`; 1 where it is."""
    return torch.where(norm > bound * INSIDE, bound * INSIDE / norm.clamp_min(1e-30), torch.ones_like(norm))


def clipped(update: Tree, bound: float) -> Tree:
    """Gives the update, no longer than `bound`."""
    factor = shrink(length(update), bound)
    return tree.map_leaves(lambda leaf: factor * leaf, update)


def noisy(update: Tree, std: float | Tensor, key: Tensor) -> Tree:
    """Gives the update with N(0, std²) added to each entry; every leaf has a stream of its own, whatever their order."""
    flat, own = tree.flatten(update), random_key(key[0], key[1])
    drawn = {path: leaf + std * normal(own, path, leaf.shape) for path, leaf in flat.items()}
    return tree.filled(update, drawn)


def largest(update: Tree, share: float) -> Tree:
    """Gives the update with its largest entries alone, of all leaves together; the others are 0."""
    flat = tree.flatten(update)
    entries = torch.cat([leaf.flatten() for leaf in flat.values()])
    count = kept_entries(len(entries), share)
    places = torch.topk(entries.abs(), count, sorted=False).indices
    chosen = torch.zeros_like(entries).scatter(0, places, torch.ones_like(entries[:count]))
    parts = torch.split(entries * chosen, [leaf.numel() for leaf in flat.values()])
    return tree.filled(update, {path: part.reshape(flat[path].shape) for path, part in zip(flat, parts, strict=True)})


def kept_entries(entries: int, share: float) -> int:
    """Gives how many of so many entries are sent."""
    return max(1, math.ceil(share * entries - 1e-9))


def rounded(update: Tree, bits: int, key: Tensor | None) -> Tree:
    """Gives the update with every entry one of 2^bits − 1 even levels between plus and minus its leaf's largest.

    With a key an entry goes up or down by chance, so that it is right on average; without one to the nearest level.
    """
    levels = float(2 ** (bits - 1) - 1)
    flat = tree.flatten(update)

    def leveled(path: str, leaf: Tensor) -> Tensor:
        largest = leaf.abs().max()
        scaled = leaf / largest.clamp_min(1e-30) * levels
        whole = scaled.round() if key is None else (scaled + uniform(random_key(key[0], key[1], path), leaf.shape)).floor()
        return whole.clamp(-levels, levels) / levels * largest

    return tree.filled(update, {path: leveled(path, leaf) for path, leaf in flat.items()})


def protected(sent: Tree, upload: Tree, defence: DefenceConfig, std: float, key: Tensor) -> Tree:
    """Gives an upload under a defence: the update is clipped, noise of `std` is added, then it is made smaller."""
    update = tree.map_leaves(torch.sub, upload, sent)
    if defence.clip:
        update = clipped(update, defence.clip)
    if std:
        update = noisy(update, std, random_key(key[0], key[1], "noise"))
    if defence.top_k < 1:
        update = largest(update, defence.top_k)
    if defence.bits < WHOLE:
        chance = random_key(key[0], key[1], "rounding") if defence.rounding == "stochastic" else None
        update = rounded(update, defence.bits, chance)
    return tree.map_leaves(torch.add, sent, update)


def wire_bytes(upload: Tree, defence: DefenceConfig) -> int:
    """Gives the bytes of an upload on the wire.

    Of few entries the places are sent too: as numbers of four bytes, or a bit for every entry, whichever is less. Levels
    take their bits, and each tensor a scale.
    """
    sizes = [leaf.numel() for leaf in tree.leaves(upload)]
    if not defence.compresses or not sizes:
        return tree.count_bytes(upload)
    count = kept_entries(sum(sizes), defence.top_k)
    places = min(INDEX * count, math.ceil(sum(sizes) / 8)) if defence.top_k < 1 else 0
    scales = INDEX * len(sizes) if defence.bits < WHOLE else 0
    return math.ceil(count * defence.bits / 8) + places + scales
