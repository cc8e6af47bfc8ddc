"""Pathological and Dirichlet partitions."""

from __future__ import annotations

import numpy as np
import pytest

from gpfl.errors import GpflError
from gpfl.federation.partition import Dirichlet, Partition, Pathological, assign_classes

LABELS = np.arange(3000) % 10


def assign(partition: Partition, labels: np.ndarray = LABELS, classes: int = 10, seed: int = 1) -> list[np.ndarray]:
    return partition.assign_labels(labels, classes, np.random.default_rng(seed))


def classes_of(parts: list[np.ndarray], labels: np.ndarray = LABELS) -> list[list[int]]:
    return [np.unique(labels[part]).tolist() for part in parts]


def sizes_of(parts: list[np.ndarray]) -> list[int]:
    return [len(part) for part in parts]


def authors_rule(clients: int, classes: int, per_client: int) -> list[list[int]]:
    """Return the first int(N/U·k) clients that lack classes, class after class."""
    room = [per_client] * clients
    holders = []
    for _ in range(classes):
        chosen = [client for client in range(clients) if room[client]][: int(clients / classes * per_client)]
        for client in chosen:
            room[client] -= 1
        holders.append(chosen)
    return holders


@pytest.mark.parametrize(
    "partition",
    [
        Pathological(clients=20, classes_per_client=2),
        Pathological(clients=7, classes_per_client=3, balanced=True),
        Dirichlet(clients=8),
        Dirichlet(clients=8, cap=False, min_samples=1),
    ],
    ids=["pathological", "balanced", "dirichlet", "uncapped"],
)
def test_every_sample_has_one_client_which_depends_on_the_seed(partition: Partition) -> None:
    parts = assign(partition)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all(np.array_equal(a, b) for a, b in zip(parts, assign(partition), strict=True))


@pytest.mark.parametrize("partition", [Pathological(clients=20), Dirichlet(clients=8)], ids=["pathological", "dirichlet"])
def test_another_seed_gives_another_partition(partition: Partition) -> None:
    assert sizes_of(assign(partition)) != sizes_of(assign(partition, seed=2))


def test_neighbouring_clients_have_the_same_classes() -> None:
    held = classes_of(assign(Pathological(clients=20, classes_per_client=2)))
    assert held == [[2 * (client // 4), 2 * (client // 4) + 1] for client in range(20)]


def test_classes_and_clients_are_balanced() -> None:
    for clients in range(1, 21):
        for classes in range(1, 16):
            for per_client in range(-(-classes // clients), classes + 1):
                holders = assign_classes(clients, classes, per_client)
                held = np.bincount(np.concatenate(holders), minlength=clients)
                counts = [len(set(chosen)) for chosen in holders]
                assert (held == per_client).all(), (clients, classes, per_client)
                assert max(counts) - min(counts) <= 1, (clients, classes, per_client)


@pytest.mark.parametrize(("clients", "classes", "per_client"), [(20, 10, 2), (20, 100, 10), (20, 200, 20), (10, 10, 2)])
def test_classes_follow_the_authors_rule_in_the_papers_settings(clients: int, classes: int, per_client: int) -> None:
    assert assign_classes(clients, classes, per_client) == authors_rule(clients, classes, per_client)


def test_classes_follow_the_authors_rule_where_it_serves_every_client() -> None:
    agreed = differing = 0
    for clients in range(1, 21):
        for classes in range(1, 16):
            for per_client in range(-(-classes // clients), classes + 1):
                theirs = authors_rule(clients, classes, per_client)
                if sum(map(len, theirs)) == clients * per_client:
                    agreed += 1
                    assert assign_classes(clients, classes, per_client) == theirs, (clients, classes, per_client)
                else:
                    differing += 1
    assert agreed > 100
    assert differing > 100


def test_last_client_of_a_class_gets_the_rest() -> None:
    parts = assign(Pathological(clients=20, classes_per_client=2))
    for label in range(10):
        counts = np.array([(LABELS[part] == label).sum() for part in parts])
        *drawn, last = counts[counts > 0]
        mean = 300 / 4
        assert all(max(mean / 10, 40 / 10) - 1 < count < mean for count in drawn)
        assert last == 300 - sum(drawn)
        assert last > max(drawn)


def test_samples_of_a_class_are_assigned_in_the_order_of_the_table() -> None:
    parts = assign(Pathological(clients=20, classes_per_client=2))
    zeros = np.concatenate([part[LABELS[part] == 0] for part in parts])
    assert np.array_equal(zeros, np.flatnonzero(LABELS == 0))


def test_balanced_clients_of_a_class_differ_by_at_most_one_sample() -> None:
    parts = assign(Pathological(clients=20, classes_per_client=2, balanced=True), LABELS[:997])
    for label in range(10):
        counts = [int((LABELS[part] == label).sum()) for part in parts]
        shares = [count for count in counts if count]
        assert len(shares) == 4
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_small_classes_are_never_empty(seed: int) -> None:
    labels = np.repeat(np.arange(100), 32)
    held = classes_of(assign(Pathological(clients=20, classes_per_client=20), labels, 100, seed), labels)
    assert [len(classes) for classes in held] == [20] * 20


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Pathological(clients=2, classes_per_client=11), "partition.classes_per_client is 11; the data has 10 classes"),
        (Pathological(clients=4, classes_per_client=2), "4 clients × 2 classes = 8, but the data has 10 classes"),
        (Pathological(clients=400, classes_per_client=2), "class 0 has 300 samples for 80 clients, 3.8 each"),
        (Pathological(clients=2000, classes_per_client=2, balanced=True), "class 0 has 300 samples for 400 clients"),
        (Dirichlet(clients=40, min_samples=80), "40 clients × 80 samples = 3200, but the table has 3000 samples"),
        (
            Dirichlet(clients=20, beta=1e-3, min_samples=149),
            "none of 5000 draws with beta 0.001 gave each of 20 clients 149 samples",
        ),
    ],
)
def test_impossible_partition_is_an_error_with_its_numbers(partition: Partition, message: str) -> None:
    with pytest.raises(GpflError) as error:
        assign(partition)
    assert message in str(error.value)


def test_smallest_client_of_a_dirichlet_partition_has_enough_samples() -> None:
    assert min(sizes_of(assign(Dirichlet(clients=6, beta=0.3, cap=False, min_samples=250)))) >= 250
    assert min(sizes_of(assign(Dirichlet(clients=6, beta=0.3, cap=False, min_samples=1)))) < 250
    assert min(sizes_of(assign(Dirichlet(clients=20)))) >= 40
    assert min(sizes_of(assign(Dirichlet(clients=10), LABELS[:400]))) >= 20


def test_full_client_gets_no_further_class() -> None:
    def overfull(parts: list[np.ndarray]) -> int:
        """Count the (client, class) pairs assigned to a client that had n/N samples already."""
        count = 0
        for part in parts:
            before = np.array([(LABELS[part] < label).sum() for label in range(10)])
            own = np.array([(LABELS[part] == label).sum() for label in range(10)])
            count += int(((before >= len(LABELS) / len(parts)) & (own > 1)).sum())
        return count

    assert overfull(assign(Dirichlet(clients=20, beta=1.0))) == 0
    assert overfull(assign(Dirichlet(clients=20, beta=1.0, cap=False))) > 0


def test_cap_makes_sizes_more_even() -> None:
    labels = np.arange(6000) % 100
    capped = sizes_of(assign(Dirichlet(clients=20, beta=0.1), labels, 100))
    free = sizes_of(assign(Dirichlet(clients=20, beta=0.1, cap=False), labels, 100))
    assert np.std(capped) < np.std(free) / 2


def test_smaller_beta_makes_clients_differ_more() -> None:
    def classes_per_client(beta: float) -> float:
        return float(np.mean([len(c) for c in classes_of(assign(Dirichlet(clients=10, beta=beta, min_samples=1)))]))

    assert classes_per_client(0.05) < classes_per_client(0.5) < classes_per_client(50.0) == 10.0


def test_dirichlet_partition_can_have_an_empty_class() -> None:
    (rows,) = assign(Dirichlet(clients=1), np.array([0, 0, 1, 1]), classes=3)
    assert sorted(rows) == [0, 1, 2, 3]
