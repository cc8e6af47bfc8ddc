"""Evaluation of many personal models at once, clients with similar numbers of samples together."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from gpfl.core import tree
from gpfl.core.local_round import Samples, evaluate_client, predict_client
from gpfl.core.method import ClientInfo
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest
from gpfl.engine.compiler.program import Buffers, Function, Program
from gpfl.engine.slots import SEGMENT, batched, load_segment

GROUP_SAMPLES = 2048  # samples of all clients of a group that are evaluated at once
GROUP_CLIENTS = {"cpu": 16}  # clients of a group by device, where a wider stack gains nothing


class EvalGroup(NamedTuple):
    """Clients that are evaluated together, by position in the request."""

    positions: list[int]
    padded: list[int]  # filled up to the width of the program with the first client
    padded_index: Tensor  # the same on the device
    adaptation_indices: Tensor  # (clients, samples) of the batch that personal models may adapt to
    plan: Tensor  # (clients, steps, samples)


class BatchedEvaluator:
    """Evaluator of an engine's clients; `make_program` returns a program for a number of calls."""

    def __init__(
        self, engine: Engine, max_clients: int, make_program: Callable[[Function, Buffers, Buffers, int], Program]
    ) -> None:
        self._engine, self._max_clients, self._make_program = engine, max_clients, make_program
        self._groups: dict[object, list[EvalGroup]] = {}
        self._programs: dict[object, Program] = {}

    def for_engine(self, engine: Engine) -> "BatchedEvaluator":
        """Return an evaluator with the same programs for an engine whose clients have other samples of the same table."""
        out = BatchedEvaluator(engine, self._max_clients, self._make_program)
        out._programs = self._programs
        return out

    def scores(self, request: EvalRequest) -> Tensor:
        """Return (correct predictions, summed loss) of every client."""
        clients = list(request.clients)
        info = self._engine.client_info(clients, request.round)
        scores = torch.zeros(len(clients), 2, device=self._engine.device)
        with torch.no_grad():
            for group in self._split_into_groups(request.split, clients):
                scores[group.positions] = self.score_group(request.shared, request.private, group, info)
            for i in self._unstacked(clients):
                scores[i] = self._engine.score_client(request, i, info)
        return scores

    def logits(self, request: EvalRequest) -> list[Tensor]:
        """Return the logits of every client on the CPU, (samples, classes) each."""
        clients, engine = list(request.clients), self._engine
        info, table, method = engine.client_info(clients, request.round), engine.federation.table, engine.method
        sizes = engine.federation.n_samples(request.split)[clients]
        predict = vmap(partial(predict_client, method), in_dims=(None, 0, 0, 0, 0))
        logits: dict[int, Tensor] = {}
        with torch.no_grad():
            for group in self._split_into_groups(request.split, clients):
                private = tree.fetch(request.private, group.padded, engine.device)
                adaptation_batch, client = table.batch(group.adaptation_indices), info.select(group.padded_index)
                plan = group.plan.to(engine.device)
                steps = [
                    predict(request.shared, private, adaptation_batch, client, table.batch(batch)) for batch in plan.unbind(1)
                ]
                rows = torch.cat(steps, dim=1).cpu()  # (clients, samples, classes), padding last
                logits |= {i: client_logits[: sizes[i]] for i, client_logits in zip(group.positions, rows, strict=False)}
            logits |= {i: engine.predict_client(request, i, info) for i in self._unstacked(clients)}
        return [logits[i] for i in range(len(clients))]

    def _unstacked(self, clients: list[int]) -> list[int]:
        """Return the positions of clients whose adaptation batch is short, where padding would shift BatchNorm statistics."""
        if not self._engine.method.net.has_batch_norm:
            return []
        return [i for i, client in enumerate(clients) if bool((self._engine.adaptation_indices(client) < 0).any())]

    def _split_into_groups(self, split: str, clients: list[int]) -> list[EvalGroup]:
        key = (split, tuple(clients))
        if key not in self._groups:
            sizes, unstacked = self._engine.federation.n_samples(split)[clients], set(self._unstacked(clients))
            order = [i for i in np.argsort(-sizes, kind="stable").tolist() if i not in unstacked]
            limit = GROUP_CLIENTS.get(self._engine.device.type, self._max_clients)
            n_groups = max(1, -(-len(order) // min(self._max_clients, limit)))
            width = max(1, -(-len(order) // n_groups))  # groups of equal size, so that the last one is not mostly padding
            batch = max(16, min(GROUP_SAMPLES // width, -(-int(sizes.max()) // 16) * 16))
            self._groups[key] = [self._group(positions, clients, width, batch, split) for positions in batched(order, width)]
        return self._groups[key]

    def _group(self, positions: list[int], clients: list[int], width: int, batch: int, split: str) -> EvalGroup:
        padded = [*positions, *[positions[0]] * (width - len(positions))]
        samples = [self._engine.federation.shards[clients[i]].split(split) for i in positions]
        steps = max(1, -(-len(samples[0]) // batch))  # at least one, empty where clients have no samples
        plan = np.full((width, steps * batch), -1, dtype=np.int64)
        for row, indices in zip(plan, samples, strict=False):
            row[: len(indices)] = indices
        adaptation_indices = torch.stack([self._engine.adaptation_indices(clients[i]) for i in padded])
        padded_index = torch.as_tensor(padded, device=self._engine.device)
        return EvalGroup(
            positions, padded, padded_index, adaptation_indices, torch.from_numpy(plan).reshape(width, steps, batch)
        )

    def score_group(self, shared: Tree, private: Tree, group: EvalGroup, info: ClientInfo) -> Tensor:
        """Return (correct predictions, summed loss) of the clients of a group."""
        program = self._program(shared, private, group, info)
        fixed = program.fixed
        tree.copy_(fixed["shared"], shared)
        tree.copy_(fixed["private"], tree.fetch(private, group.padded, self._engine.device))
        for buffer, field in zip(fixed["client"], info.select(group.padded_index), strict=True):
            buffer.copy_(field)
        fixed["adaptation_indices"].copy_(group.adaptation_indices)
        program.state["scores"].zero_()
        for start in range(0, group.plan.shape[1], fixed["plan"].shape[1]):
            for _ in range(load_segment(program, group.plan, start)):
                program()
        scores: Tensor = program.state["scores"][: len(group.positions)]
        return scores.clone()

    def _program(self, shared: Tree, private: Tree, group: EvalGroup, info: ClientInfo) -> Program:
        """Return the program that evaluates a batch of every client of a group, made on first use."""
        width, steps, batch_size = group.plan.shape
        key = (width, batch_size)
        if key not in self._programs:
            table, method = self._engine.federation.table, self._engine.method
            evaluate = vmap(partial(evaluate_client, method), in_dims=(None, 0, 0, 0, 0))

            def advance(state: Buffers, fixed: Buffers) -> Buffers:
                samples = Samples(fixed["x"], fixed["y"], table.input_spec)
                batch = samples.batch(fixed["plan"].index_select(1, state["step"]).squeeze(1))  # (clients, samples)
                adaptation_batch = samples.batch(fixed["adaptation_indices"])
                score = evaluate(fixed["shared"], fixed["private"], adaptation_batch, fixed["client"], batch)
                return {"scores": state["scores"] + torch.stack(score, dim=1), "step": state["step"] + 1}

            device = self._engine.device
            state = {
                "scores": torch.zeros(width, 2, device=device),
                "step": torch.zeros(1, dtype=torch.int64, device=device),
            }
            fixed = {
                "shared": tree.clone(shared),
                "private": tree.fetch(private, group.padded, device),
                "adaptation_indices": group.adaptation_indices.clone(),
                "client": info.select(group.padded_index),
                "plan": torch.zeros(width, min(steps, SEGMENT), batch_size, dtype=torch.int64, device=device),
                "x": table.x,
                "y": table.y,
            }
            self._programs[key] = self._make_program(advance, state, fixed, steps * self._engine.schedule.rounds)
        return self._programs[key]
