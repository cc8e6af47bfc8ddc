"""Downloads of published files, checked against the published checksum."""

import gzip
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpfl.errors import GpflError

CHUNK = 1 << 16
Progress = Callable[[str, int, int], None]
"""Callback that receives a file's name, the bytes on disk and the total bytes (0 if unknown)."""


@dataclass(frozen=True)
class PublishedFile:
    """A file at its publisher's address with its SHA-256, or MD5 where nothing better is published."""

    name: str
    url: str
    size: int
    sha256: str = ""
    md5: str = ""
    content_sha256: str = ""  # of the decompressed content: the bytes of a .gz depend on the program that wrote it

    @property
    def checksum(self) -> tuple[str, str]:
        """Algorithm and value of the checksum."""
        return ("sha256", self.sha256) if self.sha256 else ("md5", self.md5)

    def matches(self, path: Path) -> bool:
        """Return whether the file at `path` has the published content."""
        algorithm, expected = self.checksum
        if file_hash(path, algorithm) == expected:
            return True
        if not self.content_sha256:
            return False
        try:
            with gzip.open(path, "rb") as content:
                return hashlib.file_digest(content, "sha256").hexdigest() == self.content_sha256
        except (OSError, EOFError, zlib.error):
            return False


def file_hash(path: Path, algorithm: str = "sha256") -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def ignore_progress(name: str, received: int, total: int) -> None:
    """Report nothing."""


def download(file: PublishedFile, folder: Path, progress: Progress = ignore_progress, instructions: str = "") -> Path:
    """Return the path of the downloaded file; an interrupted download resumes.

    `instructions` say in error messages how to provide the file without a network.
    """
    path, partial = folder / file.name, folder / f"{file.name}.part"
    if path.exists() and file.matches(path):
        return path
    try:
        import pooch  # type: ignore[import-untyped]
        import requests
    except ImportError:
        raise GpflError(f"downloading {file.url} needs pooch: pip install pooch, or {instructions}") from None

    def receive(url: str, output_file: str, _: object) -> None:
        with partial.open("ab") as out:
            received = out.tell()
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={received}-"} if received else {})
            with requests.get(url, headers=headers, stream=True, timeout=60) as response:
                if response.status_code != 416:  # 416: nothing is missing
                    response.raise_for_status()
                    if response.status_code != 206:  # the whole file follows
                        received = out.truncate(0)
                    length = int(response.headers.get("Content-Length", 0))
                    total = received + length if length else 0
                    for chunk in response.iter_content(CHUNK):
                        received += out.write(chunk)
                        if received > max(2 * file.size, 1 << 24):
                            raise ValueError("the file is too long")
                        progress(file.name, received, total)
        partial.replace(output_file)

    pooch.get_logger().setLevel("ERROR")
    try:
        pooch.retrieve(file.url, ":".join(file.checksum), file.name, folder, downloader=receive)
    except requests.RequestException as error:
        message = f"cannot download {file.url} ({file.size:,} bytes): {_cause(error)}"
        raise GpflError(f"{message}; try again, or {instructions}") from None
    except ValueError:  # from pooch, if the checksum differs
        partial.unlink(missing_ok=True)
        message = f"{file.url} is not the published file: its {file.checksum[0]} or size differs"
        raise GpflError(f"{message}; try again later, or {instructions}") from None
    except OSError as error:
        raise GpflError(f"cannot write to {folder}: {error.strerror}; set GPFL_CACHE to another folder") from None
    return path


def _cause(error: BaseException) -> str:
    while error.__context__ is not None:  # requests and urllib3 wrap the error of the system
        error = error.__context__
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
