"""Build federations from datasets by name, files, tables, arrays and torch datasets."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from gpfl.core import options
from gpfl.data import find_dataset
from gpfl.data.table import ArrayLike, Table
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import PARTITIONS
from gpfl.federation.federation import Federation, Shard, check_nonempty
from gpfl.federation.partition import Partition

TorchDataset: TypeAlias = Dataset[tuple[Tensor, int]]
ClientData: TypeAlias = (
    tuple[ArrayLike, ArrayLike]
    | tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]
    | TorchDataset
    | tuple[TorchDataset, TorchDataset]
)
"""A client's (x, y), (x_train, y_train, x_test, y_test), torch Dataset of (x, y), or one Dataset to train and one to test."""

EXPECTED = "give (x, y) or (x_train, y_train, x_test, y_test), or torch Datasets in their place"


def federate(
    data: str | Path | Table | Sequence[ClientData] | Mapping[str, ClientData],
    *,
    partition: str | None = None,
    **settings: object,
) -> Federation:
    """Divide data among clients.

    Args:
        data: The name of a dataset, the path of files, a table, or each client's own data: (x, y), which is split into
            training and test, or (x_train, y_train, x_test, y_test), which is kept.
        partition: Name of the partition, by default that of the dataset.
        **settings: Options of the partition, such as `clients=20, classes_per_client=4, seed=1` or `beta=0.1`, and how the
            data are read, such as `client="hospital", label="outcome"`.

    """
    if isinstance(data, (str, Path, Table)):
        defaults: Mapping[str, object] = {}
        data_options: Collection[str] = ()
        if not isinstance(data, Table):
            data_options = options.options_of(type(find_dataset(str(data), {})))
            source = find_dataset(str(data), {key: value for key, value in settings.items() if key in data_options})
            settings = {key: value for key, value in settings.items() if key not in data_options}
            defaults = source.defaults.get("partition", {})
        name = partition or str(defaults.get("name", "pathological"))
        if name not in PARTITIONS:
            raise GpflError(f"unknown partition '{name}'; {did_you_mean(name, PARTITIONS)}")
        table = data if isinstance(data, Table) else source.load()
        partition_options = {key for kind in PARTITIONS.values() for key in options.options_of(kind)}
        for key in sorted(settings.keys() - partition_options):
            suggestion = did_you_mean(key, {*partition_options, *data_options})
            if any(f"'{option}'" in suggestion for option in data_options):  # `options.build` reports the others
                raise GpflError(f"unknown setting '{key}'; {suggestion}")
        known = {key: value for key, value in defaults.items() if name == defaults["name"] and key != "name"}
        return partition_table(table, options.build(PARTITIONS[name], {**known, **settings}, "partition"))
    if not isinstance(data, (list, tuple, Mapping)) or not data:
        raise GpflError(
            f"data is {type(data).__name__}; give a name, a gpfl.Table, or the arrays of at least one client: [(x, y), …]"
        )
    for key, value in (("partition", partition), ("clients", settings.get("clients")), ("rng", settings.get("rng"))):
        if value is not None:
            raise GpflError(
                f"{key} is {value!r}, but these arrays are divided among clients already: leave it out, or give a Table"
            )
    clients = data if isinstance(data, Mapping) else {str(i): arrays for i, arrays in enumerate(data)}
    return _from_clients(clients, options.build(Partition, {**settings, "clients": len(clients)}, "partition"))


def partition_table(table: Table, partition: Partition, split_seed: int | None = None) -> Federation:
    """Return the federation of a partitioned table; `split_seed` splits each client's samples by another seed."""
    shards = [Shard(name, *splits) for name, splits in partition.apply(table, split_seed).items()]
    check_nonempty(shards, partial(partition.suggest_fix, table, [len(shard.samples) for shard in shards]))
    if partition.validation_fraction:
        fix = "all of its training samples are one group; leave out such clients, or --validation-fraction"
        check_nonempty(shards, fix, ("validation",))
    return Federation(table, shards, {"name": partition.name, **options.config_values(partition)})


def _from_clients(clients: Mapping[str, ClientData], partition: Partition) -> Federation:
    """Return the federation of clients with their own data, concatenated to one table."""
    tables: list[Table] = []
    shards: list[Shard] = []
    start = 0
    for i, (key, client_data) in enumerate(clients.items()):
        name = str(key)
        arrays = _to_arrays(client_data, name)
        client_tables = [Table(arrays[k], arrays[k + 1], name=f"client {name}") for k in range(0, len(arrays), 2)]
        indices = [np.arange(start, start := start + len(table)) for table in client_tables]
        if len(client_tables) == 1:
            shards.append(Shard(name, *partition.split(client_tables[0], indices[0], i)))
        else:
            train, validation = partition.split_validation(client_tables[0], indices[0], i)
            shards.append(Shard(name, train, validation, indices[1]))
        tables += client_tables
    first = tables[0]
    for table in tables:
        if (table.shape, table.x.dtype) != (first.shape, first.x.dtype):
            raise GpflError(
                f"{table.name} has samples of shape {table.shape} ({table.x.dtype}), "
                f"{first.name} of {first.shape} ({first.x.dtype}); they must agree"
            )
    merged = Table(torch.cat([table.x for table in tables]), torch.cat([table.y for table in tables]))
    return Federation(merged, shards, {"name": "arrays", **options.config_values(partition)})


def _to_arrays(data: object, name: str) -> Sequence[ArrayLike]:
    parts = [data] if isinstance(data, Dataset) else data
    if not isinstance(parts, (tuple, list)):
        raise GpflError(f"client {name} has {type(parts).__name__}; {EXPECTED}")
    if parts and all(isinstance(part, Dataset) for part in parts):
        parts = [array for part in parts for array in _read_dataset(part, name)]
    if len(parts) not in (2, 4):
        raise GpflError(f"client {name} has {len(parts)} arrays; {EXPECTED}")
    return parts


def _read_dataset(dataset: TorchDataset, name: str) -> tuple[Tensor, npt.NDArray[np.int64]]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise GpflError(f"the dataset of client {name} has no length: give one with len() and items by index, or arrays (x, y)")
    items = [dataset[i] for i in range(len(dataset))]
    if not items or any(not isinstance(item, (tuple, list)) or len(item) != 2 for item in items):
        raise GpflError(f"the dataset of client {name} must have at least one item, and each must be (x, y)")
    try:
        return torch.stack([torch.as_tensor(x) for x, _ in items]), np.array([int(y) for _, y in items])
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise GpflError(f"the dataset of client {name} does not fit one array ({reason})") from None
