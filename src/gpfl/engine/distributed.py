"""The processes of a run that torchrun starts. Without torchrun there is one, and nothing here does anything."""

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


class ProcessFailedError(GpflError):
    """An error of one process during collective work: the other processes wait for it, so the run must end."""


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process and the number of processes, with the collectives that a run needs."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Return the value of the main process."""
        if self.world_size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def run_on_main(self, action: Callable[[], T]) -> T:
        """Run the action on the main process only, and return its result, or raise its error, on every process.

        A barrier comes first, so that the main process does not overwrite files that others are still reading.
        """
        if self.world_size == 1:
            return action()
        self.barrier()
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = action()
            except Exception as problem:  # of any kind: the other processes wait for the broadcast
                error = problem
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return cast(T, result)

    @contextmanager
    def abort_all_on_error(self) -> Iterator[None]:
        """Turn an error inside the block, which all processes run in step, into a `ProcessFailedError`."""
        try:
            yield
        except Exception as error:
            if self.world_size == 1:
                raise
            if not self.is_main or not isinstance(error, GpflError):  # nobody else would print it
                traceback.print_exc()
            message = str(error) if isinstance(error, GpflError) else repr(error)
            raise ProcessFailedError(
                f"{message} (process {self.rank} of {self.world_size} failed; the others cannot continue without it)"
            ) from None

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank."""
        if self.world_size == 1:
            return [value]
        out: list[T | None] = [None] * self.world_size
        distributed.all_gather_object(out, value)
        return out  # type: ignore[return-value]

    def all_reduce(self, local: Tree) -> Tree:
        """Return the sum of all processes' trees, which have equal shapes, with one message."""
        leaves = list(tree.leaves(local))
        if self.world_size == 1 or not leaves:
            return local
        flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
        distributed.all_reduce(flat)
        pieces = iter(torch.split(flat, [leaf.numel() for leaf in leaves]))
        return tree.map_leaves(lambda leaf: next(pieces).reshape(leaf.shape), local)

    def barrier(self) -> None:
        """Wait until all processes have reached this point."""
        if self.world_size > 1:
            distributed.barrier()


@cache
def process_group() -> ProcessGroup:
    """Return the process group of this process; the first call connects it to the others."""
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world_size == 1:
        return ProcessGroup()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(distributed.destroy_process_group)  # threads still waiting for messages would abort the process
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size())


def require_single_process(command: str) -> None:
    """Raise if the command runs under torchrun with several processes, each of which holds only its own clients' models."""
    if process_group().world_size > 1:
        raise GpflError(f"{command} runs in one process, not in {process_group().world_size}: start it without torchrun")


def exit_process(code: int = 0) -> NoReturn:
    """Exit. Under torchrun all processes exit at once: shutdown can abort in torch's communication threads."""
    if not distributed.is_initialized():
        sys.exit(code)
    if code == 0:
        distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def local_rank() -> int:
    """Return the index of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))
