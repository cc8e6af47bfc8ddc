"""How a step ends: its results go into the memory of its state, steps of SGD without a copy in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gpfl.engine.compiler.passes import origin
from gpfl.engine.compiler.product_passes import FEW

aten = torch.ops.aten


@dataclass(frozen=True)
class Write:
    """A result that goes into the memory of an input: a value as it is, or what is subtracted, times a rate."""

    target: fx.Node
    value: fx.Node
    rate: float | None = None


def write_back(graph: fx.Graph, count: int, compiled: bool = False, kernels: bool = False) -> None:
    """Ends the graph by writing its results into its first `count` inputs, steps of SGD without a copy in between.

    A compiler fuses products into updates its own way; where our `kernels` run they do it.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    end = next(node for node in graph.nodes if node.op == "output")
    results = end.args[0]
    if not isinstance(results, (list, tuple)):
        raise TypeError("the results of a traced step are a list")
    changed = [(old, new) for old, new in zip(inputs[:count], results, strict=True) if old is not new]
    overwritten = {old for old, _ in changed}
    writes = []
    with graph.inserting_before(end):
        for old, new in changed:
            write = (sgd_step(old, new) if len(new.users) == 1 else None) or Write(old, new)
            if origin(write.value) in overwritten:  # it would be overwritten before it is read
                write = Write(old, graph.call_function(aten.clone.default, (write.value,)), write.rate)
            writes.append(write)
        for write in writes:
            emit(graph, write, overwritten, compiled, kernels)
    end.args = ((),)
    graph.eliminate_dead_code()


def sgd_step(old: fx.Node, new: fx.Node) -> Write | None:
    """Gives the step where the new value is the old one less rate × gradient."""
    if new.target is not aten.sub.Tensor or new.args[0] is not old or new.kwargs:
        return None
    scaled = new.args[1]
    if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor:
        return None
    gradient, rate = scaled.args
    if not isinstance(gradient, fx.Node) or not isinstance(rate, (int, float)):
        return None
    return Write(old, gradient, float(rate))


def emit(graph: fx.Graph, write: Write, overwritten: set[fx.Node], compiled: bool, kernels: bool) -> None:
    """Adds the operations of a write."""
    if write.rate is None:
        graph.call_function(aten.copy_.default, (write.target, write.value))
        return
    if add_rows(graph, write, overwritten, compiled) or add_product(graph, write, overwritten, compiled, kernels):
        return
    parts = summands(write.value) if kernels and alike(write.value, write.target) else []
    for product, rest in parts:  # a gradient that is a product and a pull
        if few_terms(product_in(product, overwritten)) and origin(rest) not in overwritten:
            graph.call_function(aten.sub_.Tensor, (write.target, rest), {"alpha": write.rate})
            add_product(graph, Write(write.target, product, write.rate), overwritten, compiled, kernels)
            return
    graph.call_function(aten.sub_.Tensor, (write.target, write.value), {"alpha": write.rate})


def summands(value: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Gives the two parts of a sum of like parts, in both orders; nothing for what is not one."""
    if value.target is not aten.add.Tensor or value.kwargs or len(value.users) > 1:
        return []
    one, other = value.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or not alike(one, value) or not alike(other, value):
        return []
    return [(one, other), (other, one)]


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Tells whether two nodes are known to have one shape and one type."""
    first, second = one.meta.get("val"), other.meta.get("val")
    return (
        isinstance(first, Tensor) and isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
    )


# Embeddings: a batch touches few of many rows, and plain SGD moves only those.


@torch.library.custom_op("gpfl::add_rows_", mutates_args={"table"})
def add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds values to rows of a table, in a fixed order where a row comes several times: compilers would not keep one."""
    table.index_put_((rows,), values, accumulate=True)


def add_rows(graph: fx.Graph, write: Write, overwritten: set[fx.Node], compiled: bool) -> bool:
    """Adds a step of an embedding on the rows that a batch has touched alone; tells whether it was one."""
    made = write.value
    while made.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        made = made.args[0]  # type: ignore[assignment]
    if made.target is not aten.embedding_dense_backward.default or made.args[4]:
        return False
    if any(origin(part) in overwritten for part in made.all_input_nodes):
        return False
    gradient, rows, total, padding = made.args[:4]
    vocabulary, blank = write.target.meta["val"].shape[-2], padding
    blanking: list[fx.Node] = []
    scalings = 0  # one of them is the step's own; others would see the gradient with the padding
    for user in [user for node in chain(write.value, made) for user in node.users]:
        if user.target is aten.select.int:  # the row of the padding is set to zero, on every client
            if not zeroed(user) or user.args[1] != write.value.meta["val"].dim() - 2:
                return False
            blank = user.args[2]
            blanking += [*user.users, user]
        elif user.target is aten.mul.Tensor:
            scalings += 1
        elif user not in chain(write.value, made):
            return False
    if scalings > 1:
        return False
    width = write.target.meta["val"].shape[-1]
    call = graph.call_function
    flat = call(aten.view.default, (write.target, [total, width]))
    where = call(aten.reshape.default, (rows, [-1]))
    values = call(aten.mul.Tensor, (call(aten.reshape.default, (gradient, [-1, width])), -float(write.rate or 0.0)))
    if isinstance(blank, int) and blank >= 0:
        real = call(aten.ne.Scalar, (call(aten.remainder.Scalar, (where, vocabulary)), blank))
        values = call(aten.mul.Tensor, (values, call(aten.unsqueeze.default, (real, 1))))
        # Padding adds nothing, but many additions to one row would wait for each other: they are spread over all rows.
        spread = call(aten.remainder.Scalar, (call(aten.cumsum.default, (call(aten.ones_like.default, (where,)), 0)), total))
        where = call(aten.where.self, (real, where, spread))
    if compiled:
        call(torch.ops.gpfl.add_rows_.default, (flat, where, values))
    else:
        call(aten.index_put_.default, (flat, [where], values, True))
    for node in blanking:
        graph.erase_node(node)
    return True


def chain(node: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Gives the nodes from `node` back to `end`, each the first input of the one before."""
    out = [node]
    while out[-1] is not end:
        out.append(out[-1].args[0])  # type: ignore[arg-type]
    return out


def zeroed(node: fx.Node) -> bool:
    """Tells whether a view is there to be set to zero and nothing else."""
    return all(user.target is aten.fill_.Scalar and user.args[1] == 0 and not user.users for user in node.users)


# Linear layers: the gradient is a product, which can be subtracted as it is made.

SUBTRACTING = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def add_product(graph: fx.Graph, write: Write, overwritten: set[fx.Node], compiled: bool, kernels: bool) -> bool:
    """Adds a step whose gradient is a matrix product, which is never written down; tells whether it did."""
    found = product_in(write.value, overwritten)
    by_kernel = kernels and few_terms(found)
    if found is None or (compiled and not by_kernel) or not alike(write.value, write.target):
        return False
    call, rate, target = graph.call_function, float(write.rate or 0.0), write.target
    (node, turned) = found
    if by_kernel:
        left, right = (call(aten.transpose.int, (part, 1, 2)) for part in reversed(node.args)) if turned else node.args
        call(torch.ops.gpfl.subtract_product_.default, (target, left, right, rate))
    else:
        target = call(aten.transpose.int, (target, -2, -1)) if turned else target
        call(SUBTRACTING[node.target], (target, *node.args), {"alpha": -rate})  # type: ignore[index]
    return True


def product_in(value: fx.Node, overwritten: set[fx.Node]) -> tuple[fx.Node, bool] | None:
    """Gives the product that a value is, and whether it is turned; none where it is needed otherwise, or read too late."""
    node, turned = value, False
    while node.target not in SUBTRACTING:
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node) or not isinstance(base.meta.get("val"), Tensor) or len(node.users) > 1:
            return None
        if is_turn(node, base):
            turned = not turned
        elif not is_same(node, base):
            return None
        node = base
    if len(node.users) > 1 or any(origin(part) in overwritten for part in node.all_input_nodes):
        return None
    return node, turned


def few_terms(found: tuple[fx.Node, bool] | None) -> bool:
    """Tells whether there is a product of many clients with few terms: for those we have a kernel."""
    if found is None or found[0].target is not aten.bmm.default:
        return False
    left = found[0].args[0].meta["val"]  # type: ignore[union-attr]
    return bool(left.shape[-1] <= FEW and left.dtype == torch.float32)


def is_turn(node: fx.Node, base: fx.Node) -> bool:
    """Tells whether a node swaps the last two axes."""
    dims = base.meta["val"].dim()
    before = list(range(dims))
    after = [*before[:-2], dims - 1, dims - 2]
    if node.target is aten.transpose.int:
        first, second = (int(axis) % dims for axis in node.args[1:])  # type: ignore[arg-type]
        before[first], before[second] = before[second], before[first]
        return before == after
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == after)


def is_same(node: fx.Node, base: fx.Node) -> bool:
    """Tells whether a node is its input under another name."""
    views = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
    return node.target in views and node.meta["val"].shape == base.meta["val"].shape
