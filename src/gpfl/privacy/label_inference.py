"""Label distribution inference: the server's guess of a client's label distribution from one upload.

What reveals it depends on what is uploaded: GPFL's valve (exactly, see `valve_inference`) and embeddings (approximately, see
`embedding_inference`), a shared head (the scores of the client's classes are pushed up) or prototypes (only those of the
client's classes are sent). A shared base alone reveals nothing directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.defences import undefended
from gpfl.engine import Engine, matmul_precision
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.privacy.embedding_inference import embedding_scores
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.uploads import AttackedBatch, check_can_train, cohort_of, observe_uploads
from gpfl.privacy.valve_inference import LabelEstimate, counts_in_mean, infer_from_valve
from gpfl.training.run_dir import RunState

Floats = npt.NDArray[np.float64]

_UNCHANGED = 1e-6  # fraction of the largest change below which the weights of a class count as unchanged


def estimate_distribution(view: ServerView) -> LabelEstimate | None:
    """Return the estimated label distribution of a client, or None if its upload reveals nothing.

    Where GPFL's valve tells nothing, as when it is left out or noisy, the embeddings still allow a guess, which excludes no
    distribution.
    """
    if (estimate := infer_from_valve(view)) is not None:
        return estimate
    guess = guess_distribution(view)
    return None if guess is None else LabelEstimate(guess, torch.zeros_like(guess), torch.ones_like(guess))


def guess_distribution(view: ServerView) -> Tensor | None:
    """Return the guessed label distribution of the samples of the round (classes,), or None if the upload reveals nothing."""
    scores: Tensor
    if "prototypes" in view.upload:
        scores = (tree.leaf(tree.branch(view.upload, "prototypes"), "seen") > 0).to(torch.float32)
    elif "gce" in view.upload:
        scores = embedding_scores(view)
    elif "head" in view.upload:
        scores = _head_scores(view)
    else:
        return None
    total = scores.sum()
    return torch.where(total > 0, scores / total.clamp_min(1e-30), torch.full_like(scores, 1 / len(scores)))


def _head_scores(view: ServerView) -> Tensor:
    """Return how far each class of a shared head was pushed up from the level of absent classes.

    The gradient of cross-entropy by a bias is the mean of p − y, so only classes of the client are pushed up, and the others
    show p. If the loss contains the client's label counts (FedRoD), absent classes do not change at all, and the others change
    in proportion to their samples.
    """
    gradient = tree.branch(view.gradient(("head",)), "head")
    layers = [value for value in tree.leaves(gradient) if len(value) == view.method.net.classes]
    biases, weights = [v for v in layers if v.dim() == 1], [v for v in layers if v.dim() == 2]
    if gradient_targets(view.method)["model"].counts_in_loss:
        change = torch.linalg.vector_norm(weights[-1], dim=1)
        return torch.where(change > _UNCHANGED * change.max(), change, torch.zeros_like(change))
    push = biases[-1] if biases else weights[-1].sum(1)
    absent = push[push > 0]
    return ((absent.mean() if len(absent) else 0.0) - push).clamp_min(0)


def guess_labels(view: ServerView) -> Tensor | None:
    """Return a label for each image to reconstruct, in ascending order, or None if the upload reveals nothing."""
    distribution = guess_distribution(view)
    if distribution is None:
        return None
    return torch.repeat_interleave(_round_counts(distribution, view.n_images).to(torch.int64))


def _round_counts(distribution: Tensor, total: int) -> Tensor:
    """Return the whole numbers (classes,) that are closest to a distribution and sum to `total`."""
    expected = distribution.double() * total
    counts = expected.floor()
    left = int(total - counts.sum().item())
    order = torch.argsort(expected - counts, descending=True, stable=True)
    counts[order[:left]] += 1
    return counts


@dataclass(frozen=True)
class LabelInference:
    """How well one client's label distribution was guessed: total variation distances, from 0 (exact) to 1."""

    client: str
    guess: float | None  # None if the upload reveals nothing
    uniform: float  # guess that all classes are equally frequent
    overall: float  # guess that the client is like all clients together
    correlation: float | None
    interval: tuple[float, float] | None = None
    """Least and greatest distance to the distributions that the upload of GPFL allows; None: it allows the guess alone, or
    the method is another."""
    bounds: list[tuple[float, float]] | None = None  # the same for the share of each class

    @property
    def is_exact(self) -> bool:
        """Whether the upload allows one distribution, which is the true one."""
        return self.interval is None and self.guess is not None and self.guess < 1e-6


def infer_label_distributions(engine: Engine, state: RunState, clients: Sequence[int]) -> list[LabelInference]:
    """Guess each client's label distribution from the upload of a local round, in float32.

    Clients that have too few samples to train upload nothing and are left out.
    """
    with matmul_precision("float32"):
        return [_infer_label_distribution(engine, state, client) for client in uploading_clients(engine, clients)]


def uploading_clients(engine: Engine, clients: Sequence[int]) -> list[int]:
    """Return the clients that have enough samples to train. Raise if there are none."""
    trainable = [client for client in clients if engine.can_train(client)]
    if not trainable:
        check_can_train(engine, clients[0])
    return trainable


def _infer_label_distribution(engine: Engine, state: RunState, client: int) -> LabelInference:
    everyone = engine.client_info(range(len(engine.federation)), state.round)
    counts = everyone.label_counts.double().cpu().numpy()
    (view,) = observe_uploads(engine, state, [AttackedBatch(client, (0,))], "epoch")
    view = view.to(torch.device("cpu"))  # many small operations in float64, which a GPU does more slowly
    estimate = _estimate_from_sum(engine, state, client, view) if engine.aggregation.secure_sum else estimate_distribution(view)
    truth = counts[client] / counts[client].sum()
    guess = None if estimate is None else estimate.guess.double().cpu().numpy()
    bounds: tuple[Floats, Floats] | None = None
    if estimate is not None and "gce" in view.upload and not estimate.is_exact:
        bounds = estimate.low.double().cpu().numpy(), estimate.high.double().cpu().numpy()
    return LabelInference(
        engine.federation.shards[client].name,
        None if guess is None else total_variation_distance(truth, guess),
        total_variation_distance(truth, np.full_like(truth, 1 / len(truth))),
        total_variation_distance(truth, counts.sum(0) / counts.sum()),
        None if guess is None else _correlation(truth, guess),
        None if bounds is None else _distance_interval(truth, *bounds),
        None if bounds is None else list(zip(*(bound.tolist() for bound in bounds), strict=True)),
    )


def _estimate_from_sum(engine: Engine, state: RunState, client: int, view: ServerView) -> LabelEstimate | None:
    """Return what the mean of a cohort tells of one client: class counts that GPFL's valve still shows, or a guess for all."""
    if "cov" in view.upload and isinstance(undefended(view.method), GPFL):
        cohort, index = cohort_of(engine, state.round, client)
        n_samples = engine.client_info(cohort, state.round).n_samples.int().tolist()
        sent, mean = (tree.branch(each, "cov") for each in (view.sent, view.upload))
        if (counts := counts_in_mean(sent, mean, embeddings_of(view.sent), n_samples).get(index)) is not None:
            shares = counts / counts.sum()
            return LabelEstimate(shares, shares, shares)
    guess = guess_distribution(view)
    return None if guess is None else LabelEstimate(guess, torch.zeros_like(guess), torch.ones_like(guess))


def _distance_interval(truth: Floats, low: Floats, high: Floats) -> tuple[float, float]:
    """Return bounds on the total variation distance between a distribution and those with shares from `low` to `high`."""
    outside = np.maximum(np.maximum(low - truth, truth - high), 0)
    farthest = np.maximum(np.abs(truth - low), np.abs(high - truth))
    return float(outside.sum() / 2), float(min(farthest.sum() / 2, 1 - truth.min()))


def total_variation_distance(a: Floats, b: Floats) -> float:
    """Return the total variation distance of two distributions."""
    return float(np.abs(a - b).sum() / 2)


def _correlation(a: Floats, b: Floats) -> float | None:
    """Return the correlation of two distributions over classes, or None if one of them is uniform."""
    if np.ptp(a) < 1e-12 or np.ptp(b) < 1e-12:
        return None
    return float(np.corrcoef(a, b)[0, 1])
