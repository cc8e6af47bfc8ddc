"""Arithmetic on trees: nested dicts of tensors, the one form in which state is held, sent and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, Union

import torch
from torch import Tensor

Tree: TypeAlias = dict[str, Union["Tree", Tensor]]

SEPARATOR = "/"


def map_leaves(function: Callable[..., Tensor], first: Tree, *others: Tree) -> Tree:
    """Gives the tree of `function(leaf, …)` over trees of the same shape."""
    out: Tree = {}
    for key, value in first.items():
        rest = [other[key] for other in others]
        if isinstance(value, dict):
            out[key] = map_leaves(function, value, *rest)  # type: ignore[arg-type]
        else:
            out[key] = function(value, *rest)
    return out


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Gives every tensor of the tree, in the order of its keys."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def pairs(first: Tree, second: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    """Gives the tensors of two trees of the same names two by two, whatever the order of their keys."""
    if first.keys() != second.keys():
        raise KeyError(f"trees of different shape: {sorted(first.keys() ^ second.keys())}")
    for key, value in first.items():
        if isinstance(value, dict):
            yield from pairs(value, branch(second, key))
        else:
            yield value, leaf(second, key)


def branch(tree: Tree, key: str) -> Tree:
    """Gives the subtree under `key`."""
    value = tree[key]
    if not isinstance(value, dict):
        raise TypeError(f"'{key}' is a tensor, not a subtree")
    return value


def leaf(tree: Tree, key: str) -> Tensor:
    """Gives the tensor under `key`."""
    value = tree[key]
    if isinstance(value, dict):
        raise TypeError(f"'{key}' is a subtree, not a tensor")
    return value


def pick(tree: Tree, keys: Sequence[str]) -> Tree:
    """Gives the part of the tree under those of `keys` that it has."""
    return {key: tree[key] for key in keys if key in tree}


def drop(tree: Tree, keys: Sequence[str]) -> Tree:
    """Gives the tree without `keys`."""
    return {key: value for key, value in tree.items() if key not in keys}


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Gives one flat dict, paths joined by '/'; the form that safetensors takes."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}{SEPARATOR}"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Gives the tree back that `flatten` made flat (branches without a tensor are gone)."""
    out: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(SEPARATOR)
        here = out
        for parent in parents:
            here = here.setdefault(parent, {})  # type: ignore[assignment]
        here[name] = value
    return out


def filled(like: Tree, flat: dict[str, Tensor], prefix: str = "") -> Tree:
    """Gives the tree that has the branches of `like`, those without a tensor too, and the tensors of a flat dict."""
    out: Tree = {}
    for key, value in like.items():
        path = f"{prefix}{key}"
        out[key] = filled(value, flat, f"{path}{SEPARATOR}") if isinstance(value, dict) else flat[path]
    return out


def repeat(tree: Tree, times: int) -> Tree:
    """Gives `times` equal copies stacked on a new first axis."""
    return map_leaves(lambda t: t.unsqueeze(0).repeat(times, *[1] * t.dim()), tree)


def copy(tree: Tree) -> Tree:
    """Gives the same values in memory of their own."""
    return map_leaves(torch.clone, tree)


def lerp(a: Tree, b: Tree, share: Tensor) -> Tree:
    """Gives (1 − share)·a + share·b."""
    return map_leaves(lambda x, y: (1 - share) * x + share * y, a, b)


def stack(trees: Sequence[Tree]) -> Tree:
    """Gives the trees stacked on a new first axis."""
    return map_leaves(lambda *ts: torch.stack(ts), trees[0], *trees[1:])


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Gives stacked trees joined along their first axis."""
    return trees[0] if len(trees) == 1 else map_leaves(lambda *ts: torch.cat(ts), trees[0], *trees[1:])


def take(tree: Tree, index: int | slice | Tensor) -> Tree:
    """Gives the entries `index` of every leaf's first axis."""
    return map_leaves(lambda t: t[index], tree)


def fetch(tree: Tree, places: Sequence[int], device: torch.device) -> Tree:
    """Gives the entries of a tree that may lie elsewhere on `device`; from pinned memory without waiting for the copy."""
    if not tree:
        return tree
    home = device_of(tree) or device
    index = torch.as_tensor(list(places), dtype=torch.int64, device=home)
    if home == device:
        return take(tree, index)
    pinned = device.type == "cuda"
    return map_leaves(lambda t: (t[index].pin_memory() if pinned else t[index]).to(device, non_blocking=pinned), tree)


def device_of(tree: Tree) -> torch.device | None:
    """Gives the device of the tree's tensors, or nothing where it has none."""
    first = next(leaves(tree), None)
    return None if first is None else first.device


def put_(tree: Tree, index: Tensor, values: Tree) -> None:
    """Writes `values` over the entries `index` of the first axis, in place: private state can be larger than a copy allows."""
    targets, sources = flatten(tree), flatten(values)
    if targets.keys() != sources.keys():
        raise KeyError(f"trees of different shape: {sorted(targets.keys() ^ sources.keys())}")
    for path, target in targets.items():
        target.index_copy_(0, index, sources[path])


def put_all_(tree: Tree, values: Tree) -> None:
    """Writes the values of another tree of the same shape into the memory of this one."""
    for target, source in pairs(tree, values):
        target.copy_(source)


def count_bytes(tree: Tree) -> int:
    """Gives the bytes that the tree takes on the wire."""
    return sum(t.numel() * t.element_size() for t in leaves(tree))


def norm(tree: Tree) -> Tensor:
    """Return the L2 norm of all leaves together."""
    length: Tensor = torch.linalg.vector_norm(torch.cat([t.flatten() for t in leaves(tree)]))
    return length


def finite(tree: Tree) -> bool:
    """Tells whether no leaf holds NaN or infinity."""
    return all(bool(torch.isfinite(t).all()) for t in leaves(tree))


def to(tree: Tree, device: torch.device) -> Tree:
    """Gives the tree on `device`."""
    return map_leaves(lambda t: t.to(device), tree)
