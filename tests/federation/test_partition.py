from __future__ import annotations

import numpy as np
import pytest

from gpfl.errors import GpflError
from gpfl.federation.partition import Dirichlet, Partition, Pathological, assign_classes

LABELS = np.arange(3000) % 10


def assigned(partition: Partition, labels: np.ndarray = LABELS, classes: int = 10, seed: int = 1) -> list[np.ndarray]:
    return partition.assign_labels(labels, classes, np.random.default_rng(seed))


def classes_of(rows: list[np.ndarray], labels: np.ndarray = LABELS) -> list[list[int]]:
    return [np.unique(labels[part]).tolist() for part in rows]


def sizes_of(rows: list[np.ndarray]) -> list[int]:
    return [len(part) for part in rows]


def authors_rule(clients: int, classes: int, per_client: int) -> list[list[int]]:
    """Gives the first int(N/U·k) clients with room, class after class."""
    room = [per_client] * clients
    takers = []
    for _ in range(classes):
        chosen = [client for client in range(clients) if room[client]][: int(clients / classes * per_client)]
        for client in chosen:
            room[client] -= 1
        takers.append(chosen)
    return takers


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
def test_every_row_goes_to_exactly_one_client_and_the_same_one_under_the_same_seed(partition: Partition) -> None:
    rows = assigned(partition)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(LABELS)))
    assert all(np.array_equal(a, b) for a, b in zip(rows, assigned(partition), strict=True))


@pytest.mark.parametrize("partition", [Pathological(clients=20), Dirichlet(clients=8)], ids=["pathological", "dirichlet"])
def test_another_seed_gives_another_division(partition: Partition) -> None:
    assert sizes_of(assigned(partition)) != sizes_of(assigned(partition, seed=2))


def test_neighbouring_clients_hold_the_same_classes_as_in_the_paper() -> None:
    held = classes_of(assigned(Pathological(clients=20, classes_per_client=2)))
    assert held == [[2 * (client // 4), 2 * (client // 4) + 1] for client in range(20)]


def test_every_client_holds_exactly_its_number_of_classes_and_every_class_about_as_many_clients() -> None:
    for clients in range(1, 21):
        for classes in range(1, 16):
            for per_client in range(-(-classes // clients), classes + 1):
                takers = assign_classes(clients, classes, per_client)
                held = np.bincount(np.concatenate(takers), minlength=clients)
                counts = [len(set(chosen)) for chosen in takers]
                assert (held == per_client).all(), (clients, classes, per_client)
                assert max(counts) - min(counts) <= 1, (clients, classes, per_client)


@pytest.mark.parametrize(("clients", "classes", "per_client"), [(20, 10, 2), (20, 100, 10), (20, 200, 20), (10, 10, 2)])
def test_classes_are_dealt_by_the_authors_rule_on_the_papers_settings(clients: int, classes: int, per_client: int) -> None:
    assert assign_classes(clients, classes, per_client) == authors_rule(clients, classes, per_client)


def test_classes_are_dealt_by_the_authors_rule_wherever_it_fills_every_place() -> None:
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


def test_a_class_is_divided_in_drawn_shares_and_the_last_client_takes_the_rest() -> None:
    rows = assigned(Pathological(clients=20, classes_per_client=2))
    for label in range(10):
        counts = np.array([(LABELS[part] == label).sum() for part in rows])
        *drawn, last = counts[counts > 0]
        mean = 300 / 4
        assert all(max(mean / 10, 40 / 10) - 1 < count < mean for count in drawn)
        assert last == 300 - sum(drawn)
        assert last > max(drawn)


def test_rows_of_a_class_are_dealt_in_the_order_of_the_table() -> None:
    rows = assigned(Pathological(clients=20, classes_per_client=2))
    zeros = np.concatenate([part[LABELS[part] == 0] for part in rows])
    assert np.array_equal(zeros, np.flatnonzero(LABELS == 0))


def test_balanced_clients_of_a_class_differ_by_one_row_at_most() -> None:
    rows = assigned(Pathological(clients=20, classes_per_client=2, balanced=True), LABELS[:997])
    for label in range(10):
        counts = [int((LABELS[part] == label).sum()) for part in rows]
        shares = [count for count in counts if count]
        assert len(shares) == 4
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_drawn_shares_are_never_empty_where_classes_are_many_and_small(seed: int) -> None:
    labels = np.repeat(np.arange(100), 32)
    held = classes_of(assigned(Pathological(clients=20, classes_per_client=20), labels, 100, seed), labels)
    assert [len(classes) for classes in held] == [20] * 20


@pytest.mark.parametrize(
    ("partition", "words"),
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
def test_an_impossible_division_is_refused_with_its_numbers(partition: Partition, words: str) -> None:
    with pytest.raises(GpflError) as problem:
        assigned(partition)
    assert words in str(problem.value)


def test_the_smallest_client_of_a_dirichlet_split_has_enough_rows() -> None:
    assert min(sizes_of(assigned(Dirichlet(clients=6, beta=0.3, cap=False, min_samples=250)))) >= 250
    assert min(sizes_of(assigned(Dirichlet(clients=6, beta=0.3, cap=False, min_samples=1)))) < 250
    assert min(sizes_of(assigned(Dirichlet(clients=20)))) >= 40
    assert min(sizes_of(assigned(Dirichlet(clients=10), LABELS[:400]))) >= 20


def test_a_client_that_holds_its_share_gets_no_further_class() -> None:
    def overfull(rows: list[np.ndarray]) -> int:
        """Counts the (client, class) pairs given to a client that had n/N rows already."""
        count = 0
        for part in rows:
            before = np.array([(LABELS[part] < label).sum() for label in range(10)])
            own = np.array([(LABELS[part] == label).sum() for label in range(10)])
            count += int(((before >= len(LABELS) / len(rows)) & (own > 1)).sum())
        return count

    assert overfull(assigned(Dirichlet(clients=20, beta=1.0))) == 0
    assert overfull(assigned(Dirichlet(clients=20, beta=1.0, cap=False))) > 0


def test_the_cap_makes_sizes_more_even() -> None:
    labels = np.arange(6000) % 100
    capped = sizes_of(assigned(Dirichlet(clients=20, beta=0.1), labels, 100))
    free = sizes_of(assigned(Dirichlet(clients=20, beta=0.1, cap=False), labels, 100))
    assert np.std(capped) < np.std(free) / 2


def test_a_smaller_beta_makes_clients_differ_more() -> None:
    def held(beta: float) -> float:
        return float(np.mean([len(c) for c in classes_of(assigned(Dirichlet(clients=10, beta=beta, min_samples=1)))]))

    assert held(0.05) < held(0.5) < held(50.0) == 10.0


def test_a_class_without_rows_is_nobodys_in_a_dirichlet_split() -> None:
    (rows,) = assigned(Dirichlet(clients=1), np.array([0, 0, 1, 1]), classes=3)
    assert sorted(rows) == [0, 1, 2, 3]
