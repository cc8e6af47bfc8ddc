"""Natural partitions, choices of clients, and groups of samples that stay together."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_table

import gpfl
from gpfl.core import options
from gpfl.errors import GpflError
from gpfl.federation import partition_table
from gpfl.federation.partition import Dirichlet, Natural, Partition, Pathological, choose_groups
from gpfl.report import figures

NAMES = ("books", "dvd", "electronics", "kitchen", "nobody", "music")
CLIENT_IDS = np.array([5, 0, 1, 2, 3] * 24)
SAMPLES = {name: np.flatnonzero(number == CLIENT_IDS).tolist() for number, name in enumerate(NAMES) if name != "nobody"}


def reviews() -> gpfl.Table:
    table = toy_table(120)
    return gpfl.Table(table.x, table.y, name="reviews", client_ids=CLIENT_IDS, client_names=NAMES)


def samples_of(partition: Partition, table: gpfl.Table) -> dict[str, list[int]]:
    return {name: rows.tolist() for name, rows in partition.select_clients(table).items()}


def test_every_client_with_samples_takes_part() -> None:
    assert samples_of(Natural(), reviews()) == SAMPLES
    federation = gpfl.federate(reviews(), partition="natural")
    assert [shard.name for shard in federation.shards] == list(SAMPLES)
    for shard in federation.shards:
        assert sorted([*shard.train, *shard.validation, *shard.test]) == SAMPLES[shard.name]


def test_clients_without_names_are_named_by_their_index() -> None:
    table = toy_table(120)
    numbered = gpfl.Table(table.x, table.y, client_ids=CLIENT_IDS)
    assert list(samples_of(Natural(), numbered)) == ["0", "1", "2", "3", "5"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_choice_of_clients_grows_with_its_number(seed: int) -> None:
    table = reviews()
    chosen = [samples_of(Natural(clients=clients, seed=seed), table) for clients in (1, 2, 3, 4, 5)]
    assert [len(rows) for rows in chosen] == [1, 2, 3, 4, 5]
    for fewer, more in itertools.pairwise(chosen):
        assert fewer.items() <= more.items()
        assert list(fewer) == [name for name in more if name in fewer], "in the order of the table"
    assert chosen[-1] == SAMPLES
    assert chosen[1] == samples_of(Natural(clients=2, seed=seed), table)


def test_another_seed_chooses_other_clients() -> None:
    table = reviews()
    assert len({tuple(samples_of(Natural(clients=2, seed=seed), table)) for seed in range(20)}) > 4


def test_choice_is_recorded_in_the_manifest() -> None:
    manifest = partition_table(reviews(), Natural(clients=2, seed=4)).manifest()
    assert manifest["partition"] == {"name": "natural", **options.config_values(Natural(clients=2, seed=4))}


def test_more_clients_than_the_data_have_is_an_error() -> None:
    with pytest.raises(GpflError, match=r"partition.clients is 6; data 'reviews' has 5 clients"):
        Natural(clients=6).select_clients(reviews())


def test_total_clients_of_a_natural_partition_is_an_error() -> None:
    with pytest.raises(GpflError, match=r"partition.total_clients is 10"):
        Natural(total_clients=10).select_clients(reviews())


def test_table_without_clients_is_an_error_with_the_fix() -> None:
    with pytest.raises(GpflError, match="data 'toy' does not name the client of each sample: use --partition"):
        Natural().select_clients(toy_table())


@pytest.mark.parametrize("groups", [[0, 1], np.zeros((4, 1))], ids=["too few", "a column"])
def test_client_ids_must_be_one_per_row(groups: object) -> None:
    with pytest.raises(GpflError, match="give one value per row"):
        gpfl.Table(np.eye(4), [0, 1, 0, 1], client_ids=groups)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [[0, 1, 2, 1], [0, -1, 0, 1]], ids=["above", "below"])
def test_client_without_a_name_is_an_error(groups: list[int]) -> None:
    with pytest.raises(GpflError, match="names for clients 0 to 1"):
        gpfl.Table(np.eye(4), [0, 1, 0, 1], client_ids=groups, client_names=["a", "b"])


def test_digest_depends_on_client_ids() -> None:
    x, y = np.eye(4), [0, 1, 0, 1]
    tables = [gpfl.Table(x, y), gpfl.Table(x, y, client_ids=[0, 0, 1, 1]), gpfl.Table(x, y, client_ids=[0, 1, 0, 1])]
    assert len({table.digest for table in tables}) == 3


SPLITS = [
    Dirichlet(total_clients=10, clients=10, beta=5.0, min_samples=1),
    Pathological(total_clients=10, clients=10, classes_per_client=2, balanced=True),
]


@pytest.mark.parametrize("whole", SPLITS, ids=["dirichlet", "pathological"])
@pytest.mark.parametrize("seed", [1, 2])
def test_chosen_clients_are_those_of_the_full_partition(whole: Partition, seed: int) -> None:
    table = toy_table(300)

    def choose(clients: int, of: int) -> dict[str, list[int]]:
        values = {**options.option_values(whole), "clients": clients, "total_clients": of, "seed": seed}
        return samples_of(options.build(type(whole), values, "partition"), table)

    full = choose(10, 0)
    assert choose(10, 10) == full
    assert sorted(row for rows in full.values() for row in rows) == list(range(300))
    chosen = [choose(clients, 10) for clients in range(1, 11)]
    for clients, (fewer, more) in enumerate(itertools.pairwise(chosen), start=1):
        assert len(fewer) == clients
        assert fewer.items() <= more.items(), "names and rows stay"
        assert list(fewer) == sorted(fewer, key=int)


def test_choice_among_total_clients_depends_on_the_seed() -> None:
    table = toy_table(300)
    chosen = {
        tuple(samples_of(Pathological(clients=3, total_clients=10, balanced=True, seed=seed), table)) for seed in range(20)
    }
    assert len(chosen) > 10


def test_total_clients_is_recorded_in_the_manifest(tmp_path: Path) -> None:
    table = toy_table(300)
    federation = gpfl.federate(table, partition="dirichlet", clients=3, total_clients=10, beta=5.0, min_samples=10)
    assert len(federation) == 3
    assert federation.partition["total_clients"] == 10
    federation.save(tmp_path / "federation.toml")
    again = gpfl.Federation.load(tmp_path / "federation.toml", table)
    assert [shard.name for shard in again.shards] == [shard.name for shard in federation.shards]


# Groups.


def visits(sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)) -> tuple[gpfl.Table, np.ndarray]:
    """Return two clients, each with groups of these sizes, in random order."""
    group_ids = np.random.default_rng(0).permutation(np.repeat(np.arange(2 * len(sizes)), sizes * 2))
    table = toy_table(len(group_ids))
    client_ids = (group_ids >= len(sizes)).astype(int)
    return gpfl.Table(table.x, table.y, name="visits", client_ids=client_ids, group_ids=group_ids), group_ids


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_not_divided_between_splits(seed: int) -> None:
    table, group_ids = visits()
    federation = gpfl.federate(table, partition="natural", test_fraction=0.25, validation_fraction=0.2, seed=seed)
    for shard, group in zip(federation.shards, (0, 1), strict=True):
        parts = [set(group_ids[rows]) for rows in (shard.train, shard.validation, shard.test)]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts)) == 8, "each group is in one of them"
        everything = np.concatenate([shard.train, shard.validation, shard.test])
        assert sorted(everything) == np.flatnonzero(table.client_ids == group).tolist()
        assert abs(len(shard.test) - 9) <= 3, "groups come that near to a quarter of 36 samples"
        assert abs(len(shard.validation) - 0.2 * (36 - len(shard.test))) <= 3


def test_groups_are_chosen_by_the_seed() -> None:
    table, group_ids = visits()
    drawn = [gpfl.federate(table, partition="natural", seed=seed).shards[0] for seed in (1, 1, 2, 3, 4)]
    tests = [tuple(sorted(set(group_ids[shard.test]))) for shard in drawn]
    assert tests[0] == tests[1]
    assert len(set(tests)) > 2
    assert list(group_ids[drawn[0].train]) != sorted(group_ids[drawn[0].train]), "samples are shuffled, not group by group"


def test_chosen_groups_come_near_to_the_fraction_and_one_is_left() -> None:
    def chosen(sizes: list[int], share: float, seed: int) -> int:
        group_ids = np.repeat(np.arange(len(sizes)), sizes)
        return int(choose_groups(group_ids, np.arange(len(group_ids)) % 2, share, np.random.default_rng(seed)).sum())

    for seed in range(8):
        assert chosen([2, 2, 2, 2, 2], 0.35, seed) == 4
        assert chosen([2, 2, 2, 2, 2], 0.25, seed) == 2
        assert chosen([27, 3], 0.25, seed) == 3, "not 27, whichever is drawn first"
        assert chosen([9, 8], 0.1, seed) == 8, "one group at least, the smallest"
        assert chosen([2, 2], 0.9, seed) == 2, "not all of them"
        assert chosen([7], 0.25, seed) == 0


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_pure_groups_are_chosen_from_each_class(share: float) -> None:
    draw = np.random.default_rng(0)
    group_ids = np.repeat(np.arange(60), draw.integers(8, 14, 60))
    labels = group_ids % 6
    for seed in range(8):
        mask = choose_groups(group_ids, labels, share, np.random.default_rng(seed))
        assert not set(group_ids[mask]) & set(group_ids[~mask])
        assert abs(mask.mean() - share) < 0.01
        by_class = np.array([mask[labels == label].mean() for label in range(6)])
        assert np.abs(by_class - share).max() < 0.11, "no class is off by more than a group of ten"
    few = np.repeat(np.arange(4), 5)
    for seed in range(8):
        mask = choose_groups(few, np.minimum(few, 2), 0.25, np.random.default_rng(seed))
        assert set(few[mask]) <= {2, 3}, "the only group of a class is left"
        assert len(set(few[mask])) == 1
    alone = choose_groups(np.repeat(np.arange(3), [5, 4, 6]), np.repeat(np.arange(3), [5, 4, 6]), 0.25, draw)
    assert alone.sum() == 4, "where each class has one, the smallest is chosen all the same"


def test_digest_depends_on_group_ids() -> None:
    table, group_ids = visits()
    plain = gpfl.Table(table.x, table.y, name="visits", client_ids=table.client_ids)
    other = gpfl.Table(table.x, table.y, name="visits", client_ids=table.client_ids, group_ids=group_ids + (group_ids == 3))
    parted = gpfl.Table(table.x, table.y, name="visits", client_ids=table.client_ids, splits=group_ids % 2)
    same = gpfl.Table(table.x, table.y, name="visits", client_ids=table.client_ids, group_ids=group_ids % 2)
    assert len({table.digest, plain.digest, other.digest, parted.digest, same.digest}) == 5


def test_client_with_a_single_group_is_an_error() -> None:
    table = toy_table(30)
    whole = gpfl.Table(table.x, table.y, client_ids=np.arange(30) % 2, group_ids=np.where(np.arange(30) % 2, 0, np.arange(30)))
    with pytest.raises(
        GpflError, match=r"client 1 has no test samples \(15 training, 0 test\): all of its samples are one group; give"
    ):
        gpfl.federate(whole, partition="natural")
    small = gpfl.Table(table.x, table.y, client_ids=np.repeat([0, 1], [26, 4]), group_ids=np.minimum(np.arange(30), 26))
    with pytest.raises(GpflError, match=r"all of its samples are one group; --min-samples 5 leaves out 1 of 2 clients"):
        gpfl.federate(small, partition="natural")
    assert [shard.name for shard in gpfl.federate(small, partition="natural", min_samples=5).shards] == ["0"]


def test_client_without_validation_samples_is_an_error() -> None:
    table = toy_table(30)
    two = gpfl.Table(table.x, table.y, client_ids=np.arange(30) % 2, group_ids=np.arange(30) // 15)
    with pytest.raises(
        GpflError,
        match=r"client 0 has no validation samples \(8 training, 7 test\), and 1 .*: all of its training samples are one group",
    ):
        gpfl.federate(two, partition="natural", validation_fraction=0.2)
    assert len(gpfl.federate(two, partition="natural")) == 2


def test_given_splits_must_keep_groups_together() -> None:
    table = toy_table(40)
    group_ids, client_ids = np.arange(40) // 4, np.arange(40) // 20
    parts = np.where(group_ids % 5 == 0, 2, 0)
    whole = gpfl.Table(table.x, table.y, client_ids=client_ids, splits=parts, group_ids=group_ids)
    for shard in gpfl.federate(whole, partition="natural", validation_fraction=0.25).shards:
        assert len(shard.validation) == 4
        assert len(set(group_ids[shard.validation])) == 1, "validation keeps groups together"
    parts[7] = 2
    parted = gpfl.Table(table.x, table.y, client_ids=client_ids, splits=parts, group_ids=group_ids)
    with pytest.raises(
        GpflError, match=r"client 0 has samples of one group in train and in test, such as samples 6 and 7: assign them"
    ):
        gpfl.federate(parted, partition="natural")


def test_selected_samples_keep_their_ids() -> None:
    table, group_ids = visits()
    rows = np.array([7, 3, 50])
    few = table.select(rows)
    assert few.group_ids is not None
    assert few.client_ids is not None
    assert table.group_ids is not None
    assert table.client_ids is not None
    assert torch.equal(few.x, table.x[rows])
    assert few.y.tolist() == table.y[rows].tolist()
    assert (few.group_ids.tolist(), few.client_ids.tolist()) == (
        table.group_ids[rows].tolist(),
        table.client_ids[rows].tolist(),
    )
    assert few.digest != table.digest
    assert len(table) == len(group_ids), "the table itself is as it was"


def test_group_ids_can_be_values_of_any_type() -> None:
    table = toy_table(4)
    for values in (["b", "a", "b", "c"], [2.5, 2.4, 2.5, 3.0], np.array(["b", 1, "b", None], dtype=object)):
        made = gpfl.Table(table.x, table.y, group_ids=values).group_ids
        assert made is not None
        assert len(set(made.tolist())) == 3
        assert made[0] == made[2]


def test_partition_that_would_divide_groups_is_an_error() -> None:
    table, group_ids = visits()
    with pytest.raises(GpflError, match=r"'visits' has groups, and partition 'dirichlet' assigns single samples: use"):
        gpfl.federate(table, partition="dirichlet", clients=2)
    with pytest.raises(GpflError, match=r"partition.rng is 'pfllib', but data 'visits' has groups.* set it to gpfl"):
        gpfl.federate(table, partition="natural", rng="pfllib")
    with pytest.raises(GpflError, match=r"does not name the client of each sample: name the column of clients with --client"):
        gpfl.federate(gpfl.Table(table.x, table.y, group_ids=group_ids), partition="natural")
    with pytest.raises(GpflError, match=r"has 72 rows and group_ids of shape \(3,\); give one value per row"):
        gpfl.Table(table.x, table.y, group_ids=[0, 1, 2])


@pytest.mark.parametrize("partition", [Dirichlet(clients=11, total_clients=10), Pathological(clients=11, total_clients=10)])
def test_more_clients_than_total_clients_is_an_error(partition: Partition) -> None:
    with pytest.raises(GpflError, match=r"partition.clients is 11 of partition.total_clients = 10; .* --clients"):
        partition.select_clients(toy_table(300))


def test_class_counts_are_of_all_samples_of_each_client(tmp_path: Path) -> None:
    federation = gpfl.federate(reviews(), partition="natural", validation_fraction=0.2)
    counts = figures.ClassCounts.from_federation(federation)
    assert counts.counts.sum() == 120
    for index, samples in enumerate(SAMPLES.values()):
        labels = federation.table.y.numpy()[samples]
        assert counts.counts[index].tolist() == np.bincount(labels, minlength=federation.table.classes).tolist()
    figures.draw_class_counts(counts, tmp_path / "bubbles.png")
    assert (tmp_path / "bubbles.png").read_bytes().startswith(b"\x89PNG")
