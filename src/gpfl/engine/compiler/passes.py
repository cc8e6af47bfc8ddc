"""What is done to the traced operations of a step before they run: what is idle is left out, what repeats is shared."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def sizes_by_values(graph: fx.Graph) -> bool:
    """Tells whether a shape depends on values, such as that of entries under a mask: another batch would have another."""
    return any(node.op == "call_function" and sized_by_values(node) for node in graph.nodes)


def sized_by_values(node: fx.Node) -> bool:
    """Tells whether the shape of what an operation gives, or takes, depends on values."""
    if any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in indices(node)):  # masks
        return True
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.dynamic_output_shape in tags and node.target is not aten.index.Tensor


def indices(node: fx.Node) -> list[object]:
    """Gives the values by which an operation indexes its first input."""
    several = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    return [part.meta.get("val") for part in several if isinstance(part, fx.Node)]


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
