"""Lanes: the slots of a phase in parts that a GPU runs side by side, each by a program on memory of its own.

Many of a step's kernels are too small to fill a card: while one lane waits, another counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from gpfl.data.table import Rows
from gpfl.engine.pack import Packing
from gpfl.engine.program import Program
from gpfl.engine.slots import Changes, Stock


def split(packing: Packing, count: int) -> list[Packing]:
    """Gives the slots in so many parts of one width, where need be with slots that stay empty."""
    padded = [*packing.slots, *([] for _ in range(-len(packing.slots) % count))]
    return [Packing(padded[number::count], packing.lengths) for number in range(count)]


class Lane:
    """Some slots, their plan, and when they change hands."""

    def __init__(self, program: Program, packing: Packing, rows: Sequence[Rows], stock: Stock) -> None:
        self._program, self._stock, self._steps = program, stock, packing.steps
        self._plan = torch.from_numpy(packing.plan(rows)).to(program.device)
        self._changes = Changes(packing, program.device)
        self._segment = program.fixed["plan"].shape[1]

    @property
    def times(self) -> set[int]:
        """The times at which it needs more than its program, and that of its end."""
        return {*self._changes.times, *range(0, self._steps, self._segment), self._steps}

    def run(self, now: int, until: int) -> None:
        """Advances from one time to another, among which none of its own lies."""
        self._changes.apply(now, self._program, self._stock)
        if now % self._segment == 0 and now < self._steps:
            self._program.state["step"].zero_()
            part = self._plan[:, now : now + self._segment]
            self._program.fixed["plan"][:, : part.shape[1]].copy_(part)
        for _ in range(min(until, self._steps) - now):
            self._program()


def run_lanes(lanes: Sequence[Lane], streams: Sequence[torch.cuda.Stream]) -> None:
    """Runs lanes to their ends, each of `streams` one of the last; the others, on a CPU all, in turn where we are."""
    times = sorted({time for lane in lanes for time in lane.times})
    here = [nullcontext() for _ in lanes[len(streams) :]]
    where: list[AbstractContextManager[object]] = [*here, *(torch.cuda.stream(stream) for stream in streams)]
    with side_by_side(streams):
        for now, until in zip(times, [*times[1:], times[-1]], strict=True):
            for lane, place in zip(lanes, where, strict=True):
                with place:
                    lane.run(now, until)


@contextmanager
def side_by_side(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Lets streams begin after what was asked for before, and what is asked for afterwards wait for them."""
    if not streams:
        yield
        return
    main = torch.cuda.current_stream(streams[0].device)
    for stream in streams:
        stream.wait_stream(main)
    yield
    for stream in streams:
        main.wait_stream(stream)
