"""Federations: a table and the samples of each client; manifests that rebuild them.

A manifest is a TOML file that names the table and lists the samples of each client.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from gpfl.core import options
from gpfl.core.local_round import Indices
from gpfl.data import DATASETS, FileDataset, find_dataset
from gpfl.data.table import SPLITS, DataSource, Table
from gpfl.errors import GpflError, pluralize
from gpfl.federation.preprocessing import FederatedPreprocessing
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_manifest

MANIFEST = "federation.toml"  # name of the manifest in a run's folder
MAX_NAME_BYTES = 64  # longest name of a client, which names files


@dataclass(frozen=True)
class Shard:
    """The samples of one client, as indices into the table."""

    name: str
    train: Indices
    validation: Indices
    test: Indices

    def split(self, name: str) -> Indices:
        """Return the samples of a split, "train", "validation" or "test"."""
        samples: Indices = getattr(self, name)
        return samples

    @property
    def samples(self) -> Indices:
        """All samples of the client."""
        return np.concatenate([self.train, self.validation, self.test])

    def shift(self, start: int) -> "Shard":
        """Return the same samples as indices into a larger table that contains this one from row `start` on."""
        return Shard(self.name, self.train + start, self.validation + start, self.test + start) if start else self


class Federation:
    """A table divided among clients.

    Args:
        table: All samples.
        shards: The samples of each client.
        partition: How the table was divided, for the manifest.
        preprocessing: The fitted preprocessing of a table whose raw columns are encoded already; by default they are
            encoded now, by the statistics of each client's training samples.

    """

    def __init__(
        self,
        table: Table,
        shards: Sequence[Shard],
        partition: Mapping[str, object] | None = None,
        preprocessing: FederatedPreprocessing | None = None,
    ) -> None:
        self.table, self.shards, self.preprocessing = table, tuple(shards), preprocessing
        self.partition = dict(partition or {})
        if not self.shards:
            raise GpflError("a federation needs at least one client")
        check_nonempty(self.shards, "give every client both, or leave such clients out")
        _check_shards(self.shards, table)
        if table.raw is not None and preprocessing is None:
            training = {shard.name: shard.train for shard in self.shards}
            self.preprocessing = FederatedPreprocessing.fit(table.raw, training, table.preprocessing)
            self.table = self.preprocessing.encode(table, {shard.name: shard.samples for shard in self.shards})

    def __len__(self) -> int:
        return len(self.shards)

    def __repr__(self) -> str:
        sizes = self.n_samples("train")
        low, high = sizes.min(), sizes.max()
        return (
            f"Federation of {pluralize(len(self), 'client')} on '{self.table.name}': {sizes.sum()} training samples "
            f"({low if low == high else f'{low} to {high}'} per client), {self.n_samples('test').sum()} test samples, "
            f"{self.table.classes} classes"
        )

    def n_samples(self, split: str) -> npt.NDArray[np.int64]:
        """Return the number of samples of each client."""
        return np.array([len(shard.split(split)) for shard in self.shards])

    def labels(self, client: int, split: str) -> npt.NDArray[np.int64]:
        """Return the labels of a client's samples."""
        labels: npt.NDArray[np.int64] = self.table.y.cpu().numpy()[self.shards[client].split(split)]
        return labels

    @property
    def class_names(self) -> list[str]:
        """The names of the classes if the data have them, else their numbers."""
        return list(self.table.class_names) or [str(label) for label in range(self.table.classes)]

    @property
    def has_validation(self) -> bool:
        """Whether clients have validation samples."""
        return bool(self.n_samples("validation").sum())

    @cached_property
    def label_counts(self) -> npt.NDArray[np.float32]:
        """Training samples of each class on each client, (clients, classes)."""
        return self.count_labels([shard.train for shard in self.shards])

    def count_labels(self, parts: Sequence[Indices]) -> npt.NDArray[np.float32]:
        """Return the samples of each class in each part, (parts, classes)."""
        labels, classes = self.table.y.cpu().numpy(), self.table.classes
        return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.float32)

    def data_warnings(self) -> list[str]:
        """Return warnings about clients that were left out and labels that cannot be learnt."""
        trained, tested = self.label_counts > 0, self.count_labels([shard.test for shard in self.shards])
        warnings = []
        if small := self._left_out_clients():
            needed = pluralize(cast(int, self.partition["min_samples"]), "sample")
            warnings.append(f"{pluralize(len(small), 'client')} with fewer than {needed}, left out: {_shorten(small)}.")
        if untrained := [self.class_names[label] for label in np.flatnonzero((tested.sum(0) > 0) & ~trained.any(0))]:
            warnings.append(f"{pluralize(len(untrained), 'class')} only in test samples: {_shorten(untrained)}.")
        if self.preprocessing is not None and self.table.raw is not None:
            divided = np.concatenate([shard.samples for shard in self.shards])
            unseen = self.preprocessing.federated.count_unseen(self.table.raw.select(divided))
            values = pluralize(sum(unseen.values()), "value")
            listed = _shorten([f"{name} {count:,}" for name, count in unseen.items()])
            if unseen:
                warnings.append(f"{values} that no client trains on, encoded as zeros, in categorical columns: {listed}.")
        unknown = np.where(trained, 0, tested).sum(1)
        if unknown.any():
            samples, clients = pluralize(int(unknown.sum()), "test sample"), pluralize(int((unknown > 0).sum()), "client")
            most = f"client {self.shards[unknown.argmax()].name}, {int(unknown.max()):,}"
            warnings.append(f"{samples} of {clients} with labels that their client never trains on (most: {most}).")
        if single := [self.shards[client].name for client in np.flatnonzero(trained.sum(1) == 1)]:
            warnings.append(f"{pluralize(len(single), 'client')} with training samples of one class only: {_shorten(single)}.")
        return warnings

    def to(self, device: torch.device) -> "Federation":
        """Return the same federation with its table on `device`."""
        return Federation(self.table.to(device), self.shards, self.partition, self.preprocessing)

    def manifest(self) -> dict[str, object]:
        """Return the content of the manifest: the table's name and digest, and the samples of each client."""
        clients = [{"name": shard.name, **{split: shard.split(split).tolist() for split in SPLITS}} for shard in self.shards]
        table = {"name": self.table.name, "rows": len(self.table), "classes": self.table.classes, "sha256": self.table.digest}
        content = {"format_version": FORMAT_VERSION, "table": table, "partition": self.partition, "client": clients}
        source = {**self.table.metadata, **_changed_options(self.table.source)}
        return {**content, "source": source} if source else content

    def save(self, path: str | Path) -> None:
        """Write the manifest."""
        files.write_text(Path(path), toml.dump(self.manifest()))

    @classmethod
    def load(cls, path: str | Path, table: Table | None = None) -> "Federation":
        """Load a federation from its manifest; the table that it divides is by default the named dataset."""
        path = Path(path)
        content = read_manifest(path)
        try:
            header, clients = content["table"], content["client"]
            if not isinstance(header, dict) or not isinstance(clients, list):
                raise TypeError("[table] or [[client]]")
            name, digest = str(header["name"]), str(header["sha256"])
            shards = [Shard(str(c["name"]), *(_parse_indices(c[split]) for split in SPLITS)) for c in clients]
        except (KeyError, TypeError, ValueError) as error:
            raise GpflError(f"{path} is not a federation manifest (missing or wrong: {error})") from None
        if table is None:
            if name not in DATASETS:
                raise _unknown_data_error(path, name, content)
            table = find_dataset(name, manifest_data_options(path, name)).load()
        if table.digest != digest:
            source = content.get("source")
            if isinstance(source, dict) and "columns" in source:
                raise GpflError(
                    f"{path} was written by an earlier gpfl, which scaled columns by pooled rows; this version scales them by "
                    "the training samples of each client, so numbers differ: start a new run (models of the old one still load)"
                )
            raise GpflError(
                f"{path} divides a table with sha256 {digest[:12]}…, but the data '{table.name}' has {table.digest[:12]}…: "
                "give the table it was made from"
            )
        partition = content.get("partition", {})
        return cls(table, shards, partition if isinstance(partition, dict) else {})

    def _left_out_clients(self) -> list[str]:
        needed, ids = self.partition.get("min_samples"), self.table.client_ids
        if self.partition.get("name") != "natural" or ids is None or not isinstance(needed, int):
            return []
        sizes = np.bincount(ids, minlength=len(self.table.client_names))
        return [name for name, size in zip(self.table.client_names, sizes, strict=True) if 0 < size < needed]


def share_table(federations: Sequence[Federation]) -> list[Federation]:
    """Return the same federations on one table, so that an engine can train the clients of all in the same batched steps.

    Federations with the same encoded samples share them. Otherwise, as where each was encoded by the statistics of its own
    training samples, their tables are concatenated, and the indices in the shards of each are shifted to its own.
    """
    tables: list[Table] = []
    positions = []
    for federation in federations:
        same = (i for i, table in enumerate(tables) if _has_same_samples(table, federation.table))
        positions.append(next(same, len(tables)))
        if positions[-1] == len(tables):
            tables.append(federation.table)
    joint = tables[0] if len(tables) == 1 else tables[0].concatenate(tables[1:])
    starts = np.cumsum([0, *(len(table) for table in tables)])
    return [
        Federation(joint, [shard.shift(starts[i]) for shard in each.shards], each.partition, each.preprocessing)
        for each, i in zip(federations, positions, strict=True)
    ]


def _has_same_samples(one: Table, other: Table) -> bool:
    if one.x is other.x and one.y is other.y:
        return True
    if one.input_spec != other.input_spec or one.classes != other.classes:
        raise GpflError(f"concurrent trials must have the same inputs and classes, not {one.input_spec} and others")
    return one.x.shape == other.x.shape and torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


def check_nonempty(
    shards: Sequence[Shard], fix: str | Callable[[Sequence[int]], str], splits: Sequence[str] = ("train", "test")
) -> None:
    """Raise if clients lack samples of a split. `fix` may be a function of the numbers of samples of those clients."""
    lacking = [shard for shard in shards if not all(len(shard.split(split)) for split in splits)]
    if lacking:
        first = lacking[0]
        split = next(split for split in splits if not len(first.split(split)))
        others = pluralize(len(lacking) - 1, "other client")
        more = f", and {others} of {len(shards):,} lack some as well" if len(lacking) > 1 else ""
        remedy = fix if isinstance(fix, str) else fix([len(shard.samples) for shard in lacking])
        raise GpflError(
            f"client {first.name} has no {'training' if split == 'train' else split} samples ({len(first.train)} training, "
            f"{len(first.test)} test){more}: {remedy}"
        )


def _check_shards(shards: Sequence[Shard], table: Table) -> None:
    """Raise if a name cannot name a file, clients or splits share samples, or a group is in two splits of a client."""
    names = Counter(shard.name for shard in shards)
    owner = np.full(len(table), -1)
    for i, shard in enumerate(shards):
        name, samples = shard.name, shard.samples
        if names[name] > 1:
            raise GpflError(f"two clients are named '{name}'; give each its own name")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise GpflError(f"the client name '{name[:20]}…' names a file and has over {MAX_NAME_BYTES} bytes: shorten it")
        outside = samples[(samples < 0) | (samples >= len(table))]
        if len(outside):
            raise GpflError(f"client {name} has sample {outside[0]}; the table has samples 0 to {len(table) - 1}")
        if len(np.unique(samples)) != len(samples):
            raise GpflError(f"client {name} has a sample twice; training, validation and test samples must be disjoint")
        taken = samples[owner[samples] >= 0]
        if len(taken):  # it could be one's test and the other's training sample
            first = shards[owner[taken[0]]].name
            raise GpflError(f"sample {taken[0]} belongs to client {first} and to client {name}; clients must be disjoint")
        owner[samples] = i
        if table.group_ids is not None:
            splits = np.repeat(np.arange(len(SPLITS)), [len(shard.split(split)) for split in SPLITS])
            groups = table.group_ids[samples]
            order = np.argsort(groups, kind="stable")
            divided = (np.diff(groups[order]) == 0) & (np.diff(splits[order]) != 0)
            if divided.any():
                one, other = order[divided.argmax() :][:2]
                raise GpflError(
                    f"client {name} has samples of one group in {SPLITS[splits[one]]} and in {SPLITS[splits[other]]}, such as "
                    f"samples {samples[one]} and {samples[other]}: assign them to one split, or leave out the groups"
                )


def _parse_indices(values: Sequence[int]) -> Indices:
    indices = np.asarray(values)
    if indices.ndim != 1 or (len(indices) and indices.dtype.kind != "i"):
        raise ValueError("indices of samples")
    return indices.astype(np.int64)


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


# Manifests.


def read_manifest(path: Path) -> dict[str, object]:
    """Return the content of a manifest, upgraded to today's names."""
    content = toml.read(path)
    return upgrade_manifest(content) if read_version(content, path) == 1 else content


def manifest_data_name(path: Path) -> str:
    """Return the name of the dataset that a manifest divides. Raise if it is not a named dataset."""
    content = read_manifest(path) if path.is_file() else {}
    table = content.get("table")
    name = str(table.get("name", "digits")) if isinstance(table, dict) else "digits"
    if name not in DATASETS:
        raise _unknown_data_error(path, name, content)
    return name


def manifest_data_options(path: Path, name: str) -> dict[str, object]:
    """Return the options with which the data of a manifest were read."""
    source = read_manifest(path).get("source") if path.is_file() else None
    known = options.options_of(type(DATASETS[name]) if name in DATASETS else FileDataset)
    return {key: source[key] for key in known if key in source} if isinstance(source, dict) else {}


def _changed_options(source: DataSource | None) -> dict[str, object]:
    """Return the options of a named dataset that differ from its defaults. Files record theirs in the table's metadata."""
    if source is None or isinstance(source, FileDataset):
        return {}
    defaults = options.option_values(DATASETS[source.name]) if source.name in DATASETS else {}
    return {key: value for key, value in options.option_values(source).items() if value != defaults.get(key)}


def _unknown_data_error(path: Path, name: str, content: Mapping[str, object]) -> GpflError:
    source = content.get("source")
    if isinstance(source, dict) and "classes" in source:
        return GpflError(f"{path} divides '{name}', files of your own: name the file or folder with --data")
    return GpflError(f"{path} divides the data '{name}', which were given in Python: give them again there")
