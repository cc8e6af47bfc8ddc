"""Clients by files and folders, and their training, validation and test rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from user_files import RNG, TEST, TRAIN, client_names_of, close, inputs, lines, load, message_of, scaled, write

import gpfl
from gpfl.data import find_dataset


def per_client(mark: str = ",") -> dict[str, str]:
    return {
        "10": lines(("a", "label"), (1, "x"), (2, "y"), mark=mark),
        "2": lines(("label", "a"), ("y", 4), mark=mark),
    }


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".npz"])
def test_each_client_may_have_a_file(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    for name, text in per_client("\t" if ending == ".tsv" else ",").items():
        if ending == ".npz":
            folder.mkdir(exist_ok=True)
            a, label = ([1.0, 2.0], ["x", "y"]) if name == "10" else ([4.0], ["y"])
            np.savez(folder / f"{name}.npz", x=np.array(a)[:, None], label=np.array(label))
        else:
            write(folder / f"{name}{ending}", text)
    write(folder / ".hidden.csv", "x")
    write(folder / "README.txt", "x")
    table = load(folder)
    expected = [[4.0], [1.0], [2.0]] if ending == ".npz" else [[v] for v in scaled([4, 1, 2])]
    assert close(inputs(table), expected), "arrays are not scaled"
    assert client_names_of(table) == ["2", "10", "10"]
    assert table.client_names == ("2", "10")
    assert table.y.tolist() == [1, 0, 1]
    assert (table.name, table.splits) == ("sites", None)


def divided_files() -> dict[tuple[str, str], str]:
    """Return CSV texts by client and split."""
    return {
        ("north", "train"): lines(("a", "label"), (1, "x"), (2, "y")),
        ("north", "test"): lines(("a", "label"), (9, "x")),
        ("south", "train"): lines(("a", "label"), (4, "y"), (5, "x")),
        ("south", "test"): lines(("a", "label"), (8, "y")),
    }


@pytest.mark.parametrize("outer", ["clients", "parts"])
def test_splits_may_be_inside_clients_or_clients_inside_splits(outer: str, tmp_path: Path) -> None:
    for (client, part), text in divided_files().items():
        write(tmp_path / "d" / (f"{client}/{part}.csv" if outer == "clients" else f"{part}/{client}.csv"), text)
    federation = gpfl.federate(tmp_path / "d")
    table = federation.table
    values = (table.x[:, 0].numpy() * 1.5811388 + 3).round(4)  # 1, 2, 4, 5: mean 3, variance 2.5
    by_client = {
        s.name: [sorted(values[s.split(part)].tolist()) for part in ("train", "validation", "test")] for s in federation.shards
    }
    assert by_client == {"north": [[1.0, 2.0], [], [9.0]], "south": [[4.0, 5.0], [], [8.0]]}
    assert federation.table.description.startswith("d: 6 rows; 2 clients with 3 rows; train and test from the files.\n")


def test_validation_files_are_validation_rows(tmp_path: Path) -> None:
    for client in ("north", "south"):
        for part, rows in (("train", 4), ("val", 2), ("test", 1)):
            write(tmp_path / "d" / client / f"{part}.csv", lines(("a", "label"), *((k, k % 2) for k in range(rows))))
    federation = gpfl.federate(tmp_path / "d", validation_fraction=0.5)
    assert federation.n_samples("train").tolist() == [4, 4]
    assert federation.n_samples("validation").tolist() == [2, 2], "those given, not a share"
    assert federation.n_samples("test").tolist() == [1, 1]


def test_a_fraction_of_given_training_rows_can_be_used_for_validation(tmp_path: Path) -> None:
    for client in ("north", "south"):
        for part, rows in (("train", 8), ("test", 2)):
            write(tmp_path / "d" / client / f"{part}.csv", lines(("a", "label"), *((k, k % 2) for k in range(rows))))
    federation = gpfl.federate(tmp_path / "d", validation_fraction=0.25)
    for shard in federation.shards:
        assert federation.table.splits is not None
        assert (len(shard.train), len(shard.validation), len(shard.test)) == (6, 2, 2)
        assert set(federation.table.splits[[*shard.train, *shard.validation]]) == {TRAIN}
        assert set(federation.table.splits[shard.test]) == {TEST}


@pytest.mark.parametrize("partition", ["dirichlet", "pathological"])
def test_splits_hold_under_any_partition(partition: str, tmp_path: Path) -> None:
    for part, rows in (("train", 90), ("test", 30)):
        write(tmp_path / "d" / f"{part}.csv", lines(("a", "label"), *((k, k % 3) for k in range(rows))))
    options = {"beta": 100.0} if partition == "dirichlet" else {"classes_per_client": 3, "balanced": True}
    federation = gpfl.federate(tmp_path / "d", partition=partition, clients=2, **options)
    splits = federation.table.splits
    assert splits is not None
    assert sorted(np.concatenate([shard.train for shard in federation.shards])) == np.flatnonzero(splits == TRAIN).tolist()
    assert sorted(np.concatenate([shard.test for shard in federation.shards])) == np.flatnonzero(splits == TEST).tolist()


@pytest.mark.parametrize("partition", ["natural", "dirichlet"])
def test_a_test_fraction_is_an_error_if_the_files_have_test_rows(partition: str, tmp_path: Path) -> None:
    for (client, part), text in divided_files().items():
        write(tmp_path / "d" / client / f"{part}.csv", text)
    assert message_of(lambda: gpfl.federate(tmp_path / "d", partition=partition, clients=2, test_fraction=0.5)) == (
        "partition.test_fraction is 0.5, but data 'd' has test samples already: leave it out"
    )
    assert len(gpfl.federate(tmp_path / "d", test_fraction=0.25)) == 2, "as a run's config.toml says"


@pytest.mark.parametrize("leftovers", [(), ("rawdata/MNIST/raw/t10k", "config.json")], ids=["bare", "with downloads"])
def test_folders_of_pfllib_are_read(leftovers: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "MNIST"
    arrays = {}
    for part, rows in (("train", 3), ("test", 2)):
        (root / part).mkdir(parents=True)
        for client in range(11):
            x = RNG.normal(size=(rows, 1, 4, 5)).astype(np.float32)
            y = np.array([client % 3, (client + 1) % 3, 0])[:rows]
            arrays[str(client), part] = x, y
            with (root / part / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": x, "y": y})  # type: ignore[arg-type]
    for name in leftovers:
        write(root / name, "x")
    federation = gpfl.federate(root)
    assert [shard.name for shard in federation.shards] == [str(client) for client in range(11)]
    assert federation.table.shape == (1, 4, 5)
    for shard in federation.shards:
        for part, rows_ in (("train", shard.train), ("test", shard.test)):
            x, y = arrays[shard.name, part]
            assert np.array_equal(federation.table.x[rows_].numpy(), x)
            assert np.array_equal(federation.table.y[rows_].numpy(), y)
    assert find_dataset(str(root), {}).defaults == {"partition": {"name": "natural"}, "net": {"name": "cnn4"}}
