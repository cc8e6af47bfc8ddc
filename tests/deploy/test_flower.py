"""The Flower adapter, called directly: what is passed on, whose replies count, and how long it waits."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpfl

pytest.importorskip("flwr", reason="needs gpfl[flower]")

from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from gpfl.deploy import flower
from gpfl.deploy.init import write_app
from gpfl.deploy.socket import receive, send

NODES = {0: 101, 1: 102, 2: 103}


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what Flower sets in the process of an app."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """A SuperLink whose sites answer with `reply`; `online` are its nodes at each question."""

    def __init__(self, reply: Callable[[int, bytes], object], online: Iterable[set[int]] = ()) -> None:
        self.reply, self.online = reply, [*online] or [set(NODES.values())]
        self.sent: dict[str, tuple[int, bytes]] = {}

    def get_node_ids(self) -> set[int]:
        return self.online.pop(0) if len(self.online) > 1 else self.online[0]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        name = f"message {len(self.sent)}"
        self.sent[name] = (message.metadata.dst_node_id, flower.unpack_record(message.content))
        return [name]

    def pull_messages(self, names: Iterable[str]) -> list[object]:
        found = [(name, self.reply(*self.sent[name])) for name in names]
        return [make_reply(name, self.sent[name][0], reply) for name, reply in reversed(found) if reply is not None]


def make_reply(name: str, node: int, content: object) -> object:
    error = content if isinstance(content, SimpleNamespace) else None
    source = 1 if error else node
    record = content
    if isinstance(content, tuple):
        source, record = content
    if isinstance(record, bytes):
        record = flower.pack_record(record)
    metadata = SimpleNamespace(reply_to_message_id=name, src_node_id=source)
    return SimpleNamespace(metadata=metadata, has_error=lambda: error is not None, error=error, content=record)


def transport(grid: Grid, deadline: float = 5.0, connect: float = 0.0, min_clients: int = 1) -> flower.FlowerTransport:
    return flower.FlowerTransport(grid, NODES, deadline, connect, min_clients)


def test_messages_go_to_the_registered_nodes_and_replies_come_back_by_client() -> None:
    grid = Grid(lambda node, message: message + str(node).encode())
    answers = transport(grid)({0: b"a", 1: b"b" * 100_000, 2: b"c"})
    assert {client: answer.payload for client, answer in answers.items()} == {
        0: b"a101",
        1: b"b" * 100_000 + b"102",
        2: b"c103",
    }


FAULTS: dict[str, tuple[object, str]] = {
    "error": (SimpleNamespace(code=4, reason="Node Unavailable\nmore"), "no reply (Flower's error 4: Node Unavailable)"),
    "foreign": ((103, b"x"), "the reply came from the node of another site"),
    "record": (RecordDict({}), "the message is not one of gpfl"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_reply_is_an_error_of_its_client_alone(name: str) -> None:
    fault, reason = FAULTS[name]
    answers = transport(Grid(lambda node, message: fault if node == 102 else message))({0: b"a", 1: b"b", 2: b"c"})
    assert answers[1].error == reason
    assert (answers[0].payload, answers[2].payload) == (b"a", b"c")


def test_a_site_that_is_late_is_left_out_after_the_deadline() -> None:
    answers = transport(Grid(lambda node, message: None if node == 101 else message), deadline=0.3)({0: b"a", 1: b"b"})
    assert set(answers) == {1}


def test_it_waits_for_sites_to_connect() -> None:
    grid = Grid(lambda node, message: message, [{101}, {101}, {101, 102}])
    answers = transport(grid, connect=5.0)({0: b"a", 1: b"b"})
    assert {answer.error for answer in answers.values()} == {""}


def test_it_goes_on_without_a_site_that_stays_away_and_does_not_wait_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(lambda node, message: message, [{101, 103}])
    send = transport(grid, connect=0.3)
    assert send({0: b"a", 1: b"b"})[1].error == "not connected"
    monkeypatch.setattr(flower.time, "sleep", lambda seconds: pytest.fail("it waited"))
    assert send({0: b"a", 1: b"b"})[0].payload == b"a"


def test_it_waits_until_the_deadline_while_fewer_than_min_clients_are_connected() -> None:
    grid = Grid(lambda node, message: message, [{101}] * 4 + [{101, 102}])
    answers = transport(grid, min_clients=2)({0: b"a", 1: b"b"})
    assert {answer.error for answer in answers.values()} == {""}


def test_the_client_app_passes_bytes_to_the_worker_and_back(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            with server.accept()[0] as connection:
                send(connection, receive(connection)[::-1])

        thread = threading.Thread(target=serve)
        thread.start()
        message = Message(flower.pack_record(b"request"), dst_node_id=1, message_type="train")
        reply = flower.client_app(message, SimpleNamespace(node_config={"socket": path}))
        thread.join()
    assert flower.unpack_record(reply.content) == b"tseuqer"


def test_the_client_app_says_nothing_of_why_the_worker_is_silent(tmp_path: Path) -> None:
    message = Message(flower.pack_record(b"request"), dst_node_id=1, message_type="train")
    with pytest.raises(RuntimeError) as caught:
        flower.client_app(message, SimpleNamespace(node_config={"socket": str(tmp_path / "patients")}))
    assert str(caught.value) == "the worker of the site did not answer"
    assert caught.value.__cause__ is None


def test_the_client_app_imports_no_torch() -> None:
    """Flower starts a process for every message."""
    code = "import sys, gpfl.deploy.flower; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_flower_is_imported_in_one_module() -> None:
    texts = {path.name: path.read_text() for path in Path(gpfl.__file__).parent.rglob("*.py")}
    assert [name for name, text in texts.items() if "import flwr" in text or "from flwr" in text] == ["flower.py"]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    write_app(tmp_path / "gpfl")
    return tmp_path / "gpfl"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_app_is_built_without_code(app: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as fab:
        assert {each.filename for each in fab.infolist()} == {".info/CONTENT", "LICENSE", "README.md", "pyproject.toml"}
        assert sum(each.file_size for each in fab.infolist()) < 10_000


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_app_could_be_published_on_flower_hub(app: Path) -> None:
    """By the checks of `flwr app publish`: file types, sizes, encoding, license, name and description."""
    from flwr.cli.config_utils import load_and_validate

    publish = import_module("flwr.cli.app_cmd.publish")
    publish._validate_app_name(app.name, "Flower App directory name")
    config, _ = load_and_validate(app / "pyproject.toml")
    assert len(config["project"]["description"]) <= 200
    publish._validate_description(config["project"]["description"])
    files = publish._collect_file_paths(app)
    publish._validate_files(files)
    assert {path.name for path in files} == {"LICENSE", "README.md", "pyproject.toml"}


@pytest.mark.parametrize(("version", "replaced"), [("1.41.3", True), ("1.42.0", False)])
def test_internals_of_other_versions_of_flower_are_left_alone(
    version: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    internals = import_module("flwr.supernode.start_client_internal")
    started: list[object] = []
    for name in ("time", "subprocess"):
        monkeypatch.setattr(internals, name, import_module(name))
    connection = import_module("flwr.supernode.fleet_http_connection")
    monkeypatch.setattr(connection, "HEARTBEAT_DEFAULT_INTERVAL", connection.HEARTBEAT_DEFAULT_INTERVAL)
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", lambda: started.append(internals.subprocess))
    monkeypatch.setattr(flower, "version", lambda name: version)
    flower.run_supernode()
    assert (started != [subprocess]) is replaced
