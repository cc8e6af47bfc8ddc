"""Programs: a step of training as plain operations on fixed memory, traced once and run many times.

A function of trees, whatever torch.func transforms it uses, is traced into one flat graph of operations that updates its state
in place. On a GPU the graph is captured as a CUDA graph, which is replayed without Python.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from gpfl.core import tree
from gpfl.core.randomness import box_muller
from gpfl.core.tree import Tree
from gpfl.engine.compiler import step_times
from gpfl.engine.compiler.convolution import DECOMPOSITIONS
from gpfl.engine.compiler.ghost_clipping import apply_ghost_clipping
from gpfl.engine.compiler.matmul_passes import expand_outer_products, use_skinny_kernel
from gpfl.engine.compiler.operators import has_kernels
from gpfl.engine.compiler.passes import eliminate_common_subexpressions, eliminate_no_ops, has_dynamic_shapes
from gpfl.engine.compiler.write_back import write_back
from gpfl.errors import GpflError

Buffers = Any  # a tree of tensors that may have tuples and named tuples as branches
Function = Callable[[Buffers, Buffers], Buffers]
FlatFunction = Callable[..., list[Tensor]]
COMPILE_OPTIONS: dict[str, Any] = {"shape_padding": False, "triton.autotune_pointwise": False}
"""No padded products and no autotuning: the order of a sum, and so its last digits, would depend on the fastest candidate."""

CPU_COMPILE_OPTIONS: dict[str, Any] = {"compile_threads": 1}
"""No pool of processes: to start them takes longer than to compile a step."""

TIMED_CALLS = 15  # of each form of a step, of which the fastest counts


class Program:
    """A function of state and fixed buffers that returns the new state; a call writes it into the state's memory."""

    matmul_devices: ClassVar[tuple[str, ...]] = ("cuda",)  # where stacked convolutions are run as matrix products
    capture_devices: ClassVar[tuple[str, ...]] = ("cuda",)  # where programs are captured as graphs
    min_operations_to_time: ClassVar[int] = 5_000_000
    """Operations of all calls together from which compiling can pay on a CPU: it saves up to 3 µs each and takes 5 to 15 s."""

    def __init__(
        self,
        function: Function,
        state: Buffers,
        fixed: Buffers,
        *,
        traced: bool = True,
        compiled: bool = False,
        compile_required: bool = False,
        calls: int = 0,
        weights: Mapping[str, bool] | None = None,
    ) -> None:
        """Trace the function on the buffers; without `traced`, or where it cannot be traced, it runs as it is.

        With `compiled` the traced operations are compiled; on a CPU only if the times measured on this machine say that it
        pays for this number of `calls`. With `compile_required` they always are, and it is an error if they cannot be.
        `weights` names the buffers that hold weights and says whether those of many clients are stacked: their memory
        format may change.
        """
        self.state, self.fixed = state, fixed
        self._leaves, self._spec = pytree.tree_flatten((state, fixed))
        self._state_spec = pytree.tree_structure(state)
        self._n_state = self._state_spec.num_leaves
        self.device = self._leaves[0].device
        self._unread: frozenset[int] = frozenset()  # ids of the fixed buffers that no operation reads
        flat = self._flatten(function)
        # Streams, graphs and kernels belong to the current GPU, which may be another.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            module = self._trace(flat, weights or {}) if traced else None
            self.traced = module is not None
            self._run = self._untraced(flat)
            if module is not None:
                self._run = self._optimize(module, compiled, compile_required, calls)
            self._graph: torch.cuda.CUDAGraph | None = None
            if self.traced and self.device.type in self.capture_devices:
                self._graph = self._capture_compiled(compile_required) if compiled else self._capture_if_possible()

    def __call__(self) -> None:
        """Advance the state."""
        if self._graph is not None:
            self._graph.replay()
        else:
            with torch.no_grad():
                self._run(*self._leaves)

    def load(self, name: str, values: Tree) -> None:
        """Copy values to the fixed buffers `name`, but for those that no operation reads: they may be large."""
        for buffer, value in tree.zip_leaves(self.fixed[name], values):
            if id(buffer) not in self._unread:
                buffer.copy_(value)

    def clone(self, aliased: tuple[str, ...]) -> "Program":
        """Return the same program on memory of its own, except for the fixed buffers named `aliased`."""
        out = copy.copy(self)
        out.fixed = {key: value if key in aliased else pytree.tree_map(torch.clone, value) for key, value in self.fixed.items()}
        out.state = pytree.tree_map(torch.clone, self.state)
        out._leaves = pytree.tree_leaves((out.state, out.fixed))
        return out

    # Tracing.

    def _flatten(self, function: Function) -> FlatFunction:
        """Return the function of leaves; results are ordered like the state, whatever the order of their keys."""

        def flat(*leaves: Tensor) -> list[Tensor]:
            state, fixed = pytree.tree_unflatten(list(leaves), self._spec)
            return self._state_spec.flatten_up_to(function(state, fixed))

        return flat

    def _untraced(self, flat: FlatFunction) -> Callable[..., object]:
        def run(*leaves: Tensor) -> None:
            olds = leaves[: self._n_state]
            state_memory = {_storage(old) for old in olds}
            pairs = [(old, new) for old, new in zip(olds, flat(*leaves), strict=True) if not _is_same_view(old, new)]
            # Results in the state's memory would be overwritten before they are read.
            pairs = [(old, new.clone() if _storage(new) in state_memory else new) for old, new in pairs]
            for old, new in pairs:
                old.copy_(new)

        return run

    def _trace(self, flat: FlatFunction, weights: Mapping[str, bool]) -> fx.GraphModule | None:
        """Return the operations of a function, or None if they depend on values: a user's forward may branch."""
        table = dict(DECOMPOSITIONS) if self.device.type in self.matmul_devices else {}
        if table and not has_kernels(self.device):  # a compiler fuses what it sees
            table[torch.ops.gpfl.normals.default] = box_muller
        buffers = {**self.state, **self.fixed}
        if has_kernels(self.device) or self.device.type == "cpu":
            buffers.update({name: to_channels_last(buffers[name], stacked) for name, stacked in weights.items()})
        state, fixed = ({name: buffers[name] for name in part} for part in (self.state, self.fixed))
        leaves = pytree.tree_leaves((state, fixed))
        shapes = FakeTensorMode(allow_fallback_kernels=True)  # make_fx else makes one for each operation: twice the time
        with warnings.catch_warnings(), tracing(TracingContext(shapes)):
            warnings.simplefilter("ignore")
            try:
                module = make_fx(flat, decomposition_table=table, _error_on_data_dependent_ops=True)(*leaves)
            except Exception:  # an error of the function itself is raised when it runs
                return None
        if has_dynamic_shapes(module.graph):
            return None
        self.state, self.fixed, self._leaves = state, fixed, leaves
        return module

    def _optimize(self, module: fx.GraphModule, compiled: bool, required: bool, calls: int) -> Callable[..., object]:
        eliminate_no_ops(module.graph)
        eliminate_common_subexpressions(module.graph)
        apply_ghost_clipping(module.graph)
        if has_kernels(self.device):
            use_skinny_kernel(module.graph)
        if self.device.type in (*self.matmul_devices, *self.capture_devices):
            return self._write_back(module, compiled)
        if not compiled or self.device.type != "cpu":
            return self._write_back(module)
        if required:
            try:
                return self._compile_for_cpu(module)
            except (RuntimeError, OSError) as error:
                raise _compile_error(self.device, error) from error
        return self._faster_form(module, calls)

    def _write_back(self, module: fx.GraphModule, compiled: bool = False) -> fx.GraphModule:
        """Make the operations write the results into the memory of the state, in a form to be compiled or to be called."""
        write_back(module.graph, self._n_state, compiled, has_kernels(self.device))
        if compiled:
            expand_outer_products(module.graph)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        fixed = list(zip(inputs, self._leaves, strict=True))[self._n_state :]
        self._unread = frozenset(id(leaf) for node, leaf in fixed if not node.users)
        module.graph.lint()
        module.recompile()
        return module

    # Compiling for a CPU.

    def _faster_form(self, module: fx.GraphModule, calls: int) -> Callable[..., object]:
        """Return the operations compiled if that pays for this number of calls by the times stored on this machine.

        The first run that is long enough measures and stores them, and decides by what is stored, like all later runs: runs
        on one machine agree to the bit.
        """
        uncompiled = self._write_back(copy.deepcopy(module))
        if calls * len(module.graph.nodes) < self.min_operations_to_time:
            return uncompiled
        path = step_times.path_of(module.graph)
        times = step_times.load(path)
        compiled: Callable[..., object] | None = None
        if times is None:
            try:
                start = time.perf_counter()
                compiled = self._compile_for_cpu(module)
                compiling = time.perf_counter() - start
            except (RuntimeError, OSError):  # no compiler on the machine, or an operation it does not support
                return uncompiled
            plain, fused = self._time_forms(uncompiled, compiled)
            times = step_times.store(path, step_times.StepTimes(plain, fused, compiling))
        if times is None or not times.compiling_pays(calls):
            return uncompiled
        return compiled or self._compile_for_cpu(module)

    def _time_forms(self, *forms: Callable[..., object]) -> list[float]:
        """Return the fastest of several calls of each form, in seconds; the state stays as it is."""
        state = self._leaves[: self._n_state]
        before = [leaf.clone() for leaf in state]
        times: list[list[float]] = [[] for _ in forms]
        with torch.no_grad():
            for _ in range(TIMED_CALLS):
                for form, seconds in zip(forms, times, strict=True):
                    start = time.perf_counter()
                    form(*self._leaves)
                    seconds.append(time.perf_counter() - start)
                    for leaf, value in zip(state, before, strict=True):
                        leaf.copy_(value)
        return [min(seconds) for seconds in times]

    def _compile_for_cpu(self, module: fx.GraphModule) -> Callable[..., object]:
        """Return the compiled operations, without the checks of shapes that `torch.compile` makes at every call."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy, which takes long

        # Fake tensors of fixed shapes, without those of the trace, let the compiler use its cache on disk.
        mode = FakeTensorMode(shape_env=ShapeEnv())
        examples: list[Any] = [mode.from_tensor(leaf, static_shapes=True) for leaf in self._leaves]
        module = self._write_back(module, compiled=True)
        for node in module.graph.nodes:
            node.meta.clear()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled: Callable[..., object] = torch._inductor.compile(module, examples, options=CPU_COMPILE_OPTIONS)
        return compiled

    # CUDA graphs.

    def _capture_compiled(self, required: bool) -> torch.cuda.CUDAGraph | None:
        eager = self._run
        self._run = torch.compile(eager, fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as the advice to allow TF32
                return self._capture()
        except RuntimeError as error:  # no compiler on the machine, or an operation it does not support
            if required:
                raise _compile_error(self.device, error) from error
            self._run = eager
            return self._capture_if_possible()

    def _capture_if_possible(self) -> torch.cuda.CUDAGraph | None:
        """Return the captured graph, or None if an operation waits for the host; operations are then called one by one."""
        try:
            return self._capture()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an error of an operation itself is raised when it is called
            return None

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._warm_up()
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.graph(graph):
                self._run(*self._leaves)
        finally:
            torch.cuda.set_stream(stream)  # after a failed capture torch stays on the captured stream
        return graph

    def _warm_up(self) -> None:
        """Call the operations twice: the first call may compile them; what synchronises in the second cannot be captured."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        state = self._leaves[: self._n_state]
        before = [leaf.clone() for leaf in state]
        for context in (nullcontext(), raise_on_synchronization()):
            stream.wait_stream(current)
            try:
                with torch.no_grad(), torch.cuda.stream(stream), context:
                    self._run(*self._leaves)
            finally:
                current.wait_stream(stream)
                for leaf, value in zip(state, before, strict=True):  # a step counter would run past its plan
                    leaf.copy_(value)


@contextmanager
def raise_on_synchronization() -> Iterator[None]:
    """Make operations that wait for the GPU raise: they would break the capture of a graph."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def to_channels_last(weights: Buffers, stacked: bool) -> Buffers:
    """Return weights, with convolutions in the format of our kernels and of fast pooling on CPUs: input channels innermost."""

    def convert(t: Tensor) -> Tensor:
        if t.dim() - stacked != 4 or not t.is_floating_point():
            return t
        # A copy: a tensor of one channel counts as contiguous in both formats, but convolutions look at its strides.
        return t.movedim(-3, -1).clone(memory_format=torch.contiguous_format).movedim(-1, -3)

    return pytree.tree_map(convert, weights)


def _compile_error(device: torch.device, error: Exception) -> GpflError:
    reason = str(error).strip().splitlines()[0]
    return GpflError(f"the step cannot be compiled on {device} ({reason}): use --compile off")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.data_ptr() == b.data_ptr()
