"""Operations on trees, nested dicts of tensors: the form in which state is stored, sent and saved."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, Union

import torch
from torch import Tensor

Tree: TypeAlias = dict[str, Union["Tree", Tensor]]

SEPARATOR = "/"


def branch(tree: Tree, key: str) -> Tree:
    """Return the subtree under `key`."""
    value = tree[key]
    if not isinstance(value, dict):
        raise TypeError(f"'{key}' is a tensor, not a subtree")
    return value


def leaf(tree: Tree, key: str) -> Tensor:
    """Return the tensor under `key`."""
    value = tree[key]
    if isinstance(value, dict):
        raise TypeError(f"'{key}' is a subtree, not a tensor")
    return value


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield every tensor of the tree, in the order of its keys."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def zip_leaves(first: Tree, second: Tree) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors with the same path, in the order of the first tree."""
    if first.keys() != second.keys():
        raise KeyError(f"trees of different shape: {sorted(first.keys() ^ second.keys())}")
    for key, value in first.items():
        if isinstance(value, dict):
            yield from zip_leaves(value, branch(second, key))
        else:
            yield value, leaf(second, key)


def pick(tree: Tree, keys: Sequence[str]) -> Tree:
    """Return the tree with those of `keys` that it has, in their order."""
    return {key: tree[key] for key in keys if key in tree}


def drop(tree: Tree, keys: Sequence[str]) -> Tree:
    """Return the tree without `keys`."""
    return {key: value for key, value in tree.items() if key not in keys}


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return a flat dict of the tensors by path, joined with '/'."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}{SEPARATOR}"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Return the tree of a flat dict. Branches without a tensor are lost; see `unflatten_like`."""
    out: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(SEPARATOR)
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})  # type: ignore[assignment]
        node[name] = value
    return out


def unflatten_like(like: Tree, flat: dict[str, Tensor], prefix: str = "") -> Tree:
    """Return a tree with the branches of `like`, also those without a tensor, and the tensors of a flat dict."""
    out: Tree = {}
    for key, value in like.items():
        path = f"{prefix}{key}"
        out[key] = unflatten_like(value, flat, f"{path}{SEPARATOR}") if isinstance(value, dict) else flat[path]
    return out


def map_leaves(function: Callable[..., Tensor], first: Tree, *others: Tree) -> Tree:
    """Return the tree of `function(leaf, …)` over trees of the same shape."""
    out: Tree = {}
    for key, value in first.items():
        rest = [other[key] for other in others]
        if isinstance(value, dict):
            out[key] = map_leaves(function, value, *rest)  # type: ignore[arg-type]
        else:
            out[key] = function(value, *rest)
    return out


_CHUNK = 4096  # entries of the first axis that are examined at once: stacked states may be larger than the memory


def clone(tree: Tree) -> Tree:
    """Return a copy with its own memory."""
    return map_leaves(torch.clone, tree)


def lerp(a: Tree, b: Tree, weight: Tensor | float) -> Tree:
    """Return (1 − weight)·a + weight·b."""
    return map_leaves(lambda x, y: (1 - weight) * x + weight * y, a, b)


def norm(tree: Tree) -> Tensor:
    """Return the L2 norm of all leaves together."""
    length: Tensor = torch.linalg.vector_norm(torch.cat([t.flatten() for t in leaves(tree)]))
    return length


def is_finite(tree: Tree) -> bool:
    """Return whether no leaf holds NaN or infinity."""
    parts = (part for t in leaves(tree) for part in torch.split(t if t.dim() else t[None], _CHUNK))
    return all(bool(torch.isfinite(part).all()) for part in parts)


def count_bytes(tree: Tree) -> int:
    """Return the size of all tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in leaves(tree))


# The states of several clients, stacked on the first axis.


def stack(trees: Sequence[Tree]) -> Tree:
    """Return the trees stacked on a new first axis."""
    return map_leaves(lambda *ts: torch.stack(ts), trees[0], *trees[1:])


def repeat(tree: Tree, times: int) -> Tree:
    """Return `times` copies stacked on a new first axis."""
    return map_leaves(lambda t: t.unsqueeze(0).repeat(times, *[1] * t.dim()), tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Return stacked trees joined along the first axis."""
    return trees[0] if len(trees) == 1 else map_leaves(lambda *ts: torch.cat(ts), trees[0], *trees[1:])


def take(tree: Tree, index: int | slice | Tensor) -> Tree:
    """Return the entries `index` of the first axis."""
    return map_leaves(lambda t: t[index], tree)


def index_copy_(tree: Tree, index: Tensor, values: Tree) -> None:
    """Copy `values` to the entries `index` of the first axis, in place: a copy of all private states may not fit."""
    for target, source in zip_leaves(tree, values):
        target.index_copy_(0, index, source)


def copy_(tree: Tree, values: Tree) -> None:
    """Copy the values of another tree into the memory of this one."""
    for target, source in zip_leaves(tree, values):
        target.copy_(source)


def device_of(tree: Tree) -> torch.device | None:
    """Return the device of the tree's tensors, None if it has none."""
    first = next(leaves(tree), None)
    return None if first is None else first.device


def to(tree: Tree, device: torch.device) -> Tree:
    """Return the tree on `device`."""
    return map_leaves(lambda t: t.to(device), tree)


def fetch(tree: Tree, indices: Sequence[int], device: torch.device) -> Tree:
    """Return entries of the first axis, copied to `device`; to a GPU asynchronously, from pinned memory."""
    if not tree:
        return tree
    source = device_of(tree) or device
    index = torch.as_tensor(list(indices), dtype=torch.int64, device=source)
    if source == device:
        return take(tree, index)
    pinned = device.type == "cuda"
    return map_leaves(lambda t: (t[index].pin_memory() if pinned else t[index]).to(device, non_blocking=pinned), tree)
