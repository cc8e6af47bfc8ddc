"""Work: what a round of a method asks of a machine, counted on the operations that an engine would run.

Steps and judgements are traced without values, as engines trace them. Gradients, passes and inner steps, pulls that move all of
an embedding of which a batch touches few rows, gradients row by row: all are counted as they are, and a method says nothing of
them. Machines are rough, so a time of this kind serves best beside another: it tells how much longer one round takes. Alone it
was 0.5 to 1.5 times what 37 recorded benchmarks took (benchmarks/estimates.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from gpfl.core import tree
from gpfl.core.local_round import evaluate_client
from gpfl.core.method import ClientInfo, Phase
from gpfl.core.tree import Tree
from gpfl.engine import RunSpec
from gpfl.engine.compiler.ghost_clipping import apply_ghost_clipping
from gpfl.engine.compiler.passes import base_node, eliminate_common_subexpressions, eliminate_no_ops, is_view, mutated_inputs
from gpfl.engine.compiler.write_back import write_back
from gpfl.engine.selection import saturates_core
from gpfl.engine.vmap import Vmap
from gpfl.experiments.machine import Limits, limits_at_hand
from gpfl.federation.federation import Federation, Shard

aten = torch.ops.aten


class Machine(NamedTuple):
    """What a machine does in a second of a step's operations, which reach less than its peak."""

    operations: float  # of products
    bytes: float  # read or written
    scattered: float  # bytes that are added to rows of a table, one row after the other
    calls: float  # operations, however small
    fuses: bool  # operations on single entries are one with those before and after


MACHINES = {
    "cpu": Machine(1e11, 4e10, 2.5e9, 1e5, fuses=False),
    "cuda": Machine(2e13, 4e12, 3e10, 1e6, fuses=True),
}
"""Those of the benchmarks: two cores, and an H200."""

PEAKS = {"cpu": Limits(1.98e11, 4.81e10), "cuda": Limits(5.09e13, 4.19e12)}
"""What was measured there."""


def machine_at_hand(device: torch.device) -> Machine:
    """Gives the benchmarks' machine of this kind, as much faster or slower as this one multiplies and copies now."""
    kind = device.type if device.type in MACHINES else "cuda"
    known, peak = MACHINES[kind], PEAKS[kind]
    found = limits_at_hand(device) or peak
    products, copies = found.operations / peak.operations, found.bytes / peak.bytes
    return known._replace(
        operations=known.operations * products, bytes=known.bytes * copies, scattered=known.scattered * copies
    )


CARRIED = 4
"""How often a client's state is copied in a round: into its slot and out of it, into the mean and into its place."""


@dataclass(frozen=True)
class Sample:
    """What of data the work of a round depends on."""

    federation: Federation  # one client with few rows
    clients: int  # of the whole federation
    trained: float  # rows of a round for each client that joins it
    judged: float


def sample_of(setting: RunSpec) -> Sample:
    """Gives the sample of a setting, its rows in a table of their own: the whole need not be held for it."""
    federation, schedule, rows = setting.federation, setting.schedule, setting.federation.n_samples
    largest = max(federation.shards, key=lambda shard: len(shard.train))
    train = largest.train[: max(4 * schedule.batch_size, schedule.min_samples(setting.method.phases()))]
    chosen = np.concatenate([train, largest.test[:1]])
    table = federation.table.select(chosen)
    numbers = np.arange(len(chosen))
    few = Federation(table, [Shard(largest.name, numbers[: len(train)], numbers[:0], numbers[len(train) :])])
    judged = float(rows("test").mean() + rows("validation").mean())  # of all clients, whoever joins
    return Sample(few, len(federation), float(rows("train").mean()), judged / share_of(setting))


def share_of(setting: RunSpec) -> float:
    """Gives the share of clients that join a round, in the mean."""
    join = setting.schedule.client_fraction
    return sum(join) / 2 if isinstance(join, tuple) else join


class Stint(NamedTuple):
    """What a phase of a round asks for."""

    epochs: float
    rows: int  # of a step
    seconds: float  # of a step of all clients that train at once


class Round(NamedTuple):
    """What a round of so many clients at once may take, whatever rows they have."""

    clients: int
    stints: tuple[Stint, ...]
    judging: float  # seconds for a row of each
    carrying: float  # seconds for their states

    def of_step(self, sample: Sample) -> float:
        """Gives the seconds of a round for each step of a client that has as many rows as those of a sample."""
        steps = [stint.epochs * max(1.0, sample.trained / stint.rows) for stint in self.stints]
        times = [stint.seconds for stint in self.stints]
        besides = self.judging * sample.judged + self.carrying
        return (float(np.dot(steps, times)) + besides) / sum(steps) / self.clients


JUDGED = 100
"""Rows on which judging is traced."""


def round_of(setting: RunSpec, clients: int, device: torch.device, machine: Machine | None = None) -> Round | None:
    """Gives what a round may take, where so many clients train at once; None where it cannot be traced.

    The setting is that of a method on few rows, on a CPU whatever the device. The machine is that of the benchmarks unless
    another is given.
    """
    apart = device.type == "cpu" and saturates_core(setting)  # engines then run clients one by one
    width = None if apart else max(2, min(clients, Vmap.max_slots))
    machine = machine or MACHINES.get(device.type, MACHINES["cuda"])
    phases, size = setting.method.phases(), setting.schedule.batch_size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stints = [
                Stint(each.epochs, size * each.batches, seconds(step_graph(setting, each, width), machine)) for each in phases
            ]
            judging = seconds(judge_graph(setting, width, JUDGED), machine) / JUDGED
    except Exception:  # a method or net may do what cannot be traced; it then runs all the same
        return None
    return Round(width or 1, tuple(stints), judging, carrying(setting, width or 1, machine))


def carrying(setting: RunSpec, width: int, machine: Machine) -> float:
    """Gives what it may take to give clients their state, and to take it from them."""
    sizes = [width * held(leaf) for state in setting.method.init(0) for leaf in tree.leaves(state)]
    return CARRIED * (2 * sum(sizes) / machine.bytes + len(sizes) / machine.calls)


# Tracing.


class Stage(NamedTuple):
    """What operations are traced on: shapes without values, of clients stacked or of one alone."""

    shared: Tree
    private: Tree
    client: ClientInfo
    x: Tensor
    y: Tensor


def stage(setting: RunSpec, width: int | None, fake: FakeTensorMode) -> Stage:
    """Gives the state of `width` clients, or of one alone."""
    table, lead = setting.federation.table, [] if width is None else [width]
    shared, private = (tree.map_leaves(fake.from_tensor, state) for state in setting.method.init(0))
    with fake:
        fact, counts = torch.ones(lead), torch.ones(*lead, table.classes)
        private = private if width is None else tree.repeat(private, width)
        return Stage(
            shared, private, ClientInfo(fact, counts, fact, fact, fact), fake.from_tensor(table.x), fake.from_tensor(table.y)
        )


def step_graph(setting: RunSpec, phase: Phase, width: int | None) -> fx.Graph:
    """Gives the operations of a phase's step."""
    method, table = setting.method, setting.federation.table
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        shared, private, client, x, y = stage(setting, width, fake)
        work = tree.clone(each(method.download, width)(shared, private, client))
        rows = places(width, setting.schedule.batch_size * phase.batches)
        leaves, shape = pytree.tree_flatten((work, shared, client, x, y, rows))
        state = pytree.tree_structure(work)

        def advance(*leaves: Tensor) -> list[Tensor]:
            work, shared, client, x, y, rows = pytree.tree_unflatten(list(leaves), shape)
            after, _ = each(phase.step, width)(shared, work, table.with_tensors(x, y).batch(rows), client)
            return cast(list[Tensor], state.flatten_up_to(after))

        module = simplified(advance, leaves)
        write_back(module.graph, state.num_leaves)
        return with_shapes(module, leaves, fake)


def judge_graph(setting: RunSpec, width: int | None, rows: int) -> fx.Graph:
    """Gives the operations of a judgement on so many rows of each client."""
    method, table = setting.method, setting.federation.table
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        state = stage(setting, width, fake)
        adapt, judged = places(width, setting.schedule.batch_size), places(width, rows)
        leaves, shape = pytree.tree_flatten((*state, adapt, judged))

        def score(*leaves: Tensor) -> list[Tensor]:
            shared, private, client, x, y, adapt, judged = pytree.tree_unflatten(list(leaves), shape)
            batches = [table.with_tensors(x, y).batch(part) for part in (adapt, judged)]
            return list(each(partial(evaluate_client, method), width)(shared, private, batches[0], client, batches[1]))

        return with_shapes(simplified(score, leaves), leaves, fake)


def each(function: Callable[..., Any], width: int | None) -> Callable[..., Any]:
    """Gives a function for stacked clients, the first argument of which they share; as it is for one alone."""

    def stacked(*args: object) -> Any:
        return vmap(function, in_dims=(None, *[0] * (len(args) - 1)))(*args)

    return function if width is None else stacked


def places(width: int | None, rows: int) -> Tensor:
    """Gives numbers of rows, for each client."""
    return torch.zeros(*([] if width is None else [width]), rows, dtype=torch.int64)


def simplified(function: Callable[..., list[Tensor]], leaves: list[Tensor]) -> fx.GraphModule:
    """Gives the operations of a function as engines leave them."""
    module = make_fx(function, _error_on_data_dependent_ops=True)(*leaves)
    for simplify in (eliminate_no_ops, eliminate_common_subexpressions, apply_ghost_clipping):
        simplify(module.graph)
    return module


def with_shapes(module: fx.GraphModule, leaves: list[Tensor], fake: FakeTensorMode) -> fx.Graph:
    """Gives operations that all know their shapes, those too that were put in."""
    module.recompile()
    FakeTensorProp(module, fake).propagate_dont_convert_inputs(*leaves)
    return module.graph


# Counting.

PRODUCTS = (
    *(aten.mm.default, aten.addmm.default, aten.addmm_.default),
    *(aten.bmm.default, aten.baddbmm.default, aten.baddbmm_.default),
)
TABLES = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)
"""Operations that read of their first input only what they give."""


def seconds(graph: fx.Graph, machine: Machine) -> float:
    """Gives what the operations of a graph may take, one after the other."""
    return sum(seconds_of(node, machine) for node in graph.nodes if node.op == "call_function" and not idle(node))


def seconds_of(node: fx.Node, machine: Machine) -> float:
    """Gives what an operation may take; nothing where it is one with others."""
    if node.target is aten.index_put_.default:
        return size(cast(fx.Node, node.args[2])) / machine.scattered + 1 / machine.calls
    moved = traffic(node, machine.fuses)
    if not moved:
        return 0.0
    return operations(node) / machine.operations + moved / machine.bytes + 1 / machine.calls


def operations(node: fx.Node) -> int:
    """Gives the multiplications and additions of a product or a convolution; others take no time beside their bytes."""
    target, values = node.target, [cast(Tensor, part.meta["val"]) for part in node.args if isinstance(part, fx.Node)]
    if target is aten.convolution.default:
        return 2 * cast(Tensor, node.meta["val"]).numel() * values[1][0].numel()
    if target is aten.convolution_backward.default:  # by inputs, by weights, or both
        return 2 * values[0].numel() * values[2][0].numel() * sum(cast(list[bool], node.args[10])[:2])
    return 2 * cast(Tensor, node.meta["val"]).numel() * values[-1].shape[-2] if target in PRODUCTS else 0


def traffic(node: fx.Node, fuses: bool) -> int:
    """Gives the bytes that an operation reads and writes."""
    written = size(node)
    if node.target in TABLES:
        return 2 * written
    overwritten = mutated_inputs(node) if node.target in (aten.copy_.default, aten.fill_.Scalar) else []
    read = [part for part in node.all_input_nodes if part not in overwritten]
    if fuses and single(node):
        read = [part for part in read if not single(base_node(part))]
        if not mutated_inputs(node) and all(single(user) for user in readers(node)):
            written = 0
    return written + sum(size(part) for part in read)


def single(node: fx.Node) -> bool:
    """Tells whether an operation gives each entry from entries at the same place."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Gives the operations that use a value, as it is or through a view."""
    for user in node.users:
        if idle(user):
            yield from readers(user)
        else:
            yield user


def idle(node: fx.Node) -> bool:
    """Tells whether an operation moves nothing: a view, or one of several results."""
    return is_view(node) and not mutated_inputs(node)


def size(node: fx.Node) -> int:
    """Gives the bytes of a node's tensors; entries that are one in memory count once."""
    tensors = [value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, Tensor)]
    return sum(held(tensor) for tensor in tensors)


def held(tensor: Tensor) -> int:
    """Gives the bytes of a tensor without those that it repeats."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(length for length, stride in axes if stride) * tensor.element_size()
