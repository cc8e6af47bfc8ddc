"""Archives, read in memory by the names we know: nothing is unpacked to disk, so no path, link or bomb in them can do harm."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gpfl.errors import GpflError

BROKEN = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted member, an unknown way to compress
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
"""What a truncated or wrong archive raises."""
HEADERS = 1 << 24
"""Bytes that an archive may hold besides what we want of it."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Says which file is not what it should be."""
    try:
        yield
    except BROKEN as problem:
        raise GpflError(f"{path} is damaged or of another format ({problem}): get it again") from None


def read_gzip(path: Path, most: int) -> bytes:
    """Gives the content of a gzip file of at most `most` bytes."""
    with readable(path), gzip.open(path, "rb") as file:
        return limited(file, most, str(path))


def tar_members(path: Path, names: tuple[str, ...], most: int) -> dict[str, bytes]:
    """Gives the named members of a tar.gz archive, each a plain file of at most `most` bytes."""
    found: dict[str, bytes] = {}
    seen: list[str] = []
    with (
        readable(path),
        BoundedGzip(path, len(names) * most + HEADERS) as inside,
        tarfile.open(fileobj=inside, mode="r:") as archive,
    ):
        for member in archive:
            if member.isfile() and len(seen) < 3 and member.name.isprintable():
                seen.append(member.name[:60])
            if member.name in names and member.isfile() and member.name not in found:
                content = archive.extractfile(member)
                if content is not None:
                    found[member.name] = limited(content, most, f"{member.name} in {path}")
    missing = [name for name in names if name not in found]
    if missing:
        instead = f"; it holds {', '.join(seen)}" if seen else ""
        raise GpflError(f"{path} does not hold {missing[0]}{instead}: get it again")
    return found


class BoundedGzip(gzip.GzipFile):
    """A gzip file that gives no byte beyond `most`, whatever length a header inside it claims."""

    def __init__(self, path: Path, most: int) -> None:
        super().__init__(path, "rb")
        self._most = most

    def read(self, size: int | None = -1) -> bytes:
        """Gives the next bytes."""
        self._check(self.tell() + size if size is not None and size >= 0 else self._most + 1)
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to another place."""
        self._check(offset)
        return super().seek(offset, whence)

    def _check(self, end: int) -> None:
        if end > self._most:
            raise OSError(f"it holds more than the {self._most:,} bytes it may")


@contextmanager
def open_zip(path: Path | IO[bytes], label: str) -> Iterator[zipfile.ZipFile]:
    """Gives a zip archive to read from."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except BROKEN as problem:
        raise GpflError(f"{label} is damaged or of another format ({problem}): get it again") from None


def zip_member(archive: zipfile.ZipFile, name: str, most: int, label: str) -> bytes:
    """Gives one member of a zip archive, of at most `most` bytes."""
    try:
        with archive.open(name) as file:
            return limited(file, most, f"{name} in {label}")
    except KeyError:
        raise GpflError(f"{label} does not hold {name}: get it again") from None


def limited(file: IO[bytes] | gzip.GzipFile | io.BufferedReader, most: int, name: str) -> bytes:
    """Gives a stream's content, or refuses one that is longer than it may be."""
    content = file.read(most + 1)
    if len(content) > most:
        raise GpflError(f"{name} holds more than the {most:,} bytes it may: it is not the published file")
    return content
