"""What engines have in common."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from gpfl.core.local_round import evaluate_client
from gpfl.core.method import ClientInfo, LossTerms, Method
from gpfl.core.metrics import Evaluation
from gpfl.core.schedule import Plan, Schedule
from gpfl.core.tree import Tree
from gpfl.data.table import Indices, Table
from gpfl.federation.federation import Federation

BLOCK = 1024
"""Rows of one client evaluated at once."""


@dataclass(frozen=True)
class RunSpec:
    """What a run is: a method bound to a net, a federation on its device, and a schedule."""

    method: Method
    federation: Federation
    schedule: Schedule
    class_counts: str = "all"
    compile: str = "off"
    precision: str = "float32"

    @property
    def device(self) -> torch.device:
        """Where the table lies and rounds run."""
        return self.federation.table.y.device


class TrainRequest(NamedTuple):
    """A round that is asked for: of `clients` (ascending), whose private state is stacked in that order.

    They are this process's part of the `cohort`, over all of which uploads are averaged. A trial may have a `method` of
    its own, which is the engine's but for the values of some numbers.
    """

    shared: Tree
    private: Tree
    clients: Sequence[int]
    round: int
    schedule: Schedule
    cohort: Sequence[int]
    method: Method


class EvalRequest(NamedTuple):
    """A judgement that is asked for: of the personal models of `clients` (ascending) on their rows of `split`."""

    shared: Tree
    private: Tree
    clients: Sequence[int]
    round: int
    split: str


class RoundResult(NamedTuple):
    """The outcome of a cohort's round: the weighted mean of uploads, and what each client keeps, stacked in order."""

    mean: Tree
    private: Tree
    terms: LossTerms  # (clients,) each


class Engine(ABC):
    """Executes rounds and evaluations of a setting. Private state comes and goes as one tree stacked over clients."""

    name: ClassVar[str]
    stacks: ClassVar[bool] = False  # trials may run at once
    private_share: ClassVar[float] = 0.25  # of a GPU's memory that private states may take

    def __init__(self, setting: RunSpec) -> None:
        self.method, self.schedule = setting.method, setting.schedule
        self.federation, self.device = setting.federation, setting.device
        self.class_counts = setting.class_counts
        self.owned: Sequence[int] = range(len(setting.federation))  # the clients of this process
        counted = [self.counted(shard.train) for shard in setting.federation.shards]
        self._counts = torch.from_numpy(self.federation.count_labels(counted)).to(self.device)
        self._rows = torch.from_numpy(self.federation.n_samples("train").astype(np.float32)).to(self.device)

    @abstractmethod
    def train_round(self, asked: TrainRequest) -> RoundResult:
        """Gives a round."""

    @abstractmethod
    def evaluate_clients(self, asked: EvalRequest) -> Evaluation:
        """Gives the scores of the clients."""

    def for_trial(self, setting: RunSpec) -> Self:
        """Gives the engine for another trial: the same setting with another seed, or other numbers in its method."""
        out = copy.copy(self)
        out.schedule, out.method = setting.schedule, setting.method
        return out

    def train_rounds(self, asked: Sequence[TrainRequest]) -> list[RoundResult]:
        """Gives the rounds of several trials, which may run at once."""
        return [self.train_round(one) for one in asked]

    def train(self, shared: Tree, private: Tree, clients: Sequence[int], round: int) -> RoundResult:
        """Gives the round of `clients` (ascending), whose private state is stacked in that order."""
        return self.train_rounds([TrainRequest(shared, private, clients, round, self.schedule, clients, self.method)])[0]

    def evaluate(self, shared: Tree, private: Tree, round: int, split: str) -> Evaluation:
        """Gives the scores of all clients' personal models on their rows of `split`."""
        return self.evaluate_clients(EvalRequest(shared, private, range(len(self.federation)), round, split))

    def shares(self, asked: TrainRequest) -> Tensor:
        """Gives the weights of the clients in the mean over the cohort; all of the cohort's sum to one."""
        weights = self.weights(asked.method, self.client_info(asked.cohort, asked.round))
        places = {client: place for place, client in enumerate(asked.cohort)}
        return (weights / weights.sum())[torch.as_tensor([places[client] for client in asked.clients], device=self.device)]

    def weights(self, method: Method, clients: ClientInfo) -> Tensor:
        """Gives the weights of stacked clients, each by itself."""
        return torch.stack([method.aggregation_weight(one(clients, place)) for place in range(len(clients.n_samples))])

    def private_device(self, bytes_each: int) -> torch.device:
        """Gives where private states are kept: with the engine, or on the host where they would fill a GPU."""
        if self.device.type != "cuda":
            return self.device
        _, memory = torch.cuda.mem_get_info(self.device)
        return torch.device("cpu") if bytes_each * len(self.owned) > self.private_share * memory else self.device

    def gather_private(self, private: Tree) -> Tree:
        """Gives the private states of all clients, where a process has only its own."""
        return private

    @property
    def words(self) -> str:
        """The engine in words, for the summary."""
        return self.name

    def client_info(self, clients: Sequence[int], round: int) -> ClientInfo:
        """Gives what the clients know besides their rows, stacked."""
        index = torch.as_tensor(list(clients), device=self.device)
        same = torch.ones(len(clients), device=self.device)
        return ClientInfo(
            self._rows[index], self._counts[index], same * round, same * self.schedule.rounds, index.to(same.dtype)
        )

    def counted(self, rows: Indices) -> Indices:
        """Gives the training rows that count for a client's label counts."""
        return self.schedule.used(rows) if self.class_counts == "used" else rows

    def unseen_client_info(self, table: Table, round: int) -> ClientInfo:
        """Gives what a client knows that is not of the federation and trains on all rows of a table of its own."""
        labels = table.y[torch.from_numpy(self.counted(np.arange(len(table)))).to(self.device)]
        counts = torch.bincount(labels, minlength=table.classes).to(torch.float32)
        known = [len(table), round, self.schedule.rounds, len(self.federation)]
        rows, now, planned, number = torch.tensor(known, dtype=torch.float32, device=self.device)
        return ClientInfo(rows, counts, now, planned, number)

    def plan(self, client: int, round: int, schedule: Schedule | None = None) -> Plan:
        """Gives the steps of a client's round, under the schedule of a trial or the engine's own."""
        return (schedule or self.schedule).plan(self.method.phases(), self.federation.shards[client].train, round, client)

    def trains(self, client: int) -> bool:
        """Tells whether the client has rows enough to take part in the method."""
        return len(self.federation.shards[client].train) >= self.min_samples

    @property
    def min_samples(self) -> int:
        """The fewest training rows with which a client can take part."""
        return self.schedule.min_samples(self.method.phases())

    @property
    def idle(self) -> list[int]:
        """The clients that can never take part: they keep their private state and are evaluated like the others."""
        return [client for client in range(len(self.federation)) if not self.trains(client)]

    def adaptation_rows(self, client: int) -> Tensor:
        """Gives the rows of the batch a personal model may adapt to: the client's first, padded to the batch size."""
        rows = self.schedule.batches(self.federation.shards[client].train)[0]
        return torch.from_numpy(rows).to(self.device)

    def evaluate_one(
        self, shared: Tree, private: Tree, client: int, facts: ClientInfo, split: str, method: Method | None = None
    ) -> Tensor:
        """Gives one client's (correct decisions, summed loss) on its rows of `split`; threads have a method each."""
        method = method or self.method
        table = self.federation.table
        rows = self.adaptation_rows(client)
        adapt = table.batch(rows[rows >= 0])
        blocks = torch.split(torch.from_numpy(self.federation.shards[client].split(split)).to(self.device), BLOCK)
        scores = [evaluate_client(method, shared, private, adapt, facts, table.batch(block)) for block in blocks]
        return torch.stack([torch.stack(score) for score in scores]).sum(0)


def one(client: ClientInfo, place: int) -> ClientInfo:
    """Gives one client out of a stack."""
    return ClientInfo(*(field[place] for field in client))
