"""Splits: which rows of a table go to which client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gpfl.core.local_round import Indices
from gpfl.core.options import option
from gpfl.core.randomness import MAX_SEED, generator
from gpfl.data.table import SPLITS, Table
from gpfl.errors import GpflError, pluralize
from gpfl.federation import pfllib_partition as reference_division

Labels = npt.NDArray[np.int64]
WHOSE = "say whose they are with --client"
DRAWS = 5000
"""How often a Dirichlet partition is drawn before it is called impossible."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A way to divide a table among clients, and how each client's rows are divided into train, validation and test."""

    name: ClassVar[str]

    clients: int = option(20, "number of clients", symbol="N", min=1)
    total_clients: int = option(
        0,
        "divide among this many clients, of whom `clients` take part: chosen at random, or the first (draws reference)",
        min=0,
    )
    test_fraction: float = option(0.25, "share of each client's rows kept for testing", above=0.0, max=0.9)
    validation_fraction: float = option(0.0, "share of each client's training rows kept for choosing a round", min=0.0, max=0.9)
    seed: int = option(1, "seed of the partition; trials with other seeds share one partition", min=0, max=MAX_SEED)
    rng: str = option(
        "gpfl",
        "random numbers: our own, or 'reference' = those of the authors' code, with seed 1 its very division",
        choices=("gpfl", "pfllib"),
        omit_default=True,
    )

    def divided(self, table: Table) -> dict[str, tuple[Indices, Indices, Indices]]:
        """Gives the training, validation and test rows of the clients that take part."""
        if self.rng == "pfllib":
            return self._as_reference(table)
        return {name: self.cut(table, rows, number) for number, (name, rows) in enumerate(self.choose(table).items())}

    def _as_reference(self, table: Table) -> dict[str, tuple[Indices, Indices, Indices]]:
        """Gives them as the authors' code draws them; of `of` clients the first ones take part."""
        self.check()
        if table.splits is not None:
            raise GpflError(
                f"partition.rng is 'pfllib', but data '{table.name}' tells which rows are for testing, and the authors' code "
                "draws them: set it to gpfl"
            )
        if table.group_ids is not None:
            raise GpflError(
                f"partition.rng is 'pfllib', but data '{table.name}' keeps rows together, and the authors' code draws them "
                "one by one: set it to gpfl"
            )
        whole = dataclasses.replace(self, clients=self.total_clients, total_clients=0) if self.total_clients else self
        draw = np.random.RandomState(self.seed)
        assigned = whole.reference(table, draw)
        wanted = self.clients or len(assigned)
        self._refuse_more(table, wanted, len(assigned))
        cuts = {name: reference_division.cut(rows, self.test_fraction, draw) for name, rows in assigned.items()}
        taking_part = list(cuts.items())[:wanted]
        return {name: (*self.keep_back(table, train, number), test) for number, (name, (train, test)) in enumerate(taking_part)}

    def reference(self, table: Table, draw: np.random.RandomState) -> dict[str, Indices]:
        """Gives each client's rows by its name, drawn as the authors' code draws them."""
        raise NotImplementedError

    def choose(self, table: Table) -> dict[str, Indices]:
        """Gives the rows of the clients that take part: all, or a seeded choice of them that grows with its number."""
        self.check()
        if table.splits is not None and self.test_fraction != Partition.test_fraction:
            raise GpflError(
                f"partition.test_fraction is {self.test_fraction:g}, but data '{table.name}' tells which rows are for testing: "
                "leave it out"
            )
        whole = dataclasses.replace(self, clients=self.total_clients, total_clients=0) if self.total_clients else self
        assigned = whole.assign(table, generator(self.seed, "split"))
        wanted = self.clients or len(assigned)
        self._refuse_more(table, wanted, len(assigned))
        kept = set(generator(self.seed, "subset").permutation(len(assigned))[:wanted].tolist())
        return {name: rows for place, (name, rows) in enumerate(assigned.items()) if place in kept}

    def _refuse_more(self, table: Table, wanted: int, there: int) -> None:
        if wanted > there:
            raise GpflError(f"partition.clients is {wanted}; data '{table.name}' has {there} groups: ask for at most that")

    def check(self) -> None:
        """Refuses numbers that do not go together."""
        if self.total_clients and self.clients > self.total_clients:
            raise GpflError(
                f"partition.clients is {self.clients} of partition.total_clients = {self.total_clients}; it must not be more: "
                "lower --clients"
            )

    def assign(self, table: Table, draw: np.random.Generator) -> dict[str, Indices]:
        """Gives each client's rows by its name: disjoint, and all of the table."""
        if table.group_ids is not None:
            way = "use --partition natural" if table.client_ids is not None else WHOSE
            raise GpflError(
                f"data '{table.name}' keeps rows together, and partition '{self.name}' deals rows one by one: {way}"
            )
        labels = table.y.cpu().numpy()
        if table.splits is None:
            parts = self.deal(labels, table.classes, draw)
        else:  # training and test rows may lie in blocks: mixed, each client gets some of both
            order = draw.permutation(len(labels))
            parts = [order[rows] for rows in self.deal(labels[order], table.classes, draw)]
        return numbered(parts)

    def deal(self, labels: Labels, classes: int, draw: np.random.Generator) -> list[Indices]:
        """Gives the rows of clients 0, 1, …; for partitions that go by labels."""
        raise NotImplementedError

    def cut(self, table: Table, rows: Indices, number: int) -> tuple[Indices, Indices, Indices]:
        """Gives a client's training, validation and test rows: by the table's parts, else in random order, not stratified.

        Of bundles, whole ones are chosen whose rows come near to the share.
        """
        if table.splits is not None:
            train, validation, test = (rows[table.splits[rows] == place] for place in range(len(SPLITS)))
            return (train, validation, test) if len(validation) else (*self.keep_back(table, train, number), test)
        draw = generator(self.seed, "cut", number)
        shuffled = draw.permutation(rows)
        if table.group_ids is not None:
            test = choose_bundles(table.group_ids[shuffled], labels_of(table, shuffled), self.test_fraction, draw)
            return *self.keep_back(table, shuffled[~test], number), shuffled[test]
        kept = int((1 - self.test_fraction) * len(rows) + 1e-9)  # (1 - 0.8) * 5 is a little less than 1
        return *self.keep_back(table, shuffled[:kept], number), shuffled[kept:]

    def way_out(self, table: Table, rows: Sequence[int], few: Sequence[int]) -> str:
        """Gives what helps where some clients lack training or test rows, of the numbers of rows of all and of those."""
        return "lower --clients, or change --test-fraction or --validation-fraction"

    def keep_back(self, table: Table, rows: Indices, number: int) -> tuple[Indices, Indices]:
        """Gives training rows without and with the share kept for validation; at least one row, where a share is asked
        and not all of them are one bundle.
        """
        if not self.validation_fraction:
            return rows, rows[:0]
        draw = generator(self.seed, "validation", number)
        if table.group_ids is not None:
            mask = choose_bundles(table.group_ids[rows], labels_of(table, rows), self.validation_fraction, draw)
            return rows[~mask], rows[mask]
        kept = max(1, round(self.validation_fraction * len(rows)))
        mask = np.zeros(len(rows), dtype=bool)
        mask[draw.permutation(len(rows))[:kept]] = True
        return rows[~mask], rows[mask]


@dataclass(frozen=True, kw_only=True)
class Pathological(Partition):
    """Each client holds the rows of a few classes; neighbouring clients hold the same ones, in unequal numbers."""

    name: ClassVar[str] = "pathological"

    classes_per_client: int = option(2, "classes each client holds", min=1)
    balanced: bool = option(False, "divide a class evenly among its clients")

    def deal(self, labels: Labels, classes: int, draw: np.random.Generator) -> list[Indices]:
        """Walks the classes; each goes to the next clients that still have room for one."""
        self._check(classes)
        takers = deal_classes(self.clients, classes, self.classes_per_client)
        rows: list[list[Indices]] = [[] for _ in range(self.clients)]
        for label in range(classes):
            members = np.flatnonzero(labels == label)
            sizes = self._sizes(len(members), len(takers[label]), classes, label, draw)
            for client, part in zip(takers[label], np.split(members, np.cumsum(sizes)[:-1]), strict=True):
                rows[client].append(part)
        return [np.concatenate(parts) for parts in rows]

    def reference(self, table: Table, draw: np.random.RandomState) -> dict[str, Indices]:
        """Gives each client's rows by its name, drawn as the authors' code draws them."""
        self._check(table.classes)
        takers = deal_classes(self.clients, table.classes, self.classes_per_client)
        labels = table.y.cpu().numpy()
        return numbered(reference_division.by_classes(labels, table.classes, takers, self.clients, self.balanced, draw))

    def _check(self, classes: int) -> None:
        if self.classes_per_client > classes:
            raise GpflError(
                f"partition.classes_per_client is {self.classes_per_client}; the data has {classes} classes: "
                "ask for at most that"
            )
        places = self.clients * self.classes_per_client
        if places < classes:
            raise GpflError(
                f"{self.clients} clients × {self.classes_per_client} classes = {places} places for {classes} classes, "
                "so some rows would belong to nobody: raise --clients or --classes-per-client"
            )

    def _sizes(self, count: int, takers: int, classes: int, label: int, draw: np.random.Generator) -> list[int]:
        """Gives the rows each taker gets of a class of `count` rows: drawn in [max(q/10, 40/U), q), the last takes the rest."""
        mean = count / takers
        if self.balanced:
            cuts = np.linspace(0, count, takers + 1).astype(int)
            sizes = [int(size) for size in np.diff(cuts)]
        else:
            low, high = max(1, int(max(mean / 10, 40 / classes))), int(mean)
            if low >= high and takers > 1:
                raise GpflError(
                    f"class {label} has {count} rows for {takers} clients, {mean:.1f} each; unequal shares need more than "
                    f"{low}: lower --clients or --classes-per-client, or use --balanced"
                )
            sizes = [int(draw.integers(low, high)) for _ in range(takers - 1)]
            sizes.append(count - sum(sizes))
        if min(sizes) < 1:
            raise GpflError(f"class {label} has {count} rows for {takers} clients: lower --clients or --classes-per-client")
        return sizes


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Each class is spread over the clients by shares from a symmetric Dirichlet distribution."""

    name: ClassVar[str] = "dirichlet"

    beta: float = option(
        0.1, "concentration; the smaller, the more the clients differ", symbol="β", typical="0.01 to 5", above=0.0
    )
    cap: bool = option(True, "give no more classes to a client that holds its n/N rows (authors' code)")
    min_samples: int = option(0, "fewest rows of a client; 0 = the smaller of 40 and half of n/N", min=0)

    def reference(self, table: Table, draw: np.random.RandomState) -> dict[str, Indices]:
        """Gives each client's rows by its name, drawn as the authors' code draws them."""
        if not self.cap:
            raise GpflError(
                "partition.cap is false and partition.rng is 'pfllib', but the authors' code has the cap: "
                "use --partition-rng gpfl"
            )
        labels = table.y.cpu().numpy()
        fewest = self._fewest(len(labels))
        return numbered(reference_division.by_shares(labels, table.classes, self.clients, self.beta, fewest, DRAWS, draw))

    def _fewest(self, total: int) -> int:
        """Gives the rows that every client must have, of so many in all."""
        fewest = self.min_samples or max(1, min(reference_division.FEWEST, total // self.clients // 2))
        if fewest * self.clients > total:
            raise GpflError(
                f"{self.clients} clients × {fewest} rows = {fewest * self.clients}, but the table has {total} rows: "
                "lower --clients or --min-samples"
            )
        return fewest

    def deal(self, labels: Labels, classes: int, draw: np.random.Generator) -> list[Indices]:
        """Draws all shares anew until the smallest client has enough rows."""
        fewest = self._fewest(len(labels))
        counts = np.bincount(labels, minlength=classes)
        closest = 0
        for _ in range(DRAWS):
            sizes = self._draw_sizes(counts, draw)
            smallest = int(sizes.sum(0).min())
            if smallest >= fewest:
                return self._rows(labels, sizes, draw)
            closest = max(closest, smallest)
        raise GpflError(
            f"none of {DRAWS} draws with beta {self.beta:g} gave each of {self.clients} clients {fewest} rows "
            f"(the best gave its smallest client {closest}): raise --beta, or lower --clients or --min-samples"
        )

    def _draw_sizes(self, counts: Labels, draw: np.random.Generator) -> Labels:
        """Gives the rows of each class that each client gets, (classes, clients)."""
        sizes = np.zeros((len(counts), self.clients), dtype=np.int64)
        held = np.zeros(self.clients, dtype=np.int64)
        full = counts.sum() / self.clients
        for label in np.flatnonzero(counts):
            shares = draw.dirichlet(np.full(self.clients, self.beta))
            if self.cap:
                shares = np.where(held < full, shares, 0.0)
            if shares.sum() == 0:  # all weight fell on clients that are full
                shares = (held < full).astype(float)
            cuts = (np.cumsum(shares / shares.sum()) * counts[label]).astype(int)
            cuts[-1] = counts[label]
            sizes[label] = np.diff(cuts, prepend=0)
            held += sizes[label]
        return sizes

    def _rows(self, labels: Labels, sizes: Labels, draw: np.random.Generator) -> list[Indices]:
        """Gives each client its number of rows of each class, drawn at random."""
        parts: list[list[Indices]] = [[] for _ in range(self.clients)]
        for label, wanted in enumerate(sizes):
            members = draw.permutation(np.flatnonzero(labels == label))
            for client, part in enumerate(np.split(members, np.cumsum(wanted)[:-1])):
                parts[client].append(part)
        return [np.concatenate(part) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Each group of the table is a client: a domain, a subject, a site, as the data were collected."""

    name: ClassVar[str] = "natural"

    clients: int = option(0, "groups that take part, chosen at random; 0 = all", symbol="N", min=0)
    min_samples: int = option(0, "leave out groups with fewer rows", min=0)

    def check(self) -> None:
        """Refuses a number of clients to divide among: the groups are what they are."""
        if self.total_clients:
            raise GpflError(
                f"partition.total_clients is {self.total_clients}, but partition 'natural' has the groups of the data: "
                "set --clients alone"
            )

    def assign(self, table: Table, draw: np.random.Generator) -> dict[str, Indices]:
        """Gives the rows of every group that has some."""
        if table.client_ids is None:
            way = WHOSE if table.group_ids is not None else "use --partition dirichlet or pathological"
            raise GpflError(f"data '{table.name}' does not tell the group of a row: {way}")
        parts = {name: np.flatnonzero(table.client_ids == number) for number, name in enumerate(table.client_names)}
        kept = {name: rows for name, rows in parts.items() if len(rows) >= max(1, self.min_samples)}
        if not kept:
            most = max(len(rows) for rows in parts.values())
            raise GpflError(
                f"partition.min_samples is {self.min_samples}; the largest group of data '{table.name}' has {most} rows"
            )
        return kept

    def reference(self, table: Table, draw: np.random.RandomState) -> dict[str, Indices]:
        """Gives the rows of every group, shuffled where the authors' code does that."""
        groups = self.assign(table, generator(self.seed, "split"))
        if table.name not in reference_division.SHUFFLED:
            return groups
        return {name: reference_division.shuffled(rows, draw) for name, rows in groups.items()}

    def way_out(self, table: Table, rows: Sequence[int], few: Sequence[int]) -> str:
        """Gives the number of rows from which all clients have enough, and asks whether these are the clients."""
        fewest = max(few) + 1
        left = sum(count < fewest for count in rows)
        column = table.metadata.get("client")
        ask = f"; is '{column}' the column of clients?" if column else ""
        bundle = "all of its rows stay together; " if table.group_ids is not None else ""
        if left == len(rows):
            return f"{bundle}give clients more rows{ask}"
        return f"{bundle}--min-samples {fewest} leaves out {left:,} of {pluralize(len(rows), 'client')}{ask}"


def choose_bundles(together: Indices, labels: Labels, share: float, draw: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Tells which rows are chosen: whole bundles whose rows come near to a share of all; of one bundle none.

    Where every bundle is of one class, some of each class are chosen as far as the share goes, and one of each is left.
    """
    bundles, first, place, counts = np.unique(together, return_index=True, return_inverse=True, return_counts=True)
    classes = labels[first] if (labels == labels[first][place]).all() else np.zeros(len(bundles), dtype=np.int64)
    chosen, wanted, rows = np.zeros(len(bundles), dtype=bool), 0.0, 0
    by_class = [draw.permutation(np.flatnonzero(classes == label)) for label in draw.permutation(np.unique(classes))]
    for members in sorted(by_class, key=len):  # what a class with one bundle cannot give, the others do
        wanted, left = wanted + share * counts[members].sum(), len(members)
        for member in members:
            if left > 1 and abs(rows + counts[member] - wanted) < abs(rows - wanted):
                chosen[member], rows, left = True, rows + counts[member], left - 1
    if not chosen.any() and len(bundles) > 1:
        chosen[min(range(len(bundles)), key=lambda bundle: ((classes == classes[bundle]).sum() < 2, counts[bundle]))] = True
    return chosen[place]


def labels_of(table: Table, rows: Indices) -> Labels:
    """Gives the labels of rows."""
    return table.y.cpu().numpy()[rows]


def numbered(parts: Sequence[Indices]) -> dict[str, Indices]:
    """Gives the rows of clients 0, 1, … by their names."""
    return {str(number): rows for number, rows in enumerate(parts)}


PARTITIONS: dict[str, type[Partition]] = {partition.name: partition for partition in (Pathological, Dirichlet, Natural)}


def deal_classes(clients: int, classes: int, per_client: int) -> list[list[int]]:
    """Gives the clients of each class: the first that have room, but a client that needs every class left is served before.

    The places are spread over the classes as evenly as they can be; where the authors' rule fills every place, this is it.
    """
    room = np.full(clients, per_client)
    ends = [round_half_up(clients * per_client * (label + 1), classes) for label in range(classes)]
    takers = []
    for label in range(classes):
        places = ends[label] - (ends[label - 1] if label else 0)
        urgent = room >= classes - label
        wanted = np.lexsort((np.arange(clients), ~urgent))
        chosen = sorted(int(c) for c in wanted[room[wanted] > 0][:places])
        room[chosen] -= 1
        takers.append(chosen)
    return takers


def round_half_up(numerator: int, denominator: int) -> int:
    """Gives the nearest whole number of a fraction, halves upwards."""
    return (2 * numerator + denominator) // (2 * denominator)
