"""Judging many personal models at once, clients with like numbers of rows together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from gpfl.core import tree
from gpfl.core.local_round import evaluate_client
from gpfl.core.method import ClientInfo
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest
from gpfl.engine.compiler.program import Buffers, Function, Program
from gpfl.engine.packing import blocks

SEGMENT = 512
"""Blocks whose rows lie on the device at once."""
JUDGED = 2048
"""Rows of all clients judged at once; with clients at once on a CPU, where a wider stack gains nothing."""
JUDGED_CLIENTS = {"cpu": 16}


class Group(NamedTuple):
    """Clients that are judged together, the same filled up to a width, the batches they adapt to and their rows in blocks."""

    places: list[int]
    full: list[int]
    who: Tensor
    adapt: Tensor
    plan: Tensor  # (clients, blocks, rows)


class BatchedEvaluator:
    """Judges the clients of an engine; `make` gives a program for so many calls."""

    def __init__(self, engine: Engine, slots: int, make: Callable[[Function, Buffers, Buffers, int], Program]) -> None:
        self._engine, self._slots, self._make = engine, slots, make
        self._groups: dict[object, list[Group]] = {}
        self._programs: dict[object, Program] = {}

    def scores(self, request: EvalRequest) -> Evaluation:
        """Gives the scores of the clients."""
        shared, private, clients = request.shared, request.private, list(request.clients)
        sizes = self._engine.federation.n_samples(request.split)[clients]
        facts = self._engine.client_info(clients, request.round)
        totals = torch.zeros(len(sizes), 2, device=self._engine.device)
        with torch.no_grad():
            for group in self._laid_out(request.split, clients):
                totals[group.places] = self.judge_group(shared, private, group, facts)
            for place in self._alone(clients):
                own = tree.take(tree.fetch(private, [place], self._engine.device), 0)
                totals[place] = self._engine.score_client(shared, own, clients[place], facts.select(place), request.split)
        correct, loss = totals.T.cpu().double().numpy()
        return Evaluation(correct, loss, sizes.astype(np.float64))

    def _alone(self, clients: list[int]) -> list[int]:
        """Gives the places of clients whose batch to adapt to is short, where that would shift BatchNorm statistics."""
        if not self._engine.method.net.has_batch_norm:
            return []
        return [place for place, c in enumerate(clients) if bool((self._engine.adaptation_indices(c) < 0).any())]

    def _laid_out(self, split: str, clients: list[int]) -> list[Group]:
        """Gives the clients that are judged together and their rows of `split`, laid out once."""
        key = (split, tuple(clients))
        if key not in self._groups:
            sizes, alone = self._engine.federation.n_samples(split)[clients], set(self._alone(clients))
            order = [place for place in np.argsort(-sizes, kind="stable").tolist() if place not in alone]
            width = max(1, min(len(order), self._slots, JUDGED_CLIENTS.get(self._engine.device.type, self._slots)))
            self._groups[key] = [self._group(places, clients, width, split) for places in blocks(order, width)]
        return self._groups[key]

    def _group(self, places: list[int], clients: list[int], width: int, split: str) -> Group:
        full = [*places, *[places[0]] * (width - len(places))]  # a last group is filled up, and what is added left aside
        rows = [self._engine.federation.shards[clients[place]].split(split) for place in places]
        block = max(16, JUDGED // width)
        count = max(1, -(-len(rows[0]) // block))  # clients without rows have an empty block
        plan = np.full((width, count * block), -1, dtype=np.int64)
        for place, own in enumerate(rows):
            plan[place, : len(own)] = own
        adapt = torch.stack([self._engine.adaptation_indices(clients[place]) for place in full])
        who = torch.as_tensor(full, device=self._engine.device)
        return Group(places, full, who, adapt, torch.from_numpy(plan).reshape(width, count, block))

    def judge_group(self, shared: Tree, private: Tree, group: Group, facts: ClientInfo) -> Tensor:
        """Gives (correct decisions, summed loss) of a group."""
        program = self._program(shared, private, group, facts)
        fixed = program.fixed
        tree.copy_(fixed["shared"], shared)
        tree.copy_(fixed["private"], tree.fetch(private, group.full, self._engine.device))
        for buffer, field in zip(fixed["client"], facts, strict=True):
            buffer.copy_(field[group.who])
        fixed["adapt"].copy_(group.adapt)
        program.state["totals"].zero_()
        for start in range(0, group.plan.shape[1], fixed["plan"].shape[1]):
            part = group.plan[:, start : start + fixed["plan"].shape[1]]
            fixed["plan"][:, : part.shape[1]].copy_(part)
            program.state["step"].zero_()
            for _ in range(part.shape[1]):
                program()
        totals: Tensor = program.state["totals"][: len(group.places)]
        return totals.clone()

    def _program(self, shared: Tree, private: Tree, group: Group, facts: ClientInfo) -> Program:
        """Gives the program that judges a block of rows of every client of a group, made once."""
        width, count, block = group.plan.shape
        key = (width, block)
        if key not in self._programs:
            table, method = self._engine.federation.table, self._engine.method
            scored = vmap(
                lambda shared, private, adapt, client, batch: evaluate_client(method, shared, private, adapt, client, batch),
                in_dims=(None, 0, 0, 0, 0),
            )

            def advance(state: Buffers, fixed: Buffers) -> Buffers:
                here = table.with_tensors(fixed["x"], fixed["y"])
                rows = fixed["plan"].index_select(1, state["step"]).squeeze(1)  # (clients, rows)
                score = scored(fixed["shared"], fixed["private"], here.batch(fixed["adapt"]), fixed["client"], here.batch(rows))
                return {"totals": state["totals"] + torch.stack(score, dim=1), "step": state["step"] + 1}

            state = {
                "totals": torch.zeros(width, 2, device=self._engine.device),
                "step": torch.zeros(1, dtype=torch.int64, device=self._engine.device),
            }
            fixed = {
                "shared": tree.clone(shared),
                "private": tree.fetch(private, group.full, self._engine.device),
                "adapt": group.adapt.clone(),
                "client": ClientInfo(*(field[group.who].clone() for field in facts)),
                "plan": torch.zeros(width, min(count, SEGMENT), block, dtype=torch.int64, device=self._engine.device),
                "x": table.x,
                "y": table.y,
            }
            calls = count * self._engine.schedule.rounds
            self._programs[key] = self._make(advance, state, fixed, calls)
        return self._programs[key]
