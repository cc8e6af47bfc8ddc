"""The plain engine: client after client. The others are checked and measured against it."""

from __future__ import annotations

from typing import ClassVar

from gpfl.core.local_round import local_round
from gpfl.engine.base import Engine, RoundResult, TrainRequest


class Loop(Engine):
    """Engine that trains one client after another, without padding; the reference for the others."""

    name: ClassVar[str] = "loop"

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Run a round, client by client."""
        info = self.client_info(request.clients, request.round)
        uploads = self.new_aggregator(request)
        new_private, terms = [], []
        for i, client in enumerate(request.clients):
            private = self.fetch_private(request.private, i)
            plan = self.plan(client, request.round, request.schedule)
            update = local_round(self.method, request.shared, private, self.federation.table, plan, info.select(i))
            uploads.add(i, update.upload)
            new_private.append(update.private)
            terms.append(update.terms)
        return self.to_result(request, uploads, new_private, terms)
