"""Federations: a table and each client's rows of it, saved as a small manifest that gives another person the same partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from gpfl.core import options
from gpfl.core.local_round import Indices
from gpfl.data import DATASETS, FileDataset, find_dataset
from gpfl.data.arrays import ArrayLike
from gpfl.data.table import SPLITS, DataSource, Table
from gpfl.errors import GpflError, did_you_mean, pluralize
from gpfl.federation.partition import PARTITIONS, Partition
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_manifest

Samples: TypeAlias = Dataset[tuple[Tensor, int]]
Arrays: TypeAlias = (
    tuple[ArrayLike, ArrayLike] | tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike] | Samples | tuple[Samples, Samples]
)
"""One client's (x, y), (x_train, y_train, x_test, y_test), a torch Dataset of (x, y), or one for training and one for test."""

WANTED = "give (x, y) or (x_train, y_train, x_test, y_test), or torch Datasets in their place"

LONGEST_NAME = 64
MANIFEST = "federation.toml"
"""The name of the manifest in a run's folder."""


@dataclass(frozen=True)
class Shard:
    """The rows of one client."""

    name: str
    train: Indices
    validation: Indices
    test: Indices

    def split(self, name: str) -> Indices:
        """Gives the rows of one of PARTS."""
        rows: Indices = getattr(self, name)
        return rows


class Federation:
    """A table divided among clients."""

    def __init__(self, table: Table, shards: Sequence[Shard], origin: Mapping[str, object] | None = None) -> None:
        """`origin` says how the division was made; it is kept with the manifest."""
        self.table, self.shards = table, tuple(shards)
        self.origin = dict(origin or {})
        if not self.shards:
            raise GpflError("a federation needs at least one client")
        check_filled(self.shards, "give every client both, or leave such clients out")
        for shard in self.shards:
            check_shard(shard, len(table))
            check_bundles(shard, table)
        check_disjoint(self.shards, len(table))
        check_names(self.shards)

    def __len__(self) -> int:
        return len(self.shards)

    def __repr__(self) -> str:
        sizes = self.n_samples("train")
        return (
            f"Federation of {pluralize(len(self), 'client')} on '{self.table.name}': {sizes.sum()} training rows "
            f"({sizes.min()} to {sizes.max()} a client), {self.n_samples('test').sum()} test rows, {self.table.classes} classes"
        )

    def n_samples(self, split: str) -> npt.NDArray[np.int64]:
        """Gives the number of rows of each client."""
        return np.array([len(shard.split(split)) for shard in self.shards])

    @property
    def has_validation(self) -> bool:
        """Tells whether clients hold validation rows."""
        return bool(self.n_samples("validation").sum())

    @cached_property
    def label_counts(self) -> npt.NDArray[np.float32]:
        """Training rows of each class on each client, (clients, classes)."""
        return self.count_labels([shard.train for shard in self.shards])

    def count_labels(self, rows: Sequence[Indices]) -> npt.NDArray[np.float32]:
        """Gives the number of rows of each class, (clients, classes)."""
        labels, classes = self.table.y.cpu().numpy(), self.table.classes
        return np.stack([np.bincount(labels[part], minlength=classes) for part in rows]).astype(np.float32)

    def data_warnings(self) -> list[str]:
        """Gives what a person should know of the division before training: labels that cannot be learnt from these rows."""
        seen = self.label_counts > 0
        tested = self.count_labels([shard.test for shard in self.shards])
        said = self.left_out()
        nowhere = np.flatnonzero((tested.sum(0) > 0) & ~seen.any(0))
        if len(nowhere):
            names = ", ".join(str(self.class_name(label)) for label in nowhere[:5])
            have = "has" if len(nowhere) == 1 else "have"
            said.append(f"No client has training rows of {pluralize(len(nowhere), 'class')} that {have} test rows: {names}.")
        strange = np.where(seen, 0, tested).sum(1)
        if strange.any():
            rows, who = int(strange.sum()), self.shards[int(strange.argmax())].name
            have, their = ("has", "its") if rows == 1 else ("have", "their")
            said.append(
                f"{pluralize(rows, 'test row')} of {pluralize(int((strange > 0).sum()), 'client')} {have} a label that {their} "
                f"client never trains on (most: client {who}, {int(strange.max()):,})."
            )
        single = np.flatnonzero(seen.sum(1) == 1)
        if len(single):
            train, such_as = ("trains", ":") if len(single) == 1 else ("train", ", such as")
            who = self.shards[int(single[0])].name
            said.append(f"{pluralize(len(single), 'client')} {train} on one class only{such_as} client {who}.")
        return said

    def left_out(self) -> list[str]:
        """Gives the groups of the data that have too few rows to be clients, in a line, if there are such."""
        fewest, groups = self.origin.get("min_samples"), self.table.client_ids
        if self.origin.get("name") != "natural" or groups is None or not isinstance(fewest, int):
            return []
        sizes = np.bincount(groups, minlength=len(self.table.client_names))
        small = [name for name, size in zip(self.table.client_names, sizes, strict=True) if 0 < size < fewest]
        if not small:
            return []
        names = ", ".join(small[:5]) + (", …" if len(small) > 5 else "")
        have, are = ("has", "is") if len(small) == 1 else ("have", "are")
        return [f"{pluralize(len(small), 'client')} {have} fewer than {pluralize(fewest, 'row')} and {are} left out: {names}."]

    def class_name(self, label: int) -> str:
        """Gives the name of a class, where the data tell it, else its number."""
        names = self.table.metadata.get("classes")
        return str(names[label]) if isinstance(names, list) else str(label)

    def to(self, device: torch.device) -> Federation:
        """Gives the same federation with its table on `device`."""
        return Federation(self.table.to(device), self.shards, self.origin)

    def manifest(self) -> dict[str, object]:
        """Gives the division as plain values: the table's name and content hash, and every client's row numbers."""
        clients = [{"name": shard.name, **{split: shard.split(split).tolist() for split in SPLITS}} for shard in self.shards]
        table = {"name": self.table.name, "rows": len(self.table), "classes": self.table.classes, "sha256": self.table.digest}
        content = {"format_version": FORMAT_VERSION, "table": table, "partition": self.origin, "client": clients}
        source = {**self.table.metadata, **read_otherwise(self.table.source)}
        return {**content, "source": source} if source else content

    def save(self, path: str | Path) -> None:
        """Writes the manifest (TOML)."""
        files.write_text(Path(path), toml.dump(self.manifest()))

    @classmethod
    def load(cls, path: str | Path, table: Table | None = None) -> Federation:
        """Gives the very same division again, on a table with the same content (by default the named data set)."""
        path = Path(path)
        content = read_manifest(path)
        try:
            facts, clients = content["table"], content["client"]
            if not isinstance(facts, dict) or not isinstance(clients, list):
                raise TypeError("[table] or [[client]]")
            name, digest = str(facts["name"]), str(facts["sha256"])
            shards = [Shard(str(c["name"]), *(as_rows(c[split]) for split in SPLITS)) for c in clients]
        except (KeyError, TypeError, ValueError) as problem:
            raise GpflError(f"{path} is not a federation manifest (missing or wrong: {problem})") from None
        if table is None:
            if name not in DATASETS:
                raise unnamed(path, name, content)
            table = find_dataset(name, read_in(path, name)).load()
        if table.digest != digest:
            raise GpflError(
                f"{path} divides a table with sha256 {digest[:12]}…, but the data '{table.name}' has {table.digest[:12]}…: "
                "give the table it was made from"
            )
        origin = content.get("partition", {})
        return cls(table, shards, origin if isinstance(origin, dict) else {})


def federate(
    data: str | Path | Table | Sequence[Arrays] | Mapping[str, Arrays], *, partition: str | None = None, **settings: object
) -> Federation:
    """Gives a federation: a named data set, your own files or a table, divided by a partition, or arrays that lie with clients.

    `settings` are the partition's options, such as `clients=20, classes_per_client=4, seed=1` or `beta=0.1`, and how data are
    read: `federate("visits.csv", client="hospital", label="outcome")`. Clients that bring (x, y) are divided into training
    and test rows; clients that bring (x_train, y_train, x_test, y_test) stay so.
    """
    if isinstance(data, (str, Path, Table)):
        usual: Mapping[str, object] = {}
        if not isinstance(data, Table):
            source, settings = reading(str(data), settings)
            usual = source.defaults.get("partition", {})
        name = partition or str(usual.get("name", "pathological"))
        if name not in PARTITIONS:
            raise GpflError(f"unknown partition '{name}'; {did_you_mean(name, PARTITIONS)}")
        table = data if isinstance(data, Table) else source.load()
        refuse_unknown(settings, {} if isinstance(data, Table) else options.options_of(type(source)))
        known = {key: value for key, value in usual.items() if name == usual["name"] and key != "name"}
        return partition_table(table, options.build(PARTITIONS[name], {**known, **settings}, "partition"))
    if not isinstance(data, (list, tuple, Mapping)) or not data:
        raise GpflError(
            f"data is {type(data).__name__}; give a name, a gpfl.Table, or the arrays of at least one client: [(x, y), …]"
        )
    for key, value in (("partition", partition), ("clients", settings.get("clients")), ("rng", settings.get("rng"))):
        if value is not None:
            raise GpflError(f"{key} is {value!r}, but these arrays lie with their clients: leave it out, or give a Table")
    clients: Mapping[str, Arrays] = data if isinstance(data, Mapping) else {str(n): arrays for n, arrays in enumerate(data)}
    return gather(clients, options.build(Partition, {**settings, "clients": len(clients)}, "partition"))


def read_manifest(path: Path) -> dict[str, object]:
    """Return the content of a manifest, older names replaced by today's."""
    content = toml.read(path)
    return upgrade_manifest(content) if read_version(content, path) == 1 else content


def named_in(manifest: Path) -> str:
    """Gives the name of the data that a manifest divides; refuses such as no name leads to."""
    content = read_manifest(manifest) if manifest.is_file() else {}
    table = content.get("table")
    name = str(table.get("name", "digits")) if isinstance(table, dict) else "digits"
    if name not in DATASETS:
        raise unnamed(manifest, name, content)
    return name


def read_otherwise(source: DataSource | None) -> dict[str, object]:
    """Gives the options by which data of a name were read otherwise than by default; own files tell theirs by themselves."""
    if source is None or isinstance(source, FileDataset):
        return {}
    usual = options.option_values(DATASETS[source.name]) if source.name in DATASETS else {}
    return {key: value for key, value in options.option_values(source).items() if value != usual.get(key)}


def read_in(manifest: Path, name: str) -> dict[str, object]:
    """Gives how the data of a manifest were read, as options of those of that name, or of own files."""
    source = read_manifest(manifest).get("source") if manifest.is_file() else None
    known = options.options_of(type(DATASETS[name]) if name in DATASETS else FileDataset)
    return {key: source[key] for key in known if key in source} if isinstance(source, dict) else {}


def unnamed(manifest: Path, name: str, content: Mapping[str, object]) -> GpflError:
    """Gives the complaint that a manifest divides data which its name does not lead to."""
    source = content.get("source")
    if isinstance(source, dict) and "classes" in source:
        return GpflError(f"{manifest} divides '{name}', files of your own: name the file or folder with --data")
    return GpflError(f"{manifest} divides the data '{name}', which were given in Python: give them again there")


def refuse_unknown(settings: Mapping[str, object], reading: Iterable[str]) -> None:
    """Refuses a setting that is no option of any partition; the options of reading were taken out before, and may be meant."""
    partitions = {key for partition in PARTITIONS.values() for key in options.options_of(partition)}
    for key in settings:
        close = did_you_mean(key, {*partitions, *reading})
        if key not in partitions and any(f"'{other}'" in close for other in reading):
            raise GpflError(f"unknown setting '{key}'; {close}")


def reading(name: str, settings: Mapping[str, object]) -> tuple[DataSource, dict[str, object]]:
    """Gives the data of that name, read as those of the settings say that are its own, and the other settings."""
    own = options.options_of(type(find_dataset(name, {})))
    source = find_dataset(name, {key: value for key, value in settings.items() if key in own})
    return source, {key: value for key, value in settings.items() if key not in own}


def partition_table(table: Table, partition: Partition) -> Federation:
    """Gives the table divided by a partition."""
    shards = [Shard(name, *parts) for name, parts in partition.divided(table).items()]
    rows = {shard.name: len(shard.train) + len(shard.validation) + len(shard.test) for shard in shards}
    few = [rows[shard.name] for shard in lacking(shards)]
    check_filled(shards, partition.way_out(table, list(rows.values()), few) if few else "")
    if partition.validation_fraction:
        check_validated(shards)
    return Federation(table, shards, {"name": partition.name, **options.config_values(partition)})


def gather(clients: Mapping[str, Arrays], partition: Partition) -> Federation:
    """Gives the federation of clients that bring their own arrays, joined into one table."""
    pieces: list[Table] = []
    shards: list[Shard] = []
    start = 0
    for number, (key, brought) in enumerate(clients.items()):
        name = str(key)
        arrays = unpacked(brought, name)
        tables = [Table(arrays[k], arrays[k + 1], name=f"client {name}") for k in range(0, len(arrays), 2)]
        rows = [np.arange(start, start := start + len(table)) for table in tables]
        if len(rows) == 1:
            shards.append(Shard(name, *partition.cut(tables[0], rows[0], number)))
        else:
            train, validation = partition.keep_back(tables[0], rows[0], number)
            shards.append(Shard(name, train, validation, rows[1]))
        pieces += tables
    first = pieces[0]
    for piece in pieces:
        if (piece.shape, piece.x.dtype) != (first.shape, first.x.dtype):
            raise GpflError(
                f"{piece.name} has rows of shape {piece.shape} ({piece.x.dtype}), "
                f"{first.name} of {first.shape} ({first.x.dtype}); they must agree"
            )
    table = Table(torch.cat([piece.x for piece in pieces]), torch.cat([piece.y for piece in pieces]))
    return Federation(table, shards, {"name": "arrays", **options.config_values(partition)})


def as_rows(values: Sequence[int]) -> Indices:
    """Gives row numbers as an array."""
    rows = np.asarray(values)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind != "i"):
        raise ValueError("row numbers")
    return rows.astype(np.int64)


def lacking(shards: Sequence[Shard]) -> list[Shard]:
    """Gives the clients that cannot train or cannot be tested."""
    return [shard for shard in shards if not len(shard.train) or not len(shard.test)]


def check_validated(shards: Sequence[Shard]) -> None:
    """Refuses clients without validation rows where a share was asked for: all of their training rows stay together."""
    bad = [shard for shard in shards if not len(shard.validation)]
    if bad:
        others = f", and {pluralize(len(bad) - 1, 'other client')} of {len(shards):,} have none either" if len(bad) > 1 else ""
        raise GpflError(
            f"client {bad[0].name} has no validation rows: all of its {len(bad[0].train)} training rows stay together{others}; "
            "leave out such clients, or --validation-fraction"
        )


def check_filled(shards: Sequence[Shard], way: str) -> None:
    """Refuses clients without training or test rows, all in one line with the way out."""
    bad = lacking(shards)
    if bad:
        first = bad[0]
        purpose = "test" if len(first.train) else "training"
        others = f", and {pluralize(len(bad) - 1, 'other client')} of {len(shards):,} lack some as well" if len(bad) > 1 else ""
        raise GpflError(
            f"client {first.name} has no {purpose} rows ({len(first.train)} training, {len(first.test)} test){others}: {way}"
        )


def check_bundles(shard: Shard, table: Table) -> None:
    """Refuses a client that has rows of one bundle in two parts."""
    if table.group_ids is None:
        return
    seen: dict[int, str] = {}
    for split in SPLITS:
        for bundle in np.unique(table.group_ids[shard.split(split)]).tolist():
            other = seen.setdefault(bundle, split)
            if other != split:
                rows = [int(shard.split(name)[table.group_ids[shard.split(name)] == bundle][0]) for name in (other, split)]
                raise GpflError(
                    f"client {shard.name} has rows that stay together in {other} and in {split}, such as rows {rows[0]} and "
                    f"{rows[1]}: divide them otherwise, or keep none together"
                )


def check_shard(shard: Shard, total: int) -> None:
    """Refuses a client that has rows outside the table or twice."""
    rows = np.concatenate([shard.split(split) for split in SPLITS])
    outside = rows[(rows < 0) | (rows >= total)]
    if len(outside):
        raise GpflError(f"client {shard.name} has row {int(outside[0])}; the table has rows 0 to {total - 1}")
    if len(np.unique(rows)) != len(rows):
        raise GpflError(f"client {shard.name} has a row twice; training, validation and test rows must be disjoint")


def unpacked(brought: object, name: str) -> Sequence[ArrayLike]:
    """Gives what a client brought as two or four arrays, its torch Datasets read."""
    parts = [brought] if isinstance(brought, Dataset) else brought
    if not isinstance(parts, (tuple, list)):
        raise GpflError(f"client {name} brings {type(parts).__name__}; {WANTED}")
    if parts and all(isinstance(part, Dataset) for part in parts):
        parts = [array for part in parts for array in read_dataset(part, name)]
    if len(parts) not in (2, 4):
        raise GpflError(f"client {name} brings {len(parts)} arrays; {WANTED}")
    return parts


def read_dataset(dataset: Dataset[tuple[Tensor, int]], name: str) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Gives all rows and labels of a dataset whose items are (x, y)."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise GpflError(
            f"the dataset of client {name} has no length: give one with len() and items by number, or arrays (x, y)"
        )
    items = [dataset[k] for k in range(len(dataset))]
    if not items or any(not isinstance(item, (tuple, list)) or len(item) != 2 for item in items):
        raise GpflError(f"the dataset of client {name} must have at least one item, and each must be (x, y)")
    try:
        return torch.stack([torch.as_tensor(x) for x, _ in items]), np.array([int(y) for _, y in items])
    except (RuntimeError, TypeError, ValueError) as problem:
        raise GpflError(f"the dataset of client {name} does not fit one array ({str(problem).splitlines()[0]})") from None


def check_names(shards: Sequence[Shard]) -> None:
    """Refuses a name that two clients have, or that is too long to name a file."""
    seen: set[str] = set()
    for shard in shards:
        if shard.name in seen:
            raise GpflError(f"two clients are named '{shard.name}'; give each a name of its own")
        if len(shard.name.encode()) > LONGEST_NAME:
            raise GpflError(f"the client name '{shard.name[:20]}…' names a file and has over {LONGEST_NAME} bytes: shorten it")
        seen.add(shard.name)


def check_disjoint(shards: Sequence[Shard], total: int) -> None:
    """Refuses a row that two clients hold: one's test row may be the other's training row."""
    owner = np.full(total, -1)
    for number, shard in enumerate(shards):
        rows = np.concatenate([shard.split(split) for split in SPLITS])
        taken = rows[owner[rows] >= 0]
        if len(taken):
            first = shards[owner[taken[0]]].name
            raise GpflError(
                f"row {int(taken[0])} belongs to client {first} and to client {shard.name}; clients must be disjoint"
            )
        owner[rows] = number
