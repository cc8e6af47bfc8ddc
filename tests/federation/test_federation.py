"""Federations: from tables, arrays and torch datasets, and by their manifest."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_table
from torch.utils.data import Dataset, TensorDataset

import gpfl
from gpfl.core.local_round import Indices
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.table import SPLITS
from gpfl.federation import Partition, Shard, share_table
from gpfl.io import toml


def client(rows: int, seed: int = 0, labels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 2)), np.arange(rows) % labels


def all_samples(federation: gpfl.Federation) -> np.ndarray:
    return np.concatenate([shard.split(name) for shard in federation.shards for name in SPLITS])


def split(name: str, samples: Indices, partition: Partition, client: int) -> Shard:
    return Shard(name, *partition.split(toy_table(), samples, client))


@pytest.mark.parametrize(("rows", "train"), [(4, 3), (5, 3), (6, 4), (7, 5), (40, 30), (43, 32)])
def test_three_quarters_of_the_samples_are_for_training(rows: int, train: int) -> None:
    shard = split("0", np.arange(rows), Partition(), 0)
    assert (len(shard.train), len(shard.test)) == (train, rows - train)


@pytest.mark.parametrize(("test_fraction", "rows", "train"), [(0.8, 5, 1), (0.9, 10, 1), (0.3, 10, 7), (0.35, 20, 13)])
def test_test_fraction_is_exact_if_it_divides_the_samples(test_fraction: float, rows: int, train: int) -> None:
    assert len(split("0", np.arange(rows), Partition(test_fraction=test_fraction), 0).train) == train


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_splits_are_disjoint_and_complete(validation: float) -> None:
    federation = gpfl.federate(toy_table(), partition="dirichlet", clients=4, beta=1.0, validation_fraction=validation)
    assert np.array_equal(np.sort(all_samples(federation)), np.arange(120))
    assert federation.has_validation == bool(validation)


def test_validation_samples_are_taken_from_training_samples() -> None:
    plain = gpfl.federate(toy_table(), clients=3)
    kept = gpfl.federate(toy_table(), clients=3, validation_fraction=0.2)
    for before, after in zip(plain.shards, kept.shards, strict=True):
        assert np.array_equal(before.test, after.test)
        assert sorted(before.train) == sorted([*after.train, *after.validation])
        assert len(after.validation) == round(0.2 * len(before.train))


def test_smallest_validation_split_is_one_sample() -> None:
    shard = split("0", np.arange(8), Partition(validation_fraction=0.01), 0)
    assert (len(shard.train), len(shard.validation), len(shard.test)) == (5, 1, 2)


def test_partition_is_a_function_of_the_seed() -> None:
    first, again, other = (gpfl.federate(toy_table(), clients=3, seed=seed) for seed in (1, 1, 2))
    assert first.manifest() == again.manifest()
    assert first.manifest() != other.manifest()


def test_samples_are_shuffled_before_they_are_split() -> None:
    shard = split("0", np.arange(100), Partition(), 0)
    assert shard.test.tolist() != list(range(75, 100))
    assert shard.test.tolist() != split("1", np.arange(100), Partition(), 1).test.tolist()
    assert shard.test.tolist() != split("0", np.arange(100), Partition(seed=2), 0).test.tolist()


def test_label_counts_are_those_of_training_samples() -> None:
    federation = gpfl.federate(toy_table(), clients=3, classes_per_client=1, validation_fraction=0.2)
    counts = federation.label_counts
    assert counts.shape == (3, 3)
    assert np.array_equal(counts.sum(1), federation.n_samples("train"))
    assert (counts > 0).sum(1).tolist() == [1, 1, 1]


def test_each_client_keeps_its_own_arrays() -> None:
    federation = gpfl.federate({"ann": client(8, 1), "bob": (*client(6, 2), *client(4, 3))})
    ann, bob = federation.shards
    assert (ann.name, bob.name) == ("ann", "bob")
    assert sorted([*ann.train, *ann.test]) == list(range(8))
    assert (bob.train.tolist(), bob.test.tolist()) == (list(range(8, 14)), list(range(14, 18)))
    assert np.allclose(federation.table.x[8:14], client(6, 2)[0])
    assert federation.n_samples("test").tolist() == [2, 4]


def test_given_test_samples_stay_with_a_validation_split() -> None:
    (shard,) = gpfl.federate([(*client(10), *client(4))], validation_fraction=0.3).shards
    assert shard.test.tolist() == [10, 11, 12, 13]
    assert sorted([*shard.train, *shard.validation]) == list(range(10))
    assert len(shard.validation) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(*client(5), client(5)[0])], "client 0 has 3 arrays; give (x, y) or (x_train, y_train, x_test, y_test)"),
        ([client(8), (np.zeros((8, 3)), np.zeros(8))], "client 1 has samples of shape (3,)"),
        ([client(8), (np.zeros((8, 2), np.uint8), np.zeros(8))], "client 1 has samples of shape (2,) (torch.uint8)"),
        ({"bob": client(1)}, "client bob has no training samples (0 training, 1 test)"),
        ([], "at least one client"),
    ],
)
def test_arrays_that_make_no_federation_are_an_error(data: object, message: str) -> None:
    with pytest.raises(gpfl.GpflError) as error:
        gpfl.federate(data)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_error_suggests_the_closest_name() -> None:
    with pytest.raises(gpfl.GpflError, match="unknown data 'digit'; did you mean 'digits'"):
        gpfl.federate("digit")
    with pytest.raises(gpfl.GpflError, match="unknown partition 'dirichlt'; did you mean 'dirichlet'"):
        gpfl.federate(toy_table(), partition="dirichlt")
    with pytest.raises(gpfl.GpflError, match=r"unknown key 'partition.client'; did you mean 'clients'"):
        gpfl.federate(toy_table(), client=3)


def shard_of(train: list[int], test: list[int]) -> Shard:
    return Shard("7", np.array(train), np.array([], dtype=np.int64), np.array(test))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (shard_of([0], []), "client 7 has no test samples"),
        (shard_of([0, 120], [1]), "client 7 has sample 120; the table has samples 0 to 119"),
        (shard_of([0, -1], [1]), "client 7 has sample -1; the table has samples 0 to 119"),
        (shard_of([0, 1], [1]), "client 7 has a sample twice"),
    ],
)
def test_client_with_wrong_samples_is_an_error(shard: Shard, message: str) -> None:
    with pytest.raises(gpfl.GpflError) as error:
        gpfl.Federation(toy_table(), [shard])
    assert message in str(error.value)


def test_federation_without_clients_is_an_error() -> None:
    with pytest.raises(gpfl.GpflError, match="at least one client"):
        gpfl.Federation(toy_table(), [])


def test_manifest_restores_the_same_samples(tmp_path: Path) -> None:
    federation = gpfl.federate("digits", partition="dirichlet", clients=5, beta=0.5, validation_fraction=0.1)
    federation.save(tmp_path / "federation.toml")
    again = gpfl.Federation.load(tmp_path / "federation.toml")
    for before, after in zip(federation.shards, again.shards, strict=True):
        assert all(np.array_equal(before.split(name), after.split(name)) for name in SPLITS)
    assert again.manifest() == federation.manifest()
    assert torch.equal(again.table.x, federation.table.x)


def test_manifest_keeps_unusual_client_names(tmp_path: Path) -> None:
    federation = gpfl.federate({'a "b"\\ é': client(8), "": client(8, 1)})
    federation.save(tmp_path / "f.toml")
    assert gpfl.Federation.load(tmp_path / "f.toml", federation.table).manifest() == federation.manifest()


def test_manifest_with_another_table_is_an_error(tmp_path: Path) -> None:
    federation = gpfl.federate(toy_table(), clients=3)
    federation.save(tmp_path / "f.toml")
    changed = toy_table()
    changed.x[0, 0] += 1
    with pytest.raises(gpfl.GpflError, match="give the table it was made from"):
        gpfl.Federation.load(tmp_path / "f.toml", changed)
    assert gpfl.Federation.load(tmp_path / "f.toml", toy_table()).manifest() == federation.manifest()


DAMAGE: dict[str, Callable[[dict], object]] = {
    "no table": lambda m: m.pop("table"),
    "no hash": lambda m: m["table"].pop("sha256"),
    "no clients": lambda m: m.pop("client"),
    "clients not listed": lambda m: m.update(client={"name": "0"}),
    "a client without test samples": lambda m: m["client"][0].pop("test"),
    "fractions": lambda m: m["client"][0].update(train=[0.5]),
    "text": lambda m: m["client"][0].update(train=["1"]),
    "too large indices": lambda m: m["client"][0].update(train=[2**70]),
    "nested lists": lambda m: m["client"][0].update(train=[[0, 1]]),
    "a single index": lambda m: m["client"][0].update(train=3),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_manifest_is_an_error(damage: Callable[[dict], object], tmp_path: Path) -> None:
    federation = gpfl.federate(toy_table(), clients=3)
    content = federation.manifest()
    damage(content)
    (tmp_path / "f.toml").write_text(toml.dump(content))
    with pytest.raises(gpfl.GpflError, match=r"f\.toml is not a federation manifest"):
        gpfl.Federation.load(tmp_path / "f.toml", federation.table)


def test_manifest_with_samples_outside_the_table_is_an_error(tmp_path: Path) -> None:
    federation = gpfl.federate(toy_table(), clients=3)
    content = tomllib.loads(toml.dump(federation.manifest()))
    content["client"][1]["train"].append(500)
    (tmp_path / "f.toml").write_text(toml.dump(content))
    with pytest.raises(gpfl.GpflError, match="client 1 has sample 500"):
        gpfl.Federation.load(tmp_path / "f.toml", federation.table)


def test_repr_names_the_sizes() -> None:
    federation = gpfl.federate([client(8), client(16)])
    assert (
        repr(federation)
        == "Federation of 2 clients on 'arrays': 18 training samples (6 to 12 per client), 6 test samples, 3 classes"
    )
    assert "18 training samples (9 per client)" in repr(gpfl.federate([client(12), client(12)]))


def test_clients_can_be_torch_datasets(federation: gpfl.Federation) -> None:
    x, y = federation.table.x, federation.table.y
    arrays = gpfl.federate({"a": (x[:40], y[:40]), "b": (x[40:70], y[40:70], x[70:80], y[70:80])})
    sets = gpfl.federate(
        {"a": TensorDataset(x[:40], y[:40]), "b": (TensorDataset(x[40:70], y[40:70]), TensorDataset(x[70:80], y[70:80]))}
    )
    assert arrays.manifest() == sets.manifest()


@pytest.mark.parametrize("items", [[], [(torch.zeros(2), 1), (torch.zeros(3), 0)], [torch.zeros(2)], [(torch.zeros(2), "cat")]])
def test_torch_dataset_of_unequal_items_is_an_error(items: list[object]) -> None:
    class Items(Dataset):
        def __len__(self) -> int:
            return len(items)

        def __getitem__(self, index: int) -> object:
            return items[index]

    with pytest.raises(gpfl.GpflError, match="the dataset of client 0"):
        gpfl.federate([Items()])


# Federations on one table: the same samples and labels, whatever their encodings.

SCHEMA = Schema((ColumnSchema("age"), ColumnSchema("dose")))


def columns_table() -> gpfl.Table:
    rng = np.random.default_rng(0)
    return gpfl.Table(
        RawColumns(SCHEMA, rng.normal(50, 10, (90, 2))),
        rng.integers(0, 2, 90),
        client_ids=np.arange(90) % 3,
        client_names=list("abc"),
        group_ids=np.arange(90) // 6,
    )


def test_samples_that_differ_in_their_encoding_keep_it() -> None:
    table = columns_table()
    federations = [gpfl.federate(table, partition="natural", seed=seed, validation_fraction=0.2) for seed in (1, 2, 1)]
    shared = share_table(federations)
    assert len({id(federation.table) for federation in shared}) == 1
    assert len(shared[0].table) == 180, "the first and the third have the same encoding"
    for before, after in zip(federations, shared, strict=True):
        assert after.preprocessing is before.preprocessing
        assert after.partition == before.partition
        for client, (old, new) in enumerate(zip(before.shards, after.shards, strict=True)):
            assert new.name == old.name
            for split in ("train", "validation", "test"):
                assert torch.equal(after.table.x[new.split(split)], before.table.x[old.split(split)])
                assert after.labels(client, split).tolist() == before.labels(client, split).tolist()
    assert not torch.equal(federations[0].table.x, federations[1].table.x)


def test_a_table_that_all_have_is_not_copied() -> None:
    table = toy_table()
    federations = [gpfl.federate(table, partition="dirichlet", clients=3, beta=1.0, seed=seed) for seed in (1, 2)]
    for before, after in zip(federations, share_table(federations), strict=True):
        assert after.table is table
        assert after.shards == before.shards


def test_other_inputs_or_classes_are_refused() -> None:
    wide, narrow = (gpfl.federate(toy_table(width=width), partition="dirichlet", clients=2) for width in (6, 5))
    more = gpfl.federate(toy_table(classes=4), partition="dirichlet", clients=2)
    for other in (narrow, more):
        with pytest.raises(gpfl.GpflError, match="concurrent trials must have the same inputs and classes"):
            share_table([wide, other])
