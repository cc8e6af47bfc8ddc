"""Programs: a step of training as plain operations on fixed memory, traced once and run many times.

What a method says in functions of trees is traced through torch.func into one flat list of operations. Its state is then
updated in place, and on a GPU the list is captured as a graph that is replayed without Python.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from gpfl.core.randomness import box_muller
from gpfl.engine.compiler.convolution import DECOMPOSITIONS
from gpfl.engine.compiler.in_place import write_back
from gpfl.engine.compiler.passes import drop_idle, share_equal, sizes_by_values
from gpfl.engine.compiler.per_example_passes import fold_rows
from gpfl.engine.compiler.product_passes import join_products, thin_products, write_out
from gpfl.engine.compiler.products import has_kernels
from gpfl.errors import GpflError

Buffers = Any
"""A tree of tensors, tuples and named tuples among the branches."""
Function = Callable[[Buffers, Buffers], Buffers]
Flat = Callable[..., list[Tensor]]
COMPILER: dict[str, Any] = {"shape_padding": False, "triton.autotune_pointwise": False}
"""Products stay as they are, and no candidates are timed: a sum's order, and its last digits, would hang on the fastest."""


class Program:
    """A function of state and fixed buffers that gives the new state; a call writes it into the state's memory."""

    products_on: ClassVar[tuple[str, ...]] = ("cuda",)  # devices on which stacked convolutions are run as products
    captured_on: ClassVar[tuple[str, ...]] = ("cuda",)  # devices that replay what was captured

    def __init__(
        self,
        function: Function,
        state: Buffers,
        fixed: Buffers,
        *,
        traced: bool = True,
        compiled: bool = False,
        needed: bool = False,
        weights: Mapping[str, bool] | None = None,
    ) -> None:
        """Traces the function on the buffers; one that is not traced, or cannot be, runs as it is.

        `needed` says that a step which cannot be compiled is an error. `weights` names buffers that hold weights, and whether
        those of many clients are stacked: they may come to lie in another order of memory.
        """
        self.state, self.fixed = state, fixed
        self._leaves, self._spec = pytree.tree_flatten((state, fixed))
        self._shape = pytree.tree_structure(state)
        self._count = self._shape.num_leaves
        self.device = self._leaves[0].device
        flat = self._flat(function)
        # Streams, graphs and kernels are those of the current GPU, which may be another.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            module = self._trace(flat, weights or {}) if traced else None
            self.traced = module is not None
            self._run = self._in_place(module, compiled and self._products) if module is not None else self._plain(flat)
            self._graph: torch.cuda.CUDAGraph | None = None
            if self.traced and self.device.type in self.captured_on:
                self._graph = self._capture_compiled(needed) if compiled else self._capture_plain()

    def _capture_compiled(self, needed: bool) -> torch.cuda.CUDAGraph | None:
        """Gives the graph of the compiled operations; where they cannot be compiled and need not be, of those as they are."""
        plain = self._run
        self._run = torch.compile(plain, fullgraph=True, dynamic=False, options=COMPILER)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as the advice to allow TF32
                return self._capture()
        except RuntimeError as problem:  # no compiler on the machine, or an operation that it does not know
            if needed:
                reason = str(problem).strip().splitlines()[0]
                raise GpflError(f"the step cannot be compiled on {self.device} ({reason}): use --compile off") from problem
            self._run = plain
            return self._capture_plain()

    def _capture_plain(self) -> torch.cuda.CUDAGraph | None:
        """Gives the graph of the operations as they are; none where one waits for the host, and then each is called."""
        try:
            return self._capture()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # what is really wrong with an operation is said when it is called
            return None

    def twin(self, common: tuple[str, ...]) -> Program:
        """Gives the same program on memory of its own, but for the fixed buffers named `common`."""
        out = copy.copy(self)
        own = {key: value if key in common else pytree.tree_map(torch.clone, value) for key, value in self.fixed.items()}
        out.state, out.fixed = pytree.tree_map(torch.clone, self.state), own
        out._leaves = pytree.tree_leaves((out.state, out.fixed))
        return out

    def __call__(self) -> None:
        """Advances the state."""
        if self._graph is not None:
            self._graph.replay()
        else:
            with torch.no_grad():
                self._run(*self._leaves)

    @property
    def _products(self) -> bool:
        return self.device.type in self.products_on

    def _flat(self, function: Function) -> Flat:
        """Gives the function of leaves, results in the order of the state's, whatever the order of their keys."""

        def flat(*leaves: Tensor) -> list[Tensor]:
            state, fixed = pytree.tree_unflatten(list(leaves), self._spec)
            return self._shape.flatten_up_to(function(state, fixed))

        return flat

    def _plain(self, flat: Flat) -> Callable[..., object]:
        def run(*leaves: Tensor) -> None:
            olds = leaves[: self._count]
            own = {memory(old) for old in olds}
            pairs = [(old, new) for old, new in zip(olds, flat(*leaves), strict=True) if not same(old, new)]
            # What lies in the state's memory would be overwritten before it is read.
            pairs = [(old, new.clone() if memory(new) in own else new) for old, new in pairs]
            for old, new in pairs:
                old.copy_(new)

        return run

    def _trace(self, flat: Flat, weights: Mapping[str, bool]) -> fx.GraphModule | None:
        """Gives the operations of a function, or nothing where they depend on values: a person's own forward may branch."""
        table = dict(DECOMPOSITIONS) if self._products else {}
        if self._products and not has_kernels(self.device):  # a compiler fuses what it sees
            table[torch.ops.gpfl.normals.default] = box_muller
        suited = {**self.state, **self.fixed}
        if has_kernels(self.device):
            suited.update({name: inputs_innermost(suited[name], stacked) for name, stacked in weights.items()})
        state, fixed = ({name: suited[name] for name in part} for part in (self.state, self.fixed))
        leaves = pytree.tree_leaves((state, fixed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module = make_fx(flat, decomposition_table=table, _error_on_data_dependent_ops=True)(*leaves)
            except Exception:  # what is really wrong with a function is said when it runs
                return None
        if sizes_by_values(module.graph):
            return None
        self.state, self.fixed, self._leaves = state, fixed, leaves
        return module

    def _in_place(self, module: fx.GraphModule, compiled: bool) -> Callable[..., object]:
        drop_idle(module.graph)
        share_equal(module.graph)
        fold_rows(module.graph)
        kernels = has_kernels(self.device)
        if kernels:
            join_products(module.graph)
            thin_products(module.graph)
        write_back(module.graph, self._count, compiled, kernels)
        if compiled:
            write_out(module.graph)
        module.graph.lint()
        module.recompile()
        return module

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._warm_up()
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.graph(graph):
                self._run(*self._leaves)
        finally:
            torch.cuda.set_stream(here)  # where a capture fails, torch stays on the one it captured
        return graph

    def _warm_up(self) -> None:
        """Calls the operations twice: the first time they may be compiled; what waits the second time cannot be captured."""
        here, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        state = self._leaves[: self._count]
        before = [leaf.clone() for leaf in state]
        for context in (nullcontext(), without_waits()):
            stream.wait_stream(here)
            try:
                with torch.no_grad(), torch.cuda.stream(stream), context:
                    self._run(*self._leaves)
            finally:
                here.wait_stream(stream)
                for leaf, value in zip(state, before, strict=True):  # a counter that went on would point beyond a plan
                    leaf.copy_(value)


@contextmanager
def without_waits() -> Iterator[None]:
    """Lets operations fail that wait for the GPU: while a graph is captured they would break it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not all of them are found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def inputs_innermost(weights: Buffers, stacked: bool) -> Buffers:
    """Gives weights, those of convolutions in the order of memory that our kernels like: with their inputs innermost."""

    def leaf(t: Tensor) -> Tensor:
        if t.dim() - stacked != 4 or not t.is_floating_point():
            return t
        return t.movedim(-3, -1).contiguous().movedim(-1, -3)

    return pytree.tree_map(leaf, weights)


def memory(tensor: Tensor) -> int:
    """Gives the address of the memory in which a tensor lies."""
    return tensor.untyped_storage().data_ptr()


def same(one: Tensor, other: Tensor) -> bool:
    """Tells whether two tensors are the same entries of the same memory."""
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return one.data_ptr() == other.data_ptr()
