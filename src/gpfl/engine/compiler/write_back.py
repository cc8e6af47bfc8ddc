"""The last pass over a step: it writes results into the memory of its state, and steps of SGD without a copy in between."""

from typing import NamedTuple

import torch
from torch import Tensor, fx

from gpfl.engine.compiler.matmul_passes import MAX_TERMS
from gpfl.engine.compiler.passes import VIEWS, base_node

aten = torch.ops.aten


class Write(NamedTuple):
    """A result that goes into the memory of an input: a value to copy or, with a rate, a gradient to subtract."""

    target: fx.Node
    value: fx.Node
    rate: float | None = None


def write_back(graph: fx.Graph, count: int, compiled: bool = False, kernels: bool = False) -> None:
    """End the graph by writing its results into its first `count` inputs.

    A compiler fuses matrix products into updates itself; otherwise our `kernels` do so where they run.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    end = next(node for node in graph.nodes if node.op == "output")
    results = end.args[0]
    if not isinstance(results, (list, tuple)):
        raise TypeError("a traced step must return a list")
    changed = [(old, new) for old, new in zip(inputs[:count], results, strict=True) if old is not new]
    overwritten = {old for old, _ in changed}
    writes = []
    with graph.inserting_before(end):
        for old, new in changed:
            write = (_sgd_step(old, new) if len(new.users) == 1 else None) or Write(old, new)
            if base_node(write.value) in overwritten:  # it would be overwritten before it is read
                copy = torch.ops.gpfl.materialize.default if compiled else aten.clone.default  # compilers may drop a clone
                write = Write(old, graph.call_function(copy, (write.value,)), write.rate)
            writes.append(write)
        for write in writes:
            _emit(graph, write, overwritten, compiled, kernels)
    end.args = ((),)
    graph.eliminate_dead_code()


def _sgd_step(old: fx.Node, new: fx.Node) -> Write | None:
    """Return the step if the new value is the old one minus rate × gradient."""
    if new.target is not aten.sub.Tensor or new.args[0] is not old or new.kwargs:
        return None
    scaled = new.args[1]
    if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor:
        return None
    gradient, rate = scaled.args
    if not isinstance(gradient, fx.Node) or not isinstance(rate, (int, float)):
        return None
    return Write(old, gradient, float(rate))


def _emit(graph: fx.Graph, write: Write, overwritten: set[fx.Node], compiled: bool, kernels: bool) -> None:
    if write.rate is None:
        graph.call_function(aten.copy_.default, (write.target, write.value))
        return
    if _emit_embedding_step(graph, write, overwritten, compiled):
        return
    if _emit_matmul_step(graph, write, overwritten, compiled, kernels):
        return
    summands = _summands(write.value) if kernels and _same_type(write.value, write.target) else []
    for product, rest in summands:  # a gradient that is a matrix product plus weight decay
        if _has_few_terms(_find_matmul(product, overwritten)) and base_node(rest) not in overwritten:
            graph.call_function(aten.sub_.Tensor, (write.target, rest), {"alpha": write.rate})
            _emit_matmul_step(graph, Write(write.target, product, write.rate), overwritten, compiled, kernels)
            return
    graph.call_function(aten.sub_.Tensor, (write.target, write.value), {"alpha": write.rate})


def _summands(value: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the two summands of a sum of equal shapes, in both orders; nothing for other values."""
    if value.target is not aten.add.Tensor or value.kwargs or len(value.users) > 1:
        return []
    a, b = value.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or not _same_type(a, value) or not _same_type(b, value):
        return []
    return [(a, b), (b, a)]


def _same_type(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, Tensor) and isinstance(y, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)


# Embeddings: a batch reads few of many rows, and plain SGD moves only those.


@torch.library.custom_op("gpfl::add_rows_", mutates_args={"table"})
def add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values to rows of a table, in a fixed order where a row repeats; compilers would not keep one."""
    table.index_put_((rows,), values, accumulate=True)


def _emit_embedding_step(graph: fx.Graph, write: Write, overwritten: set[fx.Node], compiled: bool) -> bool:
    """Add the step of an embedding on the rows that the batch has read; return False if it is none."""
    views = [write.value]
    while views[-1].target in VIEWS:
        views.append(views[-1].args[0])  # type: ignore[arg-type]
    node = views[-1]
    if node.target is not aten.embedding_dense_backward.default or node.args[4]:
        return False
    if any(base_node(each) in overwritten for each in node.all_input_nodes):
        return False
    gradient, rows, total, padding = node.args[:4]
    vocabulary, padding_row = write.target.meta["val"].shape[-2], padding
    zeroing: list[fx.Node] = []
    n_scalings = 0  # one of them is the step's own; others would see the gradient with the padding
    for user in [user for view in views for user in view.users]:
        if user.target is aten.select.int:  # the row of the padding is set to zero for every client
            if not _is_zeroed(user) or user.args[1] != write.value.meta["val"].dim() - 2:
                return False
            padding_row = user.args[2]
            zeroing += [*user.users, user]
        elif user.target is aten.mul.Tensor:
            n_scalings += 1
        elif user not in views:
            return False
    if n_scalings > 1:
        return False
    width = write.target.meta["val"].shape[-1]
    call = graph.call_function
    table = call(aten.view.default, (write.target, [total, width]))
    index = call(aten.reshape.default, (rows, [-1]))
    values = call(aten.mul.Tensor, (call(aten.reshape.default, (gradient, [-1, width])), -float(write.rate or 0.0)))
    if isinstance(padding_row, int) and padding_row >= 0:
        valid = call(aten.ne.Scalar, (call(aten.remainder.Scalar, (index, vocabulary)), padding_row))
        values = call(aten.mul.Tensor, (values, call(aten.unsqueeze.default, (valid, 1))))
        if write.target.meta["val"].device.type != "cpu":
            # Padding adds zeros. Many additions to one row would wait for each other, so they are distributed over all rows.
            position = call(aten.cumsum.default, (call(aten.ones_like.default, (index,)), 0))
            index = call(aten.where.self, (valid, index, call(aten.remainder.Scalar, (position, total))))
    if compiled:
        call(torch.ops.gpfl.add_rows_.default, (table, index, values))
    else:
        call(aten.index_put_.default, (table, [index], values, True))
    for each in zeroing:
        graph.erase_node(each)
    return True


def _is_zeroed(node: fx.Node) -> bool:
    return all(user.target is aten.fill_.Scalar and user.args[1] == 0 and not user.users for user in node.users)


# Linear layers: the gradient is a matrix product, which can be subtracted as it is computed.

SUBTRACTING = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def _emit_matmul_step(graph: fx.Graph, write: Write, overwritten: set[fx.Node], compiled: bool, kernels: bool) -> bool:
    """Add a step whose gradient is a matrix product, without materialising it; return False if it is none."""
    found = _find_matmul(write.value, overwritten)
    by_kernel = kernels and _has_few_terms(found)
    if found is None or (compiled and not by_kernel) or not _same_type(write.value, write.target):
        return False
    call, rate, target = graph.call_function, float(write.rate or 0.0), write.target
    (node, transposed) = found
    if by_kernel:
        left, right = (call(aten.transpose.int, (arg, 1, 2)) for arg in reversed(node.args)) if transposed else node.args
        call(torch.ops.gpfl.sub_bmm_.default, (target, left, right, rate))
    else:
        target = call(aten.transpose.int, (target, -2, -1)) if transposed else target
        call(SUBTRACTING[node.target], (target, *node.args), {"alpha": -rate})  # type: ignore[index]
    return True


def _find_matmul(value: fx.Node, overwritten: set[fx.Node]) -> tuple[fx.Node, bool] | None:
    """Return the matrix product that a value is, and whether it is transposed.

    None if it has other uses, or if its factors would be overwritten before they are read.
    """
    node, transposed = value, False
    while node.target not in SUBTRACTING:
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node) or not isinstance(base.meta.get("val"), Tensor) or len(node.users) > 1:
            return None
        if _swaps_last_axes(node, base):
            transposed = not transposed
        elif not (node.target in VIEWS and node.meta["val"].shape == base.meta["val"].shape):
            return None
        node = base
    if len(node.users) > 1 or any(base_node(each) in overwritten for each in node.all_input_nodes):
        return None
    return node, transposed


def _has_few_terms(found: tuple[fx.Node, bool] | None) -> bool:
    """Return whether there is a batched product over few terms: for those we have a kernel."""
    if found is None or found[0].target is not aten.bmm.default:
        return False
    left = found[0].args[0].meta["val"]  # type: ignore[union-attr]
    return bool(left.shape[-1] <= MAX_TERMS and left.dtype == torch.float32)


def _swaps_last_axes(node: fx.Node, base: fx.Node) -> bool:
    dims = base.meta["val"].dim()
    before = list(range(dims))
    after = [*before[:-2], dims - 1, dims - 2]
    if node.target is aten.transpose.int:
        first, second = (int(axis) % dims for axis in node.args[1:])  # type: ignore[arg-type]
        before[first], before[second] = before[second], before[first]
        return before == after
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == after)
