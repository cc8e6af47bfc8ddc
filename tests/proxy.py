"""nginx with the configuration that `gpfl deploy init` writes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpfl.deploy.server import CoordinatorFolder

MAIN = """user {user};
daemon off;
pid nginx.pid;
events {{}}
http {{
    access_log access.log;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    include {site};
}}
"""


@contextmanager
def start_nginx(coordinator: Path, folder: Path) -> Iterator[None]:
    """Run nginx in front of the SuperLink of a coordinator's folder; the test is skipped without nginx."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx")
    folder.mkdir()
    port = CoordinatorFolder(coordinator).number("port", 0)
    certs = str((coordinator / "certs").resolve())
    (folder / "site.conf").write_text((coordinator / "nginx.conf").read_text().replace("CERTS", certs))
    (folder / "main.conf").write_text(MAIN.format(user="root", site=folder / "site.conf"))
    process = subprocess.Popen(["nginx", "-p", folder, "-c", "main.conf", "-e", "error.log"], stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port)), 1).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < end, "nginx does not answer"
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.communicate(timeout=20)
