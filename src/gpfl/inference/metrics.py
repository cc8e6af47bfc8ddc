"""Metrics of predicted probabilities, per client and over all clients. They equal scikit-learn's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpfl.core.metrics import METRICS
from gpfl.errors import GpflError
from gpfl.inference import bootstrap
from gpfl.inference.bootstrap import N_RESAMPLES, Interval, Intervals, Labels, Predictions, Probabilities, ResampledMetrics
from gpfl.inference.threshold import decide

DECISION_METRICS = ("accuracy", "balanced_accuracy", "macro_f1")
"""Metrics of predicted classes; the others are of probabilities. The calibration error is that of the more probable class."""


class UndefinedMetricError(GpflError):
    """A metric has no value for some predictions. The message is the reason."""


class ConfusionMatrix(NamedTuple):
    """Number of samples by label (rows) and predicted class (columns), for the classes that occur in either."""

    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class ClientMetrics:
    """Metrics of one client, or of the stacked predictions of all. A metric is None where it is undefined."""

    n_samples: int
    values: Mapping[str, float | None]
    undefined: Mapping[str, str]  # why a metric is None
    confusion_matrix: ConfusionMatrix
    intervals: Mapping[str, Interval | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON values."""
        return {
            "samples": self.n_samples,
            **self.values,
            "undefined": dict(self.undefined),
            "intervals": {name: None if ends is None else list(ends) for name, ends in self.intervals.items()},
            "confusion_matrix": self.confusion_matrix._asdict(),
        }


@dataclass(frozen=True)
class ClientSummary:
    """One metric over the clients for which it is defined, each with the same weight."""

    mean: float | None
    clients: int
    interval: Interval | None  # of the mean
    worst_client: str | None
    worst: float | None
    worst_tenth: float | None  # mean of the worst tenth of the clients, at least one

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON values."""
        return {**asdict(self), "interval": None if self.interval is None else list(self.interval)}


@dataclass(frozen=True)
class MetricsReport:
    """The metrics of all clients on one split: of each by name, of their stacked predictions, and their means.

    Intervals are percentiles of bootstrap resamples. Test samples are drawn again within each client; the clients and their
    models stay the same.
    """

    clients: Mapping[str, ClientMetrics]
    overall: ClientMetrics
    over_clients: Mapping[str, ClientSummary]

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON values."""
        return {
            "overall": self.overall.to_dict(),
            "over_clients": {name: summary.to_dict() for name, summary in self.over_clients.items()},
            "clients": {name: client.to_dict() for name, client in self.clients.items()},
        }

    def summary(self) -> dict[str, object]:
        """Return each metric overall and over clients, without single clients."""
        return {name: {"overall": self.overall.values[name], **self.over_clients[name].to_dict()} for name in self.over_clients}


def describe_bootstrap(n_probabilities: int) -> dict[str, object]:
    """Return the settings of metrics and intervals for this number of probabilities of stacked predictions."""
    resamples = {"resamples": N_RESAMPLES, "overall_resamples": bootstrap.overall_resamples(n_probabilities)}
    return {"calibration_bins": bootstrap.ECE_BINS, "bootstrap": {"level": bootstrap.LEVEL, **resamples}}


def softmax(logits: npt.ArrayLike) -> Probabilities:
    """Return the probabilities of logits (samples, classes), in double precision."""
    values = np.asarray(logits, dtype=np.float64)
    powers = np.exp(values - values.max(axis=1, keepdims=True, initial=-np.inf))
    probabilities: Probabilities = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def evaluate_predictions(
    labels: Mapping[str, Labels],
    probabilities: Mapping[str, Probabilities],
    class_names: Sequence[str],
    *,
    n_resamples: int = N_RESAMPLES,
    thresholds: Mapping[str, float | None] | None = None,
) -> MetricsReport:
    """Return the metrics of the clients' predicted probabilities (samples, classes).

    `thresholds` has the probability at which a client's model predicts the second of two classes, or None for the more
    probable one. Without `n_resamples` there are no intervals.
    """
    thresholds = thresholds or {}
    predictions = [
        Predictions(labels[name], probabilities[name], decide(probabilities[name], thresholds.get(name))) for name in labels
    ]
    intervals = Intervals([{} for _ in predictions], {}, {})
    if n_resamples:
        intervals = bootstrap.bootstrap_intervals(predictions, n_resamples)
    clients = {
        name: _evaluate(each, class_names, ends)
        for name, each, ends in zip(labels, predictions, intervals.clients, strict=True)
    }
    summaries = {
        metric: summarize_clients(
            metric, {name: client.values[metric] for name, client in clients.items()}, intervals.mean.get(metric)
        )
        for metric in METRICS
    }
    overall = _evaluate(bootstrap.stack_predictions(predictions), class_names, intervals.overall)
    return MetricsReport(clients, overall, summaries)


def metric_values(predictions: Predictions, names: Collection[str] = tuple(METRICS)) -> dict[str, float | None]:
    """Return metrics of predictions, None where undefined."""
    values = ResampledMetrics(*predictions).values(np.ones((len(predictions.y), 1)), names)
    return {name: None if np.isnan(value[0]) else float(value[0]) for name, value in values.items()}


def summarize_clients(metric: str, values: Mapping[str, float | None], interval: Interval | None = None) -> ClientSummary:
    """Return the mean and the worst of a metric's values by client, leaving out those that are undefined."""
    defined = {name: value for name, value in values.items() if value is not None}
    if not defined:
        return ClientSummary(None, 0, None, None, None, None)
    ordered = sorted(defined, key=lambda name: defined[name], reverse=METRICS[metric].lower_is_better)  # worst first
    tenth = ordered[: max(1, len(ordered) // 10)]
    mean, worst_tenth = (float(np.mean([defined[name] for name in names])) for names in (defined, tenth))
    return ClientSummary(mean, len(defined), interval, ordered[0], defined[ordered[0]], worst_tenth)


def compute_metric(name: str, y: Labels, p: Probabilities, class_names: Sequence[str] = ()) -> float:
    """Return one metric of predictions. Raise `UndefinedMetricError` if it has no value for them."""
    value = metric_values(Predictions(y, p, p.argmax(axis=1)), [name])[name]
    if value is None:
        raise UndefinedMetricError(_explain_undefined(name, y, class_names))
    return value


def _explain_undefined(name: str, y: Labels, class_names: Sequence[str]) -> str:
    if len(y) == 0:
        return "no samples"
    if name == "log_loss":
        return "the data have one class"
    return f"all {len(y)} samples are of class {class_names[y[0]] if class_names else y[0]}"


def _evaluate(predictions: Predictions, class_names: Sequence[str], intervals: Mapping[str, Interval | None]) -> ClientMetrics:
    y, values = predictions.y, metric_values(predictions)
    undefined = {name: _explain_undefined(name, y, class_names) for name, value in values.items() if value is None}
    known = {name: None if values[name] is None else ends for name, ends in intervals.items()}
    return ClientMetrics(len(y), values, undefined, _confusion_matrix(y, predictions.decisions, class_names), known)


def _confusion_matrix(y: Labels, predicted: Labels, class_names: Sequence[str]) -> ConfusionMatrix:
    present, indices = np.unique([y, predicted], return_inverse=True)
    counts = np.zeros((len(present), len(present)), dtype=np.int64)
    np.add.at(counts, tuple(indices.reshape(2, -1)), 1)
    return ConfusionMatrix([class_names[label] for label in present], counts.tolist())
