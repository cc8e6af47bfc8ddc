"""Workers of sites and the coordinator on their folders, called directly: data card, signatures, policy, and equal results."""

from __future__ import annotations

import itertools
import json
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deployment as d
import pytest
import torch
from direct_sites import assert_equal

from gpfl.errors import GpflError

pytest.importorskip("cryptography", reason="needs gpfl[flower]")

from gpfl.core import tree
from gpfl.deploy import keys, programs
from gpfl.deploy.init import make_deployment
from gpfl.deploy.messages import Answer, Description, RoundReply, RoundRequest, Transport, pack_describe
from gpfl.deploy.programs import Control
from gpfl.deploy.server import CoordinatorFolder, run_coordinator
from gpfl.deploy.socket import ask_worker, socket_path
from gpfl.deploy.worker import SiteFolder, Worker, serve, versions


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorFolder, "nodes", lambda self: {0: 11, 1: 12, 2: 13})


@pytest.mark.usefixtures("nodes")
def test_deployed_from_files_equals_simulated(tmp_path: Path) -> None:
    card = d.make(tmp_path)
    workers = d.make_workers(tmp_path)
    outcome = run_coordinator(tmp_path / "d" / "coordinator", d.connect_directly(workers))
    expected = d.simulate_files(tmp_path, card)
    assert_equal(outcome.last.shared, expected.outcome.last.shared)
    assert [r["client_accuracies"] for r in outcome.history] == [r["client_accuracies"] for r in expected.history]
    for worker, model in zip(workers, expected.clients, strict=True):
        own = worker.model_site().model()
        assert_equal(own.weights, model.weights)
        assert own.preprocessor == model.preprocessor
    run = tmp_path / "d" / "coordinator" / "runs" / "test"
    assert json.loads((run / "summary.json").read_text())["rounds"] == 2
    assert (run / "preprocessing.json").exists()
    assert "finished: accuracy" in CoordinatorFolder(tmp_path / "d" / "coordinator").log.read_text()


@pytest.mark.usefixtures("nodes")
def test_one_changed_cell_changes_the_result(tmp_path: Path) -> None:
    card = d.make(tmp_path)
    expected = d.simulate_files(tmp_path, card)
    data = tmp_path / "d" / "sites" / "east" / "data" / "rows.csv"
    site = SiteFolder(data.parents[1])
    row = 1 + int(site.card.read(site.name, site.data, site.path).shard.train[0])
    lines = data.read_text().splitlines()
    lines[row] = ",".join([*lines[row].split(",")[:2], "119.0", *lines[row].split(",")[3:]])
    data.write_text("\n".join(lines) + "\n")
    outcome = run_coordinator(tmp_path / "d" / "coordinator", d.connect_directly(d.make_workers(tmp_path)))
    with pytest.raises(AssertionError):
        assert_equal(outcome.last.shared, expected.outcome.last.shared)
    (tmp_path / "pooled" / "east.csv").write_bytes(data.read_bytes())
    assert_equal(outcome.last.shared, d.simulate_files(tmp_path, card).outcome.last.shared)


def describe(worker: Worker, folder: Path) -> bytes:
    message = pack_describe(worker.card.digest, versions())
    return worker.answer(keys.sign(message, folder / "d" / "coordinator" / "signing.key"))


def test_a_site_answers_only_signed_requests(tmp_path: Path) -> None:
    d.make(tmp_path)
    log: list[str] = []
    worker = d.make_workers(tmp_path, log.append)[0]
    assert Description.unpack(describe(worker, tmp_path)).sizes == (42, 0, 18)
    keys.make_signing_key(tmp_path / "other")
    message = pack_describe(worker.card.digest, versions())
    for signed in (keys.sign(message, tmp_path / "other" / "signing.key"), message, b""):
        with pytest.raises(GpflError, match="not signed by the coordinator"):
            Description.unpack(worker.answer(signed))
    assert sum(line.startswith("refused") for line in log) == 3


def test_a_site_answers_only_under_the_card_and_versions_it_accepted(tmp_path: Path) -> None:
    d.make(tmp_path)
    worker = d.make_workers(tmp_path)[0]
    key = tmp_path / "d" / "coordinator" / "signing.key"
    with pytest.raises(GpflError, match="data card"):
        Description.unpack(worker.answer(keys.sign(pack_describe("0" * 64, versions()), key)))
    for other in ({"gpfl": "0.0.1"}, {"torch": "1.0"}, {"flwr": "1.0"}):
        message = pack_describe(worker.card.digest, {**versions(), **other})
        with pytest.raises(GpflError, match="another version of gpfl, torch or flwr"):
            Description.unpack(worker.answer(keys.sign(message, key)))
    (worker.folder.path / "accepted").unlink()
    with pytest.raises(GpflError, match="not accepted the data card"):
        Description.unpack(describe(worker, tmp_path))


def test_a_changed_card_is_not_the_signed_one(tmp_path: Path) -> None:
    d.make(tmp_path)
    card = tmp_path / "d" / "sites" / "east" / "card.toml"
    card.write_text(card.read_text().replace('"ill", "well"', '"well", "ill"'))
    with pytest.raises(GpflError, match="not the data card that the coordinator signed"):
        d.make_workers(tmp_path)


DATA_FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "class": (lambda text: text.replace(",well", ",healthy", 1), "'healthy'.*not among the classes"),
    "column": (lambda text: text.replace("chol", "cholesterol", 1), "declares column 'chol'"),
}


@pytest.mark.parametrize("name", DATA_FAULTS)
def test_data_that_do_not_fit_the_card_are_named_in_the_sites_terms(name: str, tmp_path: Path) -> None:
    d.make(tmp_path)
    change, reason = DATA_FAULTS[name]
    data = tmp_path / "d" / "sites" / "east" / "data" / "rows.csv"
    data.write_text(change(data.read_text()))
    with pytest.raises(GpflError, match=reason):
        d.make_workers(tmp_path)


POLICIES: dict[str, tuple[dict[str, object], str]] = {
    "card": ({"card": "0" * 64}, "card"),
    "methods": ({"methods": ["fedavg"]}, "methods"),
    "keys": ({"keys": ["base.*"]}, "keys"),
    "max_shape": ({"max_shape": [4, 4]}, "max_shape"),
    "max_bytes": ({"max_bytes": 1000}, "max_bytes"),
    "max_rounds": ({"max_rounds": 1}, "max_rounds"),
    "max_norm": ({"max_norm": 1e-6}, "max_norm"),
    "min_samples": ({"min_samples": 43}, "min_samples"),
    "statistics": ({"statistics": False}, "statistics"),
    "scores": ({"scores": False}, "scores"),
    "secure_sum": ({"secure_sum": True}, "secure_sum"),
    "min_noise": ({"min_noise": 0.5}, "min_noise"),
    "max_clip": ({"max_clip": 1.0}, "max_clip"),
    "max_epsilon": ({"max_epsilon": 8.0}, "max_epsilon"),
}


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("rule", POLICIES)
def test_the_policy_of_a_site_refuses_whatever_the_coordinator_asks(rule: str, tmp_path: Path) -> None:
    rules, reason = POLICIES[rule]
    d.make(tmp_path, policy={**d.POLICY, **rules})
    log: list[str] = []
    workers = d.make_workers(tmp_path, log.append)
    with pytest.raises(GpflError, match=rf"the site's policy refuses it \({reason}\)"):
        run_coordinator(tmp_path / "d" / "coordinator", d.connect_directly(workers))
    assert any(f"outbound.{reason}" in line for line in log)
    assert reason in CoordinatorFolder(tmp_path / "d" / "coordinator").log.read_text()


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(("form", "sent"), [("full", "weight"), ("low_rank", "coefficients")])
def test_keys_of_the_policy_name_the_form_of_the_valve_that_may_leave(form: str, sent: str, tmp_path: Path) -> None:
    other = {"weight": "coefficients", "coefficients": "weight"}[sent]
    for allowed in (sent, other):
        folder = tmp_path / allowed
        folder.mkdir()
        keys_ = ["base/*", "gce/*", "cov/*.bias", "cov/*.norm.weight", "cov/scale", f"cov/*.linear.{allowed}"]
        d.make(folder, {"method": {"name": "gpfl", "valve_upload": form}}, {**d.POLICY, "keys": keys_})
        log: list[str] = []
        workers = d.make_workers(folder, log.append)
        if allowed == sent:
            assert run_coordinator(folder / "d" / "coordinator", d.connect_directly(workers)).last.round == 2
            continue
        with pytest.raises(GpflError, match=r"the site's policy refuses it \(keys\)"):
            run_coordinator(folder / "d" / "coordinator", d.connect_directly(workers))
        assert any(f"'cov/gamma.linear.{sent}' would leave" in line for line in log)


@pytest.mark.usefixtures("nodes")
def test_a_policy_holds_from_the_moment_it_is_written(tmp_path: Path) -> None:
    d.make(tmp_path)
    workers = d.make_workers(tmp_path)
    policy = workers[0].folder.path / "outbound.toml"
    policy.write_text(policy.read_text().replace("statistics = true", "statistics = false"))
    with pytest.raises(GpflError, match=r"the site's policy refuses it \(statistics\)"):
        run_coordinator(tmp_path / "d" / "coordinator", d.connect_directly(workers))


@pytest.mark.usefixtures("nodes")
def test_the_next_run_of_the_same_sites_has_a_card_of_its_own(tmp_path: Path) -> None:
    d.make(tmp_path)
    folder, workers = tmp_path / "d" / "coordinator", d.make_workers(tmp_path)
    run_coordinator(folder, d.connect_directly(workers))
    card = d.next_card(tmp_path, "second", {"method": {"name": "ditto"}})
    outcome = run_coordinator(folder, d.connect_directly(workers))
    expected = d.simulate_files(tmp_path, card)
    assert_equal(outcome.last.shared, expected.outcome.last.shared)
    assert_equal(workers[0].model_site().model().weights, expected.clients[0].weights)
    assert {path.name for path in (folder / "runs").iterdir()} == {"test", "second"}


def test_asking_in_turn_for_two_uploads_gets_no_noise_that_does_not_count(tmp_path: Path) -> None:
    """Noise would average out over repetitions."""
    d.make(tmp_path, {"method": {"name": "fedavg"}, "defence": {"clip": 1.0, "noise": 2.0}})
    worker = Worker(SiteFolder(tmp_path / "d" / "sites" / "east"))
    description = worker._description
    roster = worker.card.roster(dict.fromkeys(worker.card.sites, description))
    shared = tree.flatten(roster.prepare(roster.federation())[1].method.init(3)[0])
    shifted = {path: tensor + 0.1 for path, tensor in shared.items()}

    def ask(state: dict[str, torch.Tensor]) -> RoundReply:
        request = RoundRequest(
            roster=roster.digest, client=0, round=0, accepted=0, train=True, splits=(), agreement=roster.to_json(), shared=state
        )
        return RoundReply.unpack(worker.answer(keys.sign(request.pack(), tmp_path / "d" / "coordinator" / "signing.key")))

    replies = [ask(state) for state in (shared, shared, shifted, shared)]
    assert [reply.uploads for reply in replies] == [1, 1, 2, 3]
    assert replies[0].epsilon == replies[1].epsilon < replies[2].epsilon < replies[3].epsilon
    same = [all(torch.equal(t, replies[i].upload[path]) for path, t in replies[0].upload.items()) for i in (1, 3)]
    assert same == [True, False]


def test_without_a_policy_nothing_leaves(tmp_path: Path) -> None:
    d.make(tmp_path)
    (tmp_path / "d" / "sites" / "east" / "outbound.toml").unlink()
    with pytest.raises(GpflError, match="without a policy nothing leaves"):
        d.make_workers(tmp_path)


@pytest.mark.usefixtures("nodes")
def test_the_text_of_an_exception_stays_at_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    d.make(tmp_path)
    log: list[str] = []
    workers = d.make_workers(tmp_path, log.append)

    def fail(*arguments: object) -> RoundReply:
        raise ValueError("patient 7 has chol 812")

    monkeypatch.setattr("gpfl.deploy.site.Site.run_round", fail)
    with pytest.raises(GpflError, match="the reason is in the site's log") as caught:
        run_coordinator(tmp_path / "d" / "coordinator", d.connect_directly(workers))
    assert "patient 7" not in str(caught.value) + CoordinatorFolder(tmp_path / "d" / "coordinator").log.read_text()
    assert any("patient 7" in line for line in log)


@pytest.mark.usefixtures("nodes")
def test_what_leaves_a_site_by_key_and_bytes(tmp_path: Path) -> None:
    d.make(tmp_path)
    workers, sent = d.make_workers(tmp_path), list[bytes]()

    def connect(*arguments: object) -> Transport:
        def send(messages: dict[int, bytes]) -> dict[int, Answer]:
            replies = {client: workers[client].answer(message) for client, message in messages.items()}
            sent.append(replies[0])
            return {client: Answer(reply) for client, reply in replies.items()}

        return send  # type: ignore[return-value]

    run_coordinator(tmp_path / "d" / "coordinator", connect)
    described, *rounds = sent
    assert set(Description.unpack(described).statistics) == {"age", "chol", "pain"}
    assert len(described) < 1000
    uploads = [RoundReply.unpack(each).upload for each in rounds]
    site = workers[0].model_site()
    expected = {path for path in uploads[0] if not path.startswith("head")}
    assert [set(upload) for upload in uploads] == [expected, expected, set()]
    numbers = 4 * sum(tensor.numel() for tensor in uploads[0].values())
    assert numbers < len(rounds[0]) < numbers + 2500
    assert {path.split(".")[0] for path in site.load_private(2)} & {path.split(".")[0] for path in uploads[0]} == set()


@pytest.mark.usefixtures("nodes")
def test_a_run_whose_site_was_not_ready_starts_later(tmp_path: Path) -> None:
    card = d.make(tmp_path)
    folder = tmp_path / "d" / "coordinator"
    workers = d.make_workers(tmp_path)
    (workers[1].folder.path / "accepted").unlink()
    with pytest.raises(GpflError, match=r"cannot start \(north: the site has not accepted the data card"):
        run_coordinator(folder, d.connect_directly(workers))
    workers[1].folder.accept()
    outcome = run_coordinator(folder, d.connect_directly(workers))
    assert_equal(outcome.last.shared, d.simulate_files(tmp_path, card).outcome.last.shared)


def test_private_keys_are_private_and_a_unit_resumes_the_run(tmp_path: Path) -> None:
    d.make(tmp_path)
    paths = [path for path in (tmp_path / "d").rglob("*") if path.suffix == ".key"]
    assert len(paths) == 3 + 3  # CA, server, signing; one for each site
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    units = tmp_path / "d" / "coordinator" / "systemd"
    assert "GPFL deploy run FOLDER\nRestart=on-failure" in (units / "gpfl-run.service").read_text()  # not after the end
    assert not list((tmp_path / "d" / "coordinator").rglob("node.key"))


def test_a_node_key_that_was_registered_is_kept_when_another_ones_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower registers a key once: a second attempt is refused."""
    d.make(tmp_path)
    control, registered = Control(CoordinatorFolder(tmp_path / "d" / "coordinator")), dict[str, str]()

    def call(self: Control, command: str, action: str, key: str, *arguments: str) -> dict[str, object]:
        if action == "list":
            return {"nodes": [{"node-id": number, "status": "online"} for number in registered.values()]}
        site = Path(key).stem
        if site in registered or (site == "east" and not registered):
            raise GpflError("already in use" if registered else "the SuperLink is not up yet")
        registered[site] = str(next(numbers))
        return {"node-id": registered[site]}

    numbers = itertools.count(101)
    monkeypatch.setattr(Control, "call", call)
    monkeypatch.setattr(programs, "ThreadPoolExecutor", lambda n: ThreadPoolExecutor(1))
    with pytest.raises(GpflError, match="not up yet"):
        control.register()
    control.register()
    nodes = json.loads((tmp_path / "d" / "coordinator" / "nodes.json").read_text())
    assert nodes == {"north": "101", "south": "102", "east": "103"} == registered
    assert control.unregistered() == []
    registered.clear()
    with pytest.raises(GpflError, match="no node key is registered for east, north, south"):
        control.submit()
    registered["stranger"] = "99"
    control.register()  # the SuperLink's database was lost
    assert set(json.loads((tmp_path / "d" / "coordinator" / "nodes.json").read_text()).values()) == {"104", "105", "106"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units_once_their_paths_are_filled_in(tmp_path: Path) -> None:
    d.make(tmp_path)
    for path in (tmp_path / "d").rglob("*.service"):
        (tmp_path / path.name).write_text(path.read_text().replace("FOLDER", str(tmp_path)).replace("GPFL", sys.executable))
    units = sorted(tmp_path.glob("*.service"))
    assert [unit.stem for unit in units] == ["gpfl-node", "gpfl-run", "gpfl-server", "gpfl-worker"]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_answers_on_its_socket(tmp_path: Path) -> None:
    d.make(tmp_path)
    worker = d.make_workers(tmp_path)[0]
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(worker, stop.is_set))
    thread.start()
    try:
        path = socket_path(worker.folder.path)
        while not path.exists():
            stop.wait(0.01)
        message = keys.sign(pack_describe(worker.card.digest, versions()), tmp_path / "d" / "coordinator" / "signing.key")
        assert Description.unpack(ask_worker(str(path), message)).sizes == (42, 0, 18)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    finally:
        stop.set()
        thread.join()
    assert not path.exists()


def test_folders_are_not_overwritten(tmp_path: Path) -> None:
    d.make(tmp_path)
    before = (tmp_path / "d" / "coordinator" / "signing.key").read_bytes()
    with pytest.raises(GpflError, match="nothing is overwritten"):
        make_deployment(tmp_path / "d", SiteFolder(tmp_path / "d" / "sites" / "east").card, ["localhost"])
    assert (tmp_path / "d" / "coordinator" / "signing.key").read_bytes() == before
