"""Flower's programs: their command lines and environment, and processes that are stopped whatever happens."""

import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from gpfl.deploy.server import NODES, CoordinatorFolder
from gpfl.deploy.socket import socket_path
from gpfl.deploy.worker import SiteFolder
from gpfl.errors import GpflError
from gpfl.io import files, toml

TOKEN = "GPFL_DEPLOYMENT"
"""Environment variable that marks the processes of one `Processes`, also those that Flower starts in sessions of their own."""
FEDERATION = "gpfl"
STOP_SECONDS, START_SECONDS = 8.0, 60.0


def program(name: str) -> str:
    """Return the path of one of Flower's programs. Raise if Flower is not installed."""
    path = Path(sys.executable).parent / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None:
        raise GpflError(f"the program {name} is missing: pip install 'gpfl[flower]'")
    return found


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of Flower's programs: nothing is sent to third parties, looked up or installed."""
    own = {
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "localhost,127.0.0.1"])),
        "PYTHONUNBUFFERED": "1",
    }
    own["no_proxy"] = own["NO_PROXY"]
    return {**os.environ, **own, **(extra or {})}


# The coordinator.


def superlink_command(folder: CoordinatorFolder) -> list[str]:
    """Return the command of the SuperLink, which listens on this machine alone."""
    certs, state = folder.path.resolve() / "certs", folder.path.resolve() / "state"
    state.mkdir(exist_ok=True)
    return [
        *(program("flower-superlink"), "--host", "127.0.0.1", "--port", str(folder.link_port)),
        *("--ssl-ca-certfile", str(certs / "ca.crt"), "--ssl-certfile", str(certs / "server.crt")),
        *("--ssl-keyfile", str(certs / "server.key"), "--enable-supernode-auth"),
        *("--database", str(state / "superlink.db"), "--disable-runtime-dependency-installation"),
    ]


def wait_for_superlink(folder: CoordinatorFolder, processes: "Processes") -> None:
    """Return once the SuperLink answers. Raise if it ends or does not answer within a minute."""
    context = ssl.create_default_context(cafile=str(folder.path / "certs" / "ca.crt"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    end = time.monotonic() + START_SECONDS
    while True:
        processes.check()
        try:
            opener.open(f"https://127.0.0.1:{folder.link_port}/health", timeout=2).close()
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > end:
                raise GpflError(f"the SuperLink does not answer ({error}): see {processes.logs / 'superlink.log'}") from None
            time.sleep(0.1)
        else:
            return


class Control:
    """Flower's command `flwr` for one SuperLink."""

    def __init__(self, folder: CoordinatorFolder) -> None:
        self.folder = folder
        self._home = folder.path / "flwr"
        connection = {
            "address": f"127.0.0.1:{folder.link_port}",
            "root-certificates": str((folder.path / "certs" / "ca.crt").resolve()),
        }
        files.write_text(self._home / "config.toml", toml.dump({"superlink": {"default": FEDERATION, FEDERATION: connection}}))

    def call(self, *arguments: str) -> dict[str, object]:
        """Return the answer of a command. Raise if it failed, which Flower's exit status does not tell."""
        command = [program("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(
            command, env=environment(self._home), capture_output=True, text=True, cwd=self._home, stdin=subprocess.DEVNULL
        )
        try:
            content = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            content = {}
        if done.returncode or not content or content.get("success") is False:
            lines = (content.get("error-message") or done.stderr or done.stdout or "no output").strip().splitlines()
            raise GpflError(f"flwr {' '.join(arguments[:2])} failed: {lines[-1][:300]}")
        assert isinstance(content, dict)
        return content

    def unregistered(self) -> list[str]:
        """Return the sites whose node key the SuperLink does not know: all of them after its database was lost."""
        own = self._node_numbers()
        known = self.nodes() if own else {}
        return [site for site in self.folder.card.sites if own.get(site) not in known]

    def register(self) -> None:
        """Register the node keys of all sites that the SuperLink does not know, and keep their node IDs."""

        def register(site: str) -> tuple[str, object]:
            key = str((self.folder.path / "sites" / f"{site}.pub").resolve())
            try:
                return site, self.call("supernode", "register", key, FEDERATION)["node-id"]
            except GpflError as error:
                return site, error

        with ThreadPoolExecutor(2) as pool:
            found = dict(pool.map(register, self.unregistered()))
        # Flower registers a key once: what was registered is kept even if another one failed.
        nodes = {site: str(node) for site, node in found.items() if not isinstance(node, GpflError)}
        self._write_node_numbers({**self._node_numbers(), **nodes})
        for node in found.values():
            if isinstance(node, GpflError):
                raise node

    def replace_key(self, site: str, key: Path) -> None:
        """Register another node key for a site, and let the old one in no longer."""
        if site not in self.folder.card.sites:
            raise GpflError(f"there is no site '{site}'; the sites are {', '.join(self.folder.card.sites)}")
        try:
            content = key.read_bytes()
        except OSError as error:
            raise GpflError(f"cannot read {key} ({error.strerror}): give the file node.pub of the site") from None
        if b"PRIVATE" in content or not content.startswith(b"ecdsa-sha2-nistp384 "):
            raise GpflError(f"{key} is not the public part of a node key: give the file node.pub of the site")
        files.write_bytes(self.folder.path / "sites" / f"{site}.pub", content)
        nodes = self._node_numbers()
        if site in nodes:
            self.call("supernode", "unregister", nodes.pop(site), FEDERATION)
            self._write_node_numbers(nodes)
        self.register()

    def _node_numbers(self) -> dict[str, str]:
        path = self.folder.path / NODES
        content = files.read_json(path, "remove it, and the SuperLink's database with it") if path.exists() else {}
        return {site: str(node) for site, node in content.items()}

    def _write_node_numbers(self, nodes: Mapping[str, str]) -> None:
        files.write_text(self.folder.path / NODES, json.dumps(nodes, indent=1) + "\n")

    def nodes(self) -> dict[str, str]:
        """Return the status of each node by its ID."""
        listed = self.call("supernode", "list", FEDERATION).get("nodes", [])
        assert isinstance(listed, list)
        return {str(node["node-id"]): str(node["status"]) for node in listed}

    def submit(self) -> str:
        """Start the run, and return Flower's run ID."""
        if missing := self.unregistered():
            raise GpflError(f"no node key is registered for {', '.join(missing)}: gpfl deploy server registers them")
        value = toml.format_value(str(self.folder.path.resolve()))
        app = str((self.folder.path / "app").resolve())
        return str(self.call("run", app, FEDERATION, "--run-config", f"folder={value}")["run-id"])

    def status(self, run: str) -> str:
        """Return the status of a run, such as "running" or "finished:completed"; "unknown" after the database was lost."""
        listed = self.call("list", FEDERATION)["runs"]  # with --run-id a run that is unknown would be an error like any other
        assert isinstance(listed, list)
        return next((str(each["status"]) for each in listed if str(each["run-id"]) == run), "unknown")

    def stop(self, run: str) -> None:
        """Stop a run."""
        self.call("stop", run, FEDERATION)


# A site.


def worker_command(site: SiteFolder) -> list[str]:
    """Return the command of a site's worker."""
    return [sys.executable, "-m", "gpfl.deploy.worker", str(site.path.resolve())]


def supernode_command(site: SiteFolder) -> list[str]:
    """Return the command of a site's SuperNode."""
    worker = toml.format_value(str(socket_path(site.path)))
    return [
        *(sys.executable, "-m", "gpfl.deploy.flower", "--superlink", site.server),
        *("--root-certificates", str((site.path / "ca.crt").resolve())),
        *("--auth-supernode-private-key", str((site.path / "node.key").resolve())),
        *("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", f"socket={worker}"),
    ]


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return whether a program of this machine listens on a port."""
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except OSError:
        return False
    return True


# Processes.


class Processes:
    """Processes with a log file each, all of which end with the block.

    Args:
        logs: Folder for their output.

    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._token = secrets.token_hex(8)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], home: Path) -> subprocess.Popen[bytes]:
        """Start a process; `home` is Flower's folder."""
        home.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(home, {TOKEN: self._token}),
                cwd=home,
                start_new_session=True,  # Ctrl-C reaches them through `stop`
            )
        self._running[name] = process
        return process

    def exited(self) -> dict[str, int]:
        """Return the exit status of processes that have ended by themselves."""
        return {name: each.returncode for name, each in self._running.items() if each.poll() is not None}

    def check(self) -> None:
        """Raise if a process has ended by itself."""
        for name, status in self.exited().items():
            path = self.logs / f"{name}.log"
            lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise GpflError(f"{name} ended with status {status} ({lines[-1][:200] if lines else 'no output'}): see {path}")

    def stop(self, names: Iterable[str] | None = None) -> None:
        """Stop some processes, or all of them and what they have started."""
        chosen = list(self._running) if names is None else list(names)
        stopping = [self._running.pop(name) for name in reversed(chosen)]
        for process in stopping:
            process.terminate()
        end = time.monotonic() + STOP_SECONDS
        for process in stopping:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if names is None:
            self._stop_descendants()

    def _stop_descendants(self) -> None:
        """Stop processes that those of this object have started, which may be in sessions of their own."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in find_processes(self._token):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            end = time.monotonic() + 3
            while find_processes(self._token) and time.monotonic() < end:
                time.sleep(0.1)


def find_processes(token: str) -> list[int]:
    """Return the processes of this user that have the token in their environment; none where there is no /proc."""
    found, mark = [], f"{TOKEN}={token}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found
