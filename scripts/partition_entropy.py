"""How uneven divisions of Cifar100 are: python docs/results/divisions.py [SEEDS] (Cifar100 must be on this machine).

A client's unevenness is told by the entropy of its training labels: e to its power is a number of classes. Seeds are those of
`split.seed`; the authors' code has 1, and its own random numbers are those of `--draws reference`. First come both settings'
divisions, then those of the practical one on which GPFL was run (300 rounds, the recorded runs), with what it reached there.
"""

from __future__ import annotations

import itertools
import json
import sys
import tomllib
from pathlib import Path

import numpy as np

from gpfl.data import DATASETS, Table
from gpfl.federation.federation import partition_table
from gpfl.federation.partition import Dirichlet, Partition, Pathological

RUNS = Path(__file__).parent / "runs"


def main() -> None:
    table = DATASETS["cifar100"].load()
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    for setting, draws in itertools.product((practical, pathological), ("reference", "own")):
        found = {seed: unevenness(table, setting(draws, seed)) for seed in seeds}
        values = np.array(list(found.values()))
        below = (values < found[1]).mean()
        print(
            f"{setting.__name__}, {draws}: mean {values.mean():.3f}, std {values.std():.3f}, {values.min():.3f} to "
            f"{values.max():.3f} over {len(values)} seeds; seed 1: {found[1]:.3f} ({below:.0%} are below), "
            f"{np.exp(found[1]):.1f} classes"
        )
    for (draws, seed), accuracies in sorted(recorded().items(), reverse=True):
        reached = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
        print(f"GPFL on {draws} {seed} ({unevenness(table, practical(draws, seed)):.3f}): {reached}")


def recorded() -> dict[tuple[str, int], list[float]]:
    """Best accuracies of GPFL's recorded runs by draws and seed of the division, in the order of the runs' seeds."""
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(RUNS.glob("cifar100-dirichlet-20-cnn4-gpfl-*/config.toml")):
        config = tomllib.loads(path.read_text(encoding="utf-8"))
        if config["train"]["rounds"] == 300 and config["run"]["protocol"] == "corrected":
            summaries = [json.loads(kept.read_text()) for kept in sorted(path.parent.glob("seed-*/summary.json"))]
            split = config["split"]  # runs from before there were other draws do not name them
            found[split.get("draws", "own"), split["seed"]] = [summary["best_accuracy"] for summary in summaries]
    return found


def practical(draws: str, seed: int) -> Dirichlet:
    """The practical setting's split."""
    return Dirichlet(clients=20, beta=0.1, draws=draws, seed=seed)


def pathological(draws: str, seed: int) -> Pathological:
    """The pathological setting's split."""
    return Pathological(clients=20, classes_per_client=10, draws=draws, seed=seed)


def unevenness(table: Table, split: Partition) -> float:
    """The entropy of a client's training labels, mean over clients."""
    federation = partition_table(table, split)
    return float(np.mean([entropy(np.asarray(table.y)[shard.train]) for shard in federation.shards]))


def entropy(labels: np.ndarray) -> float:
    shares = np.bincount(labels) / len(labels)
    return float(-sum(share * np.log(share) for share in shares if share))


if __name__ == "__main__":
    main()
