"""Gradients row by row: what each row of a batch adds to a step is clipped, the sum gets noise (DP-SGD, Abadi et al. 2016).

An objective is a function of the model that has its batch inside. All objectives ask `Method.loss` for the loss of rows, so
that is where one row is put in the place of the batch, and `torch.func.vmap` asks for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from gpfl.core import losses, tree
from gpfl.core.method import Batch, GradientResult, LossTerms
from gpfl.core.net import Model, Net
from gpfl.core.randomness import stream
from gpfl.core.tree import Tree
from gpfl.defences.uploads import noisy, shrink
from gpfl.errors import GpflError

Objective = Callable[[Model], LossTerms]
Plain = Callable[[Tree, Tree, Objective], GradientResult]
"""Gives the gradient by some weights of a state under an objective."""


@dataclass
class Pass:
    """A step that goes by rows: the stream of its noise, the rows that losses are asked of, and what was seen."""

    key: Tensor
    rows: Batch | None = None
    descents: int = 0
    apart: dict[str, float] | None = None  # by term: how far the batch's is from the mean of its rows'; None: nobody asks


PASS: ContextVar[Pass | None] = ContextVar("PASS", default=None)
WATCHED: ContextVar[list[Pass] | None] = ContextVar("WATCHED", default=None)


class RowsAskedError(Exception):
    """An objective has come to its loss: the rows that it is over."""

    def __init__(self, batch: Batch) -> None:
        super().__init__("an objective was only asked for its rows")
        self.batch = batch


@contextmanager
def by_rows(key: Tensor) -> Iterator[None]:
    """Lets gradients go by rows; each thread has its own."""
    watched = WATCHED.get()
    passing = Pass(key, apart=None if watched is None else {})
    before = PASS.set(passing)
    try:
        yield
    finally:
        PASS.reset(before)
    if watched is not None:
        watched.append(passing)


@contextmanager
def watching() -> Iterator[list[Pass]]:
    """Gives the list to which every step that goes by rows is added, its terms compared with those of the whole batch."""
    found: list[Pass] = []
    before = WATCHED.set(found)
    try:
        yield found
    finally:
        WATCHED.reset(before)


def rows_of(loss: Callable[[Batch], LossTerms], batch: Batch) -> LossTerms:
    """Gives the terms of the rows that the pass is at, in place of the batch's; those of the batch where there is no pass."""
    passing = PASS.get()
    if passing is None:
        return loss(batch)
    if passing.rows is None:
        raise RowsAskedError(batch)
    return loss(passing.rows)


def row_slope(
    plain: Plain, net: Net, local_state: Tree, moving: Tree, objective: Objective, bound: float, std: float
) -> GradientResult:
    """Gives the mean of the rows' gradients, each no longer than `bound`, with noise of `std` on their sum."""
    passing = PASS.get()
    if passing is None:
        return plain(local_state, moving, objective)
    model = Model(net, {**local_state, **moving}, training=True)
    batch = asked_rows(objective, model)

    def one(x: Tensor, y: Tensor) -> tuple[Tree, LossTerms, Tree]:
        row = Batch(x.unsqueeze(0), y.unsqueeze(0), torch.ones_like(y, dtype=torch.float32).unsqueeze(0))
        with at(passing, row):
            slope = plain(local_state, moving, objective)
        return slope.gradient, slope.terms, slope.aux

    gradients, terms, kept = vmap(one)(batch.x, batch.y)
    by_leaf = [torch.linalg.vector_norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in tree.leaves(gradients)]
    norms = torch.linalg.vector_norm(torch.stack(by_leaf), dim=0)  # (rows,)
    count = batch.mask.sum().clamp_min(1.0)
    factors = batch.mask * shrink(norms, bound) / count
    mean = tree.map_leaves(lambda leaf: torch.tensordot(factors, leaf, dims=1), gradients)
    if std:
        mean = noisy(mean, torch.full_like(count, std) / count, stream(passing.key[0], passing.key[1], passing.descents))
    passing.descents += 1
    means = {name: losses.masked_mean(values, batch.mask) for name, values in terms.items()}
    if passing.apart is not None:
        with at(passing, batch):
            note_apart(passing.apart, objective(model), means)
    # What a row keeps has an axis of one row.
    return GradientResult(mean, means, {}, tree.map_leaves(lambda leaf: leaf.flatten(0, 1), kept))


@contextmanager
def at(passing: Pass, rows: Batch) -> Iterator[None]:
    """Lets losses be those of these rows."""
    passing.rows = rows
    try:
        yield
    finally:
        passing.rows = None


def asked_rows(objective: Objective, model: Model) -> Batch:
    """Gives the rows that an objective is over."""
    try:
        objective(model)
    except RowsAskedError as asked:
        return asked.batch
    raise GpflError("an objective of the method does not ask Method.loss for the loss of rows: leave out --example-clip")


def note_apart(apart: dict[str, float], whole: LossTerms, means: LossTerms) -> None:
    """Notes how far the terms of a batch are from the means of its rows' terms, as a share of them."""
    for name, value in whole.items():
        far = float((value - means[name]).abs() / (value.abs() + means[name].abs()).clamp_min(1e-12))
        apart[name] = max(far, apart.get(name, 0.0))
