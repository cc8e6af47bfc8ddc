"""The result of a run: its history, its numbers, and a personal model for each client, also for new ones."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch

from gpfl.core import tree
from gpfl.core.local_round import local_round, run_final_phases
from gpfl.core.method import NET_PARTS
from gpfl.core.precision import matmul_precision
from gpfl.core.tree import Tree
from gpfl.data.columns import RawColumns
from gpfl.data.table import SPLITS, ArrayLike, Table, read_samples
from gpfl.defences import undefended
from gpfl.engine import Engine
from gpfl.errors import GpflError
from gpfl.federation import Federation
from gpfl.inference.bootstrap import N_RESAMPLES, Labels, Probabilities
from gpfl.inference.client_model import ClientModel, OutputSpec, model_file_name
from gpfl.inference.inputs import Encoder, Inputs, read_raw
from gpfl.inference.metrics import MetricsReport, evaluate_predictions, softmax
from gpfl.inference.threshold import Threshold, choose_threshold
from gpfl.methods.fedavg import FedAvg
from gpfl.training.round_loop import RunOutcome
from gpfl.training.run_dir import MetricsRecord

EXPORT_CLIENTS = 256  # clients whose models are in memory at once while they are written


@dataclass(frozen=True)
class Result:
    """A finished run."""

    engine: Engine
    outcome: RunOutcome
    threshold_metric: str = "none"
    """Metric for which a binary model's threshold is chosen on validation samples; "none": all stay at 0.5."""

    def __repr__(self) -> str:
        s = self.summary
        return f"Result of {s['method']} on {s['data']}: {self.accuracy:.2%} after round {s['selected_round']} of {s['rounds']}"

    @property
    def summary(self) -> dict[str, object]:
        """The content of summary.json."""
        return self.outcome.summary

    @property
    def history(self) -> list[MetricsRecord]:
        """The evaluated rounds, as in metrics.jsonl."""
        return self.outcome.history

    @property
    def accuracy(self) -> float:
        """Test accuracy of the models in `clients`: of the last round, or of the round chosen on validation samples."""
        return cast(float, self.summary["selected_accuracy"])

    @property
    def best_accuracy(self) -> float:
        """Accuracy of the best round on test samples, as the paper reports it: it is chosen on the test samples themselves."""
        return cast(float, self.summary["best_accuracy"])

    @cached_property
    def metrics(self) -> MetricsReport:
        """The metrics of the models in `clients` on test samples, with bootstrap intervals."""
        return self.evaluate()

    @matmul_precision("float32")
    def evaluate(self, split: str = "test", *, n_resamples: int = N_RESAMPLES, use_thresholds: bool = False) -> MetricsReport:
        """Return the metrics of the models in `clients`: of each, of their stacked predictions, and their means.

        Args:
            split: Samples of each client: "test", "validation" or "train".
            n_resamples: Bootstrap resamples for intervals; 0 for none.
            use_thresholds: Predict by `thresholds`, as the models do, instead of the more probable class.

        """
        labels, probabilities = self._predict(split)
        thresholds = {name: each.value for name, each in self.thresholds.items() if each} if use_thresholds else {}
        return evaluate_predictions(
            labels, probabilities, self.federation.class_names, n_resamples=n_resamples, thresholds=thresholds
        )

    def metric_values(self, split: str = "test") -> tuple[dict[str, float | None], dict[str, dict[str, float | None]]]:
        """Return only the values of `evaluate`: of the stacked predictions, and of each client. None is undefined."""
        report = self.evaluate(split, n_resamples=0)
        return dict(report.overall.values), {name: dict(client.values) for name, client in report.clients.items()}

    def _predict(self, split: str) -> tuple[dict[str, Labels], dict[str, Probabilities]]:
        """Return the labels and the predicted probabilities of each client's samples."""
        federation, state = self.federation, self.outcome.selected
        if split not in SPLITS:
            raise GpflError(f"split is '{split}'; it must be one of {', '.join(SPLITS)}")
        if not federation.n_samples(split).any():
            raise GpflError(f"no client has {split} samples: set --validation-fraction, such as 0.1")
        logits = self.engine.predict(state.shared, state.private, state.round, split)
        names = [shard.name for shard in federation.shards]
        labels = {name: federation.labels(client, split) for client, name in enumerate(names)}
        return labels, {name: softmax(values.numpy()) for name, values in zip(names, logits, strict=True)}

    @cached_property
    @matmul_precision("float32")
    def thresholds(self) -> dict[str, Threshold | None]:
        """The decision threshold of each client's binary model, by name; None where none was chosen."""
        federation = self.federation
        if self.threshold_metric == "none" or federation.table.classes != 2 or not federation.has_validation:
            return {shard.name: None for shard in federation.shards}
        labels, probabilities = self._predict("validation")
        return {name: choose_threshold(y, probabilities[name], self.threshold_metric) for name, y in labels.items()}

    @property
    def federation(self) -> Federation:
        """The federation of the run."""
        return self.engine.federation

    @cached_property
    @matmul_precision("float32")
    def clients(self) -> list[ClientModel]:
        """The personal model of each client."""
        return self._make_models(range(len(self.federation.shards)))

    def _make_models(self, clients: range) -> list[ClientModel]:
        engine, state = self.engine, self.outcome.selected
        preprocessing = engine.federation.preprocessing
        private = tree.take(state.private, slice(clients.start, clients.stop))
        weights = engine.personal_weights(state.shared, private, clients, state.round)
        names = [engine.federation.shards[client].name for client in clients]
        return [
            self.make_model(each, name, preprocessing.clients[name] if preprocessing else None, self.thresholds[name])
            for each, name in zip(weights, names, strict=True)
        ]

    @matmul_precision("float32")
    def export(self, folder: str | Path) -> list[Path]:
        """Write every client's model and return the files."""
        paths = []
        for start in range(0, len(self.federation.shards), EXPORT_CLIENTS):
            for model in self._make_models(range(start, min(start + EXPORT_CLIENTS, len(self.federation.shards)))):
                paths.append(Path(folder) / model_file_name(model.name))
                model.save(paths[-1])
        return paths

    @matmul_precision("float32")
    def personalize(self, x: Inputs, y: ArrayLike, *, rounds: int = 20, name: str = "new") -> ClientModel:
        """Return a personal model for a client that did not take part in training.

        The client starts from the shared state and the initial private state, and runs local rounds whose uploads are not
        aggregated: only its private state changes.

        Args:
            x: Training samples, as `ClientModel.predict` takes them.
            y: Their labels.
            rounds: Number of local rounds.
            name: Name of the model.

        """
        if not isinstance(rounds, int) or rounds < 0:
            raise GpflError(f"rounds is {rounds}; it must be an integer, at least 0")
        engine, state = self.engine, self.outcome.selected
        method, schedule, spec = engine.method, engine.schedule, engine.federation.table.input_spec
        preprocessing = engine.federation.preprocessing
        preprocessor = preprocessing.federated if preprocessing else None
        inputs = read_raw(x, preprocessor or engine.federation.table.encoder, spec)
        if isinstance(inputs, RawColumns):
            if preprocessing is None:
                raise GpflError("this run was not trained on columns: give inputs as an array")
            preprocessor = preprocessing.for_new_client(inputs)
            inputs = preprocessor.transform(inputs)
        client, classes = f"client {name}", engine.federation.table.classes
        table = Table(read_samples(inputs, spec, client), y, classes=classes, name=client, input_spec=spec).to(engine.device)
        samples = np.arange(len(table))
        schedule.check_batch_size(method, len(samples), name)
        private = tree.to(method.init(schedule.seed)[1], engine.device)
        for i in range(rounds):
            plan = schedule.plan(method.phases(), samples, state.round + i, len(engine.federation))
            info = engine.unseen_client_info(table, state.round + i)
            update = local_round(method, state.shared, private, table, plan, info)
            if not all(bool(torch.isfinite(value)) for value in update.terms.values()):
                raise GpflError(f"the loss of client {name} is NaN after {i} rounds: check the samples")
            private = update.private
        first = torch.from_numpy(schedule.batches(samples)[0]).to(engine.device)
        last = state.round + rounds
        info = engine.unseen_client_info(table, last)
        private = run_final_phases(method, state.shared, private, table, samples, schedule, last, len(engine.federation), info)
        weights = method.personal_weights(state.shared, private, table.batch(first[first >= 0]), info)
        return self.make_model(weights, name, preprocessor)

    def shared_model(self, name: str = "shared", encoder: Encoder | None = None) -> ClientModel | None:
        """Return the net that the server holds, which a new client can use without training; None if it holds no whole net.

        Args:
            name: Name of the model.
            encoder: Encoding of the client's samples, by default that by the merged statistics.

        """
        method, state = undefended(self.engine.method), self.outcome.selected
        parts = (*NET_PARTS, "batch_norm_stats") if method.net.init(0).keys() & {"batch_norm_stats"} else NET_PARTS
        if not set(parts) <= state.shared.keys():
            return None
        preprocessing = self.federation.preprocessing
        encoder = encoder or (preprocessing.federated if preprocessing else None)
        model = self.make_model(tree.pick(state.shared, parts), name, encoder)
        model.method = FedAvg().bind(method.net, lr=method.lr, epochs=method.epochs, batch_norm=method.batch_norm)
        return model

    def make_model(
        self, weights: Tree, name: str, preprocessor: Encoder | None, threshold: Threshold | None = None
    ) -> ClientModel:
        """Return the model with these weights, which reads and predicts as those of the run."""
        table = self.engine.federation.table
        outputs = OutputSpec(table.class_names, str(table.metadata.get("label", "")))
        method, encoder = undefended(self.engine.method), preprocessor or table.encoder
        return ClientModel(method, weights, name, table.input_spec, encoder, outputs, threshold)
