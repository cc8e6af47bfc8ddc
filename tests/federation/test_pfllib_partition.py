"""Divisions as the authors' code draws them: by the counts that it published, and by sklearn's own cut."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import toy_table
from sklearn.model_selection import train_test_split

import gpfl
from gpfl.federation import partition_table, pfllib_partition
from gpfl.federation.partition import Dirichlet, Natural, Pathological, assign_classes

MNIST = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)
"""Images of each digit, published training and test parts together."""
PUBLISHED = {
    0: {0: 140, 1: 890, 4: 1, 5: 319, 7: 29, 8: 1067, 9: 184},
    1: {0: 5, 2: 27, 5: 19, 6: 335, 8: 6, 9: 107},
    8: {0: 1, 1: 3599},
    16: {0: 3628},
    17: {1: 26, 2: 1463, 3: 1379, 4: 335, 5: 60, 7: 17, 8: 2373},
    19: {0: 310, 1: 1, 2: 1, 3: 1, 4: 5789, 9: 1},
}
"""Clients of the authors' published division of MNIST: 20 clients, β = 0.1, seed 1. Labels: images."""
CIFAR10 = (6000,) * 10
SHOWN = {
    0: {1: 9, 3: 668, 4: 476, 5: 287, 6: 5, 7: 167, 9: 9},
    1: {0: 7, 1: 1, 2: 62, 4: 43, 7: 177, 8: 1524},
    2: {2: 16, 3: 158, 4: 1034, 5: 3},
    3: {1: 402, 2: 12, 3: 7, 6: 1, 8: 1, 9: 1657},
    4: {0: 24, 2: 5104},
    5: {0: 2832, 3: 1432},
}
"""Clients of Cifar10 in the division that their code made for a user of it in 2024 (FedALA's issue 18)."""


@pytest.mark.parametrize(("images", "known"), [(MNIST, PUBLISHED), (CIFAR10, SHOWN)], ids=["MNIST", "Cifar10"])
def test_shares_are_those_of_a_division_that_their_code_made(images: tuple[int, ...], known: dict[int, dict[int, int]]) -> None:
    labels = np.repeat(np.arange(10), images)
    parts = pfllib_partition.dirichlet(labels, 10, 20, 0.1, 40, 10, np.random.RandomState(1))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    counts = [np.bincount(labels[rows], minlength=10) for rows in parts]
    for client, held in known.items():
        assert {label: int(n) for label, n in enumerate(counts[client]) if n} == held


def test_too_few_rows_are_drawn_anew_and_then_refused() -> None:
    labels = np.arange(400) % 4
    parts = pfllib_partition.dirichlet(labels, 4, 8, 0.3, 10, 5000, np.random.RandomState(1))
    assert min(len(rows) for rows in parts) >= 10
    with pytest.raises(gpfl.GpflError, match=r"none of 3 draws with beta 0\.01"):
        pfllib_partition.dirichlet(labels, 4, 8, 0.01, 45, 3, np.random.RandomState(1))


@pytest.mark.parametrize("rows", [40, 41, 42, 43])
def test_a_cut_is_sklearns(rows: int) -> None:
    content = np.arange(rows) * 7
    np.random.seed(5)  # noqa: NPY002  the generator that sklearn takes where none is given
    train, test = train_test_split(content, train_size=0.75, shuffle=True)
    ours = pfllib_partition.split(content, 0.25, np.random.RandomState(5))
    assert np.array_equal(ours[0], train)
    assert np.array_equal(ours[1], test)


def test_classes_go_to_their_takers_in_drawn_numbers_and_in_order() -> None:
    labels = np.arange(4000) % 10
    takers = assign_classes(20, 10, 2)
    table = gpfl.Table(np.zeros((4000, 1)), labels)
    parts = Pathological(clients=20).assign(table, np.random.RandomState(1)).values()
    draw = np.random.RandomState(1)
    expected: list[list[int]] = [[] for _ in range(20)]
    for label in range(10):
        members = [row for row in range(4000) if labels[row] == label]
        sizes = draw.randint(10, 100, 3).tolist()  # 400 rows for four clients: at least a tenth of 100
        for client, size in zip(takers[label], [*sizes, 400 - sum(sizes)], strict=True):
            expected[client] += members[:size]
            members = members[size:]
    assert [rows.tolist() for rows in parts] == expected
    even = Pathological(clients=20, balanced=True).assign(table, np.random.RandomState(1))
    assert {len(rows) for rows in even.values()} == {200}


def test_federations_are_divided_and_cut_from_one_stream() -> None:
    table = toy_table(900)
    partition = Dirichlet(clients=4, beta=1.0, rng="pfllib")
    federation = partition_table(table, partition)
    draw = np.random.RandomState(1)
    parts = pfllib_partition.dirichlet(table.y.numpy(), table.classes, 4, 1.0, 40, 99, draw)
    for shard, rows in zip(federation.shards, parts, strict=True):
        train, test = pfllib_partition.split(rows, 0.25, draw)
        assert np.array_equal(shard.train, train)
        assert np.array_equal(shard.test, test)
    assert federation.manifest()["partition"]["rng"] == "pfllib"
    older = partition_table(table, Dirichlet(clients=4, beta=1.0)).manifest()["partition"]
    assert "rng" not in older, "divisions of before stay the same by content"


def test_of_many_clients_the_first_take_part_and_validation_rows_are_kept_back() -> None:
    table = toy_table(900)
    all_six = partition_table(table, Dirichlet(clients=6, beta=1.0, rng="pfllib"))
    two = partition_table(table, Dirichlet(clients=2, total_clients=6, beta=1.0, rng="pfllib"))
    assert [shard.name for shard in two.shards] == ["0", "1"]
    for few, many in zip(two.shards, all_six.shards, strict=False):
        assert np.array_equal(few.train, many.train)
    kept = partition_table(table, Dirichlet(clients=6, beta=1.0, rng="pfllib", validation_fraction=0.2))
    for shard, whole in zip(kept.shards, all_six.shards, strict=True):
        assert sorted([*shard.train, *shard.validation]) == sorted(whole.train)
        assert np.array_equal(shard.test, whole.test)


def test_groups_are_cut_as_they_are_or_shuffled_before() -> None:
    x, groups = np.arange(60, dtype=np.float32).reshape(60, 1), np.arange(60) % 2
    for name in ("har", "amazon"):
        table = gpfl.Table(x, np.arange(60) % 3, name=name, client_ids=groups, client_names=("a", "b"))
        federation = partition_table(table, Natural(rng="pfllib"))
        draw = np.random.RandomState(1)
        parts = [np.flatnonzero(groups == group) for group in range(2)]
        if name == "amazon":
            orders = [np.arange(len(rows)) for rows in parts]
            for order in orders:
                draw.shuffle(order)
            parts = [rows[order] for rows, order in zip(parts, orders, strict=True)]
        for shard, rows in zip(federation.shards, parts, strict=True):
            assert np.array_equal(shard.train, pfllib_partition.split(rows, 0.25, draw)[0])


@pytest.mark.parametrize(
    ("partition", "complaint"),
    [
        (Dirichlet(clients=4, cap=False, rng="pfllib"), "the authors' code has the cap"),
        (Dirichlet(clients=4, min_samples=400, rng="pfllib"), "but the table has 900 samples"),
        (Pathological(clients=300, classes_per_client=3, rng="pfllib"), "unequal shares need more than"),
    ],
)
def test_what_the_authors_code_cannot_do_is_refused(partition: Dirichlet | Pathological, complaint: str) -> None:
    with pytest.raises(gpfl.GpflError, match=complaint):
        partition_table(toy_table(900), partition)
