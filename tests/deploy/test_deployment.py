"""A real deployment on this machine: server, workers and SuperNodes over TLS with node keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Command

from gpfl.deploy.programs import TOKEN, Processes, find_processes

pytestmark = pytest.mark.deployment


def tokens() -> set[bytes]:
    """The marks of all deployments whose processes run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found |= {entry for entry in path.read_bytes().split(b"\0") if entry.startswith(f"{TOKEN}=".encode())}
        except OSError:
            continue
    return found


def test_the_demo_equals_the_simulation_and_leaves_no_process(command: Command) -> None:
    before, start = tokens(), time.monotonic()
    result = command("deploy", "demo", "--data", "digits", "--rounds", "2", "--out", "kept")
    assert result.code == 0, result.out + result.err
    assert time.monotonic() - start < 180  # 90 s on two idle cores
    assert "equal to the simulation" in result.out
    assert result.out.count("equal to the bit") == 3
    assert tokens() <= before
    lines = Path("kept/coordinator/runs/demo/clients.jsonl").read_text().splitlines()
    assert [json.loads(line)["averaged"] for line in lines] == [["east", "north", "south"]] * 2
    assert "telemetry" not in Path("kept/log/superlink.log").read_text()


def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    before = tokens()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpfl", "deploy", "demo", "--out", str(tmp_path / "d")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "SuperLink up" in line:
            break
    assert tokens() - before
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    process.stdout.close()
    assert tokens() <= before


def test_stop_finds_processes_in_sessions_of_their_own(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    with Processes(tmp_path / "log") as processes:
        processes.start("parent", [sys.executable, "-c", code], tmp_path)
        token = processes._token
        end = time.monotonic() + 20
        while len(find_processes(token)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(find_processes(token)) == 2
    assert find_processes(token) == []
    assert os.getpid() not in find_processes(token)
