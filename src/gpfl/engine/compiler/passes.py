"""General passes over the traced graph of a step: no-ops and repeated operations are eliminated."""

import operator

import torch
from torch import Tensor, fx

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def has_dynamic_shapes(graph: fx.Graph) -> bool:
    """Return whether a shape depends on values, as with boolean masks: the next batch would have another."""
    return any(node.op == "call_function" and _has_dynamic_shape(node) for node in graph.nodes)


def _has_dynamic_shape(node: fx.Node) -> bool:
    if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in _indices(node)):  # masks
        return True
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.dynamic_output_shape in tags and node.target is not aten.index.Tensor


def _indices(node: fx.Node) -> list[object]:
    indices = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    return [index.meta.get("val") for index in indices if isinstance(index, fx.Node)]


def eliminate_no_ops(graph: fx.Graph) -> None:
    """Remove operations that return their input: traces have many views of equal shape and transposes in pairs."""
    mutated = mutated_nodes(graph)
    for node in list(graph.nodes):
        same = _equal_input(node)
        if same is not None and not {node, base_node(node), base_node(same)} & mutated:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()  # the first transpose of a pair has no use any more


def _equal_input(node: fx.Node) -> fx.Node | None:
    """Return the node whose value an operation returns unchanged, or None."""
    base = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(base, fx.Node) or not isinstance(base.meta.get("val"), Tensor):
        return None
    before, target = base.meta["val"], node.target
    no_op = (
        (target in (*VIEWS, aten.expand.default) and node.meta["val"].shape == before.shape)
        or (target is aten.permute.default and node.args[1] == list(range(before.dim())))
        or (target is aten.mul.Scalar and node.args[1] == 1 and node.meta["val"].dtype == before.dtype)
    )
    if no_op:
        return base
    if target is aten.transpose.int and base.target is aten.transpose.int and _swap_same_axes(node, base):
        first = base.args[0]
        return first if isinstance(first, fx.Node) else None
    return None


def _swap_same_axes(node: fx.Node, base: fx.Node) -> bool:
    dims = node.meta["val"].dim()
    pairs = [{int(axis) % dims for axis in transpose.args[1:]} for transpose in (node, base)]  # type: ignore[arg-type]
    return pairs[0] == pairs[1]


def eliminate_common_subexpressions(graph: fx.Graph) -> None:
    """Replace equal operations on equal inputs by one: a traced backward pass repeats much of its forward pass."""
    mutated = mutated_nodes(graph)
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if not is_pure(node) or any(base_node(each) in mutated for each in (node, *node.all_input_nodes)):
            continue
        key = _expression(node)
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        elif key is not None:
            first[key] = node


def is_pure(node: fx.Node) -> bool:
    """Return whether an operation mutates nothing and is not random."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not mutated_inputs(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


def mutated_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory an operation of the graph writes into."""
    return {base_node(value) for node in graph.nodes for value in mutated_inputs(node)}


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an operation writes into."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = node.target._schema.arguments
    values = [(argument, value) for argument, value in zip(arguments, node.args, strict=False)]
    values += [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    return [value for argument, value in values if _is_mutated(argument) and isinstance(value, fx.Node)]


def _is_mutated(argument: torch.Argument) -> bool:
    # BatchNorm writes into its statistics, although its schema does not say so.
    declared = argument.alias_info is not None and argument.alias_info.is_write
    return declared or argument.name in ("running_mean", "running_var")


def base_node(node: fx.Node) -> fx.Node:
    """Return the node in whose memory the value of a view is."""
    while is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Return whether the value of a node may be in the memory of its first input."""
    # getitem selects one of several results; _unsafe_view is a view, although its schema does not say so.
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.returns:
        return False
    return node.target._schema.returns[0].alias_info is not None


def _expression(node: fx.Node) -> object:
    """Return a hashable form of an operation and its inputs, or None if there is none."""

    def hashable(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *(hashable(entry) for entry in value))
        return (type(value).__name__, value)

    try:
        key = (node.target, hashable(node.args), hashable(tuple(sorted(node.kwargs.items()))))
        hash(key)
    except TypeError:
        return None
    return key
