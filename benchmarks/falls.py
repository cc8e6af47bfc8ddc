"""How far GPFL and FedPer fall after their best round, and how much of it is noise.

    python benchmarks/falls.py     # the table of docs/methods/gpfl.md, from docs/results/runs.jsonl.xz

The best of many rounds lies above the level of its neighbours by chance. How far is simulated: rounds of constant accuracy with
the standard deviation and the correlation of neighbours that the last rounds of a run have once their trend is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpfl.experiments.stored_runs import StoredTrials, read_stored_trials

Floats = NDArray[np.float64]

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LAST = 10  # rounds of a mean
TAIL = 50  # rounds from which noise is estimated, as many as the patience of the runs

AUTHORS, FEATURES, EMBEDDINGS = "GPFL, authors' values", "GPFL, features, μ = 0.1", "GPFL, embeddings, μ = 0.1"
FEDPER = "FedPer"
TASKS: dict[str, dict[str, str]] = {  # names of the trials in the archive; first the default
    "Cifar100, 20 clients, Dirichlet 0.1": {
        AUTHORS: "cifar100-dirichlet-20-cnn4-gpfl-73e5c2a9",
        FEDPER: "cifar100-dirichlet-20-cnn4-fedper-c3106311",
    },
    "Cifar100, 20 clients, 10 classes each": {
        AUTHORS: "cifar100-pathological-20-cnn4-gpfl-ede4d369",
        FEDPER: "cifar100-pathological-20-cnn4-fedper-f617d3c3",
    },
    "Cifar100, 10 of 50 clients": {
        AUTHORS: "cifar100-dirichlet-10of50-cnn4-gpfl-5e35a678",
        FEDPER: "cifar100-dirichlet-10of50-cnn4-fedper-0c7d7cd7",
    },
    "AG News": {
        AUTHORS: "agnews-dirichlet-20-fasttext-gpfl-d8dce7e2",
        FEDPER: "agnews-dirichlet-20-fasttext-fedper-f9d38573",
    },
    "Amazon": {AUTHORS: "amazon-natural-mlp-gpfl-567a4430", FEDPER: "amazon-natural-mlp-fedper-711a61bf"},
    "FMNIST, 2 classes per client": {
        EMBEDDINGS: "fmnist-pathological-20-cnn4-gpfl-cee2aa79",
        AUTHORS: "fmnist-pathological-20-cnn4-gpfl-9ce43e74",
        FEDPER: "fmnist-pathological-20-cnn4-fedper-7a5d3b8a",
    },
    "FMNIST, Dirichlet 0.1": {
        EMBEDDINGS: "fmnist-dirichlet-20-cnn4-gpfl-1164c37e",
        AUTHORS: "fmnist-dirichlet-20-cnn4-gpfl-0f719792",
        FEDPER: "fmnist-dirichlet-20-cnn4-fedper-8e02f15c",
    },
    "HAR, 30 people": {
        EMBEDDINGS: "har-natural-harcnn-gpfl-02e2b349",
        FEATURES: "har-natural-harcnn-gpfl-5f775e62",
        AUTHORS: "har-natural-harcnn-gpfl-cea6023d",
        FEDPER: "har-natural-harcnn-fedper-7ca8eea3",
    },
}


@dataclass(frozen=True)
class Fall:
    """How one run ends, in percent."""

    best: float
    last: float  # mean of the last rounds
    noise: float  # expected best of rounds of constant accuracy, above the mean of their last
    of_means: float  # fall from the best rounds in a row to the last

    @classmethod
    def of(cls, accuracies: Floats) -> Fall:
        means = np.convolve(accuracies, np.ones(LAST) / LAST, "valid")
        return cls(accuracies.max(), means[-1], expected_excess(accuracies[-TAIL:]), means.max() - means[-1])


def expected_excess(accuracies: Floats) -> float:
    """Return by how much the best of some rounds exceeds the mean of the last, without any trend, in 2000 simulations."""
    rounds = np.arange(len(accuracies))
    noise = accuracies - np.polyval(np.polyfit(rounds, accuracies, 1), rounds)
    correlation = max(0.0, np.corrcoef(noise[:-1], noise[1:])[0, 1])
    steps = np.random.default_rng(0).standard_normal((2000, len(rounds)))
    for index in rounds[1:]:
        steps[:, index] = correlation * steps[:, index - 1] + np.sqrt(1 - correlation**2) * steps[:, index]
    return float(noise.std(ddof=2) * (steps.max(1) - steps[:, -LAST:].mean(1)).mean())


def falls_of(trials: StoredTrials) -> dict[int, Fall]:
    """Return how the finished runs end, by seed."""
    runs = {int(seed): trials.run(int(seed)) for seed in trials.archived["runs"]}
    return {
        seed: Fall.of(np.array([100 * record["accuracy"] for record in run.metrics() if record["round"]]))
        for seed, run in runs.items()
        if run is not None
    }


def with_spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):+.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


def rows() -> list[str]:
    """Return the lines of the table."""
    stored = {trials.path.name: trials for trials in read_stored_trials(RESULTS)}
    lines = [
        "| task | method | seeds | best round | last ten | fall | by noise | fall of ten-round means | last ten − FedPer |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for task, names in TASKS.items():
        fedper = falls_of(stored[names[FEDPER]])
        for method, name in names.items():
            falls = falls_of(stored[name])
            best, last, noise, means = np.mean(
                [(each.best, each.last, each.noise, each.of_means) for each in falls.values()], 0
            )
            gap = [falls[seed].last - fedper[seed].last for seed in falls if seed in fedper]
            ahead = "" if method == FEDPER else with_spread(gap)
            numbers = " | ".join(f"{value:.2f}" for value in (best, last, best - last, noise, means))
            lines.append(f"| {task} | {method} | {len(falls)} | {numbers} | {ahead} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
