"""Inference of a client's label distribution from GPFL's category embeddings C.

Apart from weight decay, only L^alg changes C_u: by −(s_u − y_u) times the features over the length of C_u, always orthogonal
to C_u. So the server searches for features that explain how all embeddings rotated. Each orthogonal step also makes C_u
longer, which reveals the classes even if C_u is so short that it reaches its final direction early in the round.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.defences import NO_DEFENCE, Defended
from gpfl.privacy import lbfgs
from gpfl.privacy.server_view import ServerView

_SPANS = 24
"""Number of spans of a round within which the lengths of embeddings count as constant; a shorter round has a span per step."""
_EVALUATIONS = 80
_SPARSITY = 0.02  # weight of the norms of the classes' features in the objective, times the number of classes
_SATURATION = 1.0
"""Rotation (radians) by one U-th of all features above which embeddings end near their limit within a round."""
_NEGLIGIBLE = 1e-3
"""Length of the sum of all features, relative to the sum of their lengths, below which its direction tells nothing."""
_MAX_ROTATION = 15.0  # exponent above which an embedding ends exactly at its limit


def embedding_scores(view: ServerView) -> Tensor:
    """Return how much of each class an upload reveals (classes,), by the rotation of its embedding and by its growth."""
    before, after = (tree.leaf(tree.branch(state, "gce"), "weight").double() for state in (view.sent, view.upload))
    squared_lengths, growth = _lengths(view, before, after)
    rates = view.method.lr * view.steps / len(squared_lengths) / squared_lengths  # (spans, classes)
    # A defence that changes uploads, which a server knows.
    defence = view.method.defence if isinstance(view.method, Defended) else NO_DEFENCE
    noisy = defence.noise or defence.example_noise or defence.compresses
    features = fit_features(before, after, rates, positive=not noisy and "cov" in view.sent)
    rotation: Tensor = torch.linalg.vector_norm(features, dim=1)
    if noisy:  # the noise makes all features long, in all directions: count only the direction of their sum
        total = features.sum(0)
        if torch.linalg.vector_norm(total) < _NEGLIGIBLE * rotation.sum():  # with two classes, often: only rounding is left
            return torch.ones_like(rotation).float()
        rotation = (features @ F.normalize(total, dim=0)).clamp_min(0)
    if float(rates.sum(0).mean()) / len(rotation) < _SATURATION:
        return rotation.float()
    return (rotation * growth).sqrt().float()


def _lengths(view: ServerView, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared lengths of embeddings in the middle of each span (spans, classes), and their growth (classes,).

    Steps at right angles make |C|² ← a²|C|² + |η·step|², a = 1 − ημ; the last term counts as constant over the round. The
    growth is that at length 1, since steps shrink as C grows.
    """
    first, last = before.square().sum(1), after.square().sum(1)
    shrinkage = (1 - view.method.lr * view.weight_decay("gce")) ** 2
    spans = min(_SPANS, view.steps)
    times = [view.steps * (span + 0.5) / spans for span in range(spans)]

    def geometric_sum(steps: float) -> float:
        return steps if shrinkage == 1 else (1 - shrinkage**steps) / (1 - shrinkage)

    gain = (last - shrinkage**view.steps * first) / geometric_sum(view.steps)
    squares = torch.stack([shrinkage**time * first + geometric_sum(time) * gain for time in times])
    squares = squares.clamp_min(torch.minimum(first, last) / 4).clamp_min(1e-12)  # noise could make them negative
    return squares, gain.clamp_min(0) / (1 / squares).mean(0)


def fit_features(before: Tensor, after: Tensor, rates: Tensor, positive: bool) -> Tensor:
    """Return the summed features of each class (classes, width) that explain how embeddings rotated.

    `rates` (spans, classes) is the learning rate over the squared lengths. Most clients lack most classes, so of equally good
    features the shortest are chosen. `positive`: features come from a ReLU.
    """
    classes, width = before.shape
    start, end = F.normalize(before, dim=1), F.normalize(after, dim=1)
    scale = 1 / rates.sum(0).unsqueeze(1)

    def objective(point: Tensor) -> Tensor:
        free = point.reshape(classes, width)
        features = free.clamp_min(0) if positive else free
        error = (rotate(start, features, rates) - end) * scale
        norms = (features.square().sum(1) + (1e-3 / classes) ** 2).sqrt().sum()
        return error.square().sum() + _SPARSITY / classes * norms + (free - features).square().sum()

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = points[0].detach().requires_grad_()
            value = objective(point)
            (grad,) = torch.autograd.grad(value, point)
        return grad[None], value.detach()[None]

    state = lbfgs.init(torch.full_like(before, 0.1 / classes / width**0.5).flatten()[None], evaluate)
    for _ in range(_EVALUATIONS):
        state = lbfgs.step(state, evaluate)
    features = tree.leaf(state, "point").reshape(classes, width)
    return features.clamp_min(0) if positive else features


def rotate(start: Tensor, features: Tensor, rates: Tensor) -> Tensor:
    """Return the directions of embeddings (classes, width) after a round on samples with these summed features.

    In each span C_u rotates towards Σ(y_u − s_u)·f along the great circle, by the exact solution for a constant force, so spans
    may be long.
    """
    own, others = torch.ones(len(start), 1, dtype=start.dtype, device=start.device), torch.zeros_like(start @ start.T)
    identity, start_products, gram = torch.eye(len(start)).to(others), start @ features.T, features @ features.T
    lengths = gram.diagonal().clamp_min(1e-24).sqrt()
    other_products = others  # of `others` with the features
    for rate in rates:  # directions are own · start + others @ features, so products of classes × classes suffice
        products = own * start_products + other_products
        mixture = identity - torch.softmax((products / lengths).T, 1).T  # force = mixture @ features
        force_products = mixture @ gram
        size = (force_products * mixture).sum(1, keepdim=True).clamp_min(1e-24).sqrt()
        cosine = (products * mixture).sum(1, keepdim=True) / size
        angle = (rate.unsqueeze(1) * size).clamp_max(_MAX_ROTATION)
        length = angle.sinh() + cosine * (angle.cosh() - 1)
        norm = (1 + 2 * length * cosine + length.square()).sqrt()
        own, others = own / norm, (others + length / size * mixture) / norm
        other_products = (other_products + length / size * force_products) / norm
    return F.normalize(own * start + others @ features, dim=1)
