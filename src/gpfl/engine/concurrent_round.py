"""One of the rounds that the vmap engine runs concurrently."""

import numpy as np
import torch
from torch.func import vmap

from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.method import ClientInfo, LossTerms
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, RoundResult, TrainRequest


class ConcurrentRound:
    """A round whose clients, given by their positions in the request, train in several groups."""

    def __init__(self, engine: Engine, request: TrainRequest) -> None:
        self._engine, self.shared, self._private = engine, request.shared, request.private
        self.method = request.method
        self.plans = [engine.plan(client, request.round, request.schedule) for client in request.clients]
        self._info = engine.client_info(request.clients, request.round)
        self._uploads = engine.new_aggregator(request)
        self._prefetched: dict[tuple[int, ...], Tree] = {}
        self._new_private: list[Tree] = []
        self._terms: list[LossTerms] = []
        self._order: list[int] = []

    def prefetch(self, positions: list[int]) -> None:
        """Start to copy clients' private state to the device ahead of its use, where it is elsewhere."""
        if positions:
            self._prefetched[tuple(positions)] = tree.fetch(self._private, positions, self._engine.device)

    def download(self, positions: list[int]) -> tuple[Tree, ClientInfo]:
        """Return the stacked local state in which clients start, for reading only, and their info."""
        private, info = self._inputs(positions)
        return vmap(self.method.download, in_dims=(None, 0, 0))(self.shared, private, info), info

    def upload(self, positions: list[int], local_state: Tree, terms: LossTerms) -> None:
        """Add trained clients to the result."""
        private, info = self._inputs(positions)
        upload, new_private = vmap(self.method.upload, in_dims=(None, 0, 0, 0))(self.shared, local_state, private, info)
        self._prefetched.pop(tuple(positions), None)
        self._add(positions, upload, new_private, terms)

    def run_client(self, position: int) -> None:
        """Train one client without stacking it, and add it to the result."""
        private, info = self._inputs([position])
        table, plan = self._engine.federation.table, self.plans[position]
        update = local_round(self.method, self.shared, tree.take(private, 0), table, plan, info.select(0))
        terms = {name: value.unsqueeze(0) for name, value in update.terms.items()}
        self._add([position], tree.repeat(update.upload, 1), tree.repeat(update.private, 1), terms)

    def result(self) -> RoundResult:
        """Return the result, stacked in the order of the request."""
        order = torch.as_tensor(np.argsort(self._order), device=self._engine.device)
        terms = {name: torch.cat([group[name] for group in self._terms])[order] for name in self._terms[0]}
        private = tree.concatenate(self._new_private)
        return RoundResult(self._uploads, tree.take(private, order.to(tree.device_of(private) or order.device)), terms)

    def _inputs(self, positions: list[int]) -> tuple[Tree, ClientInfo]:
        private = self._prefetched.get(tuple(positions))
        if private is None:
            private = tree.fetch(self._private, positions, self._engine.device)
        return private, self._info.select(torch.as_tensor(positions, device=self._engine.device))

    def _add(self, positions: list[int], upload: Tree, private: Tree, terms: LossTerms) -> None:
        self._uploads.add_stacked(positions, upload)
        bytes_per_client = tree.count_bytes(private) // len(positions)
        device = tree.device_of(self._private) or self._engine.private_device(bytes_per_client)
        self._new_private.append(tree.to(private, device))
        self._terms.append(terms)
        self._order += positions
