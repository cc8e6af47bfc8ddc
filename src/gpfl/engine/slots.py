"""Slots: clients with unequal numbers of steps share the places of a stack, so that a finished client costs nothing."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import Indices
from gpfl.core.method import ClientInfo
from gpfl.core.tree import Tree
from gpfl.engine.compiler.program import Buffers, Program

T = TypeVar("T")
STEP_OVERHEAD = 9
"""Fixed time of a step in units of one slot's time: a step of 20 slots took 0.64 ms, of 30 slots 0.86 ms (H200)."""
SEGMENT = 512  # steps whose sample indices are on the device at once


@dataclass(frozen=True)
class Packing:
    """An assignment of clients, by position, to slots. A client keeps its slot for all its steps."""

    slots: list[list[int]]  # the clients of each slot, in order
    lengths: list[int]  # the number of steps of each client

    @property
    def steps(self) -> int:
        """Number of steps until the last slot is empty."""
        return max(sum(self.lengths[client] for client in slot) for slot in self.slots)

    def plan(self, batches: Sequence[Indices]) -> Indices:
        """Return the samples of every step of every slot, (slots, steps, width), -1 where a slot is empty."""
        width = max(part.shape[1] for part in batches)
        plan = np.full((len(self.slots), self.steps, width), -1, dtype=np.int64)
        for slot, clients in enumerate(self.slots):
            start = 0
            for client in clients:
                plan[slot, start : start + self.lengths[client], : batches[client].shape[1]] = batches[client]
                start += self.lengths[client]
        return plan

    def swaps(self) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Return when slots change clients: (steps done, [(slot, leaving client, entering client)]), -1 for none."""
        swaps: dict[int, list[tuple[int, int, int]]] = {}
        for slot, clients in enumerate(self.slots):
            time, previous = 0, -1
            for client in clients:
                swaps.setdefault(time, []).append((slot, previous, client))
                time, previous = time + self.lengths[client], client
            if clients:
                swaps.setdefault(time, []).append((slot, previous, -1))
        return sorted(swaps.items())


def pack(lengths: Sequence[int], slots: int) -> Packing:
    """Assign clients to slots: the longest first, each to the slot that is free soonest."""
    free = [(0, slot) for slot in range(slots)]
    out: list[list[int]] = [[] for _ in range(slots)]
    for client in sorted(range(len(lengths)), key=lambda client: (-lengths[client], client)):
        load, slot = heapq.heappop(free)
        out[slot].append(client)
        heapq.heappush(free, (load + lengths[client], slot))
    return Packing(out, list(lengths))


def fastest_slot_count(lengths: Sequence[int], counts: Sequence[int]) -> int:
    """Return the number of slots, one of `counts`, with which these clients finish soonest."""
    return min(counts, key=lambda count: pack(lengths, count).steps * (STEP_OVERHEAD + count))


def batched(entries: Sequence[T], size: int) -> list[list[T]]:
    """Return the entries in lists of at most `size`."""
    return [list(entries[start : start + size]) for start in range(0, len(entries), size)]


LARGE_ROW = 1 << 14
"""Bytes of a client's tensor from which one copy per client is faster on a CPU than gathering the rows of all first."""


class ClientStore(NamedTuple):
    """The stacked clients that slots are filled with."""

    start: Buffers  # local state and loss terms, read when a client enters a slot
    end: Buffers  # the same, written when it leaves; it may be the same memory
    info: ClientInfo
    shared: Tree  # stacked over rounds where several run concurrently
    rounds: Tensor | None  # (clients,) the round of each; None where there is one


class SlotSwaps:
    """The exchange of clients between a store and the slots of a program.

    All indices are copied to the device at once: a copy between steps would wait for them.
    """

    def __init__(self, packing: Packing, device: torch.device) -> None:
        indices: list[int] = []
        self._spans: dict[int, list[slice]] = {}
        self._columns: dict[int, tuple[list[int], ...]] = {}
        for time, swaps in packing.swaps():
            columns = (
                [slot for slot, leaving, _ in swaps if leaving >= 0],
                [leaving for _, leaving, _ in swaps if leaving >= 0],
                [slot for slot, _, entering in swaps if entering >= 0],
                [entering for _, _, entering in swaps if entering >= 0],
            )
            self._columns[time], self._spans[time] = columns, []
            for column in columns:
                self._spans[time].append(slice(len(indices), len(indices) + len(column)))
                indices += column
        self._indices = torch.tensor(indices, device=device)

    @property
    def times(self) -> list[int]:
        """Numbers of steps after which a slot changes its client."""
        return list(self._spans)

    def apply(self, time: int, program: Program, store: ClientStore) -> None:
        """Store the state of clients that leave their slots at `time`, and load that of clients that enter."""
        if time not in self._spans:
            return
        left_slots, leaving, entered_slots, entering = (self._indices[span] for span in self._spans[time])
        from_slots, to_clients, to_slots, from_clients = self._columns[time]
        for key in ("local_state", "terms"):
            for slots, end in tree.zip_leaves(program.state[key], store.end[key]):
                _copy_rows(end, to_clients, leaving, slots, from_slots, left_slots)
            for slots, start in tree.zip_leaves(program.state[key], store.start[key]):
                _copy_rows(slots, to_slots, entered_slots, start, from_clients, entering)
        if len(entering):
            for slots, stored in zip(program.fixed["client"], store.info, strict=True):
                slots.index_copy_(0, entered_slots, stored[entering])
            if store.rounds is not None:
                rounds = store.rounds[entering]
                for slots, stored in tree.zip_leaves(program.fixed["shared"], store.shared):
                    slots.index_copy_(0, entered_slots, stored[rounds])


def _copy_rows(
    target: Tensor, rows: list[int], index: Tensor, source: Tensor, source_rows: list[int], source_index: Tensor
) -> None:
    """Copy rows of one tensor into those of another; both are given as numbers and as a tensor on the device."""
    if not rows:
        return
    if target.device.type == "cpu" and target.nbytes >= LARGE_ROW * len(target):
        for row, source_row in zip(rows, source_rows, strict=True):
            target[row].copy_(source[source_row])
    else:
        target.index_copy_(0, index, source[source_index])


def load_segment(program: Program, plan: Tensor, start: int) -> int:
    """Load the sample indices of the steps from `start` into a program, and return the number of these steps."""
    segment = plan[:, start : start + program.fixed["plan"].shape[1]]
    program.fixed["plan"][:, : segment.shape[1]].copy_(segment)
    program.state["step"].zero_()
    return segment.shape[1]
