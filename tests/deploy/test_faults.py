"""Faults of a real deployment on this machine. Each must end with the run finished, a finite model and the event in the log.

`make faults` runs them, which takes several minutes, and writes the table in docs/results/faults.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import deployment
import pytest
from direct_sites import assert_equal

pytest.importorskip("flwr", reason="needs gpfl[flower]")

from gpfl.core import tree
from gpfl.deploy import keys
from gpfl.deploy.init import replace_node_key
from gpfl.deploy.programs import free_port, supernode_command
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.supervise import finish_run
from gpfl.deploy.worker import SITE, SiteFolder
from gpfl.io import toml
from gpfl.io.tensors import read_tensors

pytestmark = pytest.mark.faults

ROUNDS = 5
CONFIG = {"train": {"rounds": ROUNDS, "lr": 0.02, "epochs": 40}}
TABLE = Path(__file__).parents[2] / "docs" / "results" / "faults.md"


class Deployment:
    """Three sites and a coordinator under the commands of gpfl, in processes of their own."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self.lines = folder, list[str]()
        self.card = deployment.make(folder, CONFIG)
        port = free_port()
        self.coordinator = CoordinatorFolder(folder / "d" / "coordinator")
        settings = {"min_clients": 2, "deadline": 20.0, "connect": 90.0, **settings, "link_port": port}
        path = self.coordinator.path / "deployment.toml"
        path.write_text(toml.dump({**toml.read(path), **settings}))
        self.sites = {name: SiteFolder(folder / "d" / "sites" / name) for name in self.card.sites}
        for name, site in self.sites.items():
            (site.path / SITE).write_text(toml.dump({"name": name, "server": f"127.0.0.1:{port}", "data": "data"}))
        self.commands = [self._start("server", self.coordinator.path)]
        self.commands += [self._start("site", "start", site.path) for site in self.sites.values()]
        self.error: list[Exception] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _start(self, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gpfl", "deploy", *map(str, words)]
        with (self.folder / f"{words[0]}.out").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _run(self) -> None:
        try:
            finish_run(self.coordinator, self.lines.append)
        except Exception as error:
            self.error.append(error)

    def wait_for(self, text: str, seconds: float = 150.0) -> None:
        """Wait until the coordinator's log has a text."""
        end = time.monotonic() + seconds
        while text not in self.log and not self.error and time.monotonic() < end:
            time.sleep(0.1)
        assert text in self.log, (self.log, self.lines, self.error)

    def find(self, name: str, folder: Path) -> int:
        """Return the process of a program whose Flower folder or arguments are in a folder."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            except OSError:
                continue
            if name.encode() in words and f"FLWR_HOME={folder}".encode() in variables:
                return int(path.name)
        raise AssertionError(f"no {name} in {folder}")

    def kill(self, name: str, folder: Path) -> None:
        os.kill(self.find(name, folder.resolve()), signal.SIGKILL)

    @property
    def log(self) -> str:
        return self.coordinator.log.read_text() if self.coordinator.log.exists() else ""

    def finish(self) -> list[dict[str, object]]:
        """Wait for the end of the run, and return the records of its rounds."""
        self.thread.join(400)
        assert not self.thread.is_alive(), (self.log, self.lines)
        assert not self.error, (self.log, self.error)
        records = [json.loads(line) for line in (self.coordinator.run / "clients.jsonl").read_text().splitlines()]
        assert [record["round"] for record in records] == list(range(ROUNDS))
        for site in self.sites.values():
            (path,) = (site.path / "state").glob("*/model.safetensors")
            assert tree.is_finite(dict(read_tensors(path)[0]))
        return records

    def check_equal(self) -> None:
        """Check that the models are those of a run without faults."""
        expected = deployment.simulate_files(self.folder, self.card)
        for site, model in zip(self.sites.values(), expected.clients, strict=True):
            (path,) = (site.path / "state").glob("*/model.safetensors")
            from gpfl.inference.load import load_model

            assert_equal(load_model(path).weights, model.weights)

    def stop(self) -> None:
        for command in reversed(self.commands):
            command.terminate()
        for command in self.commands:
            command.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    started: list[Deployment] = []

    def make(**settings: object) -> Deployment:
        started.append(Deployment(tmp_path, **settings))
        return started[-1]

    yield make
    for each in started:
        each.stop()


ROWS: list[tuple[str, str, float]] = []


@pytest.fixture(autouse=True, scope="module")
def table() -> Iterator[None]:
    """Write the table of all faults that ended well, if `make faults` asks for it."""
    yield
    if os.environ.get("GPFL_FAULTS_TABLE") and ROWS:
        lines = [f"| {fault} | {outcome} | {seconds:.0f} |" for fault, outcome, seconds in ROWS]
        head = (
            "# Faults of deployments\n\nThree sites over TLS with node keys on one machine, GPFL, five rounds, "
            "`min_clients = 2`, `deadline = 20`.\nWritten by `make faults`; a fault that ended otherwise has no line.\n\n"
        )
        TABLE.write_text(head + "| fault | outcome | s |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n")


def report(fault: str, outcome: str, start: float) -> None:
    ROWS.append((fault, outcome, time.monotonic() - start))


def averaged(records: list[dict[str, object]]) -> list[list[str]]:
    return [record["averaged"] for record in records]  # type: ignore[misc]


def test_killed_supernode(start: Callable[..., Deployment]) -> None:
    run, began = start(), time.monotonic()
    run.wait_for("round 0: 3 of 3 sites answered")
    run.kill("flower-supernode", run.sites["north"].path / "flwr")
    records = run.finish()
    assert any("north" in record["dropped"] for record in records)  # type: ignore[operator]
    missed = sum("north" not in names for names in averaged(records))
    report("SuperNode killed, restarted by its supervisor", f"run finished; the site missed {missed} of 5 rounds", began)


def test_killed_worker(start: Callable[..., Deployment]) -> None:
    run, began = start(), time.monotonic()
    run.wait_for("round 0: 3 of 3 sites answered")
    run.kill("gpfl.deploy.worker", run.sites["north"].path / "flwr")
    records = run.finish()
    missed = sum("north" not in names for names in averaged(records))
    assert averaged(records)[-1] == list(run.card.sites)
    if not missed:
        run.check_equal()
    report("worker of a site killed, restarted by its supervisor", f"run finished; the site missed {missed} of 5 rounds", began)


def test_killed_superlink(start: Callable[..., Deployment]) -> None:
    run, began = start(deadline=60.0), time.monotonic()
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill("flower-superlink", run.coordinator.path / "flwr")
    records = run.finish()
    assert averaged(records) == [list(run.card.sites)] * ROUNDS
    run.check_equal()
    report(
        "SuperLink killed, restarted by its supervisor",
        "run resumed from its checkpoint; models equal to the simulation",
        began,
    )


def test_killed_coordinator(start: Callable[..., Deployment]) -> None:
    run, began = start(), time.monotonic()
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill("flwr-serverapp", run.coordinator.path / "flwr")
    run.finish()
    run.check_equal()
    report("coordinator process killed", "run resumed from its checkpoint; models equal to the simulation", began)


def test_slow_site(start: Callable[..., Deployment]) -> None:
    run, began = start(), time.monotonic()
    run.wait_for("round 0: 3 of 3 sites answered")
    worker = run.find("gpfl.deploy.worker", (run.sites["north"].path / "flwr").resolve())
    os.kill(worker, signal.SIGSTOP)
    try:
        run.wait_for("north: no reply before the deadline")
    finally:
        os.kill(worker, signal.SIGCONT)
    records = run.finish()
    missed = sum("north" not in names for names in averaged(records))
    assert missed
    report("a site slower than the deadline", f"left out of {missed} of 5 rounds, named in the log; run finished", began)


INTRUDERS = {
    "certificate of another authority": "",
    "unregistered node key": "2004",
    "no node key": "2001",
    "plain HTTP": "",
}
"""What their output says, where Flower says anything."""


def test_intruders_are_refused(tmp_path: Path) -> None:
    """Nodes with a wrong certificate, a wrong key or none do not get in."""
    from gpfl.deploy.programs import Control, Processes, superlink_command, wait_for_superlink

    card = deployment.make(tmp_path)
    folder = CoordinatorFolder(tmp_path / "d" / "coordinator")
    path = folder.path / "deployment.toml"
    path.write_text(toml.dump({**toml.read(path), "link_port": free_port()}))
    server = f"127.0.0.1:{folder.link_port}"
    with Processes(tmp_path / "log") as processes:
        processes.start("superlink", superlink_command(folder), folder.path / "flwr")
        wait_for_superlink(folder, processes)
        control = Control(folder)
        control.register()
        site = SiteFolder(tmp_path / "d" / "sites" / card.sites[0])
        keys.make_ca(tmp_path / "other", "other")
        valid = supernode_command(site, server)
        limits = ["--max-retries", "2", "--max-wait-time", "10"]
        authority, key = valid.index("--root-certificates"), valid.index("--auth-supernode-private-key")
        foreign = [*valid, *limits]
        foreign[authority + 1] = str(tmp_path / "other" / "ca.crt")
        replace_node_key(site.path)
        without_key = [*valid[:key], *valid[key + 2 :], *limits]
        plain = [*without_key[:authority], *without_key[authority + 2 :], "--insecure"]
        commands = {
            "certificate of another authority": foreign,
            "unregistered node key": [*valid, *limits],
            "no node key": without_key,
            "plain HTTP": plain,
        }
        for number, (fault, command) in enumerate(commands.items()):
            command[command.index("--port") + 1] = str(free_port())
            began_one = time.monotonic()
            process = processes.start(f"intruder-{number}", command, tmp_path / "flwr")
            while process.poll() is None and time.monotonic() < began_one + 30:
                time.sleep(0.1)
            output = (tmp_path / "log" / f"intruder-{number}.log").read_text()
            outcome = "did not connect in 30 s" if process.returncode is None else f"refused, exit status {process.returncode}"
            assert process.returncode != 0, output
            assert INTRUDERS[fault] in output, output
            states = set(control.nodes().values())
            assert "online" not in states, (fault, states)
            processes.stop([f"intruder-{number}"])
            report(fault, outcome, began_one)
