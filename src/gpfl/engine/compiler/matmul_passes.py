"""Passes over matrix products: expand those of few terms; merge those of few rows, or use our kernel for them."""

from __future__ import annotations

import torch
from torch import fx

from gpfl.engine.compiler.operators import MAX_SKINNY_ROWS
from gpfl.engine.compiler.passes import base_node, is_pure

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.bmm.default)
MAX_TERMS = 16  # terms up to which a product is expanded, such as the gradient of a linear layer over ten samples
MIN_EXPANDED_SIZE = 1 << 14  # entries of the result from which expanding a product pays
MATERIALIZED = (
    *MATMULS,
    torch.ops.gpfl.skinny_bmm.default,
    torch.ops.gpfl.convolve.default,
    torch.ops.gpfl.materialize.default,
)
"""Operations whose results are in memory."""
MIN_MATRIX_SIZE = 1 << 17  # entries of a matrix from which a product with few rows is worth a kernel of its own


def expand_outer_products(graph: fx.Graph) -> None:
    """Write products over few terms with large results as sums of outer products, which the compiler fuses with their use."""
    for node in list(graph.nodes):
        if node.target not in MATMULS or len(node.users) != 1:
            continue
        left, right = node.args[0], node.args[1]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            continue
        terms, shape = left.meta["val"].shape[-1], node.meta["val"].shape
        if terms > MAX_TERMS or shape[-1] * shape[-2] < MIN_EXPANDED_SIZE:
            continue
        call = graph.call_function
        with graph.inserting_before(node):
            left, right = (_materialize(graph, factor) for factor in (left, right))
            total: fx.Node | None = None
            for k in range(terms):
                column, row = call(aten.slice.Tensor, (left, -1, k, k + 1)), call(aten.slice.Tensor, (right, -2, k, k + 1))
                outer = call(aten.mul.Tensor, (column, row))
                total = outer if total is None else call(aten.add.Tensor, (total, outer))
        if total is not None:
            total.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _materialize(graph: fx.Graph, factor: fx.Node) -> fx.Node:
    """Return a factor that is in memory: a fused kernel would recompute it for every entry of the product."""
    base = base_node(factor)
    if base.op == "placeholder" or base.target in MATERIALIZED:
        return factor
    return graph.call_function(torch.ops.gpfl.materialize.default, (factor,))


def merge_skinny_matmuls(graph: fx.Graph) -> None:
    """Merge products of few rows with the same large matrix, so that the matrix is read once."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.bmm.default and _rows(node) <= MAX_SKINNY_ROWS and _is_large(node.args[1]):
            groups.setdefault(node.args[1], []).append(node)
    for right, nodes in groups.items():
        merged = [nodes[0]]
        for node in nodes[1:]:
            fits = sum(map(_rows, [*merged, node])) <= MAX_SKINNY_ROWS
            if fits and _move_before(graph, node.args[0], nodes[0]):  # type: ignore[arg-type]
                merged.append(node)
        if len(merged) > 1:
            _merge(graph, merged, right)


def _merge(graph: fx.Graph, nodes: list[fx.Node], right: fx.Node) -> None:
    """Replace products by slices of one, at the place of the first."""
    with graph.inserting_before(nodes[0]):
        left = graph.call_function(aten.cat.default, ([node.args[0] for node in nodes], 1))
        _set_rows(left, nodes, nodes[0].args[0])  # type: ignore[arg-type]
        product = graph.call_function(aten.bmm.default, (left, right))
        _set_rows(product, nodes, nodes[0])
        start = 0
        for node in nodes:
            end = start + _rows(node)
            part = graph.call_function(aten.slice.Tensor, (product, 1, start, end))
            part.meta["val"], start = node.meta["val"], end
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)


def _set_rows(node: fx.Node, parts: list[fx.Node], like: fx.Node) -> None:
    """Set the shape of a node to that of `like` with the rows of all parts."""
    value = like.meta["val"]
    node.meta["val"] = value.new_empty((len(value), sum(map(_rows, parts)), value.shape[2]), device="meta")


def _rows(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-2])


def _is_large(matrix: fx.Node) -> bool:
    value = matrix.meta["val"]
    return bool(value.dtype == torch.float32 and value.shape[-1] * value.shape[-2] >= MIN_MATRIX_SIZE)


def _move_before(graph: fx.Graph, node: fx.Node, mark: fx.Node) -> bool:
    """Move a node and its inputs before `mark`; return False if it depends on `mark` or on something impure after it."""
    order = {each: index for index, each in enumerate(graph.nodes)}
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if order[each] < order[mark] or each in needed:
            continue
        if each is mark or not is_pure(each):
            return False
        needed.add(each)
        pending += each.all_input_nodes
    for each in sorted(needed, key=order.__getitem__):
        mark.prepend(each)
    return True


def use_skinny_kernel(graph: fx.Graph) -> None:
    """Replace products of few rows, or few columns, with large matrices by the operator that has a kernel for them."""
    for node in list(graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        left, right = node.args
        if left.meta["val"].dtype != torch.float32:
            continue
        rows, terms, columns = left.meta["val"].shape[-2], left.meta["val"].shape[-1], right.meta["val"].shape[-1]
        few = min(rows, columns)
        large = terms > MAX_TERMS and terms * max(rows, columns) >= MIN_MATRIX_SIZE
        if not large or few > MAX_SKINNY_ROWS or few == 1:  # libraries are fast for one row
            continue
        with graph.inserting_before(node):
            call, skinny, transpose = graph.call_function, torch.ops.gpfl.skinny_bmm.default, aten.transpose.int
            if rows <= MAX_SKINNY_ROWS:
                new = call(skinny, (left, right))
            else:
                transposed = call(skinny, (call(transpose, (right, 1, 2)), call(transpose, (left, 1, 2))))
                new = call(transpose, (transposed, 1, 2))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)
