"""Partitions: which samples of a table go to which client, and to which of its splits."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from gpfl.core.local_round import Indices
from gpfl.core.options import option
from gpfl.core.randomness import MAX_SEED, generator
from gpfl.data.table import SPLITS, Table
from gpfl.errors import GpflError, pluralize
from gpfl.federation import pfllib_partition

MAX_DRAWS = 5000  # draws of a Dirichlet partition after which it counts as impossible

RandomNumbers: TypeAlias = np.random.Generator | np.random.RandomState
NAME_CLIENTS = "name the column of clients with --client"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A division of a table among clients, and of each client's samples into train, validation and test."""

    name: ClassVar[str]

    clients: int = option(20, "number of clients", symbol="N", min=1)
    total_clients: int = option(
        0,
        "partition among this many clients but use only `clients` of them, at random or the first with rng pfllib; 0 = off",
        min=0,
    )
    test_fraction: float = option(0.25, "fraction of each client's samples for testing", above=0.0, max=0.9)
    validation_fraction: float = option(0.0, "fraction of each client's training samples for validation", min=0.0, max=0.9)
    seed: int = option(1, "seed of the partition; trials with other run seeds share it", min=0, max=MAX_SEED)
    rng: str = option(
        "gpfl",
        "random number generator: gpfl's, or PFLlib's, whose partition with seed 1 is that of the authors' scripts",
        choices=("gpfl", "pfllib"),
        omit_default=True,
    )

    def apply(self, table: Table, split_seed: int | None = None) -> dict[str, tuple[Indices, Indices, Indices]]:
        """Return the training, validation and test samples of each client that takes part.

        With `split_seed` the clients stay the same and the split into training, validation and test samples changes.
        """
        if self.rng == "pfllib":
            return self._apply_pfllib(table)
        splitting = self if split_seed is None else dataclasses.replace(self, seed=split_seed)
        return {
            name: splitting.split(table, samples, i) for i, (name, samples) in enumerate(self.select_clients(table).items())
        }

    def select_clients(self, table: Table) -> dict[str, Indices]:
        """Return the samples of the clients that take part: all, or a random subset; a larger subset contains a smaller one."""
        self.validate()
        if table.splits is not None and self.test_fraction != Partition.test_fraction:
            raise GpflError(
                f"partition.test_fraction is {self.test_fraction:g}, but data '{table.name}' has test samples already: "
                "leave it out"
            )
        assigned = self._for_all_clients().assign(table, generator(self.seed, "split"))
        count = self._count(table, len(assigned))
        chosen = set(generator(self.seed, "subset").permutation(len(assigned))[:count].tolist())
        return {name: samples for i, (name, samples) in enumerate(assigned.items()) if i in chosen}

    def validate(self) -> None:
        """Raise if options contradict each other."""
        if self.total_clients and self.clients > self.total_clients:
            raise GpflError(
                f"partition.clients is {self.clients} of partition.total_clients = {self.total_clients}; it must not be more: "
                "lower --clients"
            )

    def assign(self, table: Table, rng: RandomNumbers) -> dict[str, Indices]:
        """Return the samples of each client by name, disjoint; as the authors' code assigns them with a `RandomState`."""
        if table.group_ids is not None:
            fix = "use --partition natural" if table.client_ids is not None else NAME_CLIENTS
            raise GpflError(f"data '{table.name}' has groups, and partition '{self.name}' assigns single samples: {fix}")
        labels = table.y.cpu().numpy()
        if table.splits is None:
            return _by_index(self.assign_labels(labels, table.classes, rng))
        # The table may hold the training before the test samples: in mixed order each client gets some of both.
        order = rng.permutation(len(labels))
        return _by_index([order[samples] for samples in self.assign_labels(labels[order], table.classes, rng)])

    def assign_labels(self, labels: Indices, classes: int, rng: RandomNumbers) -> list[Indices]:
        """Return the samples of clients 0, 1, … of a partition by labels; as the authors' code with a `RandomState`."""
        raise NotImplementedError

    def split(self, table: Table, samples: Indices, client: int) -> tuple[Indices, Indices, Indices]:
        """Return a client's training, validation and test samples: by the table's splits, else at random, not stratified.

        Groups are kept whole; their test samples come near to the fraction.
        """
        if table.splits is not None:
            train, validation, test = (samples[table.splits[samples] == i] for i in range(len(SPLITS)))
            return (train, validation, test) if len(validation) else (*self.split_validation(table, train, client), test)
        rng = generator(self.seed, "cut", client)
        shuffled = rng.permutation(samples)
        if table.group_ids is not None:
            test = choose_groups(table.group_ids[shuffled], _labels(table, shuffled), self.test_fraction, rng)
        else:  # the addend because (1 - 0.8) * 5 is a little less than 1
            test = np.arange(len(samples)) >= int((1 - self.test_fraction) * len(samples) + 1e-9)
        return *self.split_validation(table, shuffled[~test], client), shuffled[test]

    def split_validation(self, table: Table, samples: Indices, client: int) -> tuple[Indices, Indices]:
        """Split training samples into training and validation: at least one for validation, unless all are one group."""
        if not self.validation_fraction:
            return samples, samples[:0]
        rng = generator(self.seed, "validation", client)
        if table.group_ids is not None:
            mask = choose_groups(table.group_ids[samples], _labels(table, samples), self.validation_fraction, rng)
        else:
            count = max(1, round(self.validation_fraction * len(samples)))
            mask = np.isin(np.arange(len(samples)), rng.permutation(len(samples))[:count])
        return samples[~mask], samples[mask]

    def suggest_fix(self, table: Table, sizes: Sequence[int], lacking: Sequence[int]) -> str:
        """Return the fix for clients without training or test samples, from the sizes of all and of those clients."""
        return "lower --clients, or change --test-fraction or --validation-fraction"

    def _apply_pfllib(self, table: Table) -> dict[str, tuple[Indices, Indices, Indices]]:
        self.validate()
        for known, what in ((table.splits, "has test samples already"), (table.group_ids, "has groups")):
            if known is not None:
                raise GpflError(
                    f"partition.rng is 'pfllib', but data '{table.name}' {what}, and the authors' code draws single samples: "
                    "set it to gpfl"
                )
        rng = np.random.RandomState(self.seed)
        assigned = self._for_all_clients().assign(table, rng)
        count = self._count(table, len(assigned))
        split = {name: pfllib_partition.split(samples, self.test_fraction, rng) for name, samples in assigned.items()}
        return {
            name: (*self.split_validation(table, train, i), test)
            for i, (name, (train, test)) in enumerate(list(split.items())[:count])
        }

    def _for_all_clients(self) -> "Partition":
        return dataclasses.replace(self, clients=self.total_clients, total_clients=0) if self.total_clients else self

    def _count(self, table: Table, available: int) -> int:
        count = self.clients or available
        if count > available:
            raise GpflError(f"partition.clients is {count}; data '{table.name}' has {available} clients: lower --clients")
        return count


@dataclass(frozen=True, kw_only=True)
class Pathological(Partition):
    """Each client has samples of a few classes only; neighbouring clients share classes, in unequal numbers."""

    name: ClassVar[str] = "pathological"

    classes_per_client: int = option(2, "classes of each client", min=1)
    balanced: bool = option(False, "split each class evenly among its clients")

    def assign_labels(self, labels: Indices, classes: int, rng: RandomNumbers) -> list[Indices]:
        """Assign each class in turn to the next clients that lack classes."""
        if self.classes_per_client > classes:
            raise GpflError(
                f"partition.classes_per_client is {self.classes_per_client}; the data has {classes} classes: "
                "lower --classes-per-client"
            )
        slots = self.clients * self.classes_per_client
        if slots < classes:
            raise GpflError(
                f"{self.clients} clients × {self.classes_per_client} classes = {slots}, but the data has {classes} classes, "
                "so some samples would belong to no client: raise --clients or --classes-per-client"
            )
        parts: list[list[Indices]] = [[] for _ in range(self.clients)]
        for label, holders in enumerate(assign_classes(self.clients, classes, self.classes_per_client)):
            members = np.flatnonzero(labels == label)
            sizes = self._draw_sizes(label, len(members), len(holders), classes, rng)
            for client, part in zip(holders, np.split(members, np.cumsum(sizes)), strict=True):
                parts[client].append(part)
        return [np.concatenate(part) for part in parts]

    def _draw_sizes(self, label: int, members: int, holders: int, classes: int, rng: RandomNumbers) -> Indices:
        """Return how many samples of a class each of its clients gets; the last one, left out, takes the rest.

        The numbers are uniform in [max(q/10, 40/U), q), where q is the mean and U the number of classes.
        """
        mean = members / holders
        pfllib = isinstance(rng, np.random.RandomState)
        low, high = int(max(mean / 10, pfllib_partition.MIN_SAMPLES / classes, 0 if pfllib else 1)), int(mean)
        if self.balanced:
            even = np.full(holders, high) if pfllib else np.diff(np.linspace(0, members, holders + 1).astype(int))
            sizes = even[:-1]
        elif low >= high and holders > 1:
            raise GpflError(
                f"class {label} has {members} samples for {holders} clients, {mean:.1f} each; unequal shares need more than "
                f"{low}: lower --clients or --classes-per-client, or use --balanced"
            )
        else:
            draw = rng.randint if isinstance(rng, np.random.RandomState) else rng.integers
            sizes = np.array([int(draw(low, high)) for _ in range(holders - 1)], dtype=np.int64)
        if not pfllib and min([*sizes, members - sizes.sum()]) < 1:
            raise GpflError(
                f"class {label} has {members} samples for {holders} clients: lower --clients or --classes-per-client"
            )
        return sizes


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Each class is distributed over the clients in proportions drawn from a symmetric Dirichlet distribution."""

    name: ClassVar[str] = "dirichlet"

    beta: float = option(
        0.1, "concentration; the smaller, the more the clients differ", symbol="β", typical="0.01 to 5", above=0.0
    )
    cap: bool = option(True, "assign no further classes to a client that has n/N samples (authors' code)")
    min_samples: int = option(
        0, "redraw until every client has this many samples; 0 = the smaller of 40 and half of n/N", min=0
    )

    def assign_labels(self, labels: Indices, classes: int, rng: RandomNumbers) -> list[Indices]:
        """Draw proportions until the smallest client has enough samples."""
        needed = self._min_samples(len(labels))
        if isinstance(rng, np.random.RandomState):
            if not self.cap:
                raise GpflError(
                    "partition.cap is false and partition.rng is 'pfllib', but the authors' code has the cap: "
                    "use --partition-rng gpfl"
                )
            return pfllib_partition.dirichlet(labels, classes, self.clients, self.beta, needed, MAX_DRAWS, rng)
        counts = np.bincount(labels, minlength=classes)
        best = 0
        for _ in range(MAX_DRAWS):
            sizes = self._draw_sizes(counts, rng)
            smallest = int(sizes.sum(0).min())
            if smallest >= needed:
                return self._draw_samples(labels, sizes, rng)
            best = max(best, smallest)
        raise GpflError(
            f"none of {MAX_DRAWS} draws with beta {self.beta:g} gave each of {self.clients} clients {needed} samples "
            f"(the best gave its smallest client {best}): raise --beta, or lower --clients or --min-samples"
        )

    def _min_samples(self, total: int) -> int:
        needed = self.min_samples or max(1, min(pfllib_partition.MIN_SAMPLES, total // self.clients // 2))
        if needed * self.clients > total:
            raise GpflError(
                f"{self.clients} clients × {needed} samples = {needed * self.clients}, but the table has {total} samples: "
                "lower --clients or --min-samples"
            )
        return needed

    def _draw_sizes(self, counts: Indices, rng: np.random.Generator) -> Indices:
        """Return the number of samples of each class and client, (classes, clients)."""
        sizes = np.zeros((len(counts), self.clients), dtype=np.int64)
        totals = np.zeros(self.clients, dtype=np.int64)
        capacity = counts.sum() / self.clients
        for label in np.flatnonzero(counts):
            shares = rng.dirichlet(np.full(self.clients, self.beta))
            if self.cap:
                shares = np.where(totals < capacity, shares, 0.0)
            if shares.sum() == 0:  # all weight fell on clients that are full
                shares = (totals < capacity).astype(float)
            bounds = (np.cumsum(shares / shares.sum()) * counts[label]).astype(int)
            bounds[-1] = counts[label]
            sizes[label] = np.diff(bounds, prepend=0)
            totals += sizes[label]
        return sizes

    def _draw_samples(self, labels: Indices, sizes: Indices, rng: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(self.clients)]
        for label, counts in enumerate(sizes):
            members = rng.permutation(np.flatnonzero(labels == label))
            for client, part in enumerate(np.split(members, np.cumsum(counts)[:-1])):
                parts[client].append(part)
        return [np.concatenate(part) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """The clients of the data as they were collected: domains, subjects, sites."""

    name: ClassVar[str] = "natural"

    clients: int = option(0, "clients that take part, chosen at random; 0 = all", symbol="N", min=0)
    min_samples: int = option(0, "leave out clients with fewer samples", min=0)

    def validate(self) -> None:
        """Raise if a number of clients to divide among is set."""
        if self.total_clients:
            raise GpflError(
                f"partition.total_clients is {self.total_clients}, but partition 'natural' has the clients of the data: "
                "set --clients alone"
            )

    def assign(self, table: Table, rng: RandomNumbers) -> dict[str, Indices]:
        """Return the samples of each client that has enough, shuffled where the authors' code shuffles them."""
        if table.client_ids is None:
            fix = NAME_CLIENTS if table.group_ids is not None else "use --partition dirichlet or pathological"
            if table.client_hint:
                at_random = "" if table.group_ids is not None else ", or divide the rows at random with --partition dirichlet"
                fix = f"{table.client_hint}{at_random}"
            raise GpflError(f"data '{table.name}' does not name the client of each sample: {fix}")
        parts = {name: np.flatnonzero(table.client_ids == i) for i, name in enumerate(table.client_names)}
        eligible = {name: samples for name, samples in parts.items() if len(samples) >= max(1, self.min_samples)}
        if not eligible:
            largest = max(len(samples) for samples in parts.values())
            raise GpflError(
                f"partition.min_samples is {self.min_samples}; the largest client of data '{table.name}' has {largest} "
                "samples: lower --min-samples"
            )
        if isinstance(rng, np.random.RandomState) and table.name in pfllib_partition.SHUFFLED_DATA:
            return {name: samples[rng.permutation(len(samples))] for name, samples in eligible.items()}
        return eligible

    def suggest_fix(self, table: Table, sizes: Sequence[int], lacking: Sequence[int]) -> str:
        """Suggest a --min-samples that leaves out clients with too few samples, and question the column of clients."""
        needed = max(lacking) + 1
        small = sum(size < needed for size in sizes)
        column = table.metadata.get("client")
        question = f"; is '{column}' the column of clients?" if column else ""
        group = "all of its samples are one group; " if table.group_ids is not None else ""
        if small == len(sizes):
            return f"{group}give clients more samples{question}"
        return f"{group}--min-samples {needed} leaves out {small:,} of {pluralize(len(sizes), 'client')}{question}"


def choose_groups(group_ids: Indices, labels: Indices, fraction: float, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Return a mask of samples in randomly chosen groups, which hold about a fraction of all samples.

    Of two groups or more, at least one is chosen and one is left. If every group has a single class, the choice is
    stratified by class as far as the groups allow, and each class keeps a group.
    """
    groups, first, inverse, sizes = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
    pure = (labels == labels[first][inverse]).all()
    classes = labels[first] if pure else np.zeros(len(groups), dtype=np.int64)
    chosen, target, count = np.zeros(len(groups), dtype=bool), 0.0, 0
    by_class = [rng.permutation(np.flatnonzero(classes == label)) for label in rng.permutation(np.unique(classes))]
    for members in sorted(by_class, key=len):  # later classes make up for one that has a single group
        target, left = target + fraction * sizes[members].sum(), len(members)
        for group in members:
            if left > 1 and abs(count + sizes[group] - target) < abs(count - target):
                chosen[group], count, left = True, count + sizes[group], left - 1
    if not chosen.any() and len(groups) > 1:
        chosen[min(range(len(groups)), key=lambda group: ((classes == classes[group]).sum() < 2, sizes[group]))] = True
    return chosen[inverse]


def assign_classes(clients: int, classes: int, per_client: int) -> list[list[int]]:
    """Return the clients of each class: the first clients that lack classes, after those that need all remaining classes.

    The numbers of clients per class are as equal as possible. The result equals the authors' wherever their rule assigns
    every client enough classes.
    """
    room = np.full(clients, per_client)
    total = clients * per_client
    ends = [(2 * total * (label + 1) + classes) // (2 * classes) for label in range(classes)]  # rounded, half up
    holders = []
    for label in range(classes):
        count = ends[label] - (ends[label - 1] if label else 0)
        urgent = room >= classes - label
        order = np.lexsort((np.arange(clients), ~urgent))
        chosen = sorted(int(client) for client in order[room[order] > 0][:count])
        room[chosen] -= 1
        holders.append(chosen)
    return holders


def _by_index(parts: Sequence[Indices]) -> dict[str, Indices]:
    return {str(i): samples for i, samples in enumerate(parts)}


def _labels(table: Table, samples: Indices) -> Indices:
    return table.y.cpu().numpy()[samples]
