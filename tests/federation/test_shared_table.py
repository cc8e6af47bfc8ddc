"""Federations on one table: the same samples and labels, whatever their encodings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import toy_table

import gpfl
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.federation import share_table

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
