"""Losses over a batch whose padded rows do not count."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Gives the mean of `values` (rows,) over the rows whose mask is 1; 0 where there is none."""
    return (values * mask).sum() / mask.sum().clamp_min(1.0)


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
