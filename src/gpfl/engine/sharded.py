"""Clients divided among processes: each runs its own on an engine of its own, and what they send is summed across."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from gpfl.core import tree
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest, RoundResult, RunSpec, TrainRequest, one
from gpfl.engine.distributed import Ranks
from gpfl.engine.packing import pack


class Sharded(Engine):
    """Runs the clients of one process. Their private states stay there; only sums, terms and scores travel."""

    name: ClassVar[str] = "sharded"

    def __init__(self, setting: RunSpec, inner: Engine, ranks: Ranks) -> None:
        super().__init__(setting)
        self._inner, self._ranks = inner, ranks
        steps = [max(1, len(shard.train) // setting.schedule.batch_size) for shard in setting.federation.shards]
        self._shares = [sorted(slot) for slot in pack(steps, ranks.world).slots]
        self.owned = self._shares[ranks.rank]

    @property
    def words(self) -> str:
        """The engine in words, for the summary."""
        return f"{self._inner.words} on {self._ranks.world} ranks"

    def train_round(self, asked: TrainRequest) -> RoundResult:
        """Gives the sum over all processes, and what this one's clients keep."""
        own = self._inner.train_round(asked) if asked.clients else self._nothing(asked)
        told = self._ranks.gather({name: values.cpu() for name, values in own.terms.items()})
        sizes = self._ranks.gather(list(asked.clients))
        order = np.argsort([client for clients in sizes for client in clients])
        names = next((list(terms) for terms in told if terms), [])
        terms = {name: torch.cat([part[name] for part in told if part])[order].to(self.device) for name in names}
        return RoundResult(self._ranks.add(own.mean), own.private, terms)

    def _nothing(self, asked: TrainRequest) -> RoundResult:
        """Gives the outcome of a process that has no client in the cohort: a mean of zeros."""
        private = tree.to(self.method.init(asked.schedule.seed)[1], self.device)
        client = one(self.client_info([0], asked.round), 0)
        local_state = self.method.download(asked.shared, private, client)
        upload, _ = self.method.upload(asked.shared, local_state, private, client)
        return RoundResult(tree.map_leaves(torch.zeros_like, upload), asked.private, {})

    def evaluate_clients(self, asked: EvalRequest) -> Evaluation:
        """Gives the scores of all clients, each judged by its process."""
        own = self._inner.evaluate_clients(asked) if asked.clients else None
        told = self._ranks.gather((list(asked.clients), own))
        out = Evaluation(*(np.zeros(len(self.federation)) for _ in range(3)))
        for clients, part in told:
            if part is not None:
                for whole, values in ((out.correct, part.correct), (out.loss_sum, part.loss_sum), (out.rows, part.rows)):
                    whole[clients] = values
        return out

    def gather_private(self, private: Tree) -> Tree:
        """Gives the private states of all clients, gathered from their processes, on the CPU."""
        parts = self._ranks.gather(tree.to(private, torch.device("cpu")))
        order = torch.as_tensor(np.argsort([client for clients in self._shares for client in clients]))
        return tree.take(tree.concatenate([part for part, clients in zip(parts, self._shares, strict=True) if clients]), order)
