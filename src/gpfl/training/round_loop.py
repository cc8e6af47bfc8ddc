"""The round loop: train, evaluate, save checkpoints, and resume exactly."""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy as np
import torch

from gpfl.core import tree
from gpfl.core.metrics import METRICS, Evaluation, best_index, mean_of_last
from gpfl.core.tree import Tree
from gpfl.defences import defence_warnings, upload_bytes
from gpfl.defences.accounting import describe_guarantee
from gpfl.engine import Engine, RunSpec
from gpfl.engine.base import EvalRequest, FinalRequest, RoundResult, TrainRequest
from gpfl.errors import DivergenceError, GpflError
from gpfl.inference.metrics import UndefinedMetricError, compute_metric, softmax
from gpfl.training import private_files
from gpfl.training.callbacks import Callback, RunInfo
from gpfl.training.config import RunOptions
from gpfl.training.devices import device_name
from gpfl.training.run_dir import MetricsRecord, RunDir, RunState, metric

Request = TrainRequest | FinalRequest | EvalRequest
Steps = Generator[Request, Any, "RunOutcome"]


@dataclass(frozen=True)
class RunOutcome:
    """A finished run: its last state, the state whose models are kept, all evaluated rounds, and the summary."""

    last: RunState
    selected: RunState
    history: list[MetricsRecord]
    summary: dict[str, object]


@dataclass
class RoundLoop:
    """The rounds of one run, from its last checkpoint to its end."""

    spec: RunSpec
    engine: Engine
    options: RunOptions
    patience: int = 0
    run_dir: RunDir | None = None
    callbacks: Sequence[Callback] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)  # further entries of the summary
    history: list[MetricsRecord] = field(default_factory=list)
    n_concurrent: int = 1  # runs that run at once: the measured time is divided by it

    def run(self) -> RunOutcome:
        """Run to the end. Raise if the run diverges."""
        outcome = run_concurrently([self])[0]
        if isinstance(outcome, DivergenceError):
            raise outcome
        return outcome

    def steps(self) -> Steps:
        """Yield rounds and evaluations as requests, whose results are sent back, and return the outcome."""
        state, selected = self._load_or_init()
        if self.run_dir:
            self.run_dir.truncate_metrics(self.history)
        rounds, path = self.spec.schedule.rounds, self.run_dir.path if self.run_dir else None
        guarantee = cast(Mapping[str, object], self.metadata.get("privacy", {}))
        notes = (*describe_guarantee(guarantee), *defence_warnings(self.spec.method))
        for callback in self.callbacks:
            callback.on_run_start(RunInfo(self.spec.method.name, rounds, state.round, path, notes))
        result: RoundResult | None = None
        self._last_time = time.perf_counter()
        while True:
            if self.engine.saves_before_evaluation:
                self._save(state, selected)
            if self._is_evaluated(state.round) and not (self.history and self.history[-1]["round"] == state.round):
                yield from self._evaluate(state, result)
                if self.selection != "last" and self._best_record(self.selection) is self.history[-1]:
                    selected = state
            ended = state.round == rounds or self._out_of_patience()
            if ended or state.round % self.options.checkpoint_every == 0:
                self._save(state, selected)
            if ended:
                break
            state, result = yield from self._train_round(state)
        selected = state if self.selection == "last" else selected
        return RunOutcome(self._gather(state), self._gather(selected), self.history, self._summarize(selected))

    def reopen(self) -> RunOutcome:
        """Return the outcome of a finished run from its directory."""
        if self.run_dir is None:
            raise GpflError("a run without a folder cannot be reopened")
        state, selected = self._load_or_init()
        if not self.history:
            raise GpflError(
                f"the run in {self.run_dir.path} has finished, but its checkpoint is gone: its models are in models/"
            )
        return RunOutcome(state, selected, self.history, self.run_dir.read_summary())

    @property
    def selection(self) -> str:
        """How the round whose models are kept is selected: last, validation or test."""
        if self.options.select != "auto":
            return self.options.select
        return "validation" if self.spec.federation.has_validation else "last"

    def _best_record(self, split: str) -> MetricsRecord:
        """Return the evaluated round that is best by `run.metric` on test or validation samples, the first in a tie."""
        name = self.options.metric
        scores = [metric(record, record_key(name, split)) for record in self.history]
        return self.history[best_index(scores, METRICS[name].lower_is_better)]

    @property
    def _splits(self) -> tuple[str, ...]:
        return ("test", "validation") if self.spec.federation.has_validation else ("test",)

    def _load_or_init(self) -> tuple[RunState, RunState]:
        """Return the state to continue from and the one selected so far, and read the history up to it."""
        shared, private = self.spec.method.init(self.options.seed)
        # The exchange of statistics comes before round 0.
        exchanged = {key: sum(by_client.values()) for key, by_client in self._preprocessing_bytes().items()}
        if self.run_dir and self._private_on_disk:
            private = private_files.allocate(private, len(self.spec.federation), self.run_dir.path)
        else:
            private = self.engine.initial_private(private)
        initial = RunState(0, tree.to(shared, self.spec.device), private, **exchanged)
        first = self._take_local(initial)
        checkpoint = self.run_dir.load_checkpoint(initial, private_on_disk=self._private_on_disk) if self.run_dir else None
        if self.run_dir is None or checkpoint is None:
            return first, first
        state = selected = self._take_local(checkpoint)
        if self.selection != "last":
            checkpoint = self.run_dir.load_checkpoint(initial, "selected")
            if checkpoint is None:  # without the selected state the run starts over
                return first, first
            selected = self._take_local(checkpoint)
        self.history = [record for record in self.run_dir.read_metrics() if metric(record, "round") <= state.round]
        evaluated = {record["round"] for record in self.history}
        end = state.round if self.engine.saves_before_evaluation else state.round + 1
        missing = [i for i in range(end) if self._is_evaluated(i) and i not in evaluated]
        if missing:
            path, hint = self.run_dir.path / "metrics.jsonl", self.run_dir.restart_hint
            raise GpflError(f"{path} is damaged (it lacks round {missing[0]}): {hint}")
        return state, selected

    @property
    def _private_on_disk(self) -> bool:
        return self.options.private_state == "disk"

    def _preprocessing_bytes(self) -> dict[str, Mapping[str, int]]:
        preprocessing = self.spec.federation.preprocessing
        return {"bytes_up": preprocessing.bytes_up, "bytes_down": preprocessing.bytes_down} if preprocessing else {}

    def _take_local(self, state: RunState) -> RunState:
        """Return a state with the private state of this process's clients only."""
        if len(self.engine.local_clients) == len(self.spec.federation):
            return state
        return state._replace(private=tree.take(state.private, self._index(self.engine.local_clients, state)))

    def _gather(self, state: RunState) -> RunState:
        return state._replace(private=self.engine.gather_private(state.private))

    def _index(self, entries: Sequence[int], state: RunState) -> torch.Tensor:
        device = tree.device_of(state.private) or self.spec.device
        return torch.as_tensor(entries, dtype=torch.int64, device=device)

    def _save(self, state: RunState, selected: RunState) -> None:
        """Write the checkpoint, unless it has NaN: then the next loss or evaluation stops the run."""
        if not self.run_dir:
            return
        state = self._gather(state)
        if tree.is_finite({"shared": state.shared, "private": state.private}):
            if self.selection != "last":
                self.run_dir.save_checkpoint(self._gather(selected), "selected")
            self.run_dir.save_checkpoint(state, private_on_disk=self._private_on_disk)
            for callback in self.callbacks:
                callback.on_checkpoint(self.run_dir.path / "checkpoint.safetensors")

    def _train_round(self, state: RunState) -> Generator[TrainRequest, RoundResult, tuple[RunState, RoundResult | None]]:
        """Return the state after a round; it is the same if no sampled client has enough samples."""
        method, schedule = self.spec.method, self.spec.schedule
        sampled = schedule.sample_clients(state.round, len(self.spec.federation))
        cohort = [client for client in sampled if self.engine.can_train(client)]
        if not cohort:
            for callback in self.callbacks:
                callback.on_round_end(state.round + 1, {})
            return state._replace(round=state.round + 1), None
        positions = {client: i for i, client in enumerate(self.engine.local_clients)}
        clients = [client for client in cohort if client in positions]
        index = self._index([positions[client] for client in clients], state)
        private = tree.take(state.private, index)
        request = TrainRequest(state.shared, private, clients, state.round, schedule, cohort, method)
        result = yield request
        if not result.terms:
            raise GpflError(f"the steps of method '{method.name}' return no loss terms: return at least one")
        self._check_losses(result, cohort, state.round)
        mean = result.mean
        if not tree.is_finite(mean):
            for client, fault in self.engine.find_faults(request).items():
                self._stop(f"the upload of client {self.spec.federation.shards[client].name} is faulty: {fault}", state.round)
            self._stop("the mean of the uploads has NaN or infinity", state.round)
        private = result.private
        if len(clients) < len(positions) or self._private_on_disk:
            # The selected state must not change in place.
            private = state.private if self.selection == "last" else tree.clone(state.private)
            tree.index_copy_(private, index, result.private)
        n_uploads = len(cohort) if result.n_uploads is None else result.n_uploads
        up = state.bytes_up + n_uploads * upload_bytes(method, mean, self.spec.aggregation.secure_sum)
        down = state.bytes_down + len(cohort) * tree.count_bytes(state.shared)
        losses = _mean_losses(result) if self.callbacks else {}
        for callback in self.callbacks:
            callback.on_round_end(state.round + 1, losses)
        return RunState(state.round + 1, method.aggregate(state.shared, mean), private, up, down), result

    def _is_evaluated(self, round: int) -> bool:
        return round % self.options.eval_every == 0 or round == self.spec.schedule.rounds

    def _evaluate(self, state: RunState, result: RoundResult | None) -> Generator[Request, Any, None]:
        """Record an evaluation; `result` is that of the previous round."""
        state = yield from self._run_final_phases(state)
        test = yield from self._evaluate_split(state, "test")
        record: MetricsRecord = {"round": state.round, "accuracy": test.accuracy, "loss": test.loss}
        if self.spec.federation.has_validation:
            record["validation_accuracy"] = (yield from self._evaluate_split(state, "validation")).accuracy
        if self.options.metric != "accuracy":
            record |= {record_key(self.options.metric, split): self._compute_metric(state, split) for split in self._splits}
        record |= {"mean": test.mean, "std": test.std, "cov": test.cov}
        record["client_accuracies"] = dict(zip(self._names(test), test.client_accuracies.tolist(), strict=True))
        if result is not None:
            record["train"] = _mean_losses(result)
            record["participants"] = len(next(iter(result.terms.values())))
        now = time.perf_counter()
        seconds = (now - self._last_time) / self.n_concurrent
        record |= {"bytes_up": state.bytes_up, "bytes_down": state.bytes_down, "seconds": round(seconds, 4)}
        self._last_time = now
        self.history.append(record)
        if self.run_dir:
            self.run_dir.append_metrics(record)
        for callback in self.callbacks:
            callback.on_evaluate(record)

    def _run_final_phases(self, state: RunState) -> Generator[FinalRequest, Tree, RunState]:
        """Return a copy of the state whose private state is that of the personal models; training does not continue from it."""
        method, clients = self.spec.method, self.engine.local_clients
        if not method.final_phases():
            return state
        return state._replace(
            private=(yield FinalRequest(state.shared, state.private, clients, state.round, self.spec.schedule, method))
        )

    def _evaluate_split(self, state: RunState, split: str) -> Generator[EvalRequest, Evaluation, Evaluation]:
        evaluation = yield EvalRequest(state.shared, state.private, self.engine.local_clients, state.round, split)
        for name, loss in zip(self._names(evaluation), evaluation.loss_sum, strict=True):
            if not math.isfinite(loss):
                self._stop(f"the model of client {name} has loss {loss} on its {split} samples", state.round)
        return evaluation

    def _names(self, evaluation: Evaluation) -> list[str]:
        shards = self.spec.federation.shards
        return [shards[client].name for client in (range(len(shards)) if evaluation.clients is None else evaluation.clients)]

    def _compute_metric(self, state: RunState, split: str) -> float:
        """Return `run.metric` of the stacked predictions of all clients."""
        federation = self.spec.federation
        request = EvalRequest(state.shared, state.private, self.engine.local_clients, state.round, split)
        logits = torch.cat(self.engine.predict_clients(request)).numpy()
        y = np.concatenate([federation.labels(client, split) for client in range(len(federation))])
        try:
            return compute_metric(self.options.metric, y, softmax(logits), federation.class_names)
        except UndefinedMetricError as reason:
            raise GpflError(
                f"run.metric is '{self.options.metric}', which is undefined on the {split} samples ({reason}): "
                "choose another --metric"
            ) from None

    def _check_losses(self, result: RoundResult, cohort: Sequence[int], round: int) -> None:
        """Stop the run if a client's training loss is NaN or infinite."""
        for term, values in result.terms.items():
            bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
            if bad:
                name = self.spec.federation.shards[cohort[bad[0]]].name
                self._stop(f"the loss of client {name} is {float(values[bad[0]])} (term '{term}')", round)

    def _stop(self, reason: str, round: int) -> NoReturn:
        checkpoint = ""
        if self.run_dir:
            self.run_dir.write_divergence(round, reason)
            path = self.run_dir.path / "checkpoint.safetensors"
            checkpoint = f"; the last good checkpoint is kept in {path}" if path.exists() else ""
        finetuning = ", lower the learning rate of fine-tuning," if self.spec.method.final_phases() else ""
        lr = f"lower train.lr (--lr or --set train.lr=…, now {self.spec.method.lr:g})"
        remedy = f"{lr}{finetuning} or check the data{checkpoint}"
        raise DivergenceError(f"round {round}: {reason}", remedy)

    def _out_of_patience(self) -> bool:
        """Return whether `run.metric` (on validation samples, if there are any) has not improved for too long."""
        if not self.patience or not self.history:
            return False
        improved = metric(self._best_record(self._splits[-1]), "round")
        return metric(self.history[-1], "round") - improved >= self.patience

    def _summarize(self, selected: RunState) -> dict[str, object]:
        test = [metric(record, "accuracy") for record in self.history]
        top, last = self.history[best_index(test)], self.history[-1]
        chosen = next((record for record in self.history if record["round"] == selected.round), last)
        validation = {}
        if self.spec.federation.has_validation:
            record = self._best_record("validation")
            validation = {"validation_best_round": record["round"], "validation_best_accuracy": record["accuracy"]}
        return {
            **self.metadata,
            "best_round": top["round"],
            "best_accuracy": top["accuracy"],
            "std": top["std"],
            "cov": top["cov"],
            "last_accuracy": last["accuracy"],
            "last_ten_accuracy": mean_of_last(test[1:] or test),  # without round 0, before training
            **validation,
            "idle_clients": len(self.engine.ineligible_clients),
            "min_samples": self.engine.min_samples,
            "selected_by": self.selection,
            "selected_round": selected.round,
            "selected_accuracy": chosen["accuracy"],
            "selected_std": chosen["std"],
            "selected_cov": chosen["cov"],
            "metric": self.options.metric,
            f"selected_{self.options.metric}": chosen[self.options.metric],
            "rounds": last["round"],
            "seconds": round(sum(metric(record, "seconds") for record in self.history), 3),
            "bytes_up": last["bytes_up"],
            "bytes_down": last["bytes_down"],
            **{f"preprocessing_{key}": sum(sent.values()) for key, sent in self._preprocessing_bytes().items()},
            "engine": self.engine.description,
            "device": device_name(self.spec.device),
            "seed": self.options.seed,
        }


def run_concurrently(loops: Sequence[RoundLoop]) -> list[RunOutcome | DivergenceError]:
    """Run trials of one config concurrently on the engine of the first, and return their outcomes.

    Trials differ in their seeds, in float hyperparameters of the method, or in the samples of their clients. Each has its own
    directory and may end earlier than others; one that diverges does not stop them.
    """
    engine = loops[0].engine
    running = {i: loop.steps() for i, loop in enumerate(loops)}
    results: dict[int, object] = dict.fromkeys(running)
    outcomes: dict[int, RunOutcome | DivergenceError] = {}
    while running:
        requests: dict[int, Request] = {}
        n_concurrent = len(running)
        for i in list(running):
            loops[i].n_concurrent = n_concurrent
            try:
                requests[i] = running[i].send(results[i])
            except StopIteration as end:
                outcomes[i] = end.value
                del running[i]
            except DivergenceError as end:  # raised in every process, so none waits for another
                outcomes[i] = end.with_traceback(None)  # the traceback would keep the state alive
                del running[i]
        rounds = {i: request for i, request in requests.items() if isinstance(request, TrainRequest)}
        final = {i: request for i, request in requests.items() if isinstance(request, FinalRequest)}
        results = {}
        if rounds:
            trained = engine.train_rounds(list(rounds.values()), [loops[i].engine for i in rounds])
            results |= dict(zip(rounds, trained, strict=True))
        if final:
            states = engine.run_final_phases(list(final.values()), [loops[i].engine for i in final])
            results |= dict(zip(final, states, strict=True))
        results |= {
            i: loops[i].engine.evaluate_clients(request) for i, request in requests.items() if isinstance(request, EvalRequest)
        }
    return [outcomes[i] for i in range(len(loops))]


def _mean_losses(result: RoundResult) -> dict[str, float]:
    return {name: float(values.double().mean()) for name, values in result.terms.items()}


def record_key(metric: str, split: str) -> str:
    """Return the key of a metric over the test or validation samples in a record of metrics.jsonl."""
    return metric if split == "test" else f"validation_{metric}"
