"""Aggregation rules: how the server combines the uploads of a round."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.tree import Tree
from gpfl.defences.config import DefenceConfig
from gpfl.errors import GpflError, pluralize

RULES = ("mean", "trimmed_mean", "median", "krum")
FRACTION_BITS = 36
"""Fractional bits of the fixed-point integers in a secure sum: each client adds an error of at most 2⁻³⁷ to the mean."""
MAX_VALUE = 2.0 ** (62 - FRACTION_BITS)
"""Bound on the magnitude of an entry times its weight, and of the sum of these over clients, which is a mean."""
INTEGER_BYTES = 8  # bytes of a number in a secure sum
MIN_COHORT = 3  # fewest clients in a secure sum (with two, each can compute the other's upload) or under a robust rule


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How uploads are combined.

    Attributes:
        rule: One of `RULES`. All but the mean compare single uploads and weight them equally.
        trim_fraction: Fraction β of the largest, and of the smallest, values that the trimmed mean leaves out.
        byzantine: Number f of malicious clients that Krum expects.
        secure_sum: Whether the server sees only the sum of weighted uploads, in fixed-point integers.

    """

    rule: str = "mean"
    trim_fraction: float = 0.2
    byzantine: int = 1
    secure_sum: bool = False

    @property
    def min_clients(self) -> int:
        """Fewest uploads of a round."""
        if self.rule == "krum":
            return 2 * self.byzantine + 3
        return MIN_COHORT if self.rule != "mean" or self.secure_sum else 1

    def check(self, method: Method, defence: DefenceConfig, fewest: int, device: torch.device) -> None:
        """Raise if the rule does not fit the run; `fewest` is the smallest number of clients in a round."""
        if self == MEAN or not method.shares:
            return
        if self.rule != "mean" and self.secure_sum:
            raise GpflError(
                f"train.aggregation is '{self.rule}', which compares single uploads, and in a secure sum the server sees none: "
                "leave out --aggregation or --secure-sum"
            )
        if self.rule != "mean" and "base" not in method.shares:
            raise GpflError(
                f"{method.name} uploads {', '.join(method.shares)}, of which a client sends only those of its own classes, so "
                f"train.aggregation = '{self.rule}' would treat the missing ones as zeros: use --aggregation mean"
            )
        if self.rule != "mean" and method.values().get("valve_upload") == "low_rank":
            raise GpflError(
                f"train.aggregation is '{self.rule}', which compares the entries of V, and method.valve_upload = 'low_rank' "
                "sends V encoded: use --aggregation mean or --valve-upload full"
            )
        if fewest < self.min_clients:
            name = "a secure sum" if self.secure_sum else f"train.aggregation = '{self.rule}'"
            krum = " (2f + 3); lower --krum-byzantine" if self.rule == "krum" and self.byzantine else ""
            raise GpflError(
                f"{name} needs {pluralize(self.min_clients, 'client')} in each round{krum}; there may be {fewest}: use more "
                "clients or a larger --client-fraction"
            )
        if self.secure_sum and (defence.compresses or method.values().get("valve_upload") == "factors"):
            raise GpflError(
                "a secure sum sends eight bytes for every number, so uploads cannot be compressed: leave out --top-k, --bits "
                "and --valve-upload, or --secure-sum"
            )
        if self.secure_sum and device.type == "mps":
            raise GpflError("a secure sum computes in float64, which device 'mps' lacks: use --device cpu")

    def combine(self, uploads: Tree) -> Tree:
        """Return the robust aggregate of uploads, stacked in the order of the clients."""
        count = next((len(t) for t in tree.leaves(uploads)), 0)
        if not count:
            return tree.map_leaves(lambda t: t.sum(0), uploads)
        if self.rule == "krum":
            return tree.take(uploads, krum(uploads, self.byzantine))
        most = (count - 1) // 2  # what the median leaves out on each side
        trimmed = most if self.rule == "median" else min(math.ceil(self.trim_fraction * count - 1e-9), most)
        return tree.map_leaves(lambda t: trimmed_mean(t, trimmed), uploads)


MEAN = Aggregation()


def trimmed_mean(values: Tensor, trimmed: int) -> Tensor:
    """Return the mean over the first axis without the `trimmed` largest and smallest values of each entry.

    NaN counts as larger than all numbers.
    """
    return values.sort(0).values[trimmed : len(values) - trimmed].mean(0)


def krum(uploads: Tree, byzantine: int) -> int:
    """Return the index of the upload with the smallest sum of squared distances to its n − f − 2 nearest others."""
    count = len(next(tree.leaves(uploads)))
    distances = torch.zeros(count, count, dtype=torch.float64)
    for t in tree.leaves(uploads):
        rows = t.reshape(count, -1)
        for i in range(count - 1):
            distances[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(1, dtype=torch.float64).cpu()
    distances = (distances + distances.T).nan_to_num(math.inf).fill_diagonal_(math.inf)  # uploads with NaN are far
    nearest = distances.sort(1).values[:, : max(1, count - byzantine - 2)]
    return int(nearest.sum(1).argmin())


# Secure sums.


def to_integers(values: Tensor, weight: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return weighted values as fixed-point integers, and whether one of them is NaN or too large."""
    weighted = values.double() * weight
    return (weighted * 2.0**FRACTION_BITS).round().to(torch.int64), ~(weighted.abs() < MAX_VALUE).all()


def from_integers(total: Tensor) -> Tensor:
    """Return the mean from a sum of fixed-point integers."""
    return (total.double() / 2.0**FRACTION_BITS).float()
