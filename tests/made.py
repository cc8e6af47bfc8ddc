"""Run folders made by hand, with accuracies of a test's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import gpfl
from gpfl.experiments.stored_runs import FolderRun, Trials
from gpfl.federation.federation import Federation, Shard
from gpfl.training.run_dir import METRICS_NUMBERS, SUMMARY_NUMBERS, SUMMARY_TEXTS, RunDir

Terms = Mapping[str, float]


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
    """A finished run whose clients had these accuracies in each evaluated round, from round 0 on, all with one test row.

    `terms` are those of training from round 1 on, `rows` the number of each client's rows in the table.
    """
    folder.mkdir(parents=True)
    run = RunDir(folder)
    lines = []
    for number, clients in enumerate(rounds):
        values = np.array(clients, dtype=np.float64)
        line = {
            **dict.fromkeys(METRICS_NUMBERS, 0),
            "round": number,
            "accuracy": float(values.mean()),
            "client_accuracies": list(clients),
        }
        line |= {"std": float(values.std()), "mean": float(values.mean())}
        if number and number <= len(terms):
            line["train"] = dict(terms[number - 1])
        lines.append(line)
        run.append_metrics(line)
    best = max(range(len(lines)), key=lambda k: (lines[k]["accuracy"], -k))
    facts = {"best_round": best, "best_accuracy": lines[best]["accuracy"], "std": lines[best]["std"], "seed": seed}
    chosen = {"selected_round": selected, "rounds": len(lines) - 1, "clients": len(rounds[0]), "method": method}
    run.write_summary({**dict.fromkeys(SUMMARY_NUMBERS, 0), **dict.fromkeys(SUMMARY_TEXTS, "text"), **facts, **chosen})
    places = rows if rows is not None else range(len(rounds[0]))
    count = 2 * len(rounds[0])
    table = gpfl.Table(np.zeros((count, 1), dtype=np.float32), np.zeros(count, dtype=np.int64), classes=2)
    none = np.zeros(0, dtype=np.int64)
    shards = [Shard(str(k), np.array([2 * place]), none, np.array([2 * place + 1])) for k, place in enumerate(places)]
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
    """The trials of a method, one a seed, in a folder of their own."""
    folders = [
        run_folder(folder / method / f"seed-{seed}", seed, rounds, terms=terms, selected=selected, rows=rows, method=method)
        for seed, rounds in seeds.items()
    ]
    return Trials(method, [FolderRun(path) for path in folders])


class SummaryRun(FolderRun):
    """A run of which there is nothing but a summary."""

    def __init__(self, path: Path | str, summary: Mapping[str, object]) -> None:
        super().__init__(Path(path))
        self.summary = summary
