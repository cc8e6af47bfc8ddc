"""Passes over matrix products: expand those of few terms; use our kernel for those of few rows."""

import torch
from torch import fx

from gpfl.engine.compiler.operators import MAX_SKINNY_ROWS
from gpfl.engine.compiler.passes import base_node

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
