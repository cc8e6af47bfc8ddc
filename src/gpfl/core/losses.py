"""Losses over a batch whose padded rows do not count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.tree import Tree

MMD_WIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Widths a of the kernels exp(−d²/(2a)) that FedPHP sums."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Gives the mean of `values` (rows,) over the rows whose mask is 1; 0 where there is none."""
    return (values * mask).sum() / mask.sum().clamp_min(1.0)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Gives rows that are 1 at their label and 0 elsewhere; torch's own looks at labels first, for which a GPU must wait."""
    return (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).to(torch.float32)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Gives the mean cross-entropy over real rows."""
    return masked_mean(F.cross_entropy(logits, y, reduction="none"), mask)


def cosine_logits(features: Tensor, embeddings: Tensor) -> Tensor:
    """Gives the cosine of every row of `features` to every embedding; 0 for an all-zero feature."""
    f = F.normalize(features, dim=-1, eps=1e-12)  # (rows, width)
    c = F.normalize(embeddings, dim=-1, eps=1e-12)  # (classes, width)
    return f @ c.T  # (rows, classes)


def batch_distance(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Gives the Frobenius norm of `a - b` over real rows; its gradient at 0 is 0, not NaN."""
    distance: Tensor = torch.linalg.vector_norm((a - b) * mask.unsqueeze(-1))
    return distance


def mean_distance(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Gives the mean over real rows of the L2 distance between the rows of `a` and `b`."""
    return masked_mean(torch.linalg.vector_norm(a - b, dim=-1), mask)


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Gives the squared L2 distance between two trees of weights."""
    parts = tree.map_leaves(lambda x, y: (x - y).square().sum(), a, b)
    return torch.stack(list(tree.leaves(parts))).sum()


def balanced(logits: Tensor, label_counts: Tensor) -> Tensor:
    """Gives the scores of the balanced softmax: log class counts added; classes without rows are all but ruled out."""
    return logits + torch.log(label_counts.clamp_min(1e-12))


def mmd2(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Gives the squared maximum mean discrepancy of two sets of rows, over all pairs of real rows, each with itself too."""
    pairs = mask.unsqueeze(0) * mask.unsqueeze(1)

    def mean_kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)  # (rows, rows)
        kernel = torch.stack([torch.exp(-squares / (2 * width)) for width in MMD_WIDTHS]).sum(0)
        return (kernel * pairs).sum() / pairs.sum().clamp_min(1.0)

    return mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)


def mean_of(values: Sequence[Tensor]) -> Tensor:
    """Gives the mean of some numbers."""
    return torch.stack(list(values)).mean(0)
