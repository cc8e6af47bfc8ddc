"""Client after client: the plain engine, against which others are checked and measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from gpfl import tree
from gpfl.engine.base import Cohort, Engine, one
from gpfl.evaluate import Evaluation
from gpfl.rounds import local_round
from gpfl.tree import Tree


class Loop(Engine):
    """Runs one client at a time, on batches of just its rows."""

    name: ClassVar[str] = "loop"

    def train(self, shared: Tree, private: Tree, clients: Sequence[int], round: int) -> Cohort:
        """Gives the cohort's round, the mean of uploads summed client by client."""
        facts = self.facts(clients, round)
        weights = torch.stack([self.method.weight(one(facts, place)) for place in range(len(clients))])
        shares = weights / weights.sum()
        mean: Tree = {}
        kept, terms = [], []
        for place, client in enumerate(clients):
            update = local_round(
                self.method,
                shared,
                tree.take(private, place),
                self.federation.table,
                self.plan(client, round),
                one(facts, place),
            )
            part = tree.map_leaves(lambda t, place=place: shares[place] * t, update.upload)
            mean = tree.map_leaves(torch.add, mean, part) if mean else part
            kept.append(update.private)
            terms.append(update.terms)
        stacked = {name: torch.stack([t[name] for t in terms]) for name in terms[0]}
        return Cohort(mean, tree.stack(kept), stacked)

    def evaluate(self, shared: Tree, private: Tree, round: int, part: str) -> Evaluation:
        """Gives the scores, each client's rows in blocks."""
        everyone = range(len(self.federation))
        facts = self.facts(everyone, round)
        with torch.no_grad():
            scores = [
                self.judge_alone(shared, tree.take(private, client), client, one(facts, client), part) for client in everyone
            ]
        correct, loss = torch.stack(scores).T.cpu().double().numpy()
        return Evaluation(correct, loss, self.federation.rows(part).astype(np.float64))
