"""Client after client: the plain engine, against which others are checked and measured."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest, RoundResult, TrainRequest


class Loop(Engine):
    """Runs one client at a time, on batches of just its rows."""

    name: ClassVar[str] = "loop"

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Gives the cohort's round, the mean of uploads summed client by client."""
        shared, private, clients, number, schedule = request[:5]
        facts = self.client_info(clients, number)
        shares = self.aggregation_weights(request)
        mean: Tree = {}
        kept, terms = [], []
        for place, client in enumerate(clients):
            update = local_round(
                self.method,
                shared,
                tree.take(tree.fetch(private, [place], self.device), 0),
                self.federation.table,
                self.plan(client, number, schedule),
                facts.select(place),
            )
            part = tree.map_leaves(lambda t, place=place: shares[place] * t, update.upload)
            mean = tree.map_leaves(torch.add, mean, part) if mean else part
            kept.append(update.private)
            terms.append(update.terms)
        stacked = {name: torch.stack([t[name] for t in terms]) for name in terms[0]}
        private = tree.stack(kept)
        return RoundResult(mean, tree.to(private, tree.device_of(request.private) or self.device), stacked)

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Gives the scores, each client's rows in blocks."""
        shared, private, clients, number, split = request
        facts = self.client_info(clients, number)
        with torch.no_grad():
            scores = [
                self.score_client(
                    shared, tree.take(tree.fetch(private, [place], self.device), 0), client, facts.select(place), split
                )
                for place, client in enumerate(clients)
            ]
        correct, loss = torch.stack(scores).T.cpu().double().numpy()
        return Evaluation(correct, loss, self.federation.n_samples(split)[list(clients)].astype(np.float64))
