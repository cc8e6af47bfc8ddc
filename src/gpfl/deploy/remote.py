"""The engine whose clients are at other sites: it asks them to train and evaluate, and aggregates what passes the guard."""

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypedDict

import numpy as np
import torch

from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.defences.aggregation import MAX_VALUE
from gpfl.deploy.messages import FlatTree, RoundReply, RoundRequest, Transport
from gpfl.deploy.roster import Roster
from gpfl.deploy.secure_sum import find_masked_fault, sum_is_plausible, sum_masked
from gpfl.engine.aggregator import Aggregator, SecureSum
from gpfl.engine.base import Engine, EvalRequest, FinalRequest, RoundResult, RunSpec, TrainRequest
from gpfl.engine.guard import Guard
from gpfl.errors import GpflError, pluralize
from gpfl.io import files

CLIENTS_LOG = "clients.jsonl"
"""File of a run's folder with a line for each round: who was averaged, who was dropped and why."""
MAX_NORM_RATIO = 10.0
"""Largest norm of an update in multiples of the cohort's median."""
ATTEMPTS = 3
"""How often a round is tried before the run stops."""


class Record(TypedDict):
    """A line of `CLIENTS_LOG`: a round, with bytes of all replies and requests and seconds of work by site.

    `uploads` counts all that a site has made, also of rounds that were lost; `epsilon` is the ε of these, 0 without noise.
    """

    round: int
    averaged: list[str]
    dropped: dict[str, str]
    seconds: dict[str, float]
    bytes_up_down: dict[str, list[int]]
    uploads: dict[str, int]
    epsilon: dict[str, float]


class Remote(Engine):
    """Engine of a coordinator, which holds no samples and no private state.

    Args:
        spec: The run, on the federation that the coordinator sees.
        roster: The run and its sites.
        transport: Sends messages to sites.
        folder: Folder of the run.
        min_clients: Fewest uploads of a round.
        log: Called with a line for each event.

    """

    name: ClassVar[str] = "remote"
    saves_before_evaluation: ClassVar[bool] = True
    noise_source: ClassVar[str] = "the operating system of each site"

    def __init__(
        self,
        spec: RunSpec,
        roster: Roster,
        transport: Transport,
        folder: Path,
        *,
        min_clients: int = 1,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(spec)
        self.local_clients: Sequence[int] = ()
        self._roster, self._transport, self._path, self._log = roster, transport, folder / CLIENTS_LOG, log
        self._min_clients = min_clients
        self._template = self._make_template()
        self._guard = Guard(tree.flatten(self._template), self.method, MAX_NORM_RATIO)
        self._replies: tuple[int, dict[int, RoundReply]] = (-1, {})  # of the last round that was asked for
        self._errors: dict[int, str] = {}
        self._traffic: dict[str, list[int]] = {}  # of all attempts at the round
        self._received = 0  # uploads of all attempts at the round
        self._uploads: dict[int, int] = {}  # made by each client in the run
        self._epsilon: dict[int, float] = {}
        self._agreed: set[int] = set()  # clients that have the roster
        self._records = self._read_records()

    # The coordinator's side of the engine interface.

    def initial_private(self, private: Tree) -> Tree:
        """Return no private state: it is at the sites."""
        return tree.repeat(private, 0)

    def run_final_phases(self, requests: Sequence[FinalRequest], engines: Sequence[Engine] = ()) -> list[Tree]:
        """Return the private states as they are: sites run the final phases themselves."""
        return [request.private for request in requests]

    def find_faults(self, request: TrainRequest) -> dict[int, str]:
        """Return nothing: the guard has dropped faulty uploads."""
        return {}

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Return the scores of the clients that answer. The same message asks those of the next round to train."""
        for attempt in range(ATTEMPTS):
            if self._replies[0] != request.round or attempt:
                last = request.round == self.schedule.rounds
                self._ask(request.round, request.shared, self._cohort(request.round), evaluate=True, final=last)
            if self._replies[1]:
                break
            self._log(f"round {request.round}: no site answered ({self._describe_errors()}); asking again")
        sizes = self.federation.n_samples(request.split)
        scores = {
            client: reply.scores[request.split]
            for client, reply in sorted(self._replies[1].items())
            if request.split in reply.scores
        }
        good = {
            client: (correct, loss)
            for client, (correct, loss, n) in scores.items()
            if n == sizes[client] and 0 <= correct <= n and math.isfinite(loss)
        }
        for client in scores.keys() - good.keys():
            self._log(f"round {request.round}: scores of {self._name(client)} ignored: {scores[client]} is not plausible")
        if not good:
            raise GpflError(
                f"round {request.round}: no site was evaluated ({self._describe_errors()}): check gpfl deploy status"
            )
        correct, loss = np.array(list(good.values()), dtype=np.float64).T
        clients = None if len(good) == len(self.federation) else tuple(good)
        return Evaluation(correct, loss, sizes[list(good)].astype(np.float64), clients)

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Return the uploads that pass the guard, asking again while there are too few."""
        if self.aggregation.secure_sum:
            return self._train_summed(request)
        needed = max(self._min_clients, self.aggregation.min_clients)
        for attempt in range(ATTEMPTS):
            if self._replies[0] != request.round or attempt:
                self._ask(request.round, request.shared, request.cohort, evaluate=False)
            replies = self._accept(request)
            if len(replies) >= needed:
                break
            self._log(f"round {request.round}: {pluralize(len(replies), 'upload')}, {needed} needed; asking again")
        else:
            lower = f"min_clients is {needed}: lower it in deployment.toml, or start the sites and run again"
            rule = f"train.aggregation = '{self.aggregation.rule}' needs {needed}: start the sites and run again"
            raise GpflError(
                f"round {request.round}: {pluralize(len(replies), 'upload')} from {len(request.cohort)} sites "
                f"({self._describe_errors()}), and {lower if needed == self._min_clients else rule}"
            )
        cohort = sorted(replies)
        uploads = self.new_aggregator(request._replace(clients=cohort, cohort=cohort))
        for i, client in enumerate(cohort):
            uploads.add(i, tree.unflatten_like(self._template, replies[client].upload))
        return self._result(request, replies, uploads)

    def _train_summed(self, request: TrainRequest) -> RoundResult:
        """Return the mean in a secure sum, repeating the round without sites that drop out."""
        cohort, template = list(request.cohort), tree.flatten(self._template)
        needed = max(self.aggregation.min_clients, self._min_clients)
        for attempt in range(ATTEMPTS):
            if self._replies[0] != request.round or attempt:
                self._ask(request.round, request.shared, cohort, evaluate=False, attempt=attempt)
            replies = {client: self._replies[1][client] for client in cohort if client in self._replies[1]}
            names = next((reply.terms.keys() for reply in replies.values()), set[str]())
            for client, reply in list(replies.items()):
                if fault := find_masked_fault(reply.upload, template) or _find_terms_fault(reply, names):
                    self._drop(request.round, client, fault)
                    del replies[client]
            if len(replies) == len(cohort) >= needed:
                total = sum_masked([reply.upload for _, reply in sorted(replies.items())], template)
                if faults := [path for path, numbers in total.items() if not sum_is_plausible(numbers)]:
                    raise GpflError(
                        f"round {request.round}: the secure sum cannot be used ('{faults[0]}' has entries beyond "
                        f"{MAX_VALUE:.3g}, so masks did not cancel or a site sent invalid numbers): check the logs of the sites"
                    )
                return self._result(request, replies, SecureSum.of(tree.unflatten_like(self._template, total)))
            # Sites that were only late may take part again; those that were not heard of are left out.
            cohort = sorted(replies) if len(replies) >= needed else list(request.cohort)
            self._log(f"round {request.round}: the secure sum lacks sites ({self._describe_errors()}); repeating the round")
        raise GpflError(
            f"round {request.round}: no secure sum of {needed} sites or more ({self._describe_errors()}): start the sites and "
            f"run again{', or lower min_clients in deployment.toml' if needed > self.aggregation.min_clients else ''}"
        )

    def _result(self, request: TrainRequest, replies: Mapping[int, RoundReply], aggregator: Aggregator) -> RoundResult:
        cohort = sorted(replies)
        names = replies[cohort[0]].terms
        terms = {name: torch.tensor([replies[client].terms[name] for client in cohort]) for name in names}
        self._record(request, cohort)
        return RoundResult(aggregator, request.private, terms, self._received)

    def finish(self, shared: Tree, round: int) -> dict[str, str]:
        """Send all sites the state whose models they keep, and return why some did not confirm, by name."""
        if round != self.schedule.rounds or self._replies[0] != round or self._errors:
            self._replies = (-1, {})
            self._ask(round, shared, [], evaluate=True, final=True)
        return {self._name(client): error for client, error in self._errors.items()}

    @property
    def most_uploads(self) -> int:
        """The most uploads that a site has made, also of rounds that were lost."""
        return max(self._uploads.values(), default=0)

    # Requests to sites.

    def _cohort(self, round: int) -> list[int]:
        """Return the clients that train in a round, as the round loop samples them."""
        if round >= self.schedule.rounds:
            return []
        return [c for c in self.schedule.sample_clients(round, len(self.federation)) if self.can_train(c)]

    def _ask(
        self, round: int, shared: Tree, cohort: Sequence[int], *, evaluate: bool, final: bool = False, attempt: int = 0
    ) -> None:
        """Ask the clients of a round, and keep their replies and the reasons of those that have none."""
        splits = ("test", *(("validation",) if self.federation.has_validation else ())) if evaluate else ()
        flat: FlatTree = tree.flatten(shared)
        messages = {
            client: RoundRequest(
                roster=self._roster.digest,
                client=client,
                round=round,
                accepted=self._last_accepted(client, round),
                train=client in cohort,
                splits=splits,
                final=final,
                agreement="" if client in self._agreed else self._roster.to_json(),
                cohort=tuple(cohort) if self.aggregation.secure_sum else (),
                attempt=attempt,
                shared=flat,
            ).pack()
            for client in (range(len(self.federation)) if evaluate else cohort)
        }
        start = time.monotonic()
        answers = self._transport(messages)
        replies: dict[int, RoundReply] = {}
        self._errors = {}
        for client in sorted(messages):
            answer = answers.get(client)
            try:
                if answer is None or answer.error:
                    raise GpflError(answer.error if answer else "no reply before the deadline")
                reply = RoundReply.unpack(answer.payload)
                if reply.round != round:
                    raise GpflError(f"its reply is that of round {reply.round}")
                replies[client] = reply
                self._agreed.add(client)
            except GpflError as error:
                self._errors[client] = str(error)
                self._log(f"round {round}: {self._name(client)}: {error}")
        if self._replies[0] != round:
            self._traffic, self._received = {}, 0
        self._replies = (round, replies)
        self._received += sum(bool(reply.upload) for reply in replies.values())
        self._uploads |= {client: reply.uploads for client, reply in replies.items()}
        self._epsilon |= {client: reply.epsilon for client, reply in replies.items()}
        for client in messages:
            up, down = self._traffic.get(self._name(client), (0, 0))
            received = len(answers[client].payload) if client in answers else 0
            self._traffic[self._name(client)] = [up + received, down + len(messages[client])]
        self._log(f"round {round}: {len(replies)} of {len(messages)} sites answered in {time.monotonic() - start:.1f} s")

    def _accept(self, request: TrainRequest) -> dict[int, RoundReply]:
        """Return the replies whose uploads may be averaged; the others' reasons are kept."""
        replies = {client: self._replies[1][client] for client in request.cohort if client in self._replies[1]}
        faults = self._guard.find_faults({c: r.upload for c, r in replies.items()}, tree.flatten(request.shared))
        terms = [frozenset(reply.terms) for client, reply in replies.items() if client not in faults]
        usual = max(terms, key=terms.count, default=frozenset())
        for client, reply in replies.items():
            if client not in faults and (fault := _find_terms_fault(reply, usual)):
                faults[client] = fault
        for client, fault in faults.items():
            self._drop(request.round, client, fault)
        return {client: reply for client, reply in replies.items() if client not in faults}

    def _drop(self, round: int, client: int, fault: str) -> None:
        self._errors[client] = f"upload dropped: {fault}"
        self._log(f"round {round}: upload of {self._name(client)} dropped: {fault}")

    def _make_template(self) -> Tree:
        """Return an upload of the method, for its names, shapes and types."""
        shared, private = self.method.init(self.schedule.seed)
        plan = [np.empty((0, 1), dtype=np.int64) for _ in self.method.phases()]
        info = self.client_info([0], 0).select(0)
        return local_round(self.method, shared, private, self.federation.table, plan, info).upload

    def _name(self, client: int) -> str:
        return self.federation.shards[client].name

    def _describe_errors(self) -> str:
        return "; ".join(f"{self._name(client)}: {error}" for client, error in self._errors.items()) or "no site was asked"

    # The log of rounds, by which sites learn which of their uploads counted.

    def _last_accepted(self, client: int, round: int) -> int:
        """Return the number of rounds after the last one, before `round`, in which the client's upload was averaged."""
        name = self._name(client)
        return max((r["round"] + 1 for r in self._records if r["round"] < round and name in r["averaged"]), default=0)

    def _record(self, request: TrainRequest, cohort: Sequence[int]) -> None:
        dropped = {self._name(client): self._errors.get(client, "") for client in request.cohort if client not in cohort}
        record: Record = {
            "round": request.round,
            "averaged": [self._name(client) for client in cohort],
            "dropped": dropped,
            "seconds": {self._name(client): round(reply.seconds, 3) for client, reply in self._replies[1].items()},
            "bytes_up_down": self._traffic,
            "uploads": {self._name(client): count for client, count in sorted(self._uploads.items())},
            "epsilon": {self._name(client): value for client, value in sorted(self._epsilon.items())},
        }
        self._records = [*(each for each in self._records if each["round"] < request.round), record]
        files.write_text(self._path, "".join(json.dumps(each) + "\n" for each in self._records))

    def _read_records(self) -> list[Record]:
        try:
            return [json.loads(line) for line in files.read_lines(self._path)]
        except ValueError as error:
            raise GpflError(f"{self._path} is damaged ({error}): restore it, or start a new run") from None


def _find_terms_fault(reply: RoundReply, names: Collection[str]) -> str:
    """Return what is wrong with the loss terms of a reply, or ""."""
    if not reply.terms or reply.terms.keys() != names:
        return f"its loss terms are {', '.join(sorted(reply.terms)) or 'missing'}"
    return "" if all(map(math.isfinite, reply.terms.values())) else "its training loss is NaN or infinite"
