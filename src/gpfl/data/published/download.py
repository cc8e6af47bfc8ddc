"""Fetching: published files, found on this machine or downloaded, checked against the published checksum."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import ssl
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpfl.errors import GpflError

CHUNK = 1 << 20
BROKEN = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError)
"""What a connection raises that cannot be made, or ends too early."""
BRING = "bring the file: gpfl data get NAME --from FILE"
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


class UnreachedError(Exception):
    """Nobody answered; the text says why."""


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


def download(file: PublishedFile, folder: Path, tell: Tell = silent, bring: str = BRING) -> Path:
    """Gives the downloaded file; a download that broke off goes on where it stopped. `bring` says the way without one."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    if target.exists() and is_published(target, file):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        receive(file, part, tell, bring)
    except urllib.error.HTTPError as problem:
        problem.close()
        raise GpflError(f"{file.url} answered {problem.code} {problem.reason}: try again later, or {bring}") from None
    except UnreachedError as problem:
        host = urllib.parse.urlsplit(file.url).hostname
        raise GpflError(f"cannot reach {host} ({problem}) for {file.url}; {bring}") from None
    except BROKEN as problem:
        raise GpflError(f"the download of {file.url} broke off ({why(problem)}): try again to go on, or {bring}") from None
    except OSError as problem:
        raise GpflError(f"cannot write {part}: {problem.strerror}") from None
    if not is_published(part, file):
        kind, expected = file.checksum
        found = digest(part, kind)
        part.unlink()
        raise GpflError(
            f"{file.url} does not hold the published file ({kind} {found[:12]}…, published {expected[:12]}…); "
            f"the download was thrown away: try again later, or {bring}"
        )
    part.replace(target)
    return target


def receive(file: PublishedFile, part: Path, tell: Tell, bring: str) -> None:
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
    except BROKEN as problem:
        raise UnreachedError(why(problem)) from None
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
                f"the download was thrown away: try again later, or {bring}"
            )
        if here < total:
            raise http.client.IncompleteRead(b"", total - here)


def why(problem: Exception) -> str:
    """Gives what went wrong with a connection, in the system's own words."""
    reason = getattr(problem, "reason", problem)
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
