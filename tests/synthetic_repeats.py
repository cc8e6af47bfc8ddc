"""Results of repeated splits with chosen scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpfl.core.metrics import METRICS
from gpfl.experiments.repeats import RepeatedResults, RepeatRecord, SplitMetrics
from gpfl.training import config as configs


def repeated_results(
    clients: Mapping[str, Mapping[str, Sequence[float | None]]], metric: str = "accuracy", partition: str = "natural"
) -> RepeatedResults:
    """Return results in which a method's clients have these scores in each repeat, and all samples together their mean.

    Every client has 60 training and 20 test samples.
    """
    data = {"name": "digits"} if partition != "natural" else {"name": "heart"}
    config = configs.resolve_config(
        {"data": data, "partition": {"name": partition}, "run": {"metric": metric}, "method": {"name": "local"}}
    )
    records = {
        method: {k: _record(k, {name: own[k] for name, own in scores.items()}, metric) for k in range(_length(scores))}
        for method, scores in clients.items()
    }
    return RepeatedResults(config, records)


def _length(scores: Mapping[str, Sequence[float | None]]) -> int:
    return len(next(iter(scores.values())))


def _record(repeat: int, scores: Mapping[str, float | None], metric: str) -> RepeatRecord:
    empty = dict.fromkeys(METRICS, None)
    defined = [score for score in scores.values() if score is not None]
    overall = {**empty, metric: sum(defined) / len(defined)}
    clients = {name: {**empty, metric: score} for name, score in scores.items()}
    return RepeatRecord(
        repeat=repeat,
        seed=repeat,
        partition_seed=repeat,
        split="",
        n_samples=dict.fromkeys(scores, (60, 0, 20)),
        metrics={"test": SplitMetrics(overall=overall, clients=clients)},
        rounds=10,
        selected_round=10,
        selected_by="last",
        bytes_up=1500,
        bytes_down=3000,
        seconds=2.0,
    )
