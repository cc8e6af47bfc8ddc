"""A real deployment on this machine: server, workers and SuperNodes over TLS with node keys."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import deployment
import pytest
import torch
from conftest import Command
from direct_sites import assert_equal

import gpfl
from gpfl.core import tree
from gpfl.deploy.demo import deployed
from gpfl.deploy.programs import TOKEN, Processes, find_processes, free_port, program
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.supervise import finish_run
from gpfl.deploy.worker import SiteFolder

pytestmark = pytest.mark.deployment


MARK, OWN = "GPFL_TEST", secrets.token_hex(8)


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark what these tests start, since other deployments may run on the machine."""
    monkeypatch.setenv(MARK, OWN)


def tokens() -> set[bytes]:
    """The tokens of all deployments that these tests have started and whose processes run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={OWN}".encode() in entries:
            found |= {entry for entry in entries if entry.startswith(f"{TOKEN}=".encode())}
    return found


def test_the_demo_equals_the_simulation_and_leaves_no_process(command: Command) -> None:
    before, start = tokens(), time.monotonic()
    result = command("deploy", "demo", "--data", "digits", "--rounds", "2", "--out", "kept")
    assert result.code == 0, result.out + result.err
    assert time.monotonic() - start < 180  # 90 s on two idle cores
    assert "equal to the simulation" in result.out
    assert result.out.count("bit-identical") == 3
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


CONFIG = """[run]
seed = 3
[method]
name = "gpfl"
[net]
name = "mlp"
hidden = [8]
[train]
rounds = 3
lr = 0.1
[data]
schema = "schema.toml"
missing = "mean"
"""


@pytest.fixture
def programs() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start commands of gpfl in other processes, which end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gpfl", *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in reversed(started):
        process.terminate()
    for process in started:
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def test_three_sites_train_by_the_commands_of_the_page_and_again_with_one_changed_cell(
    command: Command, programs: Callable[..., subprocess.Popen[str]]
) -> None:
    before = tokens()
    deployment.write_data(Path("pooled").absolute())
    Path("run.toml").write_text(CONFIG)
    port = free_port()
    made = command(
        *("deploy", "init", "d", "--config", "run.toml", "--sites", "east,north,south", "--server", "127.0.0.1"),
        *("--port", port, "--link-port", port, "--plain-uploads"),
    )
    assert made.code == 0, made.err
    sites = [Path("d/sites", name) for name in ("east", "north", "south")]
    for site in sites:
        (site / "data").mkdir()
        shutil.copy(f"pooled/{site.name}.csv", site / "data")
        checked = command("deploy", "site", "check", site, "--accept")
        assert "They fit the data card" in checked.out, checked.err
    programs("deploy", "server", "d/coordinator")
    for site in sites:
        programs("deploy", "site", "start", site)
    done = command("deploy", "run", "d/coordinator")
    assert done.code == 0, done.out + done.err
    shown = command("deploy", "status", "d/coordinator")
    assert shown.out.count("online") == 3, shown.out + shown.err
    assert "finished" in shown.out
    models = check_models(command, sites)
    assert command("predict", "east.safetensors", "pooled/east.csv").code == 0
    assert tokens() - before
    # Another run of the same sites, after one cell of one file has changed.
    path = sites[1] / "data" / "north.csv"
    header, first, *rows = path.read_text().splitlines()
    at = header.split(",").index("age")
    cells = first.split(",")
    cells[at] = str(float(cells[at] or 0) + 20)
    for each in (path, Path("pooled/north.csv")):
        each.write_text("\n".join([header, ",".join(cells), *rows]) + "\n")
    issued = command("deploy", "card", "d/coordinator", "--config", "run.toml", "--name", "next")
    assert issued.code == 0, issued.err
    for site in sites:
        old = SiteFolder(site).card.digest
        for name in ("card.toml", "card.sig"):
            shutil.copy(Path("d/coordinator", name), site)
        policy = site / "outbound.toml"
        policy.write_text(policy.read_text().replace(old, SiteFolder(site).card.digest))
        assert "Accepted." in command("deploy", "site", "check", site, "--accept").out
    done = command("deploy", "run", "d/coordinator")
    assert done.code == 0, done.out + done.err
    changed = check_models(command, sites)
    for before_change, after in zip(models, changed, strict=True):
        assert any((before_change[key] != after[key]).any() for key in after)


def check_models(command: Command, sites: list[Path]) -> list[Mapping[str, torch.Tensor]]:
    """Return the models that the sites export, after comparing them with those of the simulation of the same files."""
    federation = gpfl.federate("pooled", schema="schema.toml", missing="mean")
    expected = gpfl.fit("gpfl", federation, net="mlp", hidden=[8], rounds=3, lr=0.1, seed=3, engine="loop")
    models = []
    for site, model in zip(sites, expected.clients, strict=True):
        out = Path(f"{site.name}.safetensors")
        out.unlink(missing_ok=True)
        assert command("deploy", "model", site, "-o", out).code == 0
        weights = gpfl.load_model(out).weights
        assert_equal(weights, model.weights)
        models.append(tree.flatten(weights))
    return models


def test_one_deployment_trains_four_methods_as_the_simulation_does(tmp_path: Path) -> None:
    methods = ("gpfl", "fedavg", "ditto", "fedproto")
    card = deployment.make(tmp_path, {"method": {"name": methods[0]}})
    folder = CoordinatorFolder(tmp_path / "d" / "coordinator")
    with deployed(tmp_path / "d", card):
        for method in methods:
            if method != methods[0]:
                card = deployment.next_card(tmp_path, method, {"method": {"name": method}})
                (folder.path / "state" / "run.json").unlink()
            finish_run(folder, print)
            expected = deployment.simulate_files(tmp_path, card)
            lines = (folder.run / "metrics.jsonl").read_text().splitlines()
            deployed_accuracies = [json.loads(line)["client_accuracies"] for line in lines]
            assert deployed_accuracies == [record["client_accuracies"] for record in expected.history]
            for name, model in zip(card.sites, expected.clients, strict=True):
                paths = (tmp_path / "d" / "sites" / name / "state").glob("*/model.safetensors")
                own = max(paths, key=lambda path: path.stat().st_mtime)
                assert_equal(gpfl.load_model(own).weights, model.weights)


def test_the_app_runs_in_flowers_simulation_as_in_ours(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs flwr[simulation]")
    card = deployment.make(tmp_path)
    coordinator = tmp_path / "d" / "coordinator"
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text('[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local:"\n')
    command = [
        *(program("flwr"), "run", str(coordinator / "app"), "local", "--stream"),
        *("--run-config", f'folder="{coordinator}" simulation=true'),
        *("--federation-config", "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"),
    ]
    with Processes(tmp_path / "log") as processes:
        process = processes.start("flwr-run", command, home)
        end = time.monotonic() + 400
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
    output = (tmp_path / "log" / "flwr-run.log").read_text()
    assert (coordinator / "runs" / "test" / "summary.json").exists(), output
    expected = deployment.simulate_files(tmp_path, card)
    for name, model in zip(card.sites, expected.clients, strict=True):
        (path,) = (tmp_path / "d" / "sites" / name / "state").glob("*/model.safetensors")
        assert_equal(gpfl.load_model(path).weights, model.weights)


def test_the_programs_of_the_last_test_have_ended() -> None:
    assert tokens() == set()
