"""The socket between a site's worker and its SuperNode: one request and one reply a connection, each with its length first."""

import socket
import struct
from pathlib import Path

from gpfl.errors import GpflError

SOCKET = "worker.sock"
MAX_PATH = 107
"""Longest path of a socket in bytes on Linux."""
LENGTH = struct.Struct(">Q")
MAX_BYTES = 1 << 33


def socket_path(folder: Path) -> Path:
    """Return the path of a site's socket. Raise if it is too long."""
    path = folder.resolve() / SOCKET
    if len(str(path).encode()) > MAX_PATH:
        raise GpflError(f"the path {path} has {len(str(path).encode())} bytes; sockets take {MAX_PATH}: move the site's folder")
    return path


def send(connection: socket.socket, content: bytes) -> None:
    """Send one message."""
    connection.sendall(LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> bytes:
    """Return one message. Raise EOFError if the other side has gone."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    if length > MAX_BYTES:
        raise EOFError
    return _read(connection, length)


def ask_worker(path: str, message: bytes) -> bytes:
    """Return the worker's reply to a message."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        send(connection, message)
        return receive(connection)


def _read(connection: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        part = connection.recv(min(1 << 20, length - len(content)))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
