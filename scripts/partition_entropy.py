"""Measure how heterogeneous partitions of Cifar100 are: python scripts/partition_entropy.py [N_SEEDS].

Prints the mean entropy of a client's training labels for many partition seeds, drawn by gpfl and as the authors' code does
(`--partition-rng pfllib`), then the accuracy of the recorded GPFL runs by partition. Cifar100 must be available.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np

from gpfl.data import DATASETS, Table
from gpfl.experiments import stored_runs
from gpfl.federation import partition_table
from gpfl.federation.partition import Dirichlet, Partition, Pathological

ARCHIVE = Path(__file__).parents[1] / "docs" / "results" / stored_runs.ARCHIVE
SETTINGS = {
    "practical": Dirichlet(clients=20, beta=0.1),
    "pathological": Pathological(clients=20, classes_per_client=10),
}


def main() -> None:
    """Print entropies of partitions and the accuracies reached on some of them."""
    table = DATASETS["cifar100"].load()
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    for (name, partition), rng in itertools.product(SETTINGS.items(), ("pfllib", "gpfl")):
        entropies = np.array([label_entropy(table, dataclasses.replace(partition, rng=rng, seed=seed)) for seed in seeds])
        print(
            f"{name}, {rng}: mean {entropies.mean():.3f}, std {entropies.std():.3f}, {entropies.min():.3f} to "
            f"{entropies.max():.3f} over {len(entropies)} seeds; seed 1: {entropies[1]:.3f}, above "
            f"{(entropies < entropies[1]).mean():.0%}"
        )
    for (rng, seed), accuracies in sorted(recorded_accuracies().items(), reverse=True):
        entropy = label_entropy(table, dataclasses.replace(SETTINGS["practical"], rng=rng, seed=seed))
        print(f"GPFL on {rng} {seed} ({entropy:.3f}): {', '.join(f'{100 * accuracy:.2f}' for accuracy in accuracies)}")


def recorded_accuracies() -> dict[tuple[str, int], list[float]]:
    """Return the best accuracies of GPFL's recorded runs in the practical setting, by RNG and seed of the partition."""
    found: dict[tuple[str, int], list[float]] = {}
    for entry in stored_runs.read_archive(ARCHIVE):
        config = entry["config"]
        if (
            entry["name"].startswith("cifar100-dirichlet-20-cnn4-gpfl-")
            and config["train"]["rounds"] == 300
            and config["run"]["protocol"] == "corrected"
        ):
            key = config["partition"].get("rng", "gpfl"), config["partition"]["seed"]
            found[key] = [run["summary"]["best_accuracy"] for run in entry["runs"].values()]
    return found


def label_entropy(table: Table, partition: Partition) -> float:
    """Return the entropy of a client's training labels, averaged over clients."""
    labels = np.asarray(table.y)
    federation = partition_table(table, partition)
    shares = [np.bincount(labels[shard.train]) / len(shard.train) for shard in federation.shards]
    return float(np.mean([-(share[share > 0] * np.log(share[share > 0])).sum() for share in shares]))


if __name__ == "__main__":
    main()
