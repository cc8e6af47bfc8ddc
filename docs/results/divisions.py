"""How uneven divisions of Cifar100 are: python docs/results/divisions.py [SEEDS] (Cifar100 must be on this machine).

A client's unevenness is told by the entropy of its training labels: e to its power is a number of classes. Seeds are those of
`split.seed`; the authors' code has 1, and its own random numbers are those of `--draws reference`.
"""

from __future__ import annotations

import sys

import numpy as np

from gpfl.data import DATA
from gpfl.federation import divide
from gpfl.partition import Dirichlet


def main() -> None:
    table = DATA["cifar100"].load()
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    for draws in ("reference", "own"):
        found = {}
        for seed in seeds:
            federation = divide(table, Dirichlet(clients=20, beta=0.1, draws=draws, seed=seed))
            found[seed] = np.mean([entropy(np.asarray(table.y)[shard.train]) for shard in federation.shards])
        values = np.array(list(found.values()))
        below = (values < found[1]).mean()
        print(
            f"{draws}: mean {values.mean():.3f}, std {values.std():.3f}, {values.min():.3f} to {values.max():.3f} over "
            f"{len(values)} seeds; seed 1: {found[1]:.3f} ({below:.0%} are below), {np.exp(found[1]):.1f} classes"
        )


def entropy(labels: np.ndarray) -> float:
    shares = np.bincount(labels) / len(labels)
    return float(-sum(share * np.log(share) for share in shares if share))


if __name__ == "__main__":
    main()
