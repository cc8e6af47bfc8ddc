"""Clients side by side on the cores of a CPU: a thread for each core, every one with a client of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import Plan, local_round
from gpfl.core.method import ClientInfo, LossTerms, Method, Phase
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest, RoundResult, RunSpec, TrainRequest
from gpfl.engine.compiler.program import Buffers, Program
from gpfl.engine.packing import pack

T = TypeVar("T")


class Done(NamedTuple):
    """What a worker gives: the weighted sum of its clients' uploads, and what each of them keeps, by place."""

    total: Tree
    private: dict[int, Tree]
    terms: dict[int, LossTerms]


class Workers(Engine):
    """Runs a client on each core, one thread a client: small products gain nothing from several."""

    name: ClassVar[str] = "workers"

    trace_from: ClassVar[int] = 100  # steps of a run from which tracing them pays

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.workers = max(1, min(len(spec.federation), cores()))
        self._phases = self.method.phases()
        # A pass puts weights into the modules of its net, so no two threads may share them.
        self._methods = [self.method, *(copy.deepcopy(self.method) for _ in range(self.workers - 1))]
        self._programs: dict[tuple[int, int], list[Program | None]] = {}

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Gives the cohort's round. Who works on whom follows from the clients' steps alone, so sums are the same again."""
        shared, private, clients, number, schedule = request[:5]
        plans = [self.plan(client, number, schedule) for client in clients]
        facts = self.client_info(clients, number)
        shares = self.aggregation_weights(request)
        programs = self._prepare(shared, private, facts, plans)
        packing = pack([sum(len(steps) for steps in plan) for plan in plans], min(self.workers, len(clients)))

        def work(worker: int) -> Done:
            total: Tree = {}
            kept: dict[int, Tree] = {}
            terms: dict[int, LossTerms] = {}
            own = [lanes[worker] for lanes in programs]
            for place in packing.slots[worker]:
                client, before = facts.select(place), tree.take(tree.fetch(private, [place], self.device), 0)
                upload, kept[place], terms[place] = self._round(
                    self._methods[worker], own, shared, before, plans[place], client
                )
                part = tree.map_leaves(lambda t, place=place: shares[place] * t, upload)
                total = tree.map_leaves(torch.add, total, part) if total else part
            return Done(total, kept, terms)

        done = self._side_by_side(work, len(packing.slots))
        mean = done[0].total
        for result in done[1:]:
            mean = tree.map_leaves(torch.add, mean, result.total)
        kept = {place: own for result in done for place, own in result.private.items()}
        terms = {place: own for result in done for place, own in result.terms.items()}
        named = {name: torch.stack([terms[place][name] for place in range(len(clients))]) for name in terms[0]}
        return RoundResult(mean, tree.stack([kept[place] for place in range(len(clients))]), named)

    def _round(
        self, method: Method, programs: list[Program | None], shared: Tree, private: Tree, plan: Plan, client: ClientInfo
    ) -> tuple[Tree, Tree, LossTerms]:
        """Gives one client's upload, private state and mean terms."""
        short = any((steps < 0).any() for steps in plan)
        traced = [program for program in programs if program is not None]
        if len(traced) < len(programs) or (short and method.net.has_batch_norm):
            return local_round(method, shared, private, self.federation.table, plan, client)
        local_state = method.download(shared, private, client)
        sums: dict[str, Tensor] = {}
        steps_seen: dict[str, int] = {}
        for program, steps in zip(traced, plan, strict=True):
            tree.copy_(program.state["work"], local_state)
            for buffer, field in zip(program.fixed["client"], client, strict=True):
                buffer.copy_(field)
            for value in program.state["terms"].values():
                value.zero_()
            for rows in torch.from_numpy(steps):
                program.fixed["rows"].copy_(rows)
                program()
            local_state = tree.clone(program.state["work"])
            for name, value in program.state["terms"].items():
                sums[name] = sums.get(name, torch.zeros(())) + value
                steps_seen[name] = steps_seen.get(name, 0) + len(steps)
        upload, kept = method.upload(shared, local_state, private, client)
        return upload, kept, {name: sums[name] / steps_seen[name] for name in sums}

    def _prepare(self, shared: Tree, private: Tree, facts: ClientInfo, plans: list[Plan]) -> list[list[Program | None]]:
        """Gives each phase's programs, one for every worker, with the shared state of this round; None where none is traced."""
        calls = sum(len(steps) for plan in plans for steps in plan) * self.schedule.rounds
        if calls < self.trace_from:
            return [[None] * self.workers for _ in self._phases]
        out: list[list[Program | None]] = []
        for number, phase in enumerate(self._phases):
            width = plans[0][number].shape[1]
            if (number, width) not in self._programs:
                first = self._program(phase, shared, tree.take(private, 0), facts.select(0), width)
                twins = [first.twin(("shared", "x", "y")) for _ in range(self.workers - 1)]
                self._programs[number, width] = [first, *twins] if first.traced else [None] * self.workers
            lanes = self._programs[number, width]
            if lanes[0] is not None:
                tree.copy_(lanes[0].fixed["shared"], shared)
            out.append(lanes)
        return out

    def _program(self, phase: Phase, shared: Tree, private: Tree, client: ClientInfo, width: int) -> Program:
        """Gives the program of a phase's step for one client."""
        table = self.federation.table

        def advance(state: Buffers, fixed: Buffers) -> Buffers:
            batch = table.with_tensors(fixed["x"], fixed["y"]).batch(fixed["rows"])
            after, terms = phase.step(fixed["shared"], state["work"], batch, fixed["client"])
            sums = {name: state["terms"][name] + value for name, value in terms.items()} if state["terms"] else terms
            return {"work": after, "terms": sums}

        local_state = tree.clone(self.method.download(shared, private, client))
        fixed = {
            "shared": tree.clone(shared),
            "client": ClientInfo(*(field.clone() for field in client)),
            "rows": torch.zeros(width, dtype=torch.int64),
            "x": table.x,
            "y": table.y,
        }
        terms = {
            name: torch.zeros_like(value) for name, value in advance({"work": local_state, "terms": {}}, fixed)["terms"].items()
        }
        return Program(advance, {"work": local_state, "terms": terms}, fixed)

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Gives the scores, clients side by side."""
        shared, private, clients, number, split = request
        sizes = self.federation.n_samples(split)[list(clients)]
        facts = self.client_info(clients, number)
        packing = pack(sizes.tolist(), min(self.workers, len(sizes)))
        totals = torch.zeros(len(sizes), 2)

        def work(worker: int) -> None:
            with torch.no_grad():
                for place in packing.slots[worker]:
                    own = tree.take(tree.fetch(private, [place], self.device), 0)
                    totals[place] = self.score_client(
                        shared, own, clients[place], facts.select(place), split, self._methods[worker]
                    )

        self._side_by_side(work, len(packing.slots))
        correct, loss = totals.T.double().numpy()
        return Evaluation(correct, loss, sizes.astype(np.float64))

    def _side_by_side(self, work: Callable[[int], T], count: int) -> list[T]:
        """Gives what the workers give, each on one core."""
        with single_threaded(), ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, range(count)))


def cores() -> int:
    """Gives the cores that torch may use here."""
    return min(
        torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


@contextmanager
def single_threaded() -> Iterator[None]:
    """Lets products run on one thread, and restores their number after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
