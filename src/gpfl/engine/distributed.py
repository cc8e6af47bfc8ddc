"""Ranks: the processes of one run, as torchrun starts them. Without it there is one, and nothing here does anything."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NoReturn, TypeVar, cast

import torch
from torch import distributed

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.errors import GpflError

T = TypeVar("T")


class LoneError(GpflError):
    """An error of one process in the midst of work that others share: they wait for it, so that none can go on."""


@dataclass(frozen=True)
class Ranks:
    """A process among those of a run."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Tells whether this is the process that writes and speaks."""
        return self.rank == 0

    def agree(self, value: T) -> T:
        """Gives every process the first one's value."""
        if self.world == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def once(self, act: Callable[[], T]) -> T:
        """Gives every process what the first alone does once all are here: its result, or its error.

        What the others have read of the disk before, they have read before the first writes.
        """
        if self.world == 1:
            return act()
        self.wait()
        result: T | None = None
        problem: Exception | None = None
        if self.first:
            try:
                result = act()
            except Exception as error:  # whatever it is, the others wait to hear of it
                problem = error
        result, problem = self.agree((result, problem))
        if problem is not None:
            raise problem
        return cast(T, result)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Makes an error of this process, among several that work in step within, one after which none goes on."""
        try:
            yield
        except Exception as problem:
            if self.world == 1:
                raise
            if not self.first or not isinstance(problem, GpflError):  # of which nobody else would speak
                traceback.print_exc()
            words = str(problem) if isinstance(problem, GpflError) else repr(problem)
            raise LoneError(f"{words} (process {self.rank} of {self.world}; the others do not go on without it)") from None

    def gather(self, value: T) -> list[T]:
        """Gives every process the values of all, in their order."""
        if self.world == 1:
            return [value]
        out: list[T | None] = [None] * self.world
        distributed.all_gather_object(out, value)
        return out  # type: ignore[return-value]

    def add(self, part: Tree) -> Tree:
        """Gives every process the sum of all processes' trees, which have one shape; in one message."""
        leaves = list(tree.leaves(part))
        if self.world == 1 or not leaves:
            return part
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
        distributed.all_reduce(flat)
        pieces = iter(torch.split(flat, [leaf.numel() for leaf in leaves]))
        return tree.map_leaves(lambda leaf: next(pieces).reshape(leaf.shape), part)

    def wait(self) -> None:
        """Waits until all processes are here."""
        if self.world > 1:
            distributed.barrier()


@cache
def ranks() -> Ranks:
    """Gives this process's place, and on the first call joins it to the others."""
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world == 1:
        return Ranks()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(distributed.destroy_process_group)  # threads that still wait for messages would abort the process
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def refuse_several(command: str) -> None:
    """Refuses a command that several processes cannot share, as each holds the models of its own clients alone."""
    if ranks().world > 1:
        raise GpflError(f"{command} runs in one process, not in {ranks().world}: start it without torchrun")


def leave(code: int = 0) -> NoReturn:
    """Ends this process; of several, all together and at once.

    Threads of torch's that wait for messages can abort a process that takes itself apart, after all its work is done.
    """
    if not distributed.is_initialized():
        sys.exit(code)
    if code == 0:
        distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def local_rank() -> int:
    """Gives the number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))
