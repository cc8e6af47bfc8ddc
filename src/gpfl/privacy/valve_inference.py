"""Inference of a client's label distribution α from GPFL's valve, exact without noise.

The contexts g and p_i of a round are constants, so each linear layer of the valve ends at

    V_i = d V₀ + A gᵀ + B p_iᵀ,     g = Ĉᵀ1/U,     p_i = Ĉᵀα = g + s h,     h = Ĉᵀw,  Σw = 0,  |w| = 1.

The server knows V₀ and Ĉ. The part of V_i outside the rows of Ĉ gives d, and a singular vector of the rest gives ±w. Where the
layer's ReLU is off for g, A is 0 and the row is B_k (g + s h): its ratio is s, the same for all such rows. Class counts are
whole numbers, which removes what is left of rounding, and decides where there are no such rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.defences import undefended
from gpfl.methods.factored_valve import BRANCHES
from gpfl.methods.gpfl import GPFL
from gpfl.privacy.embedding_inference import embedding_scores
from gpfl.privacy.server_view import ServerView

_SIGMAS = 5.0  # standard deviations of the noise that an estimate allows for
_COUNT_TOLERANCE = 0.05  # distance from a whole number that rounding may cause
_ROW_TOLERANCE = 0.005  # the same in a single row
_MAX_COUNT_ERROR = 0.3  # error of a count from which on whole numbers decide nothing
_MAX_MISSING = 0.1  # fraction of the entries of a row that may be unchanged, as top-k leaves most of them
_MIN_ROWS = 2  # rows that must agree
_SHARP = 0.01  # error of their ratio above which as few may agree by chance
_MIN_NOISY_ROWS = 5  # rows that must agree with such an error
_CHANCE = 0.001  # probability at which numbers are not whole by chance


@dataclass(frozen=True)
class LabelEstimate:
    """A label distribution, and the least and greatest share of each class that the upload allows, (classes,) each."""

    guess: Tensor
    low: Tensor
    high: Tensor

    @property
    def is_exact(self) -> bool:
        """Whether the upload allows the guess alone."""
        return bool(torch.equal(self.low, self.high))


def infer_from_valve(view: ServerView) -> LabelEstimate | None:
    """Return what the valve of an upload tells of the client's label distribution, or None if it tells nothing."""
    embeddings = view.context_embeddings
    if embeddings is None:
        return None
    rows = _ValveRows.read(tree.branch(view.sent, "cov"), tree.branch(view.upload, "cov"), embeddings.double())
    line = None if rows is None else _Line.fit(rows)
    if rows is None or line is None:
        return None
    method = undefended(view.method)
    is_exact = not isinstance(method, GPFL) or not (method.alpha_levels or method.alpha_noise)
    estimate = _estimate(line, _fit_position(rows, line), view if is_exact else dataclasses.replace(view, n_samples=0))
    if isinstance(method, GPFL):
        estimate = _allow_for_changed_weights(estimate, method)
    if rows.is_sparse:  # missing entries are no random noise, so its bounds do not hold
        return LabelEstimate(estimate.guess, torch.zeros_like(estimate.low), torch.ones_like(estimate.high))
    return estimate


def counts_in_mean(sent: Tree, mean: Tree, embeddings: Tensor, n_samples: Sequence[int]) -> dict[int, Tensor]:
    """Return the class counts of single clients that a mean of valves still shows, by position in `n_samples`.

    A row in which the ReLU is off for g, and on for p_i of one client alone, is a multiple of p_i. The server recognises it by
    class counts that are whole numbers for one of the sample numbers, which happens by chance with probability `_CHANCE`.
    """
    rows = _ValveRows.read(sent, mean, embeddings.double())
    if rows is None:
        return {}
    coefficients = torch.linalg.lstsq(rows.embeddings.T, rows.change[rows.is_off].T).solution.T  # (rows, classes)
    totals = coefficients.sum(1, keepdim=True)
    shares, errors = coefficients / totals, _SIGMAS * rows.noise * rows.inverse_gram.diagonal().sqrt() / totals.abs()
    found: dict[int, Tensor] = {}
    for client, n in enumerate(n_samples):
        counts, tolerance = n * shares, n * errors + _ROW_TOLERANCE
        whole = counts.round()
        present = whole > 0  # no client of the mean may have the other classes, and the last count follows from n
        chance = ((2 * tolerance).clamp_max(1).log() * present).sum(1) * (1 - 1 / present.sum(1).clamp_min(1))
        fits = ((counts - whole).abs() <= tolerance).all(1) & (whole >= 0).all(1) & (whole.sum(1) == n)
        fits &= chance < math.log(_CHANCE / (len(shares) * len(n_samples)))
        if fits.any():
            found[client] = whole[fits][0]
    return found


def _allow_for_changed_weights(estimate: LabelEstimate, method: GPFL) -> LabelEstimate:
    """Return an estimate of the weights behind p_i with the bounds of the label distribution that they come from."""
    guess, low, high = estimate.guess, estimate.low, estimate.high
    if sigma := float(method.alpha_noise):  # α plus noise over a sum near 1
        spread = _SIGMAS * sigma * math.sqrt(len(guess))
        low = low * max(0.0, 1 - spread) - _SIGMAS * sigma
        high = high * (1 + spread + sigma * len(guess)) + _SIGMAS * sigma
    if levels := method.alpha_levels:  # rounded up to m/L, over a sum from 1 to (L + U − 1)/L
        low, high = low - 1 / levels, high * (levels + len(guess) - 1) / levels
    return LabelEstimate(guess, low.clamp(0, 1), high.clamp(0, 1))


@dataclass(frozen=True)
class _ValveRows:
    """The change of the valve's rows within the span of the embeddings, in an orthonormal basis of that span."""

    change: Tensor  # (rows, classes)
    is_off: Tensor  # (rows,) whether the ReLU is off for g before and after the round
    embeddings: Tensor  # (classes, classes)
    noise: float  # standard deviation of an entry of `change`
    inverse_gram: Tensor  # of the embeddings, (classes, classes)
    is_sparse: bool  # whether entries of rows that changed are missing

    @classmethod
    def read(cls, sent: Tree, upload: Tree, embeddings: Tensor) -> "_ValveRows | None":
        """Return the rows of both layers, or None if the embeddings do not explain how they changed."""
        classes, width = embeddings.shape
        if classes >= width or torch.linalg.matrix_rank(embeddings) != classes:
            return None
        basis = torch.linalg.qr(embeddings.T).Q.T  # (classes, width)
        g = embeddings.mean(0)
        changes, offs, rests, missing = [], [], [], []
        for name in BRANCHES:
            before, after = (tree.leaf(state, f"{name}.linear.weight").double() for state in (sent, upload))
            biases = [tree.leaf(state, f"{name}.linear.bias").double() for state in (sent, upload)]
            same = after == before
            missing.append(float(same[~same.all(1)].double().mean()))
            rest_before, rest_after = (weight - weight @ basis.T @ basis for weight in (before, after))
            decay = (rest_before * rest_after).sum() / rest_before.square().sum()
            changes.append((after - decay * before) @ basis.T)
            rests.append(rest_after - decay * rest_before)
            offs.append((before @ g + biases[0] < 0) & (after @ g + biases[1] < 0))
        rest = torch.cat(rests)
        noise = float(rest.square().sum().div(len(rest) * (width - classes)).sqrt())
        is_sparse = max(missing) > _MAX_MISSING
        if not is_sparse and _spectral_norm(rest) > 3 * _largest_noise(noise, len(rest), width - classes):
            return None
        inside = embeddings @ basis.T
        return cls(torch.cat(changes), torch.cat(offs), inside, noise, torch.linalg.inv(inside @ inside.T), is_sparse)


@dataclass(frozen=True)
class _Line:
    """The line 1/U + s·w on which the label distribution lies."""

    w: Tensor  # (classes,)
    std: Tensor  # standard deviation of w, (classes,)

    @classmethod
    def fit(cls, rows: _ValveRows) -> "_Line | None":
        """Return the line, or None if the valve moved along g alone as far as noise lets see."""
        g = rows.embeddings.mean(0)
        unit = g / g.norm()
        _, strengths, directions = torch.linalg.svd(rows.change - (rows.change @ unit)[:, None] * unit, full_matrices=False)
        if float(strengths[0]) < 2 * _largest_noise(rows.noise, *rows.change.shape):
            return None
        w = torch.linalg.solve(rows.embeddings.T, directions[0])
        w = w - w.mean()
        std = rows.noise / strengths[0] * rows.inverse_gram.diagonal().sqrt() / w.norm()
        return cls(w / w.norm(), torch.zeros_like(w) if len(w) == 2 else std)

    def at(self, s: float | Tensor) -> Tensor:
        """Return the point at s, or the points at several."""
        return 1 / len(self.w) + torch.as_tensor(s, dtype=self.w.dtype).unsqueeze(-1) * self.w

    @property
    def ends(self) -> tuple[float, float]:
        """The least and greatest s at which no share is negative, as far as the error of w allows."""
        slack = torch.minimum(_SIGMAS * self.std, self.w.abs() / 2)
        falling, rising = self.w < 0, self.w > 0
        scale = -1 / len(self.w)
        return float((scale / (self.w - slack)[rising]).max()), float((scale / (self.w + slack)[falling]).min())


def _fit_position(rows: _ValveRows, line: _Line) -> tuple[float, float] | None:
    """Return s and its standard deviation from the rows in which the ReLU is off for g, or None if too few agree."""
    pair = torch.stack([rows.embeddings.mean(0), line.w @ rows.embeddings])  # g, h
    along_g, along_h = torch.linalg.lstsq(pair.T, rows.change[rows.is_off].T).solution
    std_g, std_h = (rows.noise * torch.linalg.inv(pair @ pair.T).diagonal().sqrt()).tolist()
    moved = along_g.abs() > _SIGMAS * std_g
    along_g, along_h = along_g[moved], along_h[moved]
    if len(along_g) < _MIN_ROWS:
        return None
    s = float(_weighted_median(along_h / along_g, along_g.abs()))
    for _ in range(5):
        error = math.hypot(std_h, s * std_g)
        agree = (along_h - s * along_g).abs() < _SIGMAS * error + 1e-5 * along_g.abs()
        if int(agree.sum()) < _MIN_ROWS or along_g[agree].abs().sum() < along_g.abs().sum() / 2:
            return None
        x, y = along_g[agree], along_h[agree]
        s = float((x * y).sum() / x.square().sum())
    if len(x) < _MIN_NOISY_ROWS and _SIGMAS * error / float(x.norm()) > _SHARP:
        return None
    return s, error / float(x.norm()) + abs(s) * len(x) * std_g**2 / float(x.square().sum())  # x is noisy too


def _estimate(line: _Line, position: tuple[float, float] | None, view: ServerView) -> LabelEstimate:
    """Return the point of a line, or the part of it that rows and whole class counts allow."""
    low, high = line.ends
    n_samples = view.n_samples
    if position is not None:
        s, std = position
        margin = _SIGMAS * std + 1e-6
        low, high = max(low, s - margin), max(min(high, s + margin), max(low, s - margin))
    error = _SIGMAS * line.std * max(abs(low), abs(high))
    possible = line.at(torch.tensor([low, high]))
    if n_samples and n_samples * float(error.max()) < _MAX_COUNT_ERROR:
        counts = _whole_counts(line, low, high, n_samples, n_samples * error + _COUNT_TOLERANCE)
        if len(counts):
            shares = counts / n_samples
            distance = (counts > 0).sum(1) if position is None else (shares - line.at(position[0])).abs().sum(1)
            return LabelEstimate(shares[distance.argmin()], shares.min(0).values, shares.max(0).values)
    s = low if position is None else position[0]
    if position is None:  # the embeddings tell roughly where
        scores = embedding_scores(view).double()
        s = float(((scores / scores.sum().clamp_min(1e-30)) @ line.w).clamp(low, high))
    guess = line.at(s).clamp_min(0)
    bounds = ((possible.min(0).values - error).clamp_min(0), (possible.max(0).values + error).clamp_max(1))
    return LabelEstimate(guess / guess.sum(), *bounds)


def _whole_counts(line: _Line, low: float, high: float, n_samples: int, tolerance: Tensor) -> Tensor:
    """Return the whole class counts between two points of a line, (found, classes), as far as errors are within a tolerance."""
    first, last = line.w.argmin(), line.w.argmax()
    step = 1 / (n_samples * (line.w[last] - line.w[first]))  # from one whole difference of these two counts to the next
    margin = tolerance.max() * step
    numbers = torch.arange(int(torch.ceil((low - margin) / step)), int(torch.floor((high + margin) / step)) + 1)
    counts = n_samples * line.at(numbers * step)
    whole = counts.round()
    fits = ((counts - whole).abs() <= tolerance).all(1) & (whole >= 0).all(1) & (whole.sum(1) == n_samples)
    return whole[fits & (numbers != 0)]  # at 0 there would be no line


def _largest_noise(std: float, rows: int, columns: int) -> float:
    """Return about the largest singular value of a matrix of independent noise."""
    return std * (math.sqrt(rows) + math.sqrt(columns))


def _spectral_norm(matrix: Tensor, iterations: int = 20) -> float:
    """Return about the largest singular value, from below; a decomposition would take a minute for the widest nets."""
    vector = matrix[matrix.square().sum(1).argmax()]
    for _ in range(iterations):
        vector = matrix.T @ (matrix @ (vector / vector.norm().clamp_min(1e-300)))
    return float(vector.norm().sqrt())


def _weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    order = values.argsort()
    total = weights[order].cumsum(0)
    return values[order][int((total < total[-1] / 2).sum())]
