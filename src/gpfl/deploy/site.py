"""A site: its samples, its private state on disk, and its part of a round."""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from gpfl.core import tree
from gpfl.core.precision import matmul_precision
from gpfl.core.randomness import MAX_SEED, generator
from gpfl.core.tree import Tree
from gpfl.defences.accounting import INSTALL_COMMAND, AccountingInputs, privacy_guarantee
from gpfl.defences.aggregation import MEAN
from gpfl.defences.defended import Defended
from gpfl.deploy.messages import RoundReply, RoundRequest
from gpfl.deploy.roster import Roster, SiteData
from gpfl.engine import limit_threads
from gpfl.engine.base import EvalRequest, FinalRequest, Loop, TrainRequest
from gpfl.errors import GpflError
from gpfl.inference.client_model import ClientModel
from gpfl.inference.metrics import softmax
from gpfl.inference.threshold import choose_threshold
from gpfl.io.tensors import read_tensors, write_tensors
from gpfl.training.prepare import accounting_inputs
from gpfl.training.result import Result
from gpfl.training.round_loop import RunOutcome
from gpfl.training.run_dir import RunState

SHARED = "shared"
"""Name of the file with the last shared state that a site received."""


def new_secret() -> bytes:
    """Return a key for the noise of one round, from the operating system."""
    return secrets.token_bytes(32)


class Site:
    """One client of a deployed run. Its private state lies in `folder`, one file for each round.

    Args:
        roster: The run and its sites.
        name: Name of this site.
        data: Its samples.
        folder: Folder of its private state.
        secret: Returns the key of a round's defence noise; by default a new one each time, which nobody else can know.

    """

    def __init__(
        self, roster: Roster, name: str, data: SiteData, folder: Path, secret: Callable[[], bytes] = new_secret
    ) -> None:
        self.roster, self.name, self.folder, self._secret = roster, name, folder, secret
        self.client = roster.index(name)
        self.config, spec = roster.prepare(roster.federation(name, data))
        self.spec = replace(spec, aggregation=MEAN)  # of one upload: the upload
        self.engine = Loop(self.spec)
        self._shared, self._private = self.spec.method.init(self.config.run.seed)

    def run_round(self, request: RoundRequest) -> RoundReply:
        """Evaluate and train as the coordinator asks. The same request gives the same reply, but for noise."""
        self._check(request)
        start = time.perf_counter()
        with limit_threads(self.spec), matmul_precision(self.spec.precision):
            shared = self._unflatten_shared(request)
            private = tree.stack([tree.to(self.load_private(request.accepted), self.spec.device)])
            self._write(SHARED, shared, request.round, request.accepted)
            scores = self._evaluate(shared, private, request) if request.splits else {}
            upload, terms = self._train(shared, private, request) if request.train else ({}, {})
        if request.final:
            self.model().save(self.folder / "model.safetensors")
        self._remove_old(request.accepted)
        seconds = time.perf_counter() - start
        return RoundReply(round=request.round, upload=upload, terms=terms, scores=scores, seconds=seconds)

    def upload_weight(self, cohort: Sequence[int]) -> float:
        """Return the site's weight in the mean over a cohort."""
        shared, private, method = self._shared, self._private, self.spec.method
        request = TrainRequest(shared, private, [self.client], 0, self.spec.schedule, list(cohort), method)
        return float(self.engine.aggregation_weights(request)[0])

    @cached_property
    def planned_uploads(self) -> int:
        """Uploads of the busiest site if no round is repeated."""
        return self._accounting.most_rounds

    def epsilon(self, uploads: int) -> float:
        """Return the ε of so many uploads against a coordinator that sees each of them; infinite without noise."""
        if not uploads:
            return 0.0
        values = []
        found = privacy_guarantee(self.config.defence, replace(self._accounting, uploads=uploads))
        for level, key in (("client", "epsilon_of_all_uploads"), ("example", "epsilon")):
            if isinstance(guarantee := found.get(level), dict):
                if key not in guarantee:
                    raise GpflError(f"ε needs the accountant of privacy: {INSTALL_COMMAND}")
                values.append(math.inf if guarantee[key] is None else float(guarantee[key]))
        return min(values, default=math.inf)

    @cached_property
    def _accounting(self) -> AccountingInputs:
        return accounting_inputs(self.spec.method, self.spec.federation, self.spec.schedule)

    def load_private(self, accepted: int) -> Tree:
        """Return the private state after the round with the last accepted upload; the initial one if there was none."""
        if not accepted:
            return self._private
        path = self._path(f"round-{accepted:06d}")
        if not path.exists():
            raise GpflError(
                f"the private state after round {accepted} is missing in {self.folder}: restore it from a backup of the site"
            )
        flat, metadata = read_tensors(path)
        if metadata.get("roster") != self.roster.origin or metadata.get("round") != accepted:
            raise GpflError(f"{path} is of another run or round: restore it from a backup of the site")
        return tree.unflatten_like(self._private, flat)

    def model(self) -> ClientModel:
        """Return the personal model of the last shared state that the site received and its own private state."""
        path = self._path(SHARED)
        if not path.exists():
            raise GpflError(f"site '{self.name}' has received no shared state of run '{self.roster.run}' yet: wait for round 0")
        flat, metadata = read_tensors(path)
        shared = tree.to(tree.unflatten_like(self._shared, flat), self.spec.device)
        done, accepted = int(str(metadata["round"])), int(str(metadata["accepted"]))
        private = tree.stack([tree.to(self.load_private(accepted), self.spec.device)])
        with limit_threads(self.spec), matmul_precision(self.spec.precision):
            weights = self.engine.personal_weights(shared, private, [self.client], done)[0]
            state = RunState(done, shared, private)
            result = Result(self.engine, RunOutcome(state, state, [], {}))
            preprocessing, federation = self.spec.federation.preprocessing, self.spec.federation
            model = result.make_model(weights, self.name, preprocessing.clients[self.name] if preprocessing else None)
            shard = federation.shards[self.client]
            if self.config.run.threshold != "none" and federation.table.classes == 2 and len(shard.validation):
                final = self._final_state(shared, private, done)
                logits = self.engine.predict_clients(EvalRequest(shared, final, [self.client], done, "validation"))[0]
                labels = federation.labels(self.client, "validation")
                model.threshold = choose_threshold(labels, softmax(logits.numpy()), self.config.run.threshold)
        return model

    def _check(self, request: RoundRequest) -> None:
        if request.roster != self.roster.digest:
            raise GpflError(f"the request is for another roster than that of run '{self.roster.run}'")
        if request.client != self.client:
            raise GpflError(f"the request is for client {request.client}; site '{self.name}' is client {self.client}")
        if not 0 <= request.accepted <= request.round <= self.spec.schedule.rounds:
            raise GpflError(f"the request is for round {request.round} after {request.accepted} of {self.spec.schedule.rounds}")

    def _unflatten_shared(self, request: RoundRequest) -> Tree:
        expected = {path: (t.shape, t.dtype) for path, t in tree.flatten(self._shared).items()}
        if {path: (t.shape, t.dtype) for path, t in request.shared.items()} != expected:
            raise GpflError(f"the shared state of the request is not that of method '{self.spec.method.name}'")
        if not tree.is_finite(dict(request.shared)):
            raise GpflError("the shared state of the request has NaN or infinity")
        return tree.to(tree.unflatten_like(self._shared, request.shared), self.spec.device)

    def _evaluate(self, shared: Tree, private: Tree, request: RoundRequest) -> dict[str, tuple[float, float, int]]:
        final, clients = self._final_state(shared, private, request.round), [self.client]
        scores = {}
        for split in request.splits:
            found = self.engine.evaluate_clients(EvalRequest(shared, final, clients, request.round, split))
            scores[split] = (float(found.correct[0]), float(found.loss_sum[0]), int(found.n_samples[0]))
        return scores

    def _final_state(self, shared: Tree, private: Tree, done: int) -> Tree:
        request = FinalRequest(shared, private, [self.client], done, self.spec.schedule, self.spec.method)
        return self.engine.run_final_phases([request])[0]

    def _train(self, shared: Tree, private: Tree, request: RoundRequest) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        method, engine, clients = self.spec.method, self.engine, [self.client]
        if isinstance(method, Defended):
            method = method.replace(secret=self._secret())
            engine = engine.for_trial(replace(self.spec, method=method))
        schedule = self.spec.schedule
        if request.attempt:
            seed = int(generator(schedule.seed, "repetition", request.round, request.attempt).integers(MAX_SEED))
            schedule = replace(schedule, seed=seed)
        result = engine.train_round(TrainRequest(shared, private, clients, request.round, schedule, clients, method))
        self._write(f"round-{request.round + 1:06d}", tree.take(result.private, 0), request.round + 1, request.accepted)
        return tree.flatten(tree.to(result.mean, torch.device("cpu"))), {name: float(v[0]) for name, v in result.terms.items()}

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _write(self, name: str, state: Tree, done: int, accepted: int) -> None:
        metadata = {"roster": self.roster.origin, "round": done, "accepted": accepted}
        write_tensors(self._path(name), tree.flatten(state), metadata)

    def _remove_old(self, accepted: int) -> None:
        """Remove states before the last accepted one, unless a round chosen on validation samples may need them."""
        if self.config.run.select in ("auto", "last") and not self.spec.federation.has_validation:
            for path in self.folder.glob("round-*.safetensors"):
                if int(path.stem.removeprefix("round-")) < accepted:
                    path.unlink(missing_ok=True)
