"""One table for several federations, so that an engine can train the clients of all of them in the same batched steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpfl.data.table import Table
from gpfl.errors import GpflError
from gpfl.federation.federation import Federation, Shard


def share_table(federations: Sequence[Federation]) -> list[Federation]:
    """Return the same federations on one table.

    Federations with the same encoded samples share them. Otherwise, as where each was encoded by the statistics of its own
    training samples, their tables are concatenated, and the indices in the shards of each are shifted to its own.
    """
    tables: list[Table] = []
    positions = []
    for federation in federations:
        same = (i for i, table in enumerate(tables) if _has_same_samples(table, federation.table))
        position = next(same, len(tables))
        if position == len(tables):
            tables.append(federation.table)
        positions.append(position)
    joint = tables[0] if len(tables) == 1 else tables[0].concatenate(tables[1:])
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + len(table))
    return [
        Federation(joint, [_shift(shard, starts[i]) for shard in each.shards], each.partition, each.preprocessing)
        for each, i in zip(federations, positions, strict=True)
    ]


def _shift(shard: Shard, start: int) -> Shard:
    return Shard(shard.name, shard.train + start, shard.validation + start, shard.test + start) if start else shard


def _has_same_samples(one: Table, other: Table) -> bool:
    if one.x is other.x and one.y is other.y:
        return True
    if one.input_spec != other.input_spec or one.classes != other.classes:
        raise GpflError(f"concurrent trials must have the same inputs and classes, not {one.input_spec} and others")
    return one.x.shape == other.x.shape and torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
