"""Flower's apps of a deployment. Flower is imported here alone.

Both apps are thin. The client app passes a request to the site's worker and its reply back; nothing of torch is imported
there, since Flower starts a process for every message. The server app runs the coordinator. As a program, this module is
Flower's SuperNode with shorter waits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from gpfl.deploy.socket import ask_worker

if TYPE_CHECKING:
    from gpfl.deploy.messages import Answer, Transport

MESSAGE_TYPE = "train"
RECORD, ARRAY, FORMAT = "gpfl", "message", "gpfl.message"
POLL_SECONDS = 0.2
"""Flower's own loop asks for replies every three seconds."""
IDLE_SECONDS = 0.5
"""Flower's SuperNode asks for messages every three seconds, which is half of a short round."""
SUPEREXEC = "flower-superexec"
REPLACED_IN = "1.41."
"""Versions of Flower whose internals `run_supernode` replaces; others run as they are, with longer rounds."""
HEARTBEAT_SECONDS = 15
"""The SuperLink refuses the key of a SuperNode that was killed for two intervals; Flower's own is 30 s."""


def pack_record(payload: bytes) -> RecordDict:
    """Return a record with the bytes of a message."""
    return RecordDict({RECORD: ArrayRecord({ARRAY: Array(dtype="uint8", shape=(len(payload),), stype=FORMAT, data=payload)})})


def unpack_record(record: RecordDict) -> bytes:
    """Return the bytes of a message. Raise ValueError if the record holds anything else."""
    if list(record) != [RECORD] or not isinstance(record[RECORD], ArrayRecord) or list(record[RECORD]) != [ARRAY]:
        raise ValueError("the message is not one of gpfl")
    return bytes(record[RECORD][ARRAY].data)


# At the site.

client_app = ClientApp()


@client_app.train()  # type: ignore[untyped-decorator,unused-ignore]
def answer(message: Message, context: Context) -> Message:
    """Return the worker's reply. The text of an exception would reach the coordinator, so it is always the same."""
    try:
        request = unpack_record(message.content)
        if "socket" in context.node_config:
            reply = ask_worker(str(context.node_config["socket"]), request)
        else:  # Flower's simulation, whose nodes have no worker
            reply = _answer_here(Path(str(context.run_config["folder"])), int(message.metadata.group_id), request)
    except (OSError, EOFError, KeyError, ValueError) as error:
        print(f"gpfl: the worker did not answer: {type(error).__name__}: {error}", flush=True)  # the site's own log
        raise RuntimeError("the worker of the site did not answer") from None
    return Message(pack_record(reply), reply_to=message)


def _answer_here(coordinator: Path, client: int, request: bytes) -> bytes:
    """Return the reply of a site whose folder is beside the coordinator's, as `gpfl deploy init` writes them."""
    from gpfl.deploy.server import CoordinatorFolder
    from gpfl.deploy.worker import SiteFolder, Worker

    site = CoordinatorFolder(coordinator).card.sites[client]
    return Worker(SiteFolder(coordinator.parent / "sites" / site), lambda line: print(site, line, flush=True)).answer(request)


# At the coordinator.


class FlowerTransport:
    """Sends messages to sites over Flower, and waits for their replies.

    Args:
        grid: Flower's connection to the SuperLink.
        nodes: Node of each client: the SuperLink's number of the key that was registered for it.
        deadline: Seconds to wait for replies.
        connect: Seconds to wait for sites that are not connected.
        min_clients: Sites that must be connected. While fewer are, it waits until the deadline.

    """

    def __init__(self, grid: Grid, nodes: Mapping[int, int], deadline: float, connect: float, min_clients: int = 1) -> None:
        self._grid, self._nodes, self._deadline, self._connect = grid, dict(nodes), deadline, connect
        self._min_clients = min_clients
        self._lost: set[int] = set()  # clients that were not connected when they were last asked

    def __call__(self, messages: Mapping[int, bytes]) -> dict[int, "Answer"]:
        """Return the answers of the clients that answer before the deadline."""
        from gpfl.deploy.messages import Answer

        online = self._wait_for(set(messages))
        self._lost = set(messages) - online
        answers = {client: Answer(error="not connected") for client in self._lost}
        sent: dict[str, int] = {}
        for client in sorted(online):
            message = Message(
                pack_record(messages[client]),
                dst_node_id=self._nodes[client],
                message_type=MESSAGE_TYPE,
                group_id=str(client),
            )
            for message_id in self._grid.push_messages([message]):
                sent[message_id] = client
        end = time.monotonic() + self._deadline
        waiting = set(sent)
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(sorted(waiting)):
                message_id = reply.metadata.reply_to_message_id
                if message_id in waiting:
                    waiting.remove(message_id)
                    answers[sent[message_id]] = self._read(reply, sent[message_id])
            if waiting:
                time.sleep(POLL_SECONDS)
        return answers

    def _wait_for(self, clients: set[int]) -> set[int]:
        """Return the clients that are connected, after waiting for those that are not."""
        start = time.monotonic()
        needed = min(self._min_clients, len(clients))
        while True:
            connected = set(self._grid.get_node_ids())
            online = {client for client in clients if self._nodes[client] in connected}
            waited = time.monotonic() - start
            patience = self._deadline if len(online) < needed else self._connect if clients - online - self._lost else 0.0
            if online == clients or waited >= patience:
                return online
            time.sleep(POLL_SECONDS)

    def _read(self, reply: Message, client: int) -> "Answer":
        """Return the answer in a reply. Replies of errors come from the SuperLink itself."""
        from gpfl.deploy.messages import Answer

        if reply.has_error():
            lines = str(reply.error.reason).splitlines() or [""]
            return Answer(error=f"no reply (Flower's error {reply.error.code}: {lines[0][:120]})")
        if reply.metadata.src_node_id != self._nodes[client]:
            return Answer(error="the reply came from the node of another site")
        try:
            return Answer(unpack_record(reply.content))
        except ValueError as error:
            return Answer(error=str(error))


server_app = ServerApp()


@server_app.main()  # type: ignore[untyped-decorator,unused-ignore]
def main(grid: Grid, context: Context) -> None:
    """Run the coordinator of the folder that the run's config names."""
    from gpfl.deploy.server import run_coordinator

    def connect(nodes: Mapping[int, int], deadline: float, patience: float, min_clients: int) -> "Transport":
        return FlowerTransport(grid, nodes, deadline, patience, min_clients)

    folder = Path(str(context.run_config["folder"]))
    run_coordinator(folder, connect, _simulated_nodes(folder, grid) if context.run_config["simulation"] else None)


def _simulated_nodes(folder: Path, grid: Grid) -> dict[int, int]:
    """Return a node of Flower's simulation for each client. Any will do: the message says whose it is."""
    from gpfl.deploy.server import CoordinatorFolder

    while not (nodes := sorted(grid.get_node_ids())):
        time.sleep(POLL_SECONDS)
    return {client: nodes[client % len(nodes)] for client in range(len(CoordinatorFolder(folder).card.sites))}


# At the site, as a program.


def run_supernode() -> None:
    """Run Flower's SuperNode with the arguments of the command line, and with shorter waits than Flower's constants."""
    from flwr.supernode.cli import flower_supernode

    if version("flwr").startswith(REPLACED_IN):
        _shorten_waits()
    flower_supernode()


def _shorten_waits() -> None:
    from flwr.supernode import fleet_http_connection, start_client_internal

    def start_superexec(command: Sequence[str]) -> None:
        subprocess.Popen([sys.executable, "-m", "gpfl.deploy.flower", *command])

    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_SECONDS
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, IDLE_SECONDS)))
    start_client_internal.subprocess = SimpleNamespace(Popen=start_superexec)


def run_superexec() -> None:
    """Run Flower's SuperExec, which starts a process for every message, as forks: a new program would import for a second."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import LaunchResult, SubprocessExecutor
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    def launch(self: object, spec: Any) -> Any:
        if os.fork() == 0:
            try:
                run_clientapp(spec.runtime_api_address, spec.token, spec.insecure, parent_pid=spec.parent_pid)
            finally:
                sys.stdout.flush()
                os._exit(0)
        return LaunchResult.accepted()

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing
    SubprocessExecutor.launch = launch
    flower_superexec()


if __name__ == "__main__":
    if sys.argv[1:2] == [SUPEREXEC]:
        del sys.argv[1]
        run_superexec()
    else:
        run_supernode()
