"""Who does not get in: nodes with a wrong key or none, servers with a wrong certificate, and thieves of the CA certificate."""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_server

import deployment
import pytest
from direct_sites import assert_equal
from fault_deployment import FaultTable
from proxy import start_nginx

pytest.importorskip("flwr", reason="needs gpfl[flower]")

from gpfl.deploy import keys
from gpfl.deploy.demo import deployed
from gpfl.deploy.programs import Control, Processes, free_port, superlink_command, supernode_command, wait_for_superlink
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.supervise import finish_run
from gpfl.deploy.worker import SiteFolder
from gpfl.errors import GpflError
from gpfl.inference.load import load_model

pytestmark = [pytest.mark.faults, pytest.mark.deployment]

LIMITS = ["--max-retries", "2", "--max-wait-time", "10"]


@contextmanager
def tls_server(certs: Path) -> Iterator[tuple[str, list[bool]]]:
    """A TLS server with a certificate; the list says of each connection whether its client trusted it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server.crt", certs / "server.key")
    trusted: list[bool] = []
    with create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with suppress(TimeoutError):
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    try:
                        with context.wrap_socket(connection, server_side=True) as wrapped:
                            trusted.append(bool(wrapped.recv(1)))  # with TLS 1.3 a client refuses after the handshake
                    except OSError:
                        trusted.append(False)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", trusted
        finally:
            ended.set()
            thread.join()


def make_certificates(folder: Path, ca: Path, names: list[str], days: int = 365) -> Path:
    """Return a folder with a server's certificate signed by the CA of another."""
    folder.mkdir()
    for name in ("ca.crt", "ca.key"):
        (folder / name).write_bytes((ca / name).read_bytes())
    keys.make_server_certificate(folder, names, days)
    return folder


def first_site(folder: Path) -> SiteFolder:
    return SiteFolder(folder / "d" / "sites" / deployment.SITES[0])


def replace(command: list[str], **options: str | None) -> list[str]:
    """Return a command with other values of options, None to leave one out, and with limits on trying again."""
    changed = list(command)
    for name, value in options.items():
        at = changed.index(f"--{name.replace('_', '-')}")
        changed[at : at + 2] = [] if value is None else [changed[at], value]
    return [*changed, *LIMITS]


def test_intruders_are_refused_and_the_run_goes_on(tmp_path: Path, table: FaultTable) -> None:
    began = time.monotonic()
    card = deployment.make(tmp_path)
    folder, site = CoordinatorFolder(tmp_path / "d" / "coordinator"), first_site(tmp_path)
    certs = folder.path / "certs"
    keys.make_ca(tmp_path / "other", "other")
    (tmp_path / "stranger").mkdir()
    keys.make_node_key(tmp_path / "stranger")
    valid = supernode_command(site)
    with (
        deployed(tmp_path / "d", card) as processes,
        tls_server(make_certificates(tmp_path / "host", certs, ["fl.example.org"])) as (host, host_trusted),
        tls_server(make_certificates(tmp_path / "expired", certs, ["127.0.0.1"], -1)) as (expired, expired_trusted),
        tls_server(certs) as (good, good_trusted),
    ):
        intruders = {
            "certificate of another host": (replace(valid, superlink=host), "CERTIFICATE_VERIFY_FAILED"),
            "expired certificate": (replace(valid, superlink=expired), "CERTIFICATE_VERIFY_FAILED"),
            "certificate of another authority": (
                replace(valid, root_certificates=str(tmp_path / "other" / "ca.crt")),
                "CERTIFICATE_VERIFY_FAILED",
            ),
            "unregistered node key": (
                replace(valid, auth_supernode_private_key=str(tmp_path / "stranger" / "node.key")),
                "2004",
            ),
            "no node key": (replace(valid, auth_supernode_private_key=None), "2001"),
            "plain HTTP": ([*replace(valid, auth_supernode_private_key=None, root_certificates=None), "--insecure"], ""),
        }
        control = replace(valid, superlink=good)  # the same server with a valid certificate is trusted
        started = {"control": processes.start("control", replace(control, port=str(free_port())), tmp_path / "flwr")}
        for number, (fault, (command, _)) in enumerate(intruders.items()):
            started[fault] = processes.start(f"intruder-{number}", replace(command, port=str(free_port())), tmp_path / "flwr")
        end = time.monotonic() + 90
        while any(process.poll() is None for process in started.values()) and time.monotonic() < end:
            time.sleep(0.1)
        outputs = [(tmp_path / "d" / "log" / f"intruder-{i}.log").read_text() for i in range(len(intruders))]
        processes.stop(["control", *(f"intruder-{i}" for i in range(len(intruders)))])
        assert any(good_trusted)
        assert host_trusted
        assert expired_trusted
        assert not any(host_trusted + expired_trusted)
        assert list(Control(folder).nodes().values()).count("online") == len(card.sites)
        finish_run(folder, print)
    expected = deployment.simulate_files(tmp_path, card)
    for name, model in zip(card.sites, expected.clients, strict=True):
        (path,) = (tmp_path / "d" / "sites" / name / "state").glob("*/model.safetensors")
        assert_equal(load_model(path).weights, model.weights)
    records = [json.loads(line) for line in (folder.run / "clients.jsonl").read_text().splitlines()]
    assert [record["averaged"] for record in records] == [list(card.sites)] * 2
    for (fault, (_, reason)), output in zip(intruders.items(), outputs, strict=True):
        status = started[fault].returncode
        assert status != 0, (fault, output)
        assert reason in output, (fault, output)
        outcome = "refused; the run of the sites finished with models equal to the simulation"
        event = f"`{reason}`, at the node" if reason else f"exit status {status} of the node"
        table.add(fault, outcome, event, began, {"rounds": 2})


def test_the_proxy_lets_sites_in_and_keeps_the_control_api_from_thieves(tmp_path: Path, table: FaultTable) -> None:
    """With the CA certificate alone, whoever reaches the SuperLink can submit runs and register nodes: the proxy keeps them."""
    began, port = time.monotonic(), free_port()
    deployment.make(tmp_path, names=["127.0.0.1"], port=port)
    folder, site = CoordinatorFolder(tmp_path / "d" / "coordinator"), first_site(tmp_path)
    with Processes(tmp_path / "log") as processes, start_nginx(folder.path, tmp_path / "nginx"):
        processes.start("superlink", superlink_command(folder), folder.path / "flwr")
        wait_for_superlink(folder, processes)
        control = Control(folder)
        control.register()
        processes.start("supernode", supernode_command(site), site.path / "flwr")
        thief = CoordinatorFolder(tmp_path / "thief")
        (thief.path / "certs").mkdir(parents=True)
        (thief.path / "certs" / "ca.crt").write_bytes((folder.path / "certs" / "ca.crt").read_bytes())
        stolen = tmp_path / "stranger"
        stolen.mkdir()
        keys.make_node_key(stolen)
        register = ("supernode", "register", str(stolen / "node.pub"), "gpfl")
        (thief.path / "deployment.toml").write_text(f"link_port = {port}\n")
        for arguments in (register, ("supernode", "list", "gpfl"), ("list", "gpfl")):
            with pytest.raises(GpflError, match="failed"):
                Control(thief).call(*arguments)
        (thief.path / "deployment.toml").write_text(f"link_port = {folder.link_port}\n")
        assert Control(thief).call(*register)["node-id"]  # without the proxy he would be in
        statuses = {
            path: http_status(folder, port, path) for path in ("/health", "/v1/control/list-runs", "/v1/runtime/x", "/")
        }
        assert set(statuses.values()) == {404}
        assert http_status(folder, folder.link_port, "/health") == 200
        end = time.monotonic() + 60
        while "online" not in control.nodes().values():
            assert time.monotonic() < end, (tmp_path / "log" / "supernode.log").read_text()
        access = (tmp_path / "nginx" / "access.log").read_text().splitlines()
        served = {line.split('"')[1].split()[1] for line in access if line.split('"')[2].split()[0] == "200"}
        assert served
        assert all(path.startswith("/v1/fleet/") for path in served)
    table.add(
        "stolen CA certificate, through the proxy",
        "the control API is not found: registering a node and listing runs fail; a site's SuperNode is connected",
        "404 of `/v1/control/…`, at nginx",
        began,
    )


def http_status(folder: CoordinatorFolder, port: int, path: str) -> int:
    context = ssl.create_default_context(cafile=str(folder.path / "certs" / "ca.crt"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"https://127.0.0.1:{port}{path}", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
