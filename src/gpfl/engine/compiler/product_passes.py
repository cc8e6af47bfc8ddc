"""What is done to products before they run: of few terms written out, of few rows joined, or given to our kernels."""

from __future__ import annotations

import torch
from torch import fx

from gpfl.engine.compiler.passes import is_pure, origin
from gpfl.engine.compiler.products import THIN

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default)


# Products of few terms, such as the gradient of a linear layer over ten rows: written out, they are fused into what follows.

FEW = 16
LARGE = 1 << 14


def write_out(graph: fx.Graph) -> None:
    """Writes products over few terms with large results as sums, where one operation uses them."""
    for node in list(graph.nodes):
        if node.target not in PRODUCTS or len(node.users) != 1:
            continue
        left, right = node.args[0], node.args[1]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            continue
        inner, shape = left.meta["val"].shape[-1], node.meta["val"].shape
        if inner > FEW or shape[-1] * shape[-2] < LARGE:
            continue
        with graph.inserting_before(node):
            total = None
            left, right = (store(graph, part) for part in (left, right))
            for k in range(inner):
                column = graph.call_function(aten.slice.Tensor, (left, -1, k, k + 1))
                line = graph.call_function(aten.slice.Tensor, (right, -2, k, k + 1))
                part = graph.call_function(aten.mul.Tensor, (column, line))
                total = part if total is None else graph.call_function(aten.add.Tensor, (total, part))
        if total is not None:
            total.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(total)
            graph.erase_node(node)


LYING = (*PRODUCTS, torch.ops.gpfl.thin.default, torch.ops.gpfl.convolve.default, torch.ops.gpfl.stored.default)
"""Operations whose results lie in memory."""


def store(graph: fx.Graph, part: fx.Node) -> fx.Node:
    """Gives a factor as it lies in memory: every entry of a large product reads it, and would work out its maximum anew."""
    made = origin(part)
    if made.op == "placeholder" or made.target in LYING:
        return part
    return graph.call_function(torch.ops.gpfl.stored.default, (part,))


# Products of few rows with large matrices, such as a linear layer over ten rows.

LEAST = 1 << 17
"""Entries of a matrix from which a thin product is worth a kernel of its own."""


def join_products(graph: fx.Graph) -> None:
    """Lets products of few rows each with the same large matrix be one, so that the matrix is read once."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.bmm.default and rows_of(node) <= THIN and is_large(node.args[1]):
            groups.setdefault(node.args[1], []).append(node)
    for right, nodes in groups.items():
        joined = [nodes[0]]
        for node in nodes[1:]:
            if sum(map(rows_of, [*joined, node])) <= THIN and bring_before(graph, node.args[0], nodes[0]):  # type: ignore[arg-type]
                joined.append(node)
        if len(joined) > 1:
            join(graph, joined, right)


def join(graph: fx.Graph, nodes: list[fx.Node], right: fx.Node) -> None:
    """Replaces products by parts of one, which stands where the first stood."""
    with graph.inserting_before(nodes[0]):
        left = shaped(graph.call_function(aten.cat.default, ([node.args[0] for node in nodes], 1)), nodes, of=0)
        whole = shaped(graph.call_function(aten.bmm.default, (left, right)), nodes)
        start = 0
        for node in nodes:
            end = start + rows_of(node)
            part = graph.call_function(aten.slice.Tensor, (whole, 1, start, end))
            part.meta["val"], start = node.meta["val"], end
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)


def shaped(node: fx.Node, parts: list[fx.Node], of: int | None = None) -> fx.Node:
    """Gives a node that knows its shape: that of parts one below the other, or of their inputs number `of`."""
    first = (parts[0] if of is None else parts[0].args[of]).meta["val"]  # type: ignore[union-attr]
    node.meta["val"] = first.new_empty((len(first), sum(map(rows_of, parts)), first.shape[2]), device="meta")
    return node


def rows_of(node: fx.Node) -> int:
    """Gives the rows of a product."""
    return int(node.meta["val"].shape[-2])


def is_large(matrix: fx.Node) -> bool:
    """Tells whether reading the matrices of clients is what a product's time goes into."""
    value = matrix.meta["val"]
    return bool(value.dtype == torch.float32 and value.shape[-1] * value.shape[-2] >= LEAST)


def bring_before(graph: fx.Graph, node: fx.Node, mark: fx.Node) -> bool:
    """Moves what a node is made of before a mark; tells whether that can be: not where it is made of the mark, or writes."""
    order = {each: place for place, each in enumerate(graph.nodes)}
    needed: set[fx.Node] = set()
    open_ = [node]
    while open_:
        each = open_.pop()
        if order[each] < order[mark] or each in needed:
            continue
        if each is mark or not is_pure(each):
            return False
        needed.add(each)
        open_ += each.all_input_nodes
    for each in sorted(needed, key=order.__getitem__):
        mark.prepend(each)
    return True


def thin_products(graph: fx.Graph) -> None:
    """Lets products of few rows, or few columns, with large matrices be operations of their own."""
    for node in list(graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        left, right = node.args
        if left.meta["val"].dtype != torch.float32:
            continue
        rows, terms, columns = left.meta["val"].shape[-2], left.meta["val"].shape[-1], right.meta["val"].shape[-1]
        few = min(rows, columns)
        if terms <= FEW or terms * max(rows, columns) < LEAST or few > THIN or few == 1:  # libraries are good at one row
            continue
        with graph.inserting_before(node):
            call, thin, turn = graph.call_function, torch.ops.gpfl.thin.default, aten.transpose.int
            if rows <= THIN:
                new = call(thin, (left, right))
            else:
                new = call(turn, (call(thin, (call(turn, (right, 1, 2)), call(turn, (left, 1, 2)))), 1, 2))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        graph.erase_node(node)
