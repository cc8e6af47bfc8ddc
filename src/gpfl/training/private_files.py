"""Private state on disk: the state of all clients in memory-mapped files, of which the system reads the rows in use."""

import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.io import files

CHUNK = 1024  # clients that are written at once


def allocate(private: Tree, clients: int, folder: Path) -> Tree:
    """Return the state of one client for all clients, stacked, in files of `folder` that last as long as the tensors."""

    def map_file(value: Tensor) -> Tensor:
        stacked = _map_file((clients, *value.shape), value, folder)
        for rows in torch.split(stacked, CHUNK):
            rows.copy_(value.expand_as(rows))
        return stacked

    return tree.map_leaves(map_file, private)


def save(private: Tree, folder: Path) -> None:
    """Write the state of all clients into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with files.draft_folder(folder) as draft:
            for name, value in tree.flatten(private).items():
                with (draft / _file_name(name)).open("wb") as file:
                    value.cpu().numpy().tofile(file)
                    file.flush()
                    os.fsync(file.fileno())
    except OSError as error:
        raise GpflError(f"cannot write {folder}: {error.strerror or error}; free space and resume the run") from None


def restore(private: Tree, folder: Path, restart_hint: str) -> None:
    """Read the state of all clients that `save` wrote."""
    for name, value in tree.flatten(private).items():
        path = folder / _file_name(name)
        if not path.is_file() or path.stat().st_size != value.numel() * value.element_size():
            raise GpflError(f"{path} is missing or damaged: {restart_hint}")
        value.copy_(torch.from_numpy(np.memmap(path, value.numpy().dtype, "c", shape=tuple(value.shape))))


def _file_name(name: str) -> str:
    return f"{quote(name, safe='')}.bin"


def _map_file(shape: tuple[int, ...], like: Tensor, folder: Path) -> Tensor:
    """Return memory that is a file without a name, which the system removes when the memory is freed."""
    size = int(np.prod(shape)) * like.element_size()
    if not size:
        return like.new_empty(shape)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # on a full disk, writing into the memory would kill the process
        except OSError as error:
            raise GpflError(f"cannot keep {size / 2**30:.2f} GiB of private state in {folder}: {error.strerror}") from None
        return torch.from_numpy(np.memmap(file, like.cpu().numpy().dtype, "r+", shape=shape))
