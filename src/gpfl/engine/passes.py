"""What is done to the traced operations of a step before they run: repeats are shared, weights are updated where they lie."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gpfl.engine.products import THIN

aten = torch.ops.aten


IDLE = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)


def drop_idle(graph: fx.Graph) -> None:
    """Leaves out operations that give their input: tracing writes many views of the same shape, turns and turns back."""
    written = {origin(arg) for node in graph.nodes for arg in written_by(node)}
    for node in list(graph.nodes):
        same = input_given(node)
        if same is not None and not {node, origin(node), origin(same)} & written:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()  # a turn that was turned back has no use any more


def input_given(node: fx.Node) -> fx.Node | None:
    """Gives the node whose value an operation gives, if there is one."""
    base = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(base, fx.Node) or not isinstance(base.meta.get("val"), Tensor):
        return None
    before, target = base.meta["val"], node.target
    idle = (
        (target in IDLE and node.meta["val"].shape == before.shape)
        or (target is aten.permute.default and node.args[1] == list(range(before.dim())))
        or (target is aten.mul.Scalar and node.args[1] == 1 and node.meta["val"].dtype == before.dtype)
    )
    if idle:
        return base
    if target is aten.transpose.int and base.target is aten.transpose.int and turns_back(node, base):
        first = base.args[0]
        return first if isinstance(first, fx.Node) else None
    return None


def turns_back(node: fx.Node, base: fx.Node) -> bool:
    """Tells whether two swaps of axes, one after the other, are the same."""
    dims = node.meta["val"].dim()
    pairs = [{int(axis) % dims for axis in part.args[1:]} for part in (node, base)]  # type: ignore[arg-type]
    return pairs[0] == pairs[1]


def share_equal(graph: fx.Graph) -> None:
    """Lets equal operations on equal inputs be one: a traced backward pass repeats much of its forward pass."""
    written = {origin(arg) for node in graph.nodes for arg in written_by(node)}
    seen: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if not is_pure(node) or any(origin(part) in written for part in (node, *node.all_input_nodes)):
            continue
        key = key_of(node)
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        elif key is not None:
            seen[key] = node


def is_pure(node: fx.Node) -> bool:
    """Tells whether an operation changes nothing and is not random."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not written_by(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


def written_by(node: fx.Node) -> list[fx.Node]:
    """Gives the inputs that an operation writes into."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    named = [(argument, value) for argument, value in zip(arguments, node.args, strict=False)]
    named += [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    return [value for argument, value in named if is_written(argument) and isinstance(value, fx.Node)]


def is_written(argument: torch.Argument) -> bool:
    """Tells whether an operation writes into an argument; BatchNorm does into its statistics, though it does not say so."""
    said = argument.alias_info is not None and argument.alias_info.is_write
    return said or argument.name in ("running_mean", "running_var")


def origin(node: fx.Node) -> fx.Node:
    """Gives the node in whose memory the value of a node lies, as far as operations say so."""
    while is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Tells whether the value of a node may lie in the memory of its first input."""
    if node.target in (operator.getitem, aten._unsafe_view.default):  # one of several results; a view that does not say so
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return False
    return node.target._schema.returns[0].alias_info is not None


def key_of(node: fx.Node) -> object:
    """Gives what makes an operation the same as another; None where that cannot be told."""

    def fixed(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *(fixed(entry) for entry in value))
        return (type(value).__name__, value)

    try:
        key = (node.target, fixed(node.args), fixed(tuple(sorted(node.kwargs.items()))))
        hash(key)
    except TypeError:
        return None
    return key


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

PRODUCTS = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


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
        call(PRODUCTS[node.target], (target, *node.args), {"alpha": -rate})  # type: ignore[index]
    return True


def product_in(value: fx.Node, overwritten: set[fx.Node]) -> tuple[fx.Node, bool] | None:
    """Gives the product that a value is, and whether it is turned; none where it is needed otherwise, or read too late."""
    node, turned = value, False
    while node.target not in PRODUCTS:
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
