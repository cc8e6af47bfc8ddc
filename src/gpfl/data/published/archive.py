"""Archives, read in memory by member name. Nothing is unpacked to disk, so paths, links and bombs in them do no harm."""

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

DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted member or an unknown compression
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
"""What a truncated or wrong archive raises."""
MAX_OTHER_BYTES = 1 << 24  # bytes that a tar archive may hold besides the wanted members


@contextmanager
def _report_damage(label: str) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise GpflError(f"{label} is damaged or has another format ({error}): get it again") from None


def read_gzip(path: Path, max_bytes: int) -> bytes:
    """Return the content of a gzip file; raise if it has more than `max_bytes`."""
    with _report_damage(str(path)), gzip.open(path, "rb") as file:
        return _read(file, max_bytes, str(path))


def read_tar_gz(path: Path, names: tuple[str, ...], max_bytes: int) -> dict[str, bytes]:
    """Return the named plain files of a tar.gz archive, each of at most `max_bytes`."""
    content = read_gzip(path, len(names) * max_bytes + MAX_OTHER_BYTES)
    found: dict[str, bytes] = {}
    others: list[str] = []
    with _report_damage(str(path)), tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            if member.isfile() and len(others) < 3 and member.name.isprintable():
                others.append(member.name[:60])
            if member.name in names and member.isfile() and member.name not in found:
                file = archive.extractfile(member)
                if file is not None:
                    found[member.name] = _read(file, max_bytes, f"{member.name} in {path}")
    missing = [name for name in names if name not in found]
    if missing:
        holds = f"; it holds {', '.join(others)}" if others else ""
        raise GpflError(f"{path} does not hold {missing[0]}{holds}: get it again")
    return found


@contextmanager
def open_zip(path: Path | IO[bytes], label: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive for reading; errors name it by `label`."""
    with _report_damage(label), zipfile.ZipFile(path) as archive:
        yield archive


def read_zip_member(archive: zipfile.ZipFile, name: str, max_bytes: int, label: str) -> bytes:
    """Return one member of a zip archive; raise if it has more than `max_bytes`."""
    try:
        with archive.open(name) as file:
            return _read(file, max_bytes, f"{name} in {label}")
    except KeyError:
        raise GpflError(f"{label} does not hold {name}: get it again") from None


def _read(file: IO[bytes] | gzip.GzipFile, max_bytes: int, label: str) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise GpflError(f"{label} holds more than {max_bytes:,} bytes: it is not the published file")
    return content
