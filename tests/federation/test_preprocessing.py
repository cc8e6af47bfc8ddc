"""The exchange of statistics before round 0 and the table that it encodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from user_files import lines, write

import gpfl
from gpfl.data import Table
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.preprocessing import NumericStatistics, PreprocessingOptions
from gpfl.federation import Shard

SITES = ("north", "south", "west")
SCHEMA = Schema((ColumnSchema("age"), ColumnSchema("dose"), ColumnSchema("sex", "categorical", ("f", "m", "x"))))


def make_table(options: PreprocessingOptions | None = None, rows: int = 120) -> Table:
    rng = np.random.default_rng(3)
    site = np.arange(rows) % 3
    values = np.stack([rng.normal(50, 10, rows) + 20 * site, rng.normal(size=rows), rng.integers(0, 2, rows)], axis=1)
    values[rng.random(values.shape) < 0.1] = np.nan
    return Table(
        RawColumns(SCHEMA, values),
        rng.integers(0, 2, rows),
        client_ids=site,
        client_names=SITES,
        preprocessing=options or PreprocessingOptions(missing="mean"),
    )


def divide(table: Table) -> gpfl.Federation:
    return gpfl.federate(table, partition="natural", validation_fraction=0.2)


def with_values(table: Table, values: np.ndarray) -> Table:
    return Table(
        RawColumns(SCHEMA, values),
        table.y,
        client_ids=table.client_ids,
        client_names=SITES,
        preprocessing=table.preprocessing,
    )


def test_columns_are_scaled_by_the_training_samples_of_all_clients() -> None:
    federation = divide(make_table())
    assert federation.table.raw is not None
    raw, x = federation.table.raw.values, federation.table.x.numpy()
    train = np.concatenate([shard.train for shard in federation.shards])
    for column in (0, 1):
        pooled = raw[train, column][~np.isnan(raw[train, column])]
        expected = (np.where(np.isnan(raw[:, column]), pooled.mean(), raw[:, column]) - pooled.mean()) / pooled.std()
        np.testing.assert_allclose(x[:, column], expected, rtol=1e-6, atol=1e-6)
        assert federation.preprocessing is not None
        merged = federation.preprocessing.merged.columns[SCHEMA.columns[column].name]
        assert isinstance(merged, NumericStatistics)
        assert merged.mean == pytest.approx(pooled.mean(), rel=1e-12)
        assert merged.squared_deviation == pytest.approx(pooled.var() * len(pooled), rel=1e-12)
    assert federation.table.shape == (4,), "no sample has category x"


@pytest.mark.parametrize("scale", ["federated", "local"])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_test_and_validation_samples_change_no_statistics(split: str, scale: str) -> None:
    table = make_table(PreprocessingOptions(scale=scale, missing="mean", missing_indicator=True))
    before = divide(table)
    assert table.raw is not None
    values = table.raw.values.copy()
    changed = np.concatenate([shard.split(split) for shard in before.shards])
    values[changed] = [1e4, np.nan, 2.0]
    after = divide(with_values(table, values))
    assert [shard.train.tolist() for shard in after.shards] == [shard.train.tolist() for shard in before.shards]
    assert after.preprocessing == before.preprocessing
    others = np.setdiff1d(np.arange(len(table)), changed)
    assert np.array_equal(after.table.x[others], before.table.x[others])
    assert not np.array_equal(after.table.x[changed], before.table.x[changed])
    assert f"{len(changed)} values that no client trains on, encoded as zeros, in categorical columns: sex {len(changed)}." in (
        after.data_warnings()
    )


def test_a_client_is_scaled_by_its_own_training_samples_if_chosen() -> None:
    federation = divide(make_table(PreprocessingOptions(scale="local", missing="mean")))
    for shard in federation.shards:
        own = federation.table.x[shard.train, :2].double()
        assert own.mean(0).abs().max() < 1e-6
        assert federation.preprocessing is not None
    first, second, _ = federation.preprocessing.clients.values()
    assert abs(first.scaling["age"][0] - second.scaling["age"][0]) > 10


def test_the_digest_is_that_of_the_raw_rows() -> None:
    table = make_table()
    digests = {
        divide(make_table(PreprocessingOptions(scale=scale, missing="mean"))).table.digest for scale in ("local", "none")
    }
    other = gpfl.federate(make_table(), partition="natural", seed=7)
    assert digests == {table.digest} == {other.table.digest}
    assert table.raw is not None
    values = table.raw.values.copy()
    values[0, 0] += 1
    assert with_values(table, values).digest != table.digest


def test_a_manifest_gives_the_same_inputs_to_the_bit(tmp_path: Path) -> None:
    federation = divide(make_table())
    federation.save(tmp_path / "federation.toml")
    loaded = gpfl.Federation.load(tmp_path / "federation.toml", make_table())
    assert loaded.preprocessing == federation.preprocessing
    assert np.array_equal(loaded.table.x, federation.table.x)
    again = gpfl.Federation.load(tmp_path / "federation.toml", federation.table)
    assert np.array_equal(again.table.x, federation.table.x), "from a table that is encoded already"


def test_samples_of_no_client_take_no_part() -> None:
    table = make_table(PreprocessingOptions())
    assert table.raw is not None
    complete = np.flatnonzero(~np.isnan(table.raw.values).any(1))
    federation = gpfl.Federation(table, [Shard("a", complete[:40], complete[:0], complete[40:50])])
    assert not federation.table.x[np.setdiff1d(np.arange(len(table)), complete[:50])].any()
    with pytest.raises(gpfl.GpflError, match=r"^column 'age' has \d+ missing values, and missing values are not filled: "):
        divide(table)


def test_bytes_and_content_of_the_exchange_are_listed() -> None:
    preprocessing = divide(make_table()).preprocessing
    assert preprocessing is not None
    assert preprocessing.bytes_up == dict.fromkeys(SITES, 24 + 24 + 2 + 16)
    assert preprocessing.bytes_down == dict.fromkeys(SITES, 66)
    assert preprocessing.describe() == (
        "Preprocessing: before round 0 each client sends statistics of 3 of 3 columns, at most 66 bytes, of its training "
        "samples, and receives the merged ones, 66 bytes."
    )
    sent = preprocessing.to_dict()["sent"]
    assert isinstance(sent, Mapping)
    assert sent["north"] == [
        "age: count, mean, sum of squared deviations (24 B)",
        "dose: count, mean, sum of squared deviations (24 B)",
        "sex: 2 category names, 2 counts (18 B)",
    ]
    declared = Schema(SCHEMA.columns, declared=True)
    table = Table(RawColumns(declared, np.ones((4, 3))), [0, 1, 0, 1], preprocessing=PreprocessingOptions(scale="none"))
    nothing = gpfl.Federation(table, [Shard("a", np.array([0, 1]), np.array([], dtype=int), np.array([2]))]).preprocessing
    assert nothing is not None
    assert nothing.describe() == "Preprocessing: no statistics are exchanged."


def test_files_are_encoded_when_their_split_is_known(tmp_path: Path) -> None:
    rows = [(k, "xy"[k % 2], "ab"[k % 2], "train" if k < 6 else "test") for k in range(9)]
    path = write(tmp_path / "a.csv", lines(("age", "label", "client", "part"), *rows))
    federation = gpfl.federate(path)
    assert federation.table.x.flatten().tolist() == pytest.approx([(k - 2.5) / np.arange(6).std() for k in range(9)], rel=1e-6)
