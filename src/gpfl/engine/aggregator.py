"""Aggregators, which collect the uploads of a round and return their aggregate."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.defences.aggregation import Aggregation, from_integers, to_integers
from gpfl.engine.distributed import ProcessGroup


class Aggregator(ABC):
    """Base class of aggregators, which hold the uploads of a round so far.

    Args:
        weights: Weights of the clients in the mean, by position in the request.

    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    @abstractmethod
    def add(self, position: int, upload: Tree) -> None:
        """Add the upload of the client at a position in the request."""

    @abstractmethod
    def add_stacked(self, positions: Sequence[int], uploads: Tree) -> None:
        """Add the stacked uploads of some clients, which may be none."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add the uploads of an aggregator for other clients of the request."""

    @abstractmethod
    def gather(self, clients_by_rank: Sequence[Sequence[int]], group: ProcessGroup) -> Self:
        """Return the aggregator of the whole cohort; each process holds the uploads of its own clients."""

    @abstractmethod
    def result(self) -> Tree:
        """Return the aggregate."""

    def _weights_at(self, positions: Sequence[int]) -> Tensor:
        return self._weights[torch.as_tensor(positions, dtype=torch.int64, device=self._weights.device)]


class WeightedSum(Aggregator):
    """The weighted sum of uploads, which is their mean since the weights sum to one."""

    def __init__(self, weights: Tensor, total: Tree | None = None) -> None:
        super().__init__(weights)
        self._total: Tree = total or {}

    def add(self, position: int, upload: Tree) -> None:
        """Add weight × upload, in place: uploads may be large."""
        weight = self._weights[position]
        if self._total:
            tree.map_leaves(lambda total, t: total.addcmul_(weight, t), self._total, upload)
        else:
            self._total = tree.map_leaves(lambda t: weight * t, upload)

    def add_stacked(self, positions: Sequence[int], uploads: Tree) -> None:
        """Add the weighted sum of stacked uploads."""
        weights = self._weights_at(positions)
        self._add(tree.map_leaves(lambda t: torch.tensordot(weights.to(t.dtype), t, dims=1), uploads))

    def merge(self, other: Self) -> None:
        """Add another sum."""
        self._add(other._total)

    def gather(self, clients_by_rank: Sequence[Sequence[int]], group: ProcessGroup) -> Self:
        """Return the sum over all processes."""
        return type(self)(self._weights, group.all_reduce(self._total))

    def result(self) -> Tree:
        """Return the mean."""
        return self._total

    def _add(self, scaled: Tree) -> None:
        self._total = tree.map_leaves(Tensor.add_, self._total, scaled) if self._total else scaled


class SecureSum(WeightedSum):
    """The sum of weighted uploads in fixed-point integers, as a server gets it once the masks cancel."""

    @classmethod
    def of(cls, total: Tree) -> Self:
        """Return the aggregator with a sum of fixed-point integers."""
        return cls(torch.ones(0), {"sum": total, "faults": torch.zeros((), dtype=torch.int64)})

    def add(self, position: int, upload: Tree) -> None:
        """Add weight × upload in fixed-point integers."""
        self.add_stacked([position], tree.map_leaves(lambda t: t[None], upload))

    def add_stacked(self, positions: Sequence[int], uploads: Tree) -> None:
        """Add weighted uploads in fixed-point integers."""
        weights, faults = self._weights_at(positions).double(), torch.zeros((), dtype=torch.int64, device=self._weights.device)

        def integers(t: Tensor) -> Tensor:
            numbers, faulty = to_integers(t, weights.reshape(-1, *[1] * (t.dim() - 1)))
            faults.add_(faulty)
            return numbers.sum(0)

        self._add({"sum": tree.map_leaves(integers, uploads), "faults": faults})

    def result(self) -> Tree:
        """Return the mean; it is NaN if a value was NaN or too large."""
        faulty = bool(tree.leaf(self._total, "faults"))
        mean = tree.map_leaves(from_integers, tree.branch(self._total, "sum"))
        return tree.map_leaves(lambda t: t * torch.nan, mean) if faulty else mean


class AllUploads(Aggregator):
    """All uploads, for rules that compare them."""

    def __init__(self, weights: Tensor, aggregation: Aggregation) -> None:
        super().__init__(weights)
        self._aggregation = aggregation
        self._groups: list[tuple[list[int], Tree]] = []

    def add(self, position: int, upload: Tree) -> None:
        """Keep an upload."""
        self.add_stacked([position], tree.map_leaves(lambda t: t[None], upload))

    def add_stacked(self, positions: Sequence[int], uploads: Tree) -> None:
        """Keep stacked uploads."""
        self._groups.append((list(positions), uploads))

    def merge(self, other: Self) -> None:
        """Keep the uploads of another aggregator."""
        self._groups += other._groups

    def gather(self, clients_by_rank: Sequence[Sequence[int]], group: ProcessGroup) -> Self:
        """Return the uploads of all processes."""
        device, out = self._weights.device, type(self)(self._weights, self._aggregation)
        for clients, groups in zip(clients_by_rank, group.all_gather(self._to(torch.device("cpu"))), strict=True):
            out._groups += [([clients[i] for i in positions], tree.to(uploads, device)) for positions, uploads in groups]
        return out

    def result(self) -> Tree:
        """Return the aggregate by the rule, which gets the uploads in the order of the clients."""
        order = torch.as_tensor([i for positions, _ in self._groups for i in positions], dtype=torch.int64).argsort()
        stacked = tree.concatenate([uploads for _, uploads in self._groups])
        return self._aggregation.combine(tree.take(stacked, order.to(self._weights.device)))

    def _to(self, device: torch.device) -> list[tuple[list[int], Tree]]:
        return [(positions, tree.to(uploads, device)) for positions, uploads in self._groups]


def make_aggregator(aggregation: Aggregation, weights: Tensor) -> Aggregator:
    """Return an aggregator without uploads."""
    if aggregation.rule != "mean":
        return AllUploads(weights, aggregation)
    return SecureSum(weights) if aggregation.secure_sum else WeightedSum(weights)
