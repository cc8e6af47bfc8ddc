"""What engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpfl.evaluate import Evaluation
from gpfl.federation import Federation
from gpfl.method import Client, Method, Terms
from gpfl.schedule import Plan, Schedule
from gpfl.tree import Tree


@dataclass(frozen=True)
class Setting:
    """What a run is: a method bound to a net, a federation on its device, and a schedule."""

    method: Method
    federation: Federation
    schedule: Schedule
    class_counts: str = "all"

    @property
    def device(self) -> torch.device:
        """Where the table lies and rounds run."""
        return self.federation.table.y.device


class Cohort(NamedTuple):
    """The outcome of a cohort's round: the weighted mean of uploads, and what each client keeps, stacked in order."""

    mean: Tree
    private: Tree
    terms: Terms  # (clients,) each


class Engine(ABC):
    """Executes rounds and evaluations of a setting. Private state comes and goes as one tree stacked over clients."""

    name: ClassVar[str]

    def __init__(self, setting: Setting) -> None:
        self.method, self.schedule = setting.method, setting.schedule
        self.federation, self.device = setting.federation, setting.device
        shards = setting.federation.shards
        if setting.class_counts == "used":
            counts = self.federation.count_labels([self.schedule.used(shard.train) for shard in shards])
        else:
            counts = self.federation.label_counts
        self._counts = torch.from_numpy(counts).to(self.device)
        self._rows = torch.from_numpy(self.federation.rows("train").astype(np.float32)).to(self.device)

    @abstractmethod
    def train(self, shared: Tree, private: Tree, clients: Sequence[int], round: int) -> Cohort:
        """Gives the round of `clients` (ascending), whose private state is stacked in that order."""

    @abstractmethod
    def evaluate(self, shared: Tree, private: Tree, round: int, part: str) -> Evaluation:
        """Gives the scores of all clients' personal models on their rows of `part`."""

    def facts(self, clients: Sequence[int], round: int) -> Client:
        """Gives what the clients know besides their rows, stacked."""
        index = torch.as_tensor(list(clients), device=self.device)
        same = torch.ones(len(clients), device=self.device)
        return Client(self._rows[index], self._counts[index], same * round, same * self.schedule.rounds)

    def plan(self, client: int, round: int) -> Plan:
        """Gives the steps of a client's round."""
        return self.schedule.plan(self.method.phases(), self.federation.shards[client].train, round, client)

    def adaptation_rows(self, client: int) -> Tensor:
        """Gives the rows of the batch a personal model may adapt to: the client's first, padded to the batch size."""
        rows = self.schedule.batches(self.federation.shards[client].train)[0]
        return torch.from_numpy(rows).to(self.device)


def one(client: Client, place: int) -> Client:
    """Gives one client out of a stack."""
    return Client(*(field[place] for field in client))
