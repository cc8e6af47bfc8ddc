"""Fetching: published files, found on this machine or downloaded, checked against the published checksum."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import ssl
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpfl.errors import GpflError

CHUNK = 1 << 20
Tell = Callable[[str, int, int], None]
"""Is told a file's name, the bytes that are here, and the bytes it has in all (0 where nobody knows)."""


@dataclass(frozen=True)
class PublishedFile:
    """A file as its publisher offers it. A checksum is sha256, or md5 where the publisher gives no better."""

    name: str
    url: str
    size: int
    sha256: str = ""
    md5: str = ""
    inner_sha256: str = ""  # of what a .gz holds: its own bytes differ with the program that packed it

    @property
    def checksum(self) -> tuple[str, str]:
        """The kind of checksum and its value."""
        return ("sha256", self.sha256) if self.sha256 else ("md5", self.md5)


def silent(name: str, here: int, total: int) -> None:
    """Tells nobody."""


def digest(path: Path, kind: str = "sha256") -> str:
    """Gives a file's checksum."""
    with path.open("rb") as file:
        return hash_of(file, kind)


def hash_of(file: IO[bytes] | gzip.GzipFile, kind: str) -> str:
    """Gives the checksum of a stream."""
    found = hashlib.new(kind, usedforsecurity=False)
    while chunk := file.read(CHUNK):
        found.update(chunk)
    return found.hexdigest()


def is_published(path: Path, file: PublishedFile) -> bool:
    """Tells whether a file here has the published content."""
    kind, expected = file.checksum
    if digest(path, kind) == expected:
        return True
    if not file.inner_sha256:
        return False
    try:
        with gzip.open(path, "rb") as inside:
            return hash_of(inside, "sha256") == file.inner_sha256
    except (OSError, EOFError, zlib.error):
        return False


def download(file: PublishedFile, folder: Path, tell: Tell = silent) -> Path:
    """Gives the downloaded file; a download that broke off goes on where it stopped."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    if target.exists() and is_published(target, file):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        receive(file, part, tell)
    except urllib.error.HTTPError as problem:
        problem.close()
        raise GpflError(f"{file.url} answered {problem.code} {problem.reason}: try again later, {way_out(file)}") from None
    except (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as problem:
        reason = getattr(problem, "reason", problem)
        raise GpflError(f"the download of {file.url} broke off ({reason}): try again to go on, {way_out(file)}") from None
    except OSError as problem:
        raise GpflError(f"cannot write {part}: {problem.strerror}") from None
    if not is_published(part, file):
        kind, expected = file.checksum
        found = digest(part, kind)
        part.unlink()
        raise GpflError(
            f"{file.url} does not hold the published file ({kind} {found[:12]}…, published {expected[:12]}…); "
            f"the download was thrown away: try again later, {way_out(file)}"
        )
    part.replace(target)
    return target


def receive(file: PublishedFile, part: Path, tell: Tell) -> None:
    """Writes what is still missing of a file behind what is here."""
    here = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "gpfl", **({"Range": f"bytes={here}-"} if here else {})})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as problem:
        if problem.code == 416:  # nothing is missing
            problem.close()
            return
        raise
    with answer:
        if here and answer.status != 206:  # the server sends it all again
            here = 0
        total = here + answer.length if answer.length else 0
        limit = max(2 * file.size, 1 << 24)
        with part.open("ab" if here else "wb") as out:
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                here += len(chunk)
                tell(file.name, here, total)
                if here > limit:
                    break
        if here > limit:
            part.unlink()
            raise GpflError(
                f"{file.url} sends more than {limit:,} bytes, the published file has {file.size:,}; "
                f"the download was thrown away: try again later, {way_out(file)}"
            )
        if here < total:
            raise http.client.IncompleteRead(b"", total - here)


def way_out(file: PublishedFile) -> str:
    """Gives the other way to a file."""
    return f"or download {file.name} yourself and give it with --from"
