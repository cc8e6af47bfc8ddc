"""Archives, read in memory by member name. Nothing is unpacked to disk, so paths, links and bombs in them do no harm."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gpfl.errors import GpflError

MAX_OTHER_BYTES = 1 << 24  # bytes that a tar archive may hold besides the wanted members


@contextmanager
def report_damage(label: str | Path) -> Iterator[None]:
    """Raise what a truncated or wrong file raises as an error that names it by `label`."""
    try:
        yield
    except GpflError:
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise GpflError(f"{label} is damaged or has another format ({error}): get it again") from None


def read_gzip(path: Path, max_bytes: int) -> bytes:
    """Return the content of a gzip file; raise if it has more than `max_bytes`."""
    with gzip.open(path, "rb") as file:
        return _read(file, max_bytes, path.name)


def read_tar_gz(path: Path, names: tuple[str, ...], max_bytes: int) -> dict[str, bytes]:
    """Return the named plain files of a tar.gz archive, together of at most `max_bytes`."""
    content = io.BytesIO(read_gzip(path, max_bytes + MAX_OTHER_BYTES))
    with tarfile.open(fileobj=content, mode="r:") as archive:
        files = {member.name: member for member in archive if member.isfile()}
        if missing := [name for name in names if name not in files]:
            raise ValueError(f"it does not hold {missing[0]}")
        return {name: archive.extractfile(files[name]).read() for name in names}  # type: ignore[union-attr]


@contextmanager
def open_zip(path: Path | IO[bytes], label: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive for reading; errors inside the block name it by `label`."""
    with report_damage(label), zipfile.ZipFile(path) as archive:
        yield archive


def read_zip_member(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Return one member of a zip archive; raise if it has more than `max_bytes`."""
    with archive.open(name) as file:
        return _read(file, max_bytes, name)


def _read(file: IO[bytes] | gzip.GzipFile, max_bytes: int, name: str) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{name} holds more than {max_bytes:,} bytes")
    return content
