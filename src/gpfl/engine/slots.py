"""Slots: the places of a stack in which clients train, filled from a stock of all members' states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import ClientInfo
from gpfl.core.tree import Tree
from gpfl.engine.compiler.program import Buffers, Program
from gpfl.engine.packing import Packing


class Stock(NamedTuple):
    """What slots are filled from: members' states, what they know, and their rounds' shared states, if there are several."""

    store: Buffers
    client: ClientInfo
    shared: Tree
    groups: Tensor | None


class Changes:
    """When slots change hands. All numbers go to the device at once: a transfer in between would wait for all that runs."""

    def __init__(self, packing: Packing, device: torch.device) -> None:
        numbers: list[int] = []
        self._spans: dict[int, tuple[slice, slice, slice, slice]] = {}
        for time, events in packing.changes():
            lists = (
                [slot for slot, who, _ in events if who >= 0],
                [who for _, who, _ in events if who >= 0],
                [slot for slot, _, who in events if who >= 0],
                [who for _, _, who in events if who >= 0],
            )
            spans = []
            for part in lists:
                spans.append(slice(len(numbers), len(numbers) + len(part)))
                numbers += part
            self._spans[time] = (spans[0], spans[1], spans[2], spans[3])
        self._numbers = torch.tensor(numbers, device=device)

    @property
    def times(self) -> list[int]:
        """The times at which something changes."""
        return list(self._spans)

    def apply(self, time: int, program: Program, stock: Stock) -> None:
        """Takes the states of those who leave their slots into the store, and puts those who enter into them."""
        if time not in self._spans:
            return
        left, leavers, entered, entrants = (self._numbers[span] for span in self._spans[time])
        for part in ("work", "terms"):
            for slots, kept in tree.zip_leaves(program.state[part], stock.store[part]):
                if len(left):
                    kept.index_copy_(0, leavers, slots[left])
                if len(entered):
                    slots.index_copy_(0, entered, kept[entrants])
        if len(entered):
            for slots, known in zip(program.fixed["client"], stock.client, strict=True):
                slots.index_copy_(0, entered, known[entrants])
            if stock.groups is not None:
                of = stock.groups[entrants]
                for slots, known in tree.zip_leaves(program.fixed["shared"], stock.shared):
                    slots.index_copy_(0, entered, known[of])


def like(stacked: Tree, width: int) -> Tree:
    """Gives empty memory for `width` entries of a stacked tree."""
    return tree.map_leaves(lambda t: t.new_zeros((width, *t.shape[1:])), stacked)
