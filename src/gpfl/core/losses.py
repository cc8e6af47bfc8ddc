"""Terms of losses that several methods use, or that are long."""

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree

_MMD_WIDTHS = (10.0, 15.0, 20.0, 50.0)


def squared_mmd(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of `a` and `b` (batch, width), with kernels exp(−d²/(2·width)) summed."""
    pairs = mask.unsqueeze(0) * mask.unsqueeze(1)

    def mean_kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)  # (batch, batch)
        kernel = torch.stack([torch.exp(-squares / (2 * width)) for width in _MMD_WIDTHS]).sum(0)
        return (kernel * pairs).sum() / pairs.sum().clamp_min(1.0)

    return mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)


def squared_distance(weights: Tree, anchor: Tree) -> Tensor:
    """Return the squared L2 distance between the parts of `anchor` and those of the same name in `weights`."""
    distances = tree.map_leaves(lambda x, y: (x - y).square().sum(), tree.pick(weights, tuple(anchor)), anchor)
    return torch.stack(list(tree.leaves(distances))).sum()


def balanced_logits(logits: Tensor, label_counts: Tensor) -> Tensor:
    """Return the logits of the balanced softmax: log class counts are added, which all but excludes classes without samples."""
    return logits + torch.log(label_counts.clamp_min(1e-12))


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Return one-hot labels. `F.one_hot` reads the labels first, for which a GPU must synchronise."""
    return (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).to(torch.float32)
