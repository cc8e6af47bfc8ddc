"""A small published data set, and a server that stands in for its publisher."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpfl.data.published.cache import Parsed
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.errors import GpflError

CONTENT = b"0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19"


def parse_numbers(paths: Mapping[str, Path]) -> Parsed:
    """Gives the numbers of a text file, a row each; even ones are class 0, odd ones class 1; groups of five."""
    (path,) = paths.values()
    try:
        numbers = np.array(path.read_bytes().split(), dtype=np.float32)
    except ValueError:
        raise GpflError(f"{path} holds something else than numbers") from None
    groups = np.arange(len(numbers)) // 5
    return Parsed(
        numbers[:, None], numbers % 2, 2, client_ids=groups, client_names=[f"site {g}" for g in range(groups.max() + 1)]
    )


def numbers_set(url: str = "http://127.0.0.1:9/", content: bytes = CONTENT, also_in: tuple[Path, ...] = ()) -> PublishedDataset:
    """Gives the data set of the file numbers.txt, which is published with `content`."""
    return PublishedDataset(
        name="numbers",
        description="numbers",
        files=(PublishedFile("numbers.txt", url + "numbers.txt", len(content), sha256=hashlib.sha256(content).hexdigest()),),
        licence="none",
        parse=parse_numbers,
        settings={},
        also_in=also_in,
    )


@dataclass
class Publisher:
    """What a server offers, how it misbehaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    resumes: bool = True
    breaks_after: int | None = None  # bytes of a body, then the connection is cut
    tells_length: bool = True
    asked: list[str | None] = field(default_factory=list)  # the Range of each request
    sent: list[int] = field(default_factory=list)  # the bytes of each answer
    url: str = ""


@contextlib.contextmanager
def serving(publisher: Publisher) -> Iterator[Publisher]:
    """Serves a publisher's files on this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, publisher)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        publisher.url = f"http://127.0.0.1:{server.server_address[1]}/"
        try:
            yield publisher
        finally:
            server.shutdown()
            thread.join()


def answer(handler: http.server.BaseHTTPRequestHandler, publisher: Publisher) -> None:
    """Answers one request."""
    wanted = handler.headers.get("Range")
    publisher.asked.append(wanted)
    content = publisher.files.get(handler.path[1:])
    if content is None:
        handler.send_error(404)
        return
    start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and publisher.resumes else 0  # type: ignore[index]
    if start and start >= len(content):
        handler.send_error(416)
        return
    body = content[start:]
    handler.send_response(206 if start else 200)
    if publisher.tells_length:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    body = body[: publisher.breaks_after]
    publisher.sent.append(len(body))
    with contextlib.suppress(ConnectionError):  # a reader that has had enough hangs up
        handler.wfile.write(body)
