"""The systemd units that `gpfl deploy init` writes, run by a systemd of their own in a container without network."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import deployment
import pytest
from direct_sites import assert_equal
from fault_deployment import FaultTable

pytest.importorskip("flwr", reason="needs gpfl[flower]")

from gpfl.deploy.server import CoordinatorFolder
from gpfl.inference.load import load_model

pytestmark = pytest.mark.faults

BOX = Path("/srv/gpfl")
"""The test's folder in the container: units have a /tmp and /var/tmp of their own."""
NAMES = ("root", "nobody", "gpfl", "gpfl-data", "gpfl-net")
DRIVER = """#!/bin/bash
# Runs in the container: starts the units, kills what they run, and stops them.
exec > {folder}/driver.log 2>&1
units="gpfl-server gpfl-run gpfl-worker gpfl-node"
wait_for() {{ for i in $(seq 600); do eval "$1" && return; sleep 0.5; done; echo "waited in vain for $1"
    journalctl --no-pager -b -u 'gpfl-*' | tail -100; systemctl --no-block exit 1; exit 1; }}
chmod a+x {parents} 2> /dev/null  # folders of the container, in memory, that lead to Python
systemctl start $units
wait_for 'grep -qs "round 1: 1 of 1" {log}'
for unit in gpfl-worker gpfl-node gpfl-server; do
    wait_for 'systemctl is-active --quiet $unit'  # a node that came before its key was registered is restarted, too
    old=$(systemctl show -P MainPID $unit) next=$(($(systemctl show -P NRestarts $unit) + 1))
    kill -9 $old
    wait_for '[ $(systemctl show -P NRestarts $unit) = $next ] && systemctl is-active --quiet $unit'
    echo "$unit restarted"
done
wait_for '[ -e {run}/summary.json ] && [ "$(systemctl is-active gpfl-run)" = inactive ]'
for unit in $units; do echo "$unit $(systemctl is-active $unit) $(systemctl show -P Result $unit)"; done
ps -eo user:20,args | grep -E "[g]pfl|[f]lwr|[f]lower"
systemctl stop $units
for unit in $units; do echo "$unit $(systemctl is-active $unit)"; done
journalctl --no-pager -b -u 'gpfl-*' > {folder}/journal.log
echo "left: $(ps -eo args | grep -cE "[f]lower-super|[g]pfl.deploy|[g]pfl deploy")"
systemctl --no-block exit 0
"""


def test_systemd_starts_restarts_and_stops_coordinator_and_site(tmp_path: Path, table: FaultTable) -> None:
    """The container's root is in memory, /usr and the package are read-only, and only the test's folder is written.

    Never run a systemd on the machine's own root: at its start it empties /tmp.
    """
    if os.geteuid() or shutil.which("systemd-nspawn") is None:
        pytest.skip("needs root and systemd-nspawn (package systemd-container)")
    began, folder = time.monotonic(), tmp_path / "box"
    folder.mkdir()
    card = deployment.make(folder, {"train": {"rounds": 12, "lr": 0.1}}, sites=deployment.SITES[:1], names=["127.0.0.1"])
    coordinator, site = folder / "d" / "coordinator", folder / "d" / "sites" / "east"
    program = f"{sys.executable} -m gpfl"
    units = folder / "units"
    units.mkdir()
    for own in (coordinator, site):
        for unit in (own / "systemd").iterdir():
            text = unit.read_text().replace("FOLDER", str(BOX / own.relative_to(folder))).replace("GPFL", program)
            (units / unit.name).write_text(text)
    run = CoordinatorFolder(coordinator)
    paths = {"log": BOX / run.log.relative_to(folder), "run": BOX / run.run.relative_to(folder)}
    parents = " ".join(map(str, list(Path(sys.base_prefix).parents)[:-1]))
    (folder / "driver").write_text(DRIVER.format(folder=BOX, parents=parents, **paths))
    (units / "driver.service").write_text(f"[Unit]\nDescription=driver\n[Service]\nExecStart=/bin/bash {BOX}/driver\n")
    write_accounts(folder)
    give_to_users(coordinator, site)
    read_only = dict.fromkeys([Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]])
    command = [
        *("systemd-nspawn", "--quiet", "--directory=/", "--volatile=yes", "--machine=gpfl-units", "--private-network"),
        *("--register=no", "--keep-unit", "--link-journal=no", "--console=pipe", "--kill-signal=SIGRTMIN+3", "--boot"),
        *(f"--bind-ro={path}" for path in read_only),
        *(f"--bind-ro={folder / name}:/etc/{name}" for name in ("passwd", "group")),
        *(f"--bind={folder}:{BOX}", f"--bind-ro={units}:/etc/systemd/system", "systemd.unit=driver.service"),
    ]
    with (folder / "boot.log").open("wb") as log:
        container = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            container.wait(400)
        except subprocess.TimeoutExpired:
            container.send_signal(signal.SIGTERM)
            container.wait(60)
        finally:
            container.kill()
            container.wait()
            for name in ("payload", "supervisor"):  # empty groups of processes
                for path in Path("/sys/fs/cgroup").glob(f"*/{name}"):
                    subprocess.run(["find", path, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";"], capture_output=True)
    if not (folder / "driver.log").exists():
        pytest.skip(f"systemd cannot run in a container here: {(folder / 'boot.log').read_text(errors='replace')[-500:]}")
    lines = (folder / "driver.log").read_text().splitlines()
    for unit in ("gpfl-worker", "gpfl-node", "gpfl-server"):
        assert f"{unit} restarted" in lines, lines
        assert f"{unit} active success" in lines, lines
        assert f"{unit} inactive" in lines, lines
    assert "gpfl-run inactive success" in lines, lines
    assert "gpfl-server failed" not in lines, lines
    assert "left: 0" in lines, lines
    for user, program in (("gpfl-data", "site worker"), ("gpfl-net", "gpfl.deploy.flower"), ("gpfl ", "flower-superlink")):
        assert any(line.startswith(user) and program in line for line in lines), (user, lines)
    records = [json.loads(line) for line in (run.run / "clients.jsonl").read_text().splitlines()]
    assert [record["averaged"] for record in records] == [["east"]] * 12
    (model,) = deployment.simulate_files(folder, card).clients
    (path,) = (site / "state").glob("*/model.safetensors")
    assert_equal(load_model(path).weights, model.weights)
    table.add(
        "services of coordinator and site killed, restarted by systemd",
        "one site; run finished, models equal to the simulation; the units stop with nothing left running",
        "`Scheduled restart job`, of each unit, in the journal",
        began,
        {"rounds": 12},
    )


def write_accounts(folder: Path) -> None:
    """Write the container's passwd and group, with the users that the units and the site's README name."""
    lines = [(name, 0 if name == "root" else 700 + k) for k, name in enumerate(NAMES)]
    users = [f"{name}:x:{number}:{number}::/nonexistent:/bin/sh" for name, number in lines]
    groups = [*(f"{name}:x:{number}:" for name, number in lines), "gpfl-site:x:800:gpfl-data,gpfl-net", "nogroup:x:65534:"]
    (folder / "passwd").write_text("\n".join(users) + "\n")
    (folder / "group").write_text("\n".join(groups) + "\n")


def give_to_users(coordinator: Path, site: Path) -> None:
    """Set owners and permissions as the site's README says; the coordinator's folder belongs to user gpfl."""
    ids = {name: 0 if name == "root" else 700 + k for k, name in enumerate(NAMES)}
    for parent in list(site.parents)[:3]:
        parent.chmod(0o755)
    (site / "flwr").mkdir()
    for root, owner, group in ((coordinator, ids["gpfl"], ids["gpfl"]), (site, ids["gpfl-data"], 800)):
        for path in [root, *root.rglob("*")]:
            os.chown(path, owner, group)
    for path in (site / "node.key", site / "flwr"):
        os.chown(path, ids["gpfl-net"], 800)
    site.chmod(0o2750)
    for name in ("site.toml", "ca.crt"):
        (site / name).chmod(0o640)
    (site / "flwr").chmod(0o700)
