"""A small published dataset, and a local HTTP server that stands in for its publisher."""

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

from gpfl.data import Table
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.errors import GpflError

CONTENT = b"0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19"


def parse_numbers(paths: Mapping[str, Path]) -> Table:
    """Return the numbers of a text file as samples: even numbers are class 0, odd ones class 1; five samples per client."""
    (path,) = paths.values()
    try:
        numbers = np.array(path.read_bytes().split(), dtype=np.float32)
    except ValueError:
        raise GpflError(f"{path} holds something other than numbers") from None
    clients = np.arange(len(numbers)) // 5
    names = [f"site {client}" for client in range(clients.max() + 1)]
    return Table(numbers[:, None], numbers % 2, classes=2, name="numbers", client_ids=clients, client_names=names)


def numbers_dataset(
    url: str = "http://127.0.0.1:9/", content: bytes = CONTENT, system_folders: tuple[Path, ...] = ()
) -> PublishedDataset:
    """Return the dataset of the file numbers.txt, published with `content`."""
    return PublishedDataset(
        name="numbers",
        description="numbers",
        files=(PublishedFile("numbers.txt", url + "numbers.txt", len(content), sha256=hashlib.sha256(content).hexdigest()),),
        licence="none",
        parse=parse_numbers,
        partition={},
        net={},
        system_folders=system_folders,
    )


@dataclass
class Publisher:
    """What the server offers, how it misbehaves, and the requests it received."""

    files: dict[str, bytes] = field(default_factory=dict)
    resumes: bool = True
    cut_after: int | None = None  # bytes of a body after which the connection is closed
    sends_length: bool = True
    ranges: list[str | None] = field(default_factory=list)  # the Range header of each request
    sent: list[int] = field(default_factory=list)  # the bytes of each response
    url: str = ""


@contextlib.contextmanager
def serve(publisher: Publisher) -> Iterator[Publisher]:
    """Serve a publisher's files on this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self, publisher)

        def log_message(self, *args: object) -> None:
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


def respond(handler: http.server.BaseHTTPRequestHandler, publisher: Publisher) -> None:
    """Answer one request."""
    requested = handler.headers.get("Range")
    publisher.ranges.append(requested)
    content = publisher.files.get(handler.path[1:])
    if content is None:
        handler.send_error(404)
        return
    start = int(re.fullmatch(r"bytes=(\d+)-", requested)[1]) if requested and publisher.resumes else 0  # type: ignore[index]
    if start and start >= len(content):
        handler.send_error(416)
        return
    body = content[start:]
    handler.send_response(206 if start else 200)
    if publisher.sends_length:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    body = body[: publisher.cut_after]
    publisher.sent.append(len(body))
    with contextlib.suppress(ConnectionError):  # the client may have closed the connection
        handler.wfile.write(body)
