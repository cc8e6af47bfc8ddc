"""The ghost clipping pass: per-example gradients of linear layers that are only clipped and summed are never materialised.

An example's gradient of a linear layer is a product a b over few terms. Its norm is √Σ (aᵀa ∘ b bᵀ), and the sum of the
examples' gradients, each scaled by a factor, is one product over all examples.
"""

from typing import NamedTuple

import torch
from torch import Tensor, fx

from gpfl.engine.compiler.passes import VIEWS, base_node, mutated_nodes

aten = torch.ops.aten
MIN_SAVING = 8  # how many times larger the gradients must be than the pairs of terms that their norms need


class Product(NamedTuple):
    """Per-example gradients as left (clients, examples, out, terms) times right (clients, examples or 1, terms, in)."""

    left: fx.Node
    right: fx.Node


def apply_ghost_clipping(graph: fx.Graph) -> None:
    """Compute the norms and the sum of per-example gradients from their factors, where nothing else uses the gradients."""
    mutated = mutated_nodes(graph)
    for gradients in list(graph.nodes):
        uses = _norms_and_sums(gradients)
        parts = _products(gradients) if uses else []
        if not parts or not _saves_enough(gradients, parts):
            continue
        if any(base_node(factor) in mutated for part in parts for factor in (part.left, part.right)):  # now read later
            continue
        for node in uses:
            with graph.inserting_before(node):
                if _is_norm(node):
                    node.replace_all_uses_with(_norms(graph, parts))
                else:
                    _replace_sum(graph, node, _weighted_sum(graph, parts, node.args[0]))  # type: ignore[arg-type]
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _norms_and_sums(gradients: fx.Node) -> list[fx.Node]:
    """Return the uses of gradients (clients, examples, out, in), or nothing if one is neither a norm nor a sum."""
    value = gradients.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 4 or not all(user.target in VIEWS for user in gradients.users):
        return []
    flat = (*value.shape[:2], value.shape[2] * value.shape[3])
    if any(user.meta["val"].shape != flat for user in gradients.users):
        return []
    pairs = [(view, user) for view in gradients.users for user in view.users]
    return [user for _, user in pairs] if all(_is_norm(user) or _is_weighted_sum(user, view) for view, user in pairs) else []


def _is_norm(node: fx.Node) -> bool:
    """Return whether an operation computes the norms of examples (clients, examples, entries)."""
    return node.target is aten.linalg_vector_norm.default and node.args[1:] == (2, [2]) and not node.kwargs


def _is_weighted_sum(node: fx.Node, gradients: fx.Node) -> bool:
    """Return whether an operation sums gradients (clients, examples, entries) with factors (clients, 1, examples)."""
    if node.target is not aten.bmm.default or node.args[0] is gradients:
        return False
    return bool(node.args[0].meta["val"].shape[1] == 1)  # type: ignore[union-attr]


def _products(gradients: fx.Node) -> list[Product]:
    """Return the products of which gradients (clients, examples, out, in) are the sum, or nothing if they are more."""
    shape = gradients.meta["val"].shape
    if gradients.target is aten.add.Tensor and not gradients.kwargs:
        sides = [side for side in gradients.args if isinstance(side, fx.Node) and side.meta["val"].shape == shape]
        found = [_products(side) for side in sides if len(side.users) == 1]
        return [part for side in found for part in side] if len(found) == 2 and all(found) else []
    product = gradients.args[0] if gradients.target in VIEWS else None
    if not isinstance(product, fx.Node) or product.target is not aten.bmm.default or len(product.users) != 1:
        return []
    left, right = product.args
    clients, examples, rows, columns = shape
    batches, height, width = product.meta["val"].shape
    if width != columns or (batches, height) not in ((clients * examples, rows), (clients, examples * rows)):
        return []
    terms, graph = left.meta["val"].shape[2], gradients.graph  # type: ignore[union-attr]
    with graph.inserting_before(gradients):
        per_example = _call(graph, aten.reshape.default, left, [clients, examples, rows, terms])
        right = _call(graph, aten.reshape.default, right, [clients, batches // clients, terms, columns])
        return [Product(per_example, right)]


def _saves_enough(gradients: fx.Node, parts: list[Product]) -> bool:
    rows, columns = gradients.meta["val"].shape[2:]
    terms = sum(part.left.meta["val"].shape[3] for part in parts)
    return bool(MIN_SAVING * terms * terms * (rows + columns) <= rows * columns)


def _norms(graph: fx.Graph, parts: list[Product]) -> fx.Node:
    """Return the norms (clients, examples) of sums of products."""
    examples = parts[0].left.meta["val"].shape[1]
    left = _concatenate(graph, [part.left for part in parts], 3)
    right = _concatenate(graph, [_expand(graph, part.right, examples) for part in parts], 2)
    pairs = _call(graph, aten.mul.Tensor, _gram(graph, left, 3), _gram(graph, right, 2))  # (clients, examples, terms, terms)
    squares = _call(graph, aten.sum.dim_IntList, pairs, [2, 3])
    # Rounding may make the square of a zero norm negative.
    return _call(graph, aten.sqrt.default, _call(graph, aten.clamp_min.default, squares, 0))


def _gram(graph: fx.Graph, factor: fx.Node, term_axis: int) -> fx.Node:
    """Return the inner products (clients, examples, terms, terms) of a factor's terms, always in full precision."""
    a, b = (_call(graph, aten.unsqueeze.default, factor, axis) for axis in (term_axis, term_axis + 1))
    summed = 2 if term_axis == 3 else 4
    return _call(graph, aten.sum.dim_IntList, _call(graph, aten.mul.Tensor, a, b), [summed])


def _weighted_sum(graph: fx.Graph, parts: list[Product], factors: fx.Node) -> fx.Node:
    """Return the sum over examples of products times factors (clients, 1, examples), as one product (clients, out, in)."""
    lefts, rights = [], []
    for part in parts:
        clients, examples, rows, terms = part.left.meta["val"].shape
        columns = part.right.meta["val"].shape[3]
        by_example = _call(graph, aten.reshape.default, factors, [clients, examples, 1, 1])
        scaled = _call(graph, aten.mul.Tensor, part.left, by_example)
        if part.right.meta["val"].shape[1] == 1:
            lefts.append(_call(graph, aten.sum.dim_IntList, scaled, [1]))
        else:
            permuted = _call(graph, aten.permute.default, scaled, [0, 2, 1, 3])
            lefts.append(_call(graph, aten.reshape.default, permuted, [clients, rows, examples * terms]))
        rights.append(_call(graph, aten.reshape.default, part.right, [clients, -1, columns]))
    return _call(graph, aten.bmm.default, _concatenate(graph, lefts, 2), _concatenate(graph, rights, 1))


def _replace_sum(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Replace a sum (clients, 1, entries) by one (clients, out, in), and drop the views of it that have this shape."""
    for user in list(old.users):
        if user.target in VIEWS and user.meta["val"].shape == new.meta["val"].shape:
            user.replace_all_uses_with(new)
            graph.erase_node(user)
    if old.users:
        old.replace_all_uses_with(_call(graph, aten.reshape.default, new, list(old.meta["val"].shape)))


def _expand(graph: fx.Graph, factor: fx.Node, examples: int) -> fx.Node:
    shape = factor.meta["val"].shape
    return factor if shape[1] == examples else _call(graph, aten.expand.default, factor, [shape[0], examples, *shape[2:]])


def _concatenate(graph: fx.Graph, nodes: list[fx.Node], axis: int) -> fx.Node:
    return nodes[0] if len(nodes) == 1 else _call(graph, aten.cat.default, nodes, axis)


def _call(graph: fx.Graph, target: torch._ops.OpOverload, *args: object) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: _to_meta(arg.meta["val"])))  # type: ignore[type-var]
    return node


def _to_meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
