"""What is done to gradients of rows that are clipped and summed: those of linear layers are never written down.

A row's gradient of a linear layer is a product a b of few terms. It is as long as √Σ (aᵀa ∘ b bᵀ), and the sum of the rows'
gradients, each times a factor, is one product over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gpfl.engine.compiler.passes import origin, written_by

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
SPARED = 8
"""How many times larger gradients of rows must be than what their lengths are made of."""


@dataclass(frozen=True)
class Product:
    """Gradients by rows as left (clients, rows, down, terms) times right (clients, rows or 1 for all, terms, across)."""

    left: fx.Node
    right: fx.Node


def fold_rows(graph: fx.Graph) -> None:
    """Lets the lengths and the sum of rows' gradients be made of their factors, where nothing else uses them."""
    written = {origin(arg) for node in graph.nodes for arg in written_by(node)}
    for whole in list(graph.nodes):
        readers = readers_of(whole)
        parts = products_of(whole) if readers else []
        if not parts or not is_spared(whole, parts):
            continue
        if any(origin(factor) in written for part in parts for factor in (part.left, part.right)):  # they are read later now
            continue
        for node in readers:
            with graph.inserting_before(node):
                if is_length(node):
                    node.replace_all_uses_with(lengths(graph, parts))
                else:
                    replace_sum(graph, node, weighted(graph, parts, node.args[0]))  # type: ignore[arg-type]
            graph.erase_node(node)
    graph.eliminate_dead_code()


def readers_of(whole: fx.Node) -> list[fx.Node]:
    """Gives the operations that use rows' gradients (clients, rows, down, across); none where one is no length and no sum."""
    value = whole.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 4 or not all(user.target in VIEWS for user in whole.users):
        return []
    flat = (*value.shape[:2], value.shape[2] * value.shape[3])
    if any(user.meta["val"].shape != flat for user in whole.users):
        return []
    pairs = [(rows, user) for rows in whole.users for user in rows.users]
    return [user for _, user in pairs] if all(is_length(user) or is_sum(user, rows) for rows, user in pairs) else []


def is_length(node: fx.Node) -> bool:
    """Tells whether an operation gives the lengths of rows (clients, rows, entries)."""
    return node.target is aten.linalg_vector_norm.default and node.args[1:] == (2, [2]) and not node.kwargs


def is_sum(node: fx.Node, rows: fx.Node) -> bool:
    """Tells whether an operation sums rows (clients, rows, entries) with factors (clients, 1, rows)."""
    if node.target is not aten.bmm.default or node.args[0] is rows:
        return False
    return bool(node.args[0].meta["val"].shape[1] == 1)  # type: ignore[union-attr]


def products_of(whole: fx.Node) -> list[Product]:
    """Gives the products whose sum a value (clients, rows, down, across) is; nothing where it is more than such a sum."""
    if whole.target is aten.add.Tensor and not whole.kwargs:
        sides = [side for side in whole.args if isinstance(side, fx.Node) and side.meta["val"].shape == whole.meta["val"].shape]
        found = [products_of(side) for side in sides if len(side.users) == 1]
        return [part for side in found for part in side] if len(found) == 2 and all(found) else []
    made = whole.args[0] if whole.target in VIEWS else None
    if not isinstance(made, fx.Node) or made.target is not aten.bmm.default or len(made.users) != 1:
        return []
    left, right = made.args
    clients, rows, down, across = whole.meta["val"].shape
    blocks, height, width = made.meta["val"].shape
    if width != across or (blocks, height) not in ((clients * rows, down), (clients, rows * down)):
        return []
    terms, graph = left.meta["val"].shape[2], whole.graph  # type: ignore[union-attr]
    with graph.inserting_before(whole):
        by_rows = call(graph, aten.reshape.default, left, [clients, rows, down, terms])
        return [Product(by_rows, call(graph, aten.reshape.default, right, [clients, blocks // clients, terms, across]))]


def is_spared(whole: fx.Node, parts: list[Product]) -> bool:
    """Tells whether it is worth its while: many terms have more pairs than gradients have entries."""
    down, across = whole.meta["val"].shape[2:]
    terms = sum(part.left.meta["val"].shape[3] for part in parts)
    return bool(SPARED * terms * terms * (down + across) <= down * across)


def lengths(graph: fx.Graph, parts: list[Product]) -> fx.Node:
    """Gives the lengths (clients, rows) of sums of products."""
    rows = parts[0].left.meta["val"].shape[1]
    left = joined(graph, [part.left for part in parts], 3)
    right = joined(graph, [spread(graph, part.right, rows) for part in parts], 2)
    pairs = call(graph, aten.mul.Tensor, inner(graph, left, 3), inner(graph, right, 2))  # (clients, rows, terms, terms)
    squares = call(graph, aten.sum.dim_IntList, pairs, [2, 3])
    # Rounding may carry a length of nothing below it.
    return call(graph, aten.sqrt.default, call(graph, aten.clamp_min.default, squares, 0))


def inner(graph: fx.Graph, factor: fx.Node, terms: int) -> fx.Node:
    """Gives the inner products (clients, rows, terms, terms) of a factor's terms, in full precision whatever a run's is."""
    one, other = (call(graph, aten.unsqueeze.default, factor, axis) for axis in (terms, terms + 1))
    summed = 2 if terms == 3 else 4
    return call(graph, aten.sum.dim_IntList, call(graph, aten.mul.Tensor, one, other), [summed])


def weighted(graph: fx.Graph, parts: list[Product], factors: fx.Node) -> fx.Node:
    """Gives the sum over rows of products times factors (clients, 1, rows), as one product (clients, down, across)."""
    lefts, rights = [], []
    for part in parts:
        clients, rows, down, terms = part.left.meta["val"].shape
        across = part.right.meta["val"].shape[3]
        scaled = call(graph, aten.mul.Tensor, part.left, call(graph, aten.reshape.default, factors, [clients, rows, 1, 1]))
        if part.right.meta["val"].shape[1] == 1:
            lefts.append(call(graph, aten.sum.dim_IntList, scaled, [1]))
        else:
            turned = call(graph, aten.permute.default, scaled, [0, 2, 1, 3])
            lefts.append(call(graph, aten.reshape.default, turned, [clients, down, rows * terms]))
        rights.append(call(graph, aten.reshape.default, part.right, [clients, -1, across]))
    return call(graph, aten.bmm.default, joined(graph, lefts, 2), joined(graph, rights, 1))


def replace_sum(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Replaces a sum (clients, 1, entries) by one (clients, down, across), and views of it that want that shape."""
    for user in list(old.users):
        if user.target in VIEWS and user.meta["val"].shape == new.meta["val"].shape:
            user.replace_all_uses_with(new)
            graph.erase_node(user)
    if old.users:
        old.replace_all_uses_with(call(graph, aten.reshape.default, new, list(old.meta["val"].shape)))


def spread(graph: fx.Graph, factor: fx.Node, rows: int) -> fx.Node:
    """Gives a factor for each row."""
    shape = factor.meta["val"].shape
    return factor if shape[1] == rows else call(graph, aten.expand.default, factor, [shape[0], rows, *shape[2:]])


def joined(graph: fx.Graph, nodes: list[fx.Node], axis: int) -> fx.Node:
    """Gives nodes side by side."""
    return nodes[0] if len(nodes) == 1 else call(graph, aten.cat.default, nodes, axis)


def call(graph: fx.Graph, target: torch._ops.OpOverload, *args: object) -> fx.Node:
    """Gives a call that knows its shape."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = target(*fx.node.map_arg(args, lambda part: shape_of(part.meta["val"])))  # type: ignore[type-var]
    return node


def shape_of(value: Tensor) -> Tensor:
    """Gives a tensor of the same shape without content."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
