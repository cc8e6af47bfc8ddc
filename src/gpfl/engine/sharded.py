"""The engine for several processes: each runs its own clients on a local engine, and uploads are aggregated over processes."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.aggregator import make_aggregator
from gpfl.engine.base import Engine, EvalRequest, FinalRequest, RoundResult, RunSpec, TrainRequest
from gpfl.engine.distributed import ProcessGroup
from gpfl.engine.slots import pack


class Sharded(Engine):
    """Engine of one of several processes. Private state stays with its process.

    Processes exchange sums of uploads, loss terms and scores, and the uploads themselves if the aggregation rule compares them.
    """

    name: ClassVar[str] = "sharded"

    def __init__(self, spec: RunSpec, local_engine: Engine, group: ProcessGroup) -> None:
        super().__init__(spec)
        self._local_engine, self._group = local_engine, group
        steps = [max(1, len(shard.train) // spec.schedule.batch_size) for shard in spec.federation.shards]
        self._clients_by_rank = [sorted(slot) for slot in pack(steps, group.world_size).slots]
        self.local_clients = self._clients_by_rank[group.rank]

    @property
    def description(self) -> str:
        """Name of the engine in the summary."""
        return f"{self._local_engine.description} on {self._group.world_size} ranks"

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Run the round of this process's clients and aggregate the uploads of all processes."""
        local = self._local_engine.train_round(request) if request.clients else self._empty_result(request)
        terms_by_rank = self._group.all_gather({name: values.cpu() for name, values in local.terms.items()})
        clients_by_rank = self._group.all_gather(list(request.clients))
        order = np.argsort([client for clients in clients_by_rank for client in clients])
        names = next((list(terms) for terms in terms_by_rank if terms), [])
        terms = {name: torch.cat([terms[name] for terms in terms_by_rank if terms])[order].to(self.device) for name in names}
        return RoundResult(local.uploads.gather(clients_by_rank, self._group), local.private, terms)

    def _empty_result(self, request: TrainRequest) -> RoundResult:
        """Return the result of a process without a client in the cohort: no uploads."""
        private = tree.to(self.method.init(request.schedule.seed)[1], self.device)
        client = self.client_info([0], request.round).select(0)
        local_state = self.method.download(request.shared, private, client)
        upload, _ = self.method.upload(request.shared, local_state, private, client)
        uploads = make_aggregator(self.aggregation, self._n_samples[:0])
        uploads.add_stacked([], tree.take(tree.repeat(upload, 1), slice(0)))
        return RoundResult(uploads, request.private, {})

    def run_final_phases(self, requests: Sequence[FinalRequest], engines: Sequence[Engine] = ()) -> list[Tree]:
        """Return the clients' private state after the final phases, which send nothing to other processes."""
        return [self._local_engine.run_final_phases([each])[0] if each.clients else each.private for each in requests]

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Return the scores of all clients, each evaluated by its process."""
        local = self._local_engine.evaluate_clients(request) if request.clients else None
        correct, loss_sum, n_samples = np.zeros((3, len(self.federation)))
        out = Evaluation(correct, loss_sum, n_samples)
        for clients, scores in self._group.all_gather((list(request.clients), local)):
            if scores is not None:
                out.correct[clients] = scores.correct
                out.loss_sum[clients] = scores.loss_sum
                out.n_samples[clients] = scores.n_samples
        return out

    def predict_clients(self, request: EvalRequest) -> list[Tensor]:
        """Return the logits of all clients, each computed by its process."""
        local = self._local_engine.predict_clients(request) if request.clients else []
        gathered = self._group.all_gather((list(request.clients), local))
        by_client = {client: logits for clients, rank in gathered for client, logits in zip(clients, rank, strict=True)}
        return [by_client[client] for client in range(len(self.federation))]

    def predict(self, shared: Tree, private: Tree, round: int, split: str) -> list[Tensor]:
        """Return the logits of all clients' personal models on their samples of `split`, computed by this process."""
        return self._local_engine.predict(shared, private, round, split)

    def gather_private(self, private: Tree) -> Tree:
        """Return the private state of all clients, gathered from their processes, on the CPU."""
        shards = self._group.all_gather(tree.to(private, torch.device("cpu")))
        order = torch.as_tensor(np.argsort([client for clients in self._clients_by_rank for client in clients]))
        filled = [shard for shard, clients in zip(shards, self._clients_by_rank, strict=True) if clients]
        return tree.take(tree.concatenate(filled), order)
