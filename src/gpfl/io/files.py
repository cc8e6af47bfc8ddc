"""Atomic writes of files and folders, JSON, and output folders."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpfl.errors import GpflError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: into a temporary file in the same folder, which then replaces it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise GpflError(f"cannot write {path}: {error.strerror}; choose a folder you can write to") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_current_umask())
        Path(temporary).replace(path)
    except OSError as error:
        raise GpflError(f"cannot write {path}: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)  # still there after an error or Ctrl-C


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, content.encode("utf-8"))


def write_folder(path: Path, content: Mapping[str, bytes]) -> None:
    """Write a new folder of files atomically: under a temporary name, which is then changed. Raise if it exists."""
    if path.exists():
        raise GpflError(f"{path} exists and nothing is overwritten: choose another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise GpflError(f"cannot make the folder {path}: {error.strerror}; choose a folder you can write to") from None
    try:
        for name, each in content.items():
            write_bytes(temporary / name, each)
        temporary.chmod(0o777 & ~_current_umask())
        temporary.replace(path)
    except OSError as error:
        raise GpflError(f"cannot make the folder {path}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # still there after an error or Ctrl-C


def read_json(path: Path, remedy: str) -> dict[str, object]:
    """Return the object in a JSON file. `remedy` is the fix that an error names."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GpflError(f"cannot read {path} ({error.strerror}): {remedy}") from None
    except ValueError as error:
        raise GpflError(f"{path} is damaged ({error}): {remedy}") from None
    if not isinstance(content, dict):
        raise GpflError(f"{path} is damaged (it holds no JSON object): {remedy}")
    return content


def make_folder(path: Path) -> None:
    """Create a folder for results. Raise if that fails or if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpflError(f"cannot make the folder {path}: {error.strerror}; choose another --out") from None
    if not os.access(path, os.W_OK):
        raise GpflError(f"cannot write to the folder {path}; choose another --out")


def _current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
