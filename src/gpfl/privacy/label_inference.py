"""Label leakage: the server's guess of a client's label distribution from its upload alone.

What tells it depends on what travels: a shared head (the scores of classes that a client has are pushed up), embeddings
(those of its classes turn towards its features and grow), prototypes (those of its classes are sent). A shared base alone tells
nothing directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.defences import Defended
from gpfl.engine import Engine, matmul_precision
from gpfl.errors import pluralize
from gpfl.privacy import lbfgs
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.victims import Victim, refuse_idle, uploads_of
from gpfl.training.run_dir import RunState

Floats = npt.NDArray[np.float64]

STILL = 1e-6
"""The share of the largest movement below which a class counts as not moved."""
SPANS = 24
"""Into how many spans a round is cut where embeddings are followed through it; a shorter one has a span a step."""
EVALUATIONS = 80
"""How often the features that explain a round's embeddings are tried."""
SPARSE = 0.02
"""How much the lengths of classes' features count beside what they explain, over the number of classes."""
SATURATED = 1.0
"""The turn (radians) that one U-th of all features could give, from which on turns are near their end in a round."""
STRONGEST = 15.0
"""The strength from which on a pull leaves nothing to turn."""


def clue_of(seen: ServerView) -> str:
    """Gives the part of an upload that tells of labels, or "" where none does."""
    return next((part for part in ("prototypes", "gce", "head") if part in seen.upload), "")


def guess_shares(seen: ServerView) -> Tensor | None:
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


def head_signs(seen: ServerView) -> Tensor:
    """Gives how far each class of a shared head was pushed up from where absent classes are pushed down to.

    Cross-entropy pulls a bias by the mean of p − y; only classes that are there can be pushed up, and the others show p.
    Where the client's own label counts are in the loss (FedRoD), classes that it does not have do not move at all, and the
    others as far as their rows say.
    """
    gradient = tree.branch(seen.gradient(("head",)), "head")
    layers = [value for value in tree.leaves(gradient) if len(value) == seen.method.net.classes]
    biases, weights = [v for v in layers if v.dim() == 1], [v for v in layers if v.dim() == 2]
    if gradient_targets(seen.method)["model"].counts_in_loss:
        moved = torch.linalg.vector_norm(weights[-1], dim=1)
        return torch.where(moved > STILL * moved.max(), moved, torch.zeros_like(moved))
    pulled = biases[-1] if biases else weights[-1].sum(1)
    down = pulled[pulled > 0]
    return ((down.mean() if len(down) else 0.0) - pulled).clamp_min(0)


def embedding_signs(seen: ServerView) -> Tensor:
    """Gives how much of each class its embedding tells: by where it turned, and by how much it grew.

    L^alg, and nothing but it and decay, moves C_u, by −(s_u − y_u) times the features over the length of C_u, always at right
    angles to C_u. So the features that would have turned all embeddings as they did are searched for (`feature_sums`). Each
    step at a right angle also lengthens C_u, whichever way it goes: that still tells the classes once C_u is so short that it
    soon has turned all the way. Where a defence blurs uploads, features are long by its noise alone, in all directions: then
    only how far they go the way of all features together counts.
    """
    before, after = (tree.leaf(tree.branch(state, "gce"), "weight").double() for state in (seen.sent, seen.upload))
    squares, growth = lengths(seen, before, after)
    strengths = seen.method.lr * seen.steps / len(squares) / squares  # (spans, classes)
    clear = not blurred(seen.method)
    sums = feature_sums(before, after, strengths, clear and "cov" in seen.sent)
    turned: Tensor = torch.linalg.vector_norm(sums, dim=1) if clear else (sums @ F.normalize(sums.sum(0), dim=0)).clamp_min(0)
    if float(strengths.sum(0).mean()) / len(turned) < SATURATED:
        return turned.float()
    return (turned * growth).sqrt().float()


def blurred(method: Method) -> bool:
    """Tells whether a defence adds noise to uploads, or drops or rounds entries; a server knows that it does."""
    if not isinstance(method, Defended):
        return False
    return bool(method.defence.noise or method.defence.example_noise or method.defence.compresses)


def lengths(seen: ServerView, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Gives the squared lengths of embeddings in the middle of spans (spans, classes), and how much steps lengthened them.

    Steps at right angles make |C|² ← a²|C|² + |η·step|², a = 1 − ημ; the last term is taken to stay the same for the round.
    The growth (classes,) is told as it would be at length 1: steps are the shorter, the longer C is.
    """
    first, last = before.square().sum(1), after.square().sum(1)
    kept = (1 - seen.method.lr * seen.pull("gce")) ** 2
    spans = min(SPANS, seen.steps)
    times = [seen.steps * (span + 0.5) / spans for span in range(spans)]

    def summed(steps: float) -> float:
        return steps if kept == 1 else (1 - kept**steps) / (1 - kept)

    gain = (last - kept**seen.steps * first) / summed(seen.steps)
    squares = torch.stack([kept**time * first + summed(time) * gain for time in times])
    squares = squares.clamp_min(torch.minimum(first, last) / 4).clamp_min(1e-12)  # what a defence adds may say less
    return squares, gain.clamp_min(0) / (1 / squares).mean(0)


def feature_sums(before: Tensor, after: Tensor, strengths: Tensor, positive: bool) -> Tensor:
    """Gives the sums (classes, width) of the directions of each class's features that explain how embeddings turned.

    Embeddings are followed through the round with `strengths` (spans, classes), the rate over their squared lengths. Most
    classes of most clients are not there, so of features that explain the same the shortest are taken. `positive`: features
    come from a ReLU.
    """
    classes, width = before.shape
    start, end = F.normalize(before, dim=1), F.normalize(after, dim=1)
    per_turn = 1 / strengths.sum(0).unsqueeze(1)

    def objective(point: Tensor) -> Tensor:
        searched = point.reshape(classes, width)
        sums = searched.clamp_min(0) if positive else searched
        off = (turned_by(start, sums, strengths) - end) * per_turn
        short = (sums.square().sum(1) + (1e-3 / classes) ** 2).sqrt().sum()
        return off.square().sum() + SPARSE / classes * short + (searched - sums).square().sum()

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        slope, value = torch.func.grad_and_value(objective)(points[0])
        return slope[None], value[None]

    state = lbfgs.begin(torch.full_like(before, 0.1 / classes / width**0.5).flatten()[None], evaluate)
    for _ in range(EVALUATIONS):
        state = lbfgs.advance(state, evaluate)
    sums = tree.leaf(state, "point").reshape(classes, width)
    return sums.clamp_min(0) if positive else sums


def turned_by(start: Tensor, sums: Tensor, strengths: Tensor) -> Tensor:
    """Gives the directions of embeddings after a round on features with these sums, from those at its start (classes, width).

    In each span C_u turns towards Σ(y_u − s_u)·f along the great circle, as far as the exact solution for a pull of that
    strength says, so that spans may be long.
    """
    own, found = F.normalize(sums, dim=1), start
    for strength in strengths:
        pulled = sums - torch.softmax(own @ found.T, 1).T @ sums
        size = torch.linalg.vector_norm(pulled, dim=1, keepdim=True).clamp_min(1e-12)
        towards = pulled / size
        power = (strength.unsqueeze(1) * size).clamp_max(STRONGEST)
        near = (found * towards).sum(1, keepdim=True)
        found = F.normalize(found + towards * (power.sinh() + near * (power.cosh() - 1)), dim=1)
    return found


def guess_counts(shares: Tensor, rows: int) -> Tensor:
    """Gives whole numbers of rows (classes,) that come nearest to the shares and sum to `rows`."""
    wanted = shares.double() * rows
    counts = wanted.floor()
    left = int(rows - counts.sum().item())
    order = torch.argsort(wanted - counts, descending=True, stable=True)
    counts[order[:left]] += 1
    return counts


def guess_labels(seen: ServerView) -> Tensor | None:
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


def label_leaks(engine: Engine, state: RunState, clients: Sequence[int]) -> list[Leak]:
    """Gives how well the server guesses each client's label distribution from a whole local round's upload.

    Of several clients those that have too few rows to train are left out: they send nothing.
    """
    with matmul_precision("float32"):  # whatever the run was in
        return [leak_of(engine, state, client) for client in sending(engine, clients)]


def sending(engine: Engine, clients: Sequence[int]) -> list[int]:
    """Gives the clients that have rows enough to train; refuses clients none of which has."""
    found = [client for client in clients if engine.can_train(client)]
    if not found:
        refuse_idle(engine, clients[0])
    return found


def leak_of(engine: Engine, state: RunState, client: int) -> Leak:
    """Gives how well the server guesses one client's label distribution."""
    counts = engine.federation.label_counts.astype(np.float64)
    (seen,) = uploads_of(engine, state, [Victim(client, (0,))], "epoch")
    shares = guess_shares(seen)
    truth = counts[client] / counts[client].sum()
    guess = None if shares is None else shares.double().cpu().numpy()
    return Leak(
        engine.federation.shards[client].name,
        None if guess is None else variation(truth, guess),
        variation(truth, np.full_like(truth, 1 / len(truth))),
        variation(truth, counts.sum(0) / counts.sum()),
        None if guess is None else correlation(truth, guess),
    )


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


def told(leaks: Sequence[Leak], method: str, asked: int) -> str:
    """Gives the sentence about label leakage, so many clients having been asked."""
    uniform, overall = (float(np.mean([getattr(leak, name) for leak in leaks])) for name in ("uniform", "overall"))
    floors = f"all classes alike {uniform:.3f}, all clients together {overall:.3f}"
    over = f"mean over {spoken_of(leaks, asked)}"
    guesses = [leak.guess for leak in leaks if leak.guess is not None]
    if not guesses:
        nothing = f"what {method} sends has no head, embeddings or prototypes to read labels from"
        return f"Labels: {nothing}. Guesses without it ({over}): {floors}."
    linked = [leak.correlation for leak in leaks if leak.correlation is not None]
    words = f", correlation {np.mean(linked):.2f}" if linked else ""
    return (
        f"Labels: from {method}'s upload the label distribution of a client is guessed to a total variation distance of "
        f"{np.mean(guesses):.3f}{words} ({over}; 0 is exact). Guesses without it: {floors}."
    )


def spoken_of(leaks: Sequence[Leak], asked: int) -> str:
    """Gives of how many clients leaks tell, of so many that were asked."""
    if len(leaks) == asked:
        return pluralize(asked, "client")
    return f"{len(leaks)} of {pluralize(asked, 'client')}, the others having too few rows to train"
