"""Folders of finished runs with chosen accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import gpfl
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.federation import Federation, Shard
from gpfl.training.run_dir import RunDir

Terms = Mapping[str, float]

METRICS_NUMBERS = ("round", "accuracy", "loss", "mean", "std", "cov", "bytes_up", "bytes_down", "seconds")
SUMMARY_TEXTS = ("method", "engine", "device")
SUMMARY_NUMBERS = (
    *("best_round", "best_accuracy", "std", "cov", "last_accuracy", "last_ten_accuracy", "selected_round", "rounds"),
    *("clients", "idle_clients", "min_samples", "bytes_up", "bytes_down", "seconds", "seed"),
)


def run_folder(
    folder: Path,
    seed: int,
    rounds: Sequence[Sequence[float]],
    *,
    terms: Sequence[Terms] = (),
    selected: int = 0,
    rows: Sequence[int] | None = None,
    method: str = "gpfl",
) -> Path:
    """Write a finished run whose clients, with one test sample each, have these accuracies in each round from 0.

    `terms` are the loss terms from round 1, `rows` the index of each client's samples in the table.
    """
    folder.mkdir(parents=True)
    run = RunDir(folder)
    records = []
    for index, clients in enumerate(rounds):
        values = np.array(clients, dtype=np.float64)
        record = {
            **dict.fromkeys(METRICS_NUMBERS, 0),
            "round": index,
            "accuracy": float(values.mean()),
            "client_accuracies": list(clients),
        }
        record |= {"std": float(values.std()), "mean": float(values.mean())}
        if index and index <= len(terms):
            record["train"] = dict(terms[index - 1])
        records.append(record)
        run.append_metrics(record)
    best = max(range(len(records)), key=lambda k: (records[k]["accuracy"], -k))
    metrics = {"best_round": best, "best_accuracy": records[best]["accuracy"], "std": records[best]["std"], "seed": seed}
    metrics["cov"] = metrics["std"] / metrics["best_accuracy"] if metrics["best_accuracy"] else 0.0
    labels = {"selected_round": selected, "rounds": len(records) - 1, "clients": len(rounds[0]), "method": method}
    run.write_summary({**dict.fromkeys(SUMMARY_NUMBERS, 0), **dict.fromkeys(SUMMARY_TEXTS, "text"), **metrics, **labels})
    indices = rows if rows is not None else range(len(rounds[0]))
    count = 2 * len(rounds[0])
    table = gpfl.Table(np.zeros((count, 1), dtype=np.float32), np.zeros(count, dtype=np.int64), classes=2)
    empty = np.zeros(0, dtype=np.int64)
    shards = [Shard(str(k), np.array([2 * index]), empty, np.array([2 * index + 1])) for k, index in enumerate(indices)]
    Federation(table, shards).save(folder / "federation.toml")
    return folder


def trials_of(
    folder: Path,
    method: str,
    seeds: Mapping[int, Sequence[Sequence[float]]],
    *,
    terms: Sequence[Terms] = (),
    selected: int = 0,
    rows: Sequence[int] | None = None,
) -> Trials:
    """Write one run per seed and return them as the trials of a method."""
    folders = [
        run_folder(folder / method / f"seed-{seed}", seed, rounds, terms=terms, selected=selected, rows=rows, method=method)
        for seed, rounds in seeds.items()
    ]
    return Trials(method, [StoredRun(path) for path in folders])


class SummaryRun(StoredRun):
    """A run that consists of a summary."""

    def __init__(self, path: Path | str, summary: Mapping[str, object]) -> None:
        super().__init__(Path(path))
        self.summary = summary
