"""The partitions of the authors' code (PFLlib), sample for sample, with numpy's legacy generator.

With seed 1 and the published files these are the partitions that their scripts make. One stream of random numbers first
assigns samples to clients, then splits each client's samples into test and training.
"""

import numpy as np

from gpfl.core.local_round import Indices
from gpfl.errors import GpflError

MIN_SAMPLES = 40  # smallest client of a Dirichlet partition: a quarter of it, for testing, is one batch of 10

SHUFFLED_DATA = ("amazon",)  # data whose clients are shuffled before they are split


def dirichlet(
    labels: Indices, classes: int, clients: int, beta: float, min_samples: int, tries: int, rng: np.random.RandomState
) -> list[Indices]:
    """Return clients' samples by Dirichlet shares of each class, drawn again until each has enough.

    A client that has its n/N samples gets none of further classes.
    """
    capacity = len(labels) / clients
    for _ in range(tries):
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, dtype=np.int64)
        for label in range(classes):
            members = np.flatnonzero(labels == label)
            rng.shuffle(members)
            shares = rng.dirichlet(np.full(clients, beta)) * (sizes < capacity)
            if not shares.sum():
                raise GpflError(
                    f"the authors' code fails here: all of class {label} would go to clients that are full; "
                    "use --partition-rng gpfl"
                )
            bounds = (np.cumsum(shares / shares.sum()) * len(members)).astype(int)[:-1]
            for client, part in enumerate(np.split(members, bounds)):
                parts[client].append(part)
                sizes[client] += len(part)
        if sizes.min() >= min_samples:
            return [np.concatenate(part) for part in parts]
    raise GpflError(
        f"none of {tries} draws with beta {beta:g} gave each of {clients} clients {min_samples} samples: "
        "raise --beta, or lower --clients"
    )


def split(indices: Indices, test_fraction: float, rng: np.random.RandomState) -> tuple[Indices, Indices]:
    """Return a client's training and test samples; of a permutation the test samples come first."""
    n_train = int((1 - test_fraction) * len(indices) + 1e-9)
    order = rng.permutation(len(indices))
    return indices[order[len(indices) - n_train :]], indices[order[: len(indices) - n_train]]
