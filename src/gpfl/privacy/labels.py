"""Label leakage: the server's guess of a client's label distribution from its upload alone.

What tells it depends on what travels: a shared head (the scores of classes that a client has are pushed up), embeddings
(those of its classes move most), prototypes (those of its classes are sent). A shared base alone tells nothing directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl import tree
from gpfl.engine import Engine
from gpfl.privacy.seen import Seen
from gpfl.privacy.victim import Victim, uploads_of
from gpfl.runs import State

Floats = npt.NDArray[np.float64]

STILL = 1e-6
"""The share of the largest movement below which a class counts as not moved."""
REFINED = 3
"""How often the classes that are not there are told anew from their common movement."""


def clue_of(seen: Seen) -> str:
    """Gives the part of an upload that tells of labels, or "" where none does."""
    return next((part for part in ("prototypes", "gce", "head") if part in seen.upload), "")


def guess_shares(seen: Seen) -> Tensor | None:
    """Gives the guessed share of each class (classes,), or nothing where the upload tells nothing."""
    clue = clue_of(seen)
    if not clue:
        return None
    if clue == "prototypes":
        signs = (tree.leaf(tree.branch(seen.upload, clue), "seen") > 0).to(torch.float32)
    elif clue == "gce":
        signs = embedding_signs(seen)
    else:
        signs = head_signs(seen)
    total = signs.sum()
    return torch.where(total > 0, signs / total.clamp_min(1e-30), torch.full_like(signs, 1 / len(signs)))


def head_signs(seen: Seen) -> Tensor:
    """Gives how far each class of a shared head was pushed up from where absent classes are pushed down to.

    Cross-entropy pulls a bias by the mean of p − y; only classes that are there can be pushed up, and the others show p.
    Where the client's own label counts are in the loss (FedRoD), classes that it does not have do not move at all, and the
    others as far as their rows say.
    """
    gradient = tree.branch(seen.gradient(("head",)), "head")
    layers = [value for value in tree.leaves(gradient) if len(value) == seen.method.net.classes]
    biases, weights = [v for v in layers if v.dim() == 1], [v for v in layers if v.dim() == 2]
    if not seen.method.views()["model"].knows_loss:
        moved = torch.linalg.vector_norm(weights[-1], dim=1)
        return torch.where(moved > STILL * moved.max(), moved, torch.zeros_like(moved))
    pulled = biases[-1] if biases else weights[-1].sum(1)
    down = pulled[pulled > 0]
    return ((down.mean() if len(down) else 0.0) - pulled).clamp_min(0)


def embedding_signs(seen: Seen) -> Tensor:
    """Gives how far each class's embedding was turned towards the client's features, those of absent classes being turned away.

    The loss L^alg, and nothing else, turns C_u by s_u − y_u times the features, over the length of C_u; its softmax of
    cosines is nearly even. So absent classes show the direction and size of one U-th of all features, and the others by how
    much they exceed it.
    """
    table = tree.leaf(tree.branch(seen.sent, "gce"), "weight")
    turned = tree.leaf(tree.branch(seen.gradient(("gce",)), "gce"), "weight")
    turned = turned * torch.linalg.vector_norm(table, dim=1, keepdim=True)  # (classes, width)
    size: Tensor = torch.linalg.vector_norm(turned, dim=1)
    along = -turned @ -turned[size.argmax()]  # the class that turned most is there
    for _ in range(REFINED):
        absent = along < 0
        if not absent.any():
            return size - size.min()
        away = turned[absent].mean(0)
        along = -turned @ away
    signs: Tensor = (along + away @ away).clamp_min(0)
    return signs


def guess_counts(shares: Tensor, rows: int) -> Tensor:
    """Gives whole numbers of rows (classes,) that come nearest to the shares and sum to `rows`."""
    wanted = shares.double() * rows
    counts = wanted.floor()
    left = int(rows - counts.sum().item())
    order = torch.argsort(wanted - counts, descending=True, stable=True)
    counts[order[:left]] += 1
    return counts


def guess_labels(seen: Seen) -> Tensor | None:
    """Gives a label for each image that is looked for, (rows,) in ascending order; one image's label is exact."""
    shares = guess_shares(seen)
    if shares is None:
        return None
    return torch.repeat_interleave(guess_counts(shares, seen.rows).to(torch.int64))


@dataclass(frozen=True)
class Leak:
    """How well one client's label distribution was guessed: total variation distances (0 exact, 1 wholly wrong)."""

    client: str
    guess: float | None  # nothing where the upload tells nothing
    uniform: float  # the guess that all classes are alike
    overall: float  # the guess that the client is like all clients together
    correlation: float | None


def label_leaks(engine: Engine, state: State, clients: Sequence[int]) -> list[Leak]:
    """Gives how well the server guesses each client's label distribution from a whole local round's upload."""
    counts = engine.federation.label_counts.astype(np.float64)
    overall = counts.sum(0) / counts.sum()
    leaks = []
    for client in clients:
        (seen,) = uploads_of(engine, state, [Victim(client, (0,))], "epoch")
        shares = guess_shares(seen)
        truth = counts[client] / counts[client].sum()
        guess = None if shares is None else shares.double().cpu().numpy()
        leaks.append(
            Leak(
                engine.federation.shards[client].name,
                None if guess is None else variation(truth, guess),
                variation(truth, np.full_like(truth, 1 / len(truth))),
                variation(truth, overall),
                None if guess is None else correlation(truth, guess),
            )
        )
    return leaks


def variation(one: Floats, other: Floats) -> float:
    """Gives the total variation distance of two distributions."""
    return float(np.abs(one - other).sum() / 2)


def correlation(one: Floats, other: Floats) -> float | None:
    """Gives the correlation of two distributions over classes; nothing where one of them is even."""
    if np.ptp(one) < 1e-12 or np.ptp(other) < 1e-12:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def records(leaks: Sequence[Leak]) -> list[dict[str, object]]:
    """Gives the leaks as plain values."""
    return [asdict(leak) for leak in leaks]


def told(leaks: Sequence[Leak], method: str) -> str:
    """Gives the sentence about label leakage."""
    uniform, overall = (float(np.mean([getattr(leak, name) for leak in leaks])) for name in ("uniform", "overall"))
    floors = f"all classes alike {uniform:.3f}, all clients together {overall:.3f}"
    guesses = [leak.guess for leak in leaks if leak.guess is not None]
    if not guesses:
        nothing = f"what {method} sends has no head, embeddings or prototypes to read labels from"
        return f"Labels: {nothing}. Guesses without it: {floors}."
    linked = [leak.correlation for leak in leaks if leak.correlation is not None]
    words = f", correlation {np.mean(linked):.2f}" if linked else ""
    return (
        f"Labels: from {method}'s upload the label distribution of a client is guessed to a total variation distance of "
        f"{np.mean(guesses):.3f}{words} (mean over {len(leaks)} clients; 0 is exact). Guesses without it: {floors}."
    )
