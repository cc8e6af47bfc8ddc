"""Whether a method may promise anything about single rows: it is tried on a few, before the run.

Two things must hold. The loss of a batch is the mean of its rows' losses: else clipping rows changes the method, silently. And
what is sent depends on rows through their clipped, noisy gradients alone: else the noise does not cover it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo
from gpfl.core.randomness import torch_generator
from gpfl.core.tree import Tree
from gpfl.data.table import Table
from gpfl.defences.config import DefenceConfig
from gpfl.defences.defended import Defended
from gpfl.defences.per_example import PerExampleGradient
from gpfl.errors import GpflError

ROWS = 4
"""Rows of a batch that the method is tried on."""
SAME = 1e-3
"""The share by which a batch's term may differ from the mean of its rows' and pass for rounding."""
FAINT, LOUD = 1e-30, 1e27
"""A bound under which no row is heard, and the noise that is then 0.001."""
ENDLESS = 1e30
"""A bound that bounds nothing."""


@dataclass(frozen=True)
class Tried:
    """What was found: noisy gradients that a row can enter in a step of each phase, and whether label counts are used."""

    descents: tuple[int, ...]
    uses_counts: bool


def tried(method: Defended, table: Table, rows: list[int]) -> Tried:
    """Gives what is found of a method on some rows of a table; refuses one that cannot keep the promise."""
    device = table.y.device
    shared, private = (stirred(tree.to(state, device), place) for place, state in enumerate(method.init(0)))
    counts = torch.arange(1, table.classes + 1, dtype=torch.float32, device=device)
    one, half, none = torch.ones((), device=device), torch.full((), 0.5, device=device), torch.zeros((), device=device)
    client = ClientInfo(counts.sum(), counts, half, one, none)
    first, second = (batches(method, table, rows, start) for start in (0, ROWS))
    passes: list[PerExampleGradient] = []
    run(dataclasses.replace(method, recorded=passes), shared, private, client, first)
    refuse_coupled(method, passes)
    deaf = dataclasses.replace(method, defence=DefenceConfig(example_clip=FAINT, example_noise=LOUD))
    quiet = run(deaf, shared, private, client, first)
    if not same(quiet, run(deaf, shared, private, client, second)):
        raise GpflError(
            f"defence.example_clip is {method.defence.example_clip:g}, but {method.name} sends more of its rows than gradients "
            "tell, which noise on gradients does not cover: leave out --example-clip and --example-noise"
        )
    keen = dataclasses.replace(method, defence=DefenceConfig(example_clip=ENDLESS))
    other = client._replace(label_counts=counts.flip(0))
    heard = [run(keen, shared, private, one, first) for one in (client, other)]
    return Tried(tuple(one.calls for one in passes), not same(*heard))


def refuse_coupled(method: Defended, passes: list[PerExampleGradient]) -> None:
    """Refuses a loss whose terms of a batch are not the means of its rows'."""
    for passing in passes:
        for name, far in (passing.coupling or {}).items():
            if far > SAME:
                way = "say --mlg-norm sample_mean" if hasattr(method, "mlg_norm") else "leave out --example-clip"
                raise GpflError(
                    f"defence.example_clip is {method.defence.example_clip:g}, but the term '{name}' of {method.name} is not a "
                    f"mean over rows, so that none has a gradient of its own: {way}"
                )


def run(method: Defended, shared: Tree, private: Tree, client: ClientInfo, steps: list[Batch]) -> Tree:
    """Gives what a client sends after one step of every phase."""
    local_state = method.download(shared, private, client)
    for phase, batch in zip(method.phases(), steps, strict=True):
        local_state, _ = phase.step(shared, local_state, batch, client)
    return method.upload(shared, local_state, private, client)[0]


def batches(method: Defended, table: Table, rows: list[int], start: int) -> list[Batch]:
    """Gives a batch for a step of every phase, the rows from `start` on, over and over where they are few."""
    out = []
    for phase in method.phases():
        places = [rows[(start + place) % len(rows)] for place in range(ROWS * phase.batches)]
        out.append(table.batch(torch.tensor(places, device=table.y.device)))
    return out


def stirred(state: Tree, place: int) -> Tree:
    """Gives a state near another: terms that are zero where all states are equal must show."""
    draw = torch_generator(0, "defence", place)
    return tree.map_leaves(lambda t: t + 0.1 * (0.1 + t.abs()) * torch.randn(t.shape, generator=draw).to(t), state)


def same(one: Tree, other: Tree) -> bool:
    """Tells whether two uploads are equal but for rounding."""
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in tree.pairs(one, other))
