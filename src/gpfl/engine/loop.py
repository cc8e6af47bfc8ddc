"""The plain engine: client after client. The others are checked and measured against it."""

from __future__ import annotations

from typing import ClassVar

from gpfl.core.local_round import local_round
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, RoundResult, TrainRequest, add_weighted


class Loop(Engine):
    """Engine that trains one client after another, without padding; the reference for the others."""

    name: ClassVar[str] = "loop"

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Run a round, summing uploads client by client."""
        info = self.client_info(request.clients, request.round)
        weights = self.aggregation_weights(request)
        mean: Tree = {}
        new_private, terms = [], []
        for i, client in enumerate(request.clients):
            private = self.fetch_private(request.private, i)
            plan = self.plan(client, request.round, request.schedule)
            update = local_round(self.method, request.shared, private, self.federation.table, plan, info.select(i))
            mean = add_weighted(mean, update.upload, weights[i])
            new_private.append(update.private)
            terms.append(update.terms)
        return self.to_result(request, mean, new_private, terms)
