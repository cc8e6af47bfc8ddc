"""A run: rounds, evaluation at the start of each, checkpoints, and exact resumption."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, cast, overload, runtime_checkable

import torch

from gpfl.core import tree
from gpfl.core.metrics import Evaluation, best, mean_of_last
from gpfl.defences import defence_warnings, upload_bytes
from gpfl.defences.accounting import describe_guarantee
from gpfl.engine import Engine, RunSpec
from gpfl.engine.base import EvalRequest, RoundResult, TrainRequest
from gpfl.errors import DivergenceError, GpflError
from gpfl.training.config import RunOptions
from gpfl.training.run_dir import MetricsRecord, RunDir, RunState, device_name


class Watch(Protocol):
    """Someone who is told how a run goes."""

    def line(self, line: MetricsRecord, rounds: int) -> None:
        """Is told of an evaluated round."""


@runtime_checkable
class Listener(Protocol):
    """A watch that also hears what must be known of a run before it begins."""

    def note(self, words: str) -> None:
        """Is told a sentence."""


class Silent:
    """Nobody watches."""

    def line(self, line: MetricsRecord, rounds: int) -> None:
        """Says nothing."""


@dataclass(frozen=True)
class RunOutcome:
    """A finished run: its last state, the state whose models are kept, every evaluated round and the summary."""

    last: RunState
    selected: RunState
    lines: list[MetricsRecord]
    summary: dict[str, object]


@dataclass
class RoundLoop:
    """Runs a setting from its last checkpoint to its end."""

    setting: RunSpec
    engine: Engine
    options: RunOptions
    patience: int = 0
    folder: RunDir | None = None
    watch: Watch = field(default_factory=Silent)
    facts: Mapping[str, object] = field(default_factory=dict)  # what the summary says besides the results
    lines: list[MetricsRecord] = field(default_factory=list)
    n_concurrent: int = 1  # simulations that run at once and share the time

    def run(self) -> RunOutcome:
        """Gives the finished run."""
        outcome = run_concurrently([self])[0]
        if isinstance(outcome, DivergenceError):
            raise outcome
        return outcome

    def steps(self) -> Generator[TrainRequest | EvalRequest, Any, RunOutcome]:
        """Asks for one round or judgement after the other, is given each, and gives the finished run."""
        state, selected = self._start()
        if self.folder:
            self.folder.cut_back(self.lines)
        rounds = self.setting.schedule.rounds
        cohort: RoundResult | None = None
        self._clock = time.perf_counter()
        while True:
            due = state.round % self.options.eval_every == 0 or state.round == rounds
            if due and not (self.lines and self.lines[-1]["round"] == state.round):
                yield from self._evaluate(state, cohort)
                if self.selects != "last" and best(self.scores(self.selects)) == len(self.lines) - 1:
                    selected = state
            ended = state.round == rounds or self._out_of_patience()
            if ended or state.round % self.options.checkpoint_every == 0:
                self._save(state, selected)
            if ended:
                break
            state, cohort = yield from self._round(state)
        selected = state if self.selects == "last" else selected
        return RunOutcome(self._whole(state), self._whole(selected), self.lines, self._summary(selected))

    def reopen(self) -> RunOutcome:
        """Gives a run that has finished, from its folder."""
        if self.folder is None:
            raise GpflError("a run without a folder cannot be opened again")
        state, selected = self._start()
        if not self.lines:
            raise GpflError(
                f"the run in {self.folder.path} has finished, but its checkpoint is gone: its models are in models/"
            )
        summary = self.folder.summary()
        return RunOutcome(state, state if self.selects == "last" else selected, self.lines, summary)

    @property
    def selects(self) -> str:
        """What decides which round's models are kept: last, validation or test."""
        if self.options.select != "auto":
            return self.options.select
        return "validation" if self.setting.federation.has_validation else "last"

    def scores(self, split: str) -> list[float]:
        """Gives the accuracies of all evaluated rounds on test or validation rows."""
        return [number(line, "accuracy" if split == "test" else split) for line in self.lines]

    def _start(self) -> tuple[RunState, RunState]:
        """Gives the state to go on from and the state selected so far."""
        shared, private = self.setting.method.init(self.options.seed)
        home = self.engine.private_device(tree.count_bytes(private))
        everyone = tree.to(tree.repeat(private, len(self.setting.federation)), home)
        whole = RunState(0, tree.to(shared, self.setting.device), everyone)
        first = self._own(whole)
        if self.folder is None:
            return first, first
        state = self._own(self.folder.load_state(whole)) or first
        chosen = self._own(self.folder.load_state(whole, "selected")) if self.selects != "last" else state
        if chosen is None:
            state = chosen = first  # the round that was selected is lost, so the run starts over
        also = ("validation",) if self.setting.federation.has_validation else ()
        saved = self.folder.lines(also) if state is not first else []
        self.lines = [line for line in saved if number(line, "round") <= state.round]
        if state is not first:
            self._refuse_gaps(state.round)
        return state, chosen

    @overload
    def _own(self, state: RunState) -> RunState: ...

    @overload
    def _own(self, state: None) -> None: ...

    def _own(self, state: RunState | None) -> RunState | None:
        """Gives a state with the private states of this process's clients alone."""
        if state is None or len(self.engine.local_clients) == len(self.setting.federation):
            return state
        home = tree.device_of(state.private) or self.setting.device
        return state._replace(
            private=tree.take(state.private, torch.as_tensor(self.engine.local_clients, dtype=torch.int64, device=home))
        )

    def _whole(self, state: RunState) -> RunState:
        """Gives a state with the private states of all clients."""
        return state._replace(private=self.engine.gather_private(state.private))

    def _refuse_gaps(self, done: int) -> None:
        """Refuses metrics that lack an evaluated round up to round `done`."""
        seen = {line["round"] for line in self.lines}
        for missing in range(done + 1):
            due = missing % self.options.eval_every == 0 or missing == self.setting.schedule.rounds
            if due and missing not in seen and self.folder:
                raise GpflError(
                    f"{self.folder.path / 'metrics.jsonl'} is damaged (it lacks round {missing}): {self.folder.start_over}"
                )

    def _round(self, state: RunState) -> Generator[TrainRequest, RoundResult, tuple[RunState, RoundResult | None]]:
        """Gives the state after one more round; nothing moves where nobody of the cohort has rows enough to train."""
        method, everyone = self.setting.method, len(self.setting.federation)
        clients = [c for c in self.setting.schedule.sample_clients(state.round, everyone) if self.engine.can_train(c)]
        if not clients:
            return state._replace(round=state.round + 1), None
        places = {client: place for place, client in enumerate(self.engine.local_clients)}
        own = [client for client in clients if client in places]
        home = tree.device_of(state.private) or self.setting.device
        index = torch.as_tensor([places[client] for client in own], dtype=torch.int64, device=home)
        chosen = tree.take(state.private, index)
        cohort = yield TrainRequest(state.shared, chosen, own, state.round, self.setting.schedule, clients, method)
        if not cohort.terms:
            raise GpflError(f"the steps of method '{method.name}' name no terms: give at least one, such as the loss")
        self._refuse_nan(cohort, clients, state.round)
        private = cohort.private
        if len(own) < len(places):
            # A state that may be kept as the selected one must not change under it.
            private = state.private if self.selects == "last" else tree.clone(state.private)
            tree.index_copy_(private, index, cohort.private)
        up = state.bytes_up + len(clients) * upload_bytes(method, cohort.mean)
        down = state.bytes_down + len(clients) * tree.count_bytes(state.shared)
        return RunState(state.round + 1, method.aggregate(state.shared, cohort.mean), private, up, down), cohort

    def _evaluate(self, state: RunState, cohort: RoundResult | None) -> Generator[EvalRequest, Evaluation, None]:
        """Adds the line of a round; `cohort` is the outcome of the round before it."""
        test = yield from self._judge(state, "test")
        line: MetricsRecord = {"round": state.round, "accuracy": test.accuracy, "loss": test.loss}
        if self.setting.federation.has_validation:
            line["validation"] = (yield from self._judge(state, "validation")).accuracy
        line |= {"mean": test.mean, "std": test.std, "cov": test.cov, "clients": test.clients.tolist()}
        if cohort is not None:
            line["train"] = {name: float(values.double().mean()) for name, values in cohort.terms.items()}
            line["joined"] = len(next(iter(cohort.terms.values())))
        now = time.perf_counter()
        seconds = (now - self._clock) / self.n_concurrent
        line |= {"bytes_up": state.bytes_up, "bytes_down": state.bytes_down, "seconds": round(seconds, 4)}
        self._clock = now
        self.lines.append(line)
        if self.folder:
            self.folder.append(line)
        self.watch.line(line, self.setting.schedule.rounds)

    def _judge(self, state: RunState, split: str) -> Generator[EvalRequest, Evaluation, Evaluation]:
        """Gives the scores on the rows of `split`, none of them NaN."""
        scores = yield EvalRequest(state.shared, state.private, self.engine.local_clients, state.round, split)
        for place, loss in enumerate(scores.loss_sum):
            if not math.isfinite(loss):
                self._stop(f"the model of client {self._name(place)} has loss {loss} on its {split} rows", state.round)
        return scores

    def _refuse_nan(self, cohort: RoundResult, clients: list[int], round: int) -> None:
        """Stops the run where a client's training loss is not a number."""
        for name, values in cohort.terms.items():
            bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
            if bad:
                place = bad[0]
                self._stop(f"the loss of client {self._name(clients[place])} is {float(values[place])} (term '{name}')", round)

    def _stop(self, what: str, round: int) -> NoReturn:
        kept = ""
        if self.folder:
            self.folder.write_divergence(round, what)
            checkpoint = self.folder.path / "checkpoint.safetensors"
            kept = f"; the last good checkpoint is kept in {checkpoint}" if checkpoint.exists() else ""
        way = f"lower train.lr (--lr or --set train.lr=…, now {self.setting.method.lr:g}) or check the data{kept}"
        raise DivergenceError(f"round {round}: {what}", way)

    def _name(self, client: int) -> str:
        return self.setting.federation.shards[client].name

    def _out_of_patience(self) -> bool:
        """Tells whether the accuracy (on validation rows, where there are some) has not risen for too long."""
        if not self.patience or not self.lines:
            return False
        split = "validation" if self.setting.federation.has_validation else "test"
        risen = number(self.lines[best(self.scores(split))], "round")
        return number(self.lines[-1], "round") - risen >= self.patience

    def _save(self, state: RunState, selected: RunState) -> None:
        """Writes the checkpoint; a state with NaN in it is left out, the next loss or evaluation stops the run."""
        if not self.folder:
            return
        whole = self._whole(state)
        if tree.is_finite({"shared": whole.shared, "private": whole.private}):
            if self.selects != "last":
                self.folder.save_state(self._whole(selected), "selected")
            self.folder.save_state(whole)

    def _summary(self, selected: RunState) -> dict[str, object]:
        """Gives the content of summary.json; accuracies are shares of one."""
        test = self.scores("test")
        top = self.lines[best(test)]
        chosen = next((line for line in self.lines if line["round"] == selected.round), self.lines[-1])
        last = self.lines[-1]
        validation = {}
        if self.setting.federation.has_validation:
            line = self.lines[best(self.scores("validation"))]
            validation = {"validation_best_round": line["round"], "validation_best_accuracy": line["accuracy"]}
        return {
            **self.facts,
            "best_round": top["round"],
            "best_accuracy": top["accuracy"],
            "std": top["std"],
            "cov": top["cov"],
            "last_accuracy": last["accuracy"],
            "last_ten_accuracy": mean_of_last(test[1:] or test),  # without the start, which nothing has trained
            **validation,
            "idle_clients": len(self.engine.ineligible_clients),
            "rows_needed": self.engine.min_samples,
            "selected_by": self.selects,
            "selected_round": selected.round,
            "selected_accuracy": chosen["accuracy"],
            "rounds": last["round"],
            "seconds": round(sum(number(line, "seconds") for line in self.lines), 3),
            "bytes_up": last["bytes_up"],
            "bytes_down": last["bytes_down"],
            "engine": self.engine.description,
            "device": device_name(self.setting.device),
            "seed": self.options.seed,
        }


def run_concurrently(simulations: Sequence[RoundLoop]) -> list[RunOutcome | DivergenceError]:
    """Gives the finished runs of trials of one setting, their rounds run at once on the first one's engine.

    Trials differ in their seeds, or in numbers of their method; each has its folder, its checkpoints and its end, and one that
    diverges does not stop the others. Time is divided among those that run.
    """
    engine = simulations[0].engine
    tell_promises(simulations)
    running = {number: simulation.steps() for number, simulation in enumerate(simulations)}
    answers: dict[int, object] = dict.fromkeys(running)
    outcomes: dict[int, RunOutcome | DivergenceError] = {}
    while running:
        asked: dict[int, TrainRequest | EvalRequest] = {}
        for number in list(running):
            simulations[number].n_concurrent = len(running)
            try:
                asked[number] = running[number].send(answers[number])
            except StopIteration as end:
                outcomes[number] = end.value
                del running[number]
            except DivergenceError as end:  # alike in all processes, so that none waits for another
                outcomes[number] = end.with_traceback(None)  # which would hold on to its state
                del running[number]
        rounds = {number: work for number, work in asked.items() if isinstance(work, TrainRequest)}
        answers = dict(zip(rounds, engine.train_rounds(list(rounds.values())), strict=True)) if rounds else {}
        answers |= {
            number: simulations[number].engine.evaluate_clients(work)
            for number, work in asked.items()
            if isinstance(work, EvalRequest)
        }
    return [outcomes[number] for number in range(len(simulations))]


def tell_promises(simulations: Sequence[RoundLoop]) -> None:
    """Says before the first round what the defences of trials promise and what weakens them, what is the same once."""
    told: set[str] = set()
    for simulation in simulations:
        watch = simulation.watch
        promises = describe_guarantee(cast(Mapping[str, object], simulation.facts.get("privacy", {})))
        for sentence in (*promises, *defence_warnings(simulation.setting.method)):
            if isinstance(watch, Listener) and sentence not in told:
                watch.note(sentence)
            told.add(sentence)


def number(line: MetricsRecord, key: str) -> float:
    """Gives a number of a line."""
    return cast(float, line[key])
