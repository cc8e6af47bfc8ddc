"""The engine for the cores of a CPU: a thread per core, each with a client of its own."""

import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import ClientUpdate, Plan, Samples, local_round
from gpfl.core.method import ClientInfo, LossTerms, Method, Phase
from gpfl.core.tree import Tree
from gpfl.engine.aggregator import Aggregator
from gpfl.engine.base import ClientFunction, Engine, EvalRequest, RoundResult, RunSpec, TrainRequest, add_terms
from gpfl.engine.compiler.program import Buffers, Program, to_channels_last
from gpfl.engine.slots import pack

T = TypeVar("T")
Programs: TypeAlias = list[Program | None]


class WorkerResult(NamedTuple):
    """A worker's uploads, and its clients' private state and loss terms by position in the request."""

    uploads: Aggregator
    private: dict[int, Tree]
    terms: dict[int, LossTerms]


class Workers(Engine):
    """Engine that trains one client per CPU core, each on a single thread: more do not speed up small matrix products."""

    name: ClassVar[str] = "workers"

    min_calls_to_trace: ClassVar[int] = 100  # steps of a run below which tracing them does not pay
    max_channels_last: ClassVar[int] = 256  # channels of the widest convolution up to which channels-last is faster

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.n_workers = max(1, min(len(spec.federation), available_cores()))
        self._phases, self._compile = self.method.phases(), spec.compile
        # functional_call puts weights into the modules of the net, so threads must not share them.
        self._methods = [self.method, *(copy.deepcopy(self.method) for _ in range(self.n_workers - 1))]
        self._programs: dict[tuple[int, int], Programs] = {}

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Run a round. The clients of each worker depend on their numbers of steps only, so sums are reproducible."""
        shared, private, clients = request.shared, request.private, request.clients
        plans = [self.plan(client, request.round, request.schedule) for client in clients]
        info = self.client_info(clients, request.round)
        programs = self._programs_by_phase(shared, private, info, plans)
        packing = pack([sum(len(steps) for steps in plan) for plan in plans], min(self.n_workers, len(clients)))

        def work(worker: int) -> WorkerResult:
            out = WorkerResult(self.new_aggregator(request), {}, {})
            for i in packing.slots[worker]:
                worker_programs = [by_worker[worker] for by_worker in programs]
                update = self._local_round(
                    self._methods[worker], worker_programs, shared, self.fetch_private(private, i), plans[i], info.select(i)
                )
                out.uploads.add(i, update.upload)
                out.private[i], out.terms[i] = update.private, update.terms
            return out

        results = self._run_workers(work, len(packing.slots))
        for result in results[1:]:
            results[0].uploads.merge(result.uploads)
        new_private = {i: value for result in results for i, value in result.private.items()}
        terms = {i: value for result in results for i, value in result.terms.items()}
        order = range(len(clients))
        return self.to_result(request, results[0].uploads, [new_private[i] for i in order], [terms[i] for i in order])

    def _local_round(
        self, method: Method, programs: Programs, shared: Tree, private: Tree, plan: Plan, client: ClientInfo
    ) -> ClientUpdate:
        short = any((steps < 0).any() for steps in plan)
        traced = [program for program in programs if program is not None]
        if len(traced) < len(programs) or (short and method.net.has_batch_norm):
            return local_round(method, shared, private, self.federation.table, plan, client)
        local_state = method.download(shared, private, client)
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for program, steps in zip(traced, plan, strict=True):
            tree.copy_(program.state["local_state"], local_state)
            for buffer, field in zip(program.fixed["client"], client, strict=True):
                buffer.copy_(field)
            for value in program.state["terms"].values():
                value.zero_()
            for indices in torch.from_numpy(steps):
                program.fixed["indices"].copy_(indices)
                program()
            local_state = tree.map_leaves(contiguous_copy, program.state["local_state"])
            for name, value in program.state["terms"].items():
                sums[name] = sums.get(name, torch.zeros(())) + value
                counts[name] = counts.get(name, 0) + len(steps)
        upload, new_private = method.upload(shared, local_state, private, client)
        return ClientUpdate(upload, new_private, {name: sums[name] / counts[name] for name in sums})

    def _programs_by_phase(self, shared: Tree, private: Tree, info: ClientInfo, plans: list[Plan]) -> list[Programs]:
        """Return each phase's programs by worker, with this round's shared state; None where steps are not traced."""
        calls = sum(self.count_steps(phase) for phase in self._phases)
        if calls < self.min_calls_to_trace and self._compile != "on":
            return [[None] * self.n_workers for _ in self._phases]
        out: list[Programs] = []
        for index, phase in enumerate(self._phases):
            first_batch = torch.from_numpy(plans[0][index][0])
            width = len(first_batch)
            if (index, width) not in self._programs:
                with num_threads(1):  # for which code is compiled
                    first = self._program(
                        phase, shared, tree.take(private, 0), info.select(0), first_batch, calls // self.n_workers
                    )
                clones = [first.clone(("shared", "x", "y")) for _ in range(self.n_workers - 1)]
                self._programs[index, width] = [first, *clones] if first.traced else [None] * self.n_workers
            by_worker = self._programs[index, width]
            if by_worker[0] is not None:
                by_worker[0].load("shared", shared)
            out.append(by_worker)
        return out

    def _program(self, phase: Phase, shared: Tree, private: Tree, client: ClientInfo, indices: Tensor, calls: int) -> Program:
        table = self.federation.table

        def advance(state: Buffers, fixed: Buffers) -> Buffers:
            batch = Samples(fixed["x"], fixed["y"], table.input_spec).batch(fixed["indices"])
            local_state, terms = phase.step(fixed["shared"], state["local_state"], batch, fixed["client"])
            return {"local_state": local_state, "terms": add_terms(state["terms"], terms)}

        local_state = tree.clone(self.method.download(shared, private, client))
        fixed = {
            "shared": tree.clone(shared),
            "client": ClientInfo(*(field.clone() for field in client)),
            "indices": indices.clone(),
            "x": table.x,
            "y": table.y,
        }
        first = advance({"local_state": local_state, "terms": {}}, fixed)
        terms = {name: torch.zeros_like(value) for name, value in first["terms"].items()}
        weights = {"local_state": False, "shared": False} if self._prefers_channels_last(local_state) else None
        compiled, required = self._compile != "off", self._compile == "on"
        state = {"local_state": local_state, "terms": terms}
        return Program(advance, state, fixed, compiled=compiled, compile_required=required, calls=calls, weights=weights)

    def _prefers_channels_last(self, local_state: Tree) -> bool:
        """Return whether convolutions are faster with channels last: not with many channels, where images are small."""
        return all(t.dim() != 4 or len(t) <= self.max_channels_last for t in tree.leaves(local_state))

    def map_clients(self, request: EvalRequest, function: ClientFunction) -> list[Tensor]:
        """Return the value of a function for every client of a request; each worker passes its own copy of the method."""
        info = self.client_info(request.clients, request.round)
        convert = self._prefers_channels_last(request.shared) and self._prefers_channels_last(tree.take(request.private, 0))
        if convert:
            request = request._replace(shared=to_channels_last(request.shared, stacked=False))
        sizes = self.federation.n_samples(request.split)[list(request.clients)]
        packing = pack(sizes.tolist(), min(self.n_workers, len(sizes)))

        def run(i: int, method: Method) -> Tensor:
            only = slice(i, i + 1)
            private = tree.take(request.private, only)
            private = to_channels_last(private, stacked=True) if convert else private
            return function(request._replace(private=private, clients=request.clients[only]), 0, info.select(only), method)

        def work(worker: int) -> dict[int, Tensor]:
            with torch.no_grad():
                return {i: run(i, self._methods[worker]) for i in packing.slots[worker]}

        values = {i: value for result in self._run_workers(work, len(packing.slots)) for i, value in result.items()}
        return [values[i] for i in range(len(sizes))]

    def _run_workers(self, work: Callable[[int], T], count: int) -> list[T]:
        with num_threads(1), ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, range(count)))


def contiguous_copy(t: Tensor) -> Tensor:
    """Return a copy in the default memory format; programs keep weights of convolutions in another."""
    return t.clone(memory_format=torch.contiguous_format)


def available_cores() -> int:
    """Return the number of cores that torch may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(torch.get_num_threads(), allowed)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run torch's operations on `count` threads, and restore their number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
