"""One of the rounds that are run at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.func import vmap

from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.method import ClientInfo, LossTerms
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, RoundResult, TrainRequest


class Member(NamedTuple):
    """A client of a round: the number of the round and the client's place in its cohort."""

    round: int
    place: int


class Entered(NamedTuple):
    """Clients that begin to train, stacked."""

    local_state: Tree
    client: ClientInfo


class Round:
    """One of the rounds that are run at once: its clients enter, and leave what they send and keep."""

    def __init__(self, engine: Engine, request: TrainRequest) -> None:
        self._engine, self.shared, self._private = engine, request.shared, request.private
        self.method = request.method
        self.plans = [engine.plan(client, request.round, request.schedule) for client in request.clients]
        self._facts = engine.client_info(request.clients, request.round)
        self._shares = engine.aggregation_weights(request)
        self._fetched: dict[tuple[int, ...], Tree] = {}
        self._mean: Tree = {}
        self._kept: list[Tree] = []
        self._terms: list[LossTerms] = []
        self._order: list[int] = []

    def fetch(self, places: list[int]) -> None:
        """Begins to move clients' private states here, if they lie elsewhere, ahead of their use."""
        if places:
            self._fetched[tuple(places)] = tree.fetch(self._private, places, self._engine.device)

    def enter(self, places: list[int]) -> Entered:
        """Gives the state in which clients start."""
        private, client = self._own(places)
        local_state = vmap(self.method.download, in_dims=(None, 0, 0))(self.shared, private, client)
        return Entered(tree.clone(local_state), client)

    def leave(self, places: list[int], local_state: Tree, terms: LossTerms) -> None:
        """Takes what trained clients send and keep."""
        private, client = self._own(places)
        upload, kept = vmap(self.method.upload, in_dims=(None, 0, 0, 0))(self.shared, local_state, private, client)
        self._fetched.pop(tuple(places), None)
        self._add(places, upload, kept, terms)

    def run_alone(self, place: int) -> None:
        """Runs one client by itself."""
        private, client = self._own([place])
        table = self._engine.federation.table
        update = local_round(self.method, self.shared, tree.take(private, 0), table, self.plans[place], client.select(0))
        terms = {name: value.unsqueeze(0) for name, value in update.terms.items()}
        self._add([place], tree.repeat(update.upload, 1), tree.repeat(update.private, 1), terms)

    def cohort(self) -> RoundResult:
        """Gives the outcome, in the order of the cohort."""
        order = np.argsort(self._order)
        back = torch.as_tensor(order, device=self._engine.device)
        named = {name: torch.cat([terms[name] for terms in self._terms])[back] for name in self._terms[0]}
        private = tree.concatenate(self._kept)
        return RoundResult(self._mean, tree.take(private, back.to(tree.device_of(private) or back.device)), named)

    def _own(self, places: list[int]) -> tuple[Tree, ClientInfo]:
        index = torch.as_tensor(places, device=self._engine.device)
        private = self._fetched.get(tuple(places))
        if private is None:
            private = tree.fetch(self._private, places, self._engine.device)
        return private, ClientInfo(*(field[index] for field in self._facts))

    def _add(self, places: list[int], upload: Tree, kept: Tree, terms: LossTerms) -> None:
        share = self._shares[torch.as_tensor(places, device=self._engine.device)]
        part = tree.map_leaves(lambda t: torch.tensordot(share.to(t.dtype), t, dims=1), upload)
        self._mean = tree.map_leaves(torch.add, self._mean, part) if self._mean else part
        home = tree.device_of(self._private)
        self._kept.append(kept if home is None else tree.to(kept, home))
        self._terms.append(terms)
        self._order += places
