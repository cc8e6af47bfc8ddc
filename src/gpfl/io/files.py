"""Files that are whole or not there: everything is written beside its place and then moved into it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpfl.errors import GpflError


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as problem:
        raise GpflError(f"cannot write {path}: {problem.strerror}; choose a folder you can write to") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~current_umask())
        Path(temporary).replace(path)
    except OSError as problem:
        Path(temporary).unlink(missing_ok=True)
        raise GpflError(f"cannot write {path}: {problem.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: Path, content: str) -> None:
    """Writes a text file atomically."""
    write_bytes(path, content.encode("utf-8"))


def make_folder(path: Path) -> None:
    """Makes a folder for results, or refuses one that cannot be made or written to before anything is worked out for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise GpflError(f"cannot make the folder {path}: {problem.strerror}; choose another --out") from None
    if not os.access(path, os.W_OK):
        raise GpflError(f"cannot write to the folder {path}; choose another --out")


def current_umask() -> int:
    """Gives the permissions that new files are made without."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
