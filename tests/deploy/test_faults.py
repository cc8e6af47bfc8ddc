"""Faults of a real deployment on this machine: parts are killed, cut off, filled up, or lie.

`make faults` runs them, which takes a while, and writes the table in docs/results/faults.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fault_deployment import Deployment, FaultTable, missed_rounds
from proxy import start_nginx
from tampering_worker import CLAIMED, TAMPERED

pytest.importorskip("flwr", reason="needs gpfl[flower]")

from gpfl.deploy.programs import free_port
from gpfl.errors import pluralize

pytestmark = pytest.mark.faults

Start = Callable[..., Deployment]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Deployment] = []

    def make(**settings: object) -> Deployment:
        started.append(Deployment(tmp_path, **settings))  # type: ignore[arg-type]
        started[-1].run()
        return started[-1]

    yield make
    for each in started:
        each.stop()


def test_killed_supernode(start: Start, table: FaultTable) -> None:
    run = start()
    run.wait_for("round 0: 3 of 3 sites answered")
    run.kill("gpfl.deploy.flower", run.sites["north"].path)
    records = run.finish("north: no")
    missed = missed_rounds(records, "north")
    assert 0 < missed < run.rounds
    table.add(
        "SuperNode killed, restarted by its supervisor",
        f"run finished; the site missed {pluralize(missed, 'round')}",
        "`north: no reply …`, or `not connected`",
        run.began,
        run.settings,
    )


def test_killed_worker(start: Start, table: FaultTable) -> None:
    run = start()
    run.wait_for("round 0: 3 of 3 sites answered")
    run.kill("gpfl.deploy.worker", run.sites["north"].path)
    records = run.finish()
    missed = missed_rounds(records, "north")
    assert "worker ended with status -9; it starts again" in (run.folder / "north.out").read_text()
    assert not missed_rounds(records[-1:], "north")
    if not missed:
        run.check_equal()
    table.add(
        "worker of a site killed, restarted by its supervisor",
        f"run finished; the site missed {pluralize(missed, 'round')}",
        "`worker ended with status -9`, at the site",
        run.began,
        run.settings,
    )


def test_site_killed_and_restarted_after_5_seconds(start: Start, table: FaultTable) -> None:
    """Flower refuses its key for half a minute, in which the others go on."""
    run = start(rounds=8)
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill_all("north", run.sites["north"].path)
    time.sleep(5)
    run.start_site("north")
    records = run.finish("north: no")
    missed = missed_rounds(records, "north")
    assert missed
    assert not missed_rounds(records[-1:], "north")
    table.add(
        "site killed in mid-round, restarted after 5 s",
        f"run finished; the site missed {pluralize(missed, 'round')} and trained in the last",
        "`north: no reply …`, `not connected`",
        run.began,
        run.settings,
    )


def seconds_by_round(log: str) -> dict[str, float]:
    """Return how long each round took, with its repetitions."""
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        if " sites answered in " in line:
            number, _, rest = line.partition(" round ")[2].partition(":")
            seconds[number] = seconds.get(number, 0.0) + float(rest.partition(" in ")[2].split()[0])
    return seconds


def test_site_killed_and_restarted_after_65_seconds(start: Start, table: FaultTable) -> None:
    """With all sites needed, the run waits for it."""
    run = start(min_clients=3, deadline=150.0, connect=150.0)
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill_all("north", run.sites["north"].path)
    time.sleep(65)
    run.start_site("north")
    records = run.finish()
    assert not missed_rounds(records, "north")
    run.check_equal()
    waited = max(seconds_by_round(run.log).values())
    assert waited > 50
    table.add(
        "site killed in mid-round, restarted after 65 s",
        f"the run waited, {waited:.0f} s for a round; models equal to the simulation",
        "`2 uploads, 3 needed; asking again`",
        run.began,
        run.settings,
    )


def test_site_that_joins_late(start: Start, table: FaultTable) -> None:
    run = start(rounds=20, absent=["south"], start_clients=2, connect=5.0)
    run.wait_for("before round 0: 2 of 3 sites described their samples")
    run.wait_for("round 1: 2 of 2 sites answered")
    run.start_site("south")
    records = run.finish("south joins the run after the next checkpoint", "sites of the run: east, north, south")
    missed = missed_rounds(records, "south")
    assert 2 <= missed < run.rounds
    assert all("south" in record["averaged"] for record in records[missed:])  # type: ignore[operator]
    table.add(
        "site killed before round 0, joins late",
        f"run begun by two sites; finished, with the site from round {missed + 1} on",
        "`south joins the run after the next checkpoint`",
        run.began,
        run.settings,
    )


def test_killed_superlink(start: Start, table: FaultTable) -> None:
    run = start()
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill("flower-superlink", run.coordinator.path)
    records = run.finish()
    assert missed_rounds(records, "north") == 0
    assert run.log.count("coordinator of run 'test' started") >= 2
    assert "superlink ended with status -9; it starts again" in (run.folder / "server.out").read_text()
    run.check_equal()
    table.add(
        "SuperLink killed, restarted by its supervisor",
        "run resumed from its checkpoint; models equal to the simulation",
        "`superlink ended with status -9`, `coordinator … started` again",
        run.began,
        run.settings,
    )


def test_lost_database_of_the_superlink(start: Start, table: FaultTable) -> None:
    """As on a new machine: Flower knows neither the run nor the node keys."""
    run = start()
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill_all("server", run.coordinator.path)
    for path in (run.coordinator.path / "state").glob("superlink.db*"):
        path.unlink()
    run.start_server()
    run.finish()
    assert run.log.count("coordinator of run 'test' started") >= 2
    assert "the run ended as 'unknown'; starting it again from its checkpoint" in run.lines
    assert (run.folder / "server.out").read_text().count("node keys registered") == 2
    run.check_equal()
    table.add(
        "SuperLink killed, its database lost",
        "node keys registered again, run resumed from its checkpoint; models equal to the simulation",
        "`the run ended as 'unknown'`, at `gpfl deploy run`",
        run.began,
        run.settings,
    )


def test_killed_coordinator(start: Start, table: FaultTable) -> None:
    run = start()
    run.wait_for("round 1: 3 of 3 sites answered")
    run.kill("flwr-serverapp", run.coordinator.path)
    run.finish()
    assert run.log.count("coordinator of run 'test' started") == 2
    run.check_equal()
    table.add(
        "coordinator process killed",
        "run resumed from its checkpoint; models equal to the simulation",
        "`coordinator … started` again",
        run.began,
        run.settings,
    )


def test_killed_machine_of_the_coordinator(tmp_path: Path, table: FaultTable) -> None:
    run = Deployment(tmp_path)  # type: ignore[arg-type]
    try:
        run.start_run_command()
        run.wait_for("round 1: 3 of 3 sites answered")
        run.kill_all("run", run.coordinator.path)
        run.kill_all("server", run.coordinator.path)
        time.sleep(3)
        run.start_server()
        run.run()
        run.finish()
        assert run.log.count("coordinator of run 'test' started") >= 2
        run.check_equal()
    finally:
        run.stop()
    table.add(
        "SuperLink, coordinator and their commands killed at once, started again by hand",
        "run resumed from its checkpoint; models equal to the simulation",
        "`coordinator … started` again",
        run.began,
        run.settings,
    )


def test_slow_site(start: Start, table: FaultTable) -> None:
    run = start()
    run.wait_for("round 0: 3 of 3 sites answered")
    (worker, *_) = run.find("gpfl.deploy.worker", run.sites["north"].path)
    os.kill(worker, signal.SIGSTOP)
    try:
        run.wait_for("north: no reply before the deadline")
    finally:
        os.kill(worker, signal.SIGCONT)
    records = run.finish()
    missed = missed_rounds(records, "north")
    assert missed
    late = [record for record in records if "north" in record["dropped"]]  # type: ignore[operator]
    assert len(late) == missed  # its late replies are in no mean
    event = "`north: no reply before the deadline`"
    table.add("slow site", f"left out of {pluralize(missed, 'round')}; run finished", event, run.began, run.settings)
    table.add("late reply", "not in any mean; the site trained on from its last accepted round", event, run.began, run.settings)


def test_full_disk_at_a_site(tmp_path: Path, table: FaultTable) -> None:
    state = tmp_path / "d" / "sites" / "north" / "state"
    with small_disk(state, tmp_path) as fill:
        run = Deployment(tmp_path, rounds=8)  # type: ignore[arg-type]
        try:
            fill.mount()
            run.run()
            run.wait_for("round 1: 3 of 3 sites answered")
            fill.fill()
            run.wait_for("north: the site could not do it; the reason is in the site's log")
            fill.free()
            records = run.finish()
        finally:
            run.stop()
        missed = missed_rounds(records, "north")
        assert 0 < missed < run.rounds
        assert not missed_rounds(records[-1:], "north")
        assert "No space left on device" in (run.sites["north"].path / "log" / "worker.log").read_text()
    table.add(
        "full disk at a site",
        f"run finished; the site missed {pluralize(missed, 'round')} and trained on from its last accepted one",
        "`north: the site could not do it`; `No space left on device`, at the site",
        run.began,
        run.settings,
    )


class SmallDisk:
    """A disk of 1 MB over a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self) -> None:
        """Put the disk in place."""
        self.path.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", self.path], check=True)

    def fill(self) -> None:
        """Leave no room."""
        filler = self.path / "filler"
        for size in (4096, 1):
            with filler.open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(size)) == size:
                    continue

    def free(self) -> None:
        """Make room again."""
        (self.path / "filler").unlink()


@contextmanager
def small_disk(path: Path, folder: Path) -> Iterator[SmallDisk]:
    """A small disk; the test is skipped where none can be mounted."""
    trial = folder / "trial"
    trial.mkdir()
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", trial], capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount")
    subprocess.run(["umount", trial], check=True)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", path], capture_output=True)


NAMESPACE, LINK = "gpfl-north", "gpfl-cut"
HERE, THERE = "10.231.77.1", "10.231.77.2"


@contextmanager
def network_namespace() -> Iterator[None]:
    """A network namespace with a cable to this one; the test is skipped where none can be made."""
    commands = (
        f"ip netns add {NAMESPACE}",
        f"ip link add {LINK} type veth peer name {LINK}-n",
        f"ip link set {LINK}-n netns {NAMESPACE}",
        f"ip addr add {HERE}/30 dev {LINK}",
        f"ip link set {LINK} up",
        f"ip -n {NAMESPACE} addr add {THERE}/30 dev {LINK}-n",
        f"ip -n {NAMESPACE} link set {LINK}-n up",
        f"ip -n {NAMESPACE} link set lo up",
    )
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (iproute2)")
    try:
        for command in commands:
            if (done := subprocess.run(command.split(), capture_output=True, text=True)).returncode:
                pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run(["ip", "link", "del", LINK], capture_output=True)
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True)


def test_cut_connection(tmp_path: Path, table: FaultTable) -> None:
    """A site on another network loses its cable for half a minute. All sites come through the generated proxy."""
    port = free_port()
    with network_namespace():
        run = Deployment(
            tmp_path,
            rounds=12,
            host=HERE,
            port=port,
            prefix={"north": ["ip", "netns", "exec", NAMESPACE]},
        )
        try:
            with start_nginx(run.coordinator.path, tmp_path / "nginx"):
                run.run()
                run.wait_for("round 1: 3 of 3 sites answered")
                subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
                threading.Timer(30, subprocess.run, [["ip", "link", "set", LINK, "up"]]).start()
                records = run.finish("north: no")
        finally:
            run.stop()
    missed = missed_rounds(records, "north")
    assert 0 < missed < run.rounds
    assert not missed_rounds(records[-1:], "north")
    table.add(
        "cut connection, for 30 s",
        f"run finished; the site missed {pluralize(missed, 'round')} and trained in the last",
        "`north: no reply …`, or `not connected`",
        run.began,
        run.settings,
    )


def test_bad_replies(start: Start, table: FaultTable) -> None:
    """A site whose program lies: each round's reply is wrong in another way."""
    run = start(rounds=CLAIMED + 2, worker={"north": Path(__file__).parents[1] / "tampering_worker.py"})
    records = run.finish(
        "before round 0: north: it claims 1,000,000,010 samples; the limit, max_samples in deployment.toml, is 1,000,000",
        "scores of north ignored: (1000000000.0, 0.0, 1000000000) is not plausible",
    )
    from bad_replies import BAD_REPLIES

    for number, fault in TAMPERED.items():
        assert records[number]["averaged"] == ["east", "south"], (number, fault)
        reason = records[number]["dropped"]["north"]  # type: ignore[index]
        assert BAD_REPLIES[fault][1] in reason, (fault, reason)
        if fault not in ("norm", "loss", "garbage"):
            outcome = f"upload dropped; the mean of round {number + 1} is that of two sites"
            table.add(fault, outcome, f"`{reason}`", run.began, run.settings)
    for number in (0, CLAIMED, CLAIMED + 1):
        assert not missed_rounds(records[number : number + 1], "north")
    table.add(
        "1e9 samples in scores",
        "scores ignored; the weights of the mean are those of the roster",
        "`scores of north ignored: … is not plausible`",
        run.began,
        run.settings,
    )
    table.add(
        "1e9 samples before round 0",
        "not admitted until it claims a plausible number",
        "`it claims 1,000,000,010 samples`",
        run.began,
        run.settings,
    )


def test_a_coordinator_that_asks_for_too_much(start: Start, table: FaultTable) -> None:
    run = start(min_clients=1, policy={"max_rounds": 2, "max_norm": 1e6})
    for name in ("east", "south"):
        path = run.sites[name].path / "outbound.toml"
        path.write_text(path.read_text().replace("max_rounds = 2", "max_rounds = 0"))
    records = run.finish("north: the site's policy refuses it (max_rounds)")
    assert [missed_rounds([record], "north") for record in records] == [0, 0, 1, 1, 1]
    site = (run.sites["north"].path / "log" / "worker.log").read_text()
    assert "refused: policy: upload 3 is asked for, and outbound.max_rounds is 2" in site
    table.add(
        "coordinator asks for more than a site's policy allows",
        "a third upload refused at the site, before anything was sent; run finished with the others",
        "`the site's policy refuses it (max_rounds)`, on both sides",
        run.began,
        run.settings,
    )


def test_the_suite_leaves_no_process() -> None:
    """No program of a deployment runs on."""
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in commands if sys.executable.encode() in words and b"tampering_worker" in words]
