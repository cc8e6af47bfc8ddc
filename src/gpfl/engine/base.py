"""The engine interface (the run it serves, requests, results, what all engines share) and the plain engine, `Loop`."""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import FinalRound, Indices, Plan, Schedule, evaluate_client, local_round, predict_client
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.data.table import Table
from gpfl.defences.aggregation import MEAN, Aggregation
from gpfl.engine.aggregator import Aggregator, make_aggregator
from gpfl.engine.guard import find_fault
from gpfl.federation import Federation

T = TypeVar("T")
EVAL_BATCH_SIZE = 1024  # samples of one client that are evaluated at once


@dataclass(frozen=True)
class RunSpec:
    """The fixed inputs of a run: a method bound to a net, a federation on its device, and a schedule."""

    method: Method
    federation: Federation
    schedule: Schedule
    class_counts: str = "all"  # samples behind label counts: "all", or those "used" by an unshuffled pass
    compile: str = "off"  # "on", "off" or "auto"
    precision: str = "float32"
    aggregation: Aggregation = MEAN

    @property
    def device(self) -> torch.device:
        """Device of the table, on which rounds run."""
        return self.federation.table.y.device


class TrainRequest(NamedTuple):
    """One round of `clients` (ascending), whose private state is stacked in that order.

    `clients` are those of this process, `cohort` those of all processes, over which uploads are averaged. The `method`
    of a trial may differ from the engine's in the values of float hyperparameters.
    """

    shared: Tree
    private: Tree
    clients: Sequence[int]
    round: int
    schedule: Schedule
    cohort: Sequence[int]
    method: Method


class EvalRequest(NamedTuple):
    """An evaluation of the personal models of `clients` (ascending) on their samples of `split`.

    If the method has final phases, `private` is the state after them.
    """

    shared: Tree
    private: Tree
    clients: Sequence[int]
    round: int
    split: str


ClientFunction: TypeAlias = Callable[[EvalRequest, int, ClientInfo, Method], Tensor]
"""A function of a request, a position in it, the stacked info of its clients, and the method."""


class FinalRequest(NamedTuple):
    """The final phases of `clients` (ascending), whose private state is stacked in that order, after some round."""

    shared: Tree
    private: Tree
    clients: Sequence[int]
    round: int
    schedule: Schedule
    method: Method


class RoundResult(NamedTuple):
    """A cohort's uploads, and the clients' new private state, stacked in order."""

    uploads: Aggregator
    private: Tree
    terms: LossTerms  # (clients,) each
    n_uploads: int | None = None  # uploads received, also of clients that are not in the mean; None: one of each client

    @property
    def mean(self) -> Tree:
        """The aggregate of the uploads: their weighted mean, or the result of another aggregation rule."""
        return self.uploads.result()


class Engine(ABC):
    """Base class of engines, which train and evaluate clients. Private state is passed as one tree stacked over clients."""

    name: ClassVar[str]
    supports_concurrent_trials: ClassVar[bool] = False
    saves_before_evaluation: ClassVar[bool] = False  # for evaluations that other machines may interrupt
    noise_source: ClassVar[str] = "the seed of the run, for simulation only"  # of defences
    private_memory_fraction: ClassVar[float] = 0.25  # of a GPU's memory that private states may take

    def __init__(self, spec: RunSpec) -> None:
        self._set_spec(spec)

    def _set_spec(self, spec: RunSpec) -> None:
        self._spec = spec
        self.method, self.schedule = spec.method, spec.schedule
        self.federation, self.device = spec.federation, spec.device
        self.class_counts, self.aggregation = spec.class_counts, spec.aggregation
        self.local_clients: Sequence[int] = range(len(spec.federation))  # the clients of this process
        counted = [self._samples_for_label_counts(shard.train) for shard in spec.federation.shards]
        self._label_counts = torch.from_numpy(self.federation.count_labels(counted)).to(self.device)
        self._n_samples = torch.from_numpy(self.federation.n_samples("train").astype(np.float32)).to(self.device)

    @abstractmethod
    def train_round(self, request: TrainRequest) -> RoundResult:
        """Run a round."""

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Return the scores of the clients."""
        return self.to_evaluation(request, torch.stack(self.map_clients(request, self.score_client)))

    def predict_clients(self, request: EvalRequest) -> list[Tensor]:
        """Return the logits of the personal models of all clients of the run on their samples, (samples, classes) each."""
        return self.map_clients(request, self.predict_client)

    def map_clients(self, request: EvalRequest, function: ClientFunction) -> list[Tensor]:
        """Return the value of a function for every client of a request, by default one client after another."""
        info = self.client_info(request.clients, request.round)
        with torch.no_grad():
            return [function(request, i, info, self.method) for i in range(len(request.clients))]

    def for_trial(self, spec: RunSpec) -> Self:
        """Return this engine for another trial: equal but for the seed, float hyperparameters of the method, and shards.

        The federations of all trials are on one table.
        """
        out = copy.copy(self)
        out._set_spec(spec)
        if spec.method.final_phases():
            out.__dict__["_final_engine"] = self._final_engine.for_trial(_final_spec(spec))
        return out

    def train_rounds(self, requests: Sequence[TrainRequest], engines: Sequence["Engine"] = ()) -> list[RoundResult]:
        """Run a round of each of several trials, concurrently where the engine supports it.

        `engines` are those that `for_trial` returned for the trials; by default it is this one for all.
        """
        return [
            engine.train_round(request) for engine, request in zip(engines or [self] * len(requests), requests, strict=True)
        ]

    def train(self, shared: Tree, private: Tree, clients: Sequence[int], round: int) -> RoundResult:
        """Run a round of `clients` (ascending), whose private state is stacked in that order."""
        return self.train_rounds([TrainRequest(shared, private, clients, round, self.schedule, clients, self.method)])[0]

    def evaluate(self, shared: Tree, private: Tree, round: int, split: str) -> Evaluation:
        """Return the scores of all clients' personal models on their samples of `split`."""
        return self.evaluate_clients(self._personal_models(shared, private, round, split))

    def predict(self, shared: Tree, private: Tree, round: int, split: str) -> list[Tensor]:
        """Return the logits of all clients' personal models on their samples of `split`, computed by this process."""
        return self.predict_clients(self._personal_models(shared, private, round, split))

    def _personal_models(self, shared: Tree, private: Tree, round: int, split: str) -> EvalRequest:
        """Return the request for all clients' personal models on their samples of `split`."""
        clients = range(len(self.federation))
        private = self.run_final_phases([FinalRequest(shared, private, clients, round, self.schedule, self.method)])[0]
        return EvalRequest(shared, private, clients, round, split)

    # Final phases.

    def run_final_phases(self, requests: Sequence[FinalRequest], engines: Sequence["Engine"] = ()) -> list[Tree]:
        """Return the clients' private state after the final phases of each of several trials, stacked in order.

        A method without final phases keeps the state as it is. Clients with too few samples keep that in which the phases
        start. `engines` are those that `for_trial` returned for the trials; by default it is this one for all.
        """
        if not self.method.final_phases():
            return [request.private for request in requests]
        engines = engines or [self] * len(requests)
        trained = [
            [i for i, client in enumerate(request.clients) if engine._final_engine.can_train(client)]
            for engine, request in zip(engines, requests, strict=True)
        ]
        rounds = [
            (engine._final_engine, engine._final_round(request, positions))
            for engine, request, positions in zip(engines, requests, trained, strict=True)
            if positions
        ]
        results = iter(
            self._final_engine.train_rounds([request for _, request in rounds], [engine for engine, _ in rounds])
            if rounds
            else ()
        )
        states = [next(results).private if positions else None for positions in trained]
        return [
            engine._add_untrained(request, positions, state)
            for engine, request, positions, state in zip(engines, requests, trained, states, strict=True)
        ]

    @cached_property
    def _final_engine(self) -> Self:
        """The engine of the final phases, with programs and numbers of slots of its own."""
        return type(self)(_final_spec(self._spec))

    def _final_round(self, request: FinalRequest, positions: list[int]) -> TrainRequest:
        """Return the final phases of the clients at some positions as a round."""
        clients = [request.clients[i] for i in positions]
        private = tree.fetch(request.private, positions, self.device)
        schedule, method = request.schedule.for_final_phases(), FinalRound.of(request.method)
        return TrainRequest(request.shared, private, clients, request.round, schedule, clients, method)

    def _add_untrained(self, request: FinalRequest, trained: list[int], states: Tree | None) -> Tree:
        """Return the states of all clients of a request; `states` are those at the positions `trained`."""
        others = sorted(set(range(len(request.clients))) - set(trained))
        if states is not None and not others:
            return states
        info = self.client_info(request.clients, request.round)
        start = tree.stack(
            [
                request.method.start_final_phases(request.shared, self.fetch_private(request.private, i), info.select(i))
                for i in others
            ]
        )
        if states is None:
            return start
        device = tree.device_of(states) or self.device
        order = torch.as_tensor(np.argsort([*trained, *others]), device=device)
        return tree.take(tree.concatenate([states, tree.to(start, device)]), order)

    def personal_weights(self, shared: Tree, private: Tree, clients: Sequence[int], round: int) -> list[Tree]:
        """Return the weights of the personal models of `clients`, whose private state is stacked in that order."""
        info = self.client_info(clients, round)
        private = self.run_final_phases([FinalRequest(shared, private, clients, round, self.schedule, self.method)])[0]
        return [
            self.method.personal_weights(shared, self.fetch_private(private, i), self._adaptation_batch(client), info.select(i))
            for i, client in enumerate(clients)
        ]

    def aggregation_weights(self, request: TrainRequest) -> Tensor:
        """Return the weights of the request's clients in the mean; over the whole cohort they sum to one."""
        weights = self._client_weights(request.method, self.client_info(request.cohort, request.round))
        index = {client: i for i, client in enumerate(request.cohort)}
        return (weights / weights.sum())[torch.as_tensor([index[client] for client in request.clients], device=self.device)]

    def _client_weights(self, method: Method, clients: ClientInfo) -> Tensor:
        return torch.stack([method.aggregation_weight(clients.select(i)) for i in range(len(clients.n_samples))])

    def private_device(self, bytes_per_client: int) -> torch.device:
        """Return where to keep private state: the engine's device, or the CPU where it would fill a GPU."""
        if self.device.type != "cuda":
            return self.device
        _, memory = torch.cuda.mem_get_info(self.device)
        too_large = bytes_per_client * len(self.local_clients) > self.private_memory_fraction * memory
        return torch.device("cpu") if too_large else self.device

    def initial_private(self, private: Tree) -> Tree:
        """Return the private state of all clients before round 0, stacked; `private` is that of one client."""
        device = self.private_device(tree.count_bytes(private))
        return tree.to(tree.repeat(private, len(self.federation)), device)

    def gather_private(self, private: Tree) -> Tree:
        """Return the private state of all clients, gathered from all processes."""
        return private

    @property
    def description(self) -> str:
        """Name of the engine in the summary."""
        return self.name

    def client_info(self, clients: Sequence[int], round: int) -> ClientInfo:
        """Return the stacked `ClientInfo` of the clients."""
        index = torch.as_tensor(list(clients), device=self.device)
        ones = torch.ones(len(clients), device=self.device)
        n_samples, label_counts = self._n_samples[index], self._label_counts[index]
        return ClientInfo(n_samples, label_counts, ones * round, ones * self.schedule.rounds, index.to(ones.dtype))

    def unseen_client_info(self, table: Table, round: int) -> ClientInfo:
        """Return the `ClientInfo` of a client outside the federation that trains on all samples of `table`."""
        labels = table.y[torch.from_numpy(self._samples_for_label_counts(np.arange(len(table)))).to(self.device)]
        counts = torch.bincount(labels, minlength=table.classes).to(torch.float32)
        values = [len(table), round, self.schedule.rounds, len(self.federation)]
        n_samples, this_round, total_rounds, index = torch.tensor(values, dtype=torch.float32, device=self.device)
        return ClientInfo(n_samples, counts, this_round, total_rounds, index)

    def _samples_for_label_counts(self, samples: Indices) -> Indices:
        return self.schedule.unshuffled_samples(samples) if self.class_counts == "used" else samples

    def plan(self, client: int, round: int, schedule: Schedule | None = None) -> Plan:
        """Return the batches of a client's round, by default under the engine's own schedule."""
        return (schedule or self.schedule).plan(self.method.phases(), self.federation.shards[client].train, round, client)

    def count_steps(self, phase: Phase) -> int:
        """Return the expected number of steps that all clients take in the run.

        It decides whether steps are traced. So it must not depend on the clients sampled for the first round: a resumed run
        could decide differently, and its last digits would differ.
        """
        width, fraction = self.schedule.batch_size * phase.batches, self.schedule.client_fraction
        sizes = self.federation.n_samples("train")
        steps = np.maximum(sizes // width, 1)[sizes >= self.min_samples].sum() * phase.epochs
        return int(steps * np.mean(fraction) * self.schedule.rounds)

    def can_train(self, client: int) -> bool:
        """Return whether the client has enough samples to train."""
        return len(self.federation.shards[client].train) >= self.min_samples

    @property
    def min_samples(self) -> int:
        """Number of training samples that a client needs to train."""
        return self.schedule.min_samples(self.method.phases())

    @property
    def ineligible_clients(self) -> list[int]:
        """Clients with too few samples to train. They keep their private state and are evaluated like the others."""
        return [client for client in range(len(self.federation)) if not self.can_train(client)]

    def adaptation_indices(self, client: int) -> Tensor:
        """Return the indices of the batch a personal model may adapt to: the client's first, padded to the batch size."""
        indices = self.schedule.batches(self.federation.shards[client].train)[0]
        return torch.from_numpy(indices).to(self.device)

    def _adaptation_batch(self, client: int) -> Batch:
        indices = self.adaptation_indices(client)
        return self.federation.table.batch(indices[indices >= 0])

    def fetch_private(self, private: Tree, position: int) -> Tree:
        """Return one client's private state on the engine's device."""
        return tree.take(tree.fetch(private, [position], self.device), 0)

    def score_client(self, request: EvalRequest, position: int, info: ClientInfo, method: Method | None = None) -> Tensor:
        """Return (correct predictions, summed loss) of one client; threads pass a copy of the method each."""
        scores = self._map_batches(evaluate_client, request, position, info, method)
        return torch.stack([torch.stack(score) for score in scores]).sum(0)

    def predict_client(self, request: EvalRequest, position: int, info: ClientInfo, method: Method | None = None) -> Tensor:
        """Return the logits of one client's personal model on the CPU; threads pass a copy of the method each."""
        return torch.cat(self._map_batches(predict_client, request, position, info, method)).cpu()

    def _map_batches(
        self,
        function: Callable[[Method, Tree, Tree, Batch, ClientInfo, Batch], T],
        request: EvalRequest,
        position: int,
        info: ClientInfo,
        method: Method | None,
    ) -> list[T]:
        """Return the value of a function of a client's personal model for each batch of its samples."""
        client, private = request.clients[position], self.fetch_private(request.private, position)
        adaptation_batch, client_info = self._adaptation_batch(client), info.select(position)
        samples = torch.from_numpy(self.federation.shards[client].split(request.split)).to(self.device)
        return [
            function(
                method or self.method,
                request.shared,
                private,
                adaptation_batch,
                client_info,
                self.federation.table.batch(indices),
            )
            for indices in torch.split(samples, EVAL_BATCH_SIZE)
        ]

    def find_faults(self, request: TrainRequest) -> dict[int, str]:
        """Return what is wrong with the uploads of a round by client; each client trains again, alone."""
        info, faults = self.client_info(request.clients, request.round), {}
        for i, client in enumerate(request.clients):
            plan, private = self.plan(client, request.round, request.schedule), self.fetch_private(request.private, i)
            upload = local_round(request.method, request.shared, private, self.federation.table, plan, info.select(i)).upload
            if fault := find_fault(tree.flatten(upload)):
                faults[client] = fault
        return faults

    def to_evaluation(self, request: EvalRequest, scores: Tensor) -> Evaluation:
        """Return the evaluation for scores (clients, 2) of correct predictions and summed loss."""
        correct, loss = scores.T.cpu().double().numpy()
        return Evaluation(correct, loss, self.federation.n_samples(request.split)[list(request.clients)].astype(np.float64))

    def new_aggregator(self, request: TrainRequest) -> Aggregator:
        """Return an aggregator for the uploads of a request."""
        return make_aggregator(self.aggregation, self.aggregation_weights(request))

    def to_result(
        self, request: TrainRequest, uploads: Aggregator, private: Sequence[Tree], terms: Sequence[LossTerms]
    ) -> RoundResult:
        """Return the result of a round, private state and loss terms stacked in the order of the request."""
        stacked = {name: torch.stack([each[name] for each in terms]) for name in terms[0]}
        device = tree.device_of(request.private) or self.private_device(tree.count_bytes(private[0]))
        return RoundResult(uploads, tree.to(tree.stack(private), device), stacked)


class Loop(Engine):
    """Engine that trains one client after another, without padding; the others are checked and measured against it."""

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


def _final_spec(spec: RunSpec) -> RunSpec:
    """Return the final phases of a run as a run."""
    schedule = spec.schedule.for_final_phases()
    return dataclasses.replace(spec, method=FinalRound.of(spec.method), schedule=schedule, aggregation=MEAN)


def add_terms(sums: LossTerms, terms: LossTerms) -> LossTerms:
    """Return the sums of loss terms after a step; sums are empty before the first."""
    return {name: sums[name] + value for name, value in terms.items()} if sums else terms
