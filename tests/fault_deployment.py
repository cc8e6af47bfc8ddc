"""A deployment whose parts can be killed and cut off, what must hold after a fault, and the table of faults in the docs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import deployment
from direct_sites import Sections, assert_equal

from gpfl.core import tree
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.supervise import finish_run
from gpfl.deploy.worker import SiteFolder, Worker
from gpfl.inference.load import load_model
from gpfl.io.tensors import read_tensors

ROUNDS, EPOCHS = 5, 40
PROPERTY = "fault"
TABLE = Path(__file__).parents[1] / "docs" / "results" / "faults.md"

FAULTS = (
    "SuperNode killed, restarted by its supervisor",
    "worker of a site killed, restarted by its supervisor",
    "site killed in mid-round, restarted after 5 s",
    "site killed in mid-round, restarted after 65 s",
    "site killed before round 0, joins late",
    "SuperLink killed, restarted by its supervisor",
    "SuperLink killed, its database lost",
    "coordinator process killed",
    "SuperLink, coordinator and their commands killed at once, started again by hand",
    "services of coordinator and site killed, restarted by systemd",
    "slow site",
    "late reply",
    "full disk at a site",
    "cut connection, for 30 s",
    "NaN",
    "wrong shape",
    "missing key",
    "float64",
    "replayed reply",
    "1e9 samples in scores",
    "1e9 samples before round 0",
    "coordinator asks for more than a site's policy allows",
    "certificate of another host",
    "expired certificate",
    "certificate of another authority",
    "unregistered node key",
    "no node key",
    "plain HTTP",
    "stolen CA certificate, through the proxy",
)
"""All faults, in the order of the table."""
DEFAULTS: Mapping[str, object] = {"rounds": ROUNDS, "min_clients": 2, "deadline": 40.0}
"""Settings of a deployment; the line of a fault says what else it had."""
TEXT = """Three sites with node keys on one machine, over TLS, GPFL. Every fault happens to running programs. `make faults`
writes this page; a fault whose test fails has no line. The tests check that the run was finished afterwards, all models are
finite, each site's model can be made again from its private state, and the log names what happened. Two kinds differ: where
an intruder is refused, they check that the node fails with the error in the line and the models equal those of the
simulation; with the stolen CA certificate nothing is trained, and the check is the proxy's 404. Unless the line says
otherwise: {defaults}. Seconds are those of the whole deployment; {workers} ran at a time."""
RUN = "{start}, flwr {flwr}, torch {torch}; {passed} of {faults} faults passed, in {minutes:.0f} min."
HEAD = """# Faults of deployments

{text}

{run}

| fault | outcome | in the log | s |
| --- | --- | --- | --- |
"""


class FaultTable:
    """Takes the lines of a test's faults; `write_table` takes those of the tests that passed."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def add(self, fault: str, outcome: str, event: str, began: float, settings: Mapping[str, object] | None = None) -> None:
        """Add the line of a fault that ended well. `settings` are those of its deployment."""
        assert fault in FAULTS
        other = {key: value for key, value in (settings or {}).items() if DEFAULTS.get(key) != value}
        outcome += f"; with {describe_settings(other)}" if other else ""
        self._record(PROPERTY, (fault, f"| {fault} | {outcome} | {event} | {time.monotonic() - began:.0f} |"))


def describe_settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{key}={value:g}`" for key, value in settings.items())


def describe_start() -> str:
    """Return the commit and the machine, for the head of the page: before the tests, whose own load does not count."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.partition(": ")[2] for line in info if line.startswith("model name"))
    commit = git("rev-parse", "--short", "HEAD")
    changes = ", with changes" if git("status", "--porcelain", "--", ":/", f":!{TABLE}") else ""
    return f"Commit {commit}{changes}, {os.cpu_count()} cores of an {cpu}, load {os.getloadavg()[0]:.1f} at the start"


def write_table(lines: Iterable[tuple[str, str]], start: str, seconds: float, workers: int) -> None:
    """Write the page from the lines of tests that passed."""
    rows = dict(lines)
    text = TEXT.format(defaults=describe_settings(DEFAULTS), workers=workers)
    run = RUN.format(
        start=start,
        flwr=metadata.version("flwr"),
        torch=metadata.version("torch"),
        passed=len(rows),
        faults=len(FAULTS),
        minutes=seconds / 60,
    )
    head = HEAD.format(text=textwrap.fill(text, 128), run=textwrap.fill(run, 128))
    TABLE.write_text(head + "".join(rows[fault] + "\n" for fault in FAULTS if fault in rows))


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=TABLE.parent, capture_output=True, text=True, check=True).stdout.strip()


class Deployment:
    """Three sites and a coordinator under the commands of gpfl, in processes of their own.

    Args:
        folder: Empty folder.
        rounds: Rounds.
        policy: Rules of policies besides those of the tests.
        host: Address that sites connect to.
        port: Port that sites connect to, 0 = that of the SuperLink.
        prefix: Words before the commands of a site by its name, such as those that put it in a network namespace.
        absent: Sites that are not started.
        worker: Program in place of a site's worker, by its name.
        settings: Settings of the coordinator.

    """

    def __init__(
        self,
        folder: Path,
        *,
        rounds: int = ROUNDS,
        policy: Mapping[str, object] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        prefix: Mapping[str, Sequence[str]] | None = None,
        absent: Sequence[str] = (),
        worker: Mapping[str, Path] | None = None,
        **settings: object,
    ) -> None:
        self.folder, self.lines, self.began, self.rounds = folder, list[str](), time.monotonic(), rounds
        self._prefix, self._worker = prefix or {}, worker or {}
        config: Sections = {"train": {"rounds": rounds, "lr": 0.02, "epochs": EPOCHS}}
        limits = {key: value for key, value in DEFAULTS.items() if key != "rounds"} | settings
        self.settings = {"rounds": rounds, **limits}
        rules = {**deployment.POLICY, **(policy or {})}
        names = list(dict.fromkeys([host, "localhost", "127.0.0.1"]))
        self.card = deployment.make(folder, config, rules, names=names, port=port, settings={"connect": 120.0, **limits})
        self.coordinator = CoordinatorFolder(folder / "d" / "coordinator")
        self.sites = {name: SiteFolder(folder / "d" / "sites" / name) for name in self.card.sites}
        self.commands: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.start_server()
        wait_for_text(folder / "server.out", "node keys registered")  # sites would be refused, and try again after a while
        for name in self.sites:
            if name not in absent:
                self.start_site(name)
        self.error: list[Exception] = []
        self.thread = threading.Thread(target=self._run, daemon=True)

    def run(self) -> None:
        """Start the run, or resume it."""
        self.error.clear()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def start_run_command(self) -> None:
        """Start the run by its command, which can be killed."""
        self.commands["run"] = [self._start("run", "run", self.coordinator.path)]

    def start_server(self) -> None:
        """Start the server."""
        self.commands["server"] = [self._start("server", "server", self.coordinator.path)]

    def start_site(self, name: str) -> None:
        """Start a site."""
        folder = self.sites[name].path
        if name not in self._worker:
            self.commands[name] = [self._start(name, "site", "start", folder)]
            return
        home = {**os.environ, "FLWR_HOME": str((folder / "flwr").resolve())}
        self.commands[name] = [
            self._start(name, "site", "node", folder),
            self._popen(name, [sys.executable, str(self._worker[name]), str(folder)], home),
        ]

    def _start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        return self._popen(name, [*self._prefix.get(name, ()), sys.executable, "-m", "gpfl", "deploy", *map(str, words)])

    def _popen(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)

    def _run(self) -> None:
        try:
            finish_run(self.coordinator, self.lines.append)
        except Exception as error:
            self.error.append(error)

    def wait_for(self, text: str, seconds: float = 400.0) -> None:
        """Wait until the coordinator's log has a text."""
        end = time.monotonic() + seconds
        while text not in self.log and not self.error and time.monotonic() < end:
            time.sleep(0.1)
        assert text in self.log, (self.log, self.lines, self.error)

    def find(self, name: str, folder: Path) -> list[int]:
        """Return the processes whose Flower folder is that of a folder and whose arguments contain a name."""
        found, mark = [], f"FLWR_HOME={(folder / 'flwr').resolve()}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if name.encode() in words and mark in variables and int(path.name) != os.getpid():
                found.append(int(path.name))
        return found

    def kill(self, name: str, folder: Path) -> None:
        """Kill a program."""
        number, *_ = self.find(name, folder)
        os.kill(number, signal.SIGKILL)

    def kill_all(self, name: str, folder: Path) -> None:
        """Kill the command of a site or of the server, with all its programs, at once."""
        for command in self.commands.pop(name):
            command.kill()
            command.wait()
        while found := self.find("", folder):
            for number in found:
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)

    @property
    def log(self) -> str:
        """The coordinator's log."""
        return self.coordinator.log.read_text() if self.coordinator.log.exists() else ""

    def finish(self, *events: str) -> list[dict[str, object]]:
        """Wait for the end of the run, check what must hold after each fault, and return the records of rounds."""
        self.thread.join(600)
        assert not self.thread.is_alive(), (self.log, self.lines)
        assert not self.error, (self.log, self.error)
        records = [json.loads(line) for line in (self.coordinator.run / "clients.jsonl").read_text().splitlines()]
        assert [record["round"] for record in records] == list(range(self.rounds))
        assert tree.is_finite(dict(read_tensors(self.coordinator.run / "checkpoint.safetensors")[0]))
        for site in self.sites.values():
            (path,) = (site.path / "state").glob("*/model.safetensors")
            kept, remade = load_model(path).weights, Worker(site).model_site().model().weights
            assert tree.is_finite(kept)
            assert_equal(kept, remade)  # from the private state on disk
        for event in events:
            assert event in self.log, (event, self.log)
        return records

    def check_equal(self) -> None:
        """Check that the models are those of a run without faults."""
        expected = deployment.simulate_files(self.folder, self.card)
        for site, model in zip(self.sites.values(), expected.clients, strict=True):
            (path,) = (site.path / "state").glob("*/model.safetensors")
            assert_equal(load_model(path).weights, model.weights)

    def stop(self) -> None:
        """Stop all processes."""
        for commands in reversed(list(self.commands.values())):
            for command in commands:
                command.terminate()
        for commands in self.commands.values():
            for command in commands:
                command.wait(60)


def wait_for_text(path: Path, text: str, seconds: float = 120.0) -> None:
    """Wait until a file has a text."""
    end = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < end, (path, text)
        time.sleep(0.1)


def missed_rounds(records: Sequence[Mapping[str, object]], site: str) -> int:
    """Return the number of rounds whose mean lacks a site."""
    return sum(site not in record["averaged"] for record in records)  # type: ignore[operator]
