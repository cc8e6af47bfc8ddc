"""Atomic writes of files and folders, JSON, and output folders."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from gpfl.errors import GpflError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: into a temporary file in the same folder, which then replaces it."""
    temporary = _temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise GpflError(f"cannot write {path}: {error.strerror}; choose a folder you can write to") from None
    finally:
        with suppress(OSError):
            temporary.unlink()  # still there after an error or Ctrl-C


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, content.encode("utf-8"))


def write_folder(path: Path, content: Mapping[str, bytes]) -> None:
    """Write a new folder of files atomically. Raise if it exists."""
    if path.exists():
        raise GpflError(f"{path} exists and nothing is overwritten: choose another folder")
    try:
        with draft_folder(path) as draft:
            for name, each in content.items():
                write_bytes(draft / name, each)
    except OSError as error:
        raise GpflError(f"cannot make the folder {path}: {error.strerror}; choose a folder you can write to") from None


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder under a temporary name, which becomes `path` if the block ends without an error."""
    draft = _temporary_name(path)
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # still there after an error or Ctrl-C


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file; none if there is no file."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


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
