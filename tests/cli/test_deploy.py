"""The command `gpfl deploy`, without starting processes: folders, checks, dry run, keys and certificates."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import ssl
import stat
import tomllib
import zipfile
from pathlib import Path

import deployment
import pytest
from conftest import Command, assert_error

pytest.importorskip("flwr", reason="needs gpfl[flower]")

from flwr.cli.build import build_fab_from_disk

from gpfl.deploy import keys
from gpfl.deploy.init import draft_policy, reveals_label_proportions
from gpfl.deploy.programs import Control
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.supervise import finish_run
from gpfl.errors import GpflError
from gpfl.io import toml

INIT = ("deploy", "init", "d", "--config", "run.toml", "--sites", "south,north,east", "--server", "fl.example.org,192.0.2.7")
SITE = Path("d/sites/east")


@pytest.fixture
def made(command: Command) -> Command:
    deployment.write_data(Path("pooled").absolute())
    config = {**deployment.CONFIG, "data": {**deployment.CONFIG["data"], "schema": "schema.toml"}}
    Path("run.toml").write_text(toml.dump(config))
    assert command(*INIT).code == 0
    for site in Path("d/sites").iterdir():
        (site / "data").mkdir()
        shutil.copy(f"pooled/{site.name}.csv", site / "data")
    return command


def test_init_makes_a_folder_for_each_party_and_shares_no_private_key(made: Command) -> None:
    coordinator = {str(path.relative_to("d/coordinator")) for path in Path("d/coordinator").rglob("*") if path.is_file()}
    assert {"certs/ca.key", "certs/server.key", "signing.key", "card.toml", "nginx.conf", "sites/east.pub"} <= coordinator
    site = {str(path.relative_to(SITE)) for path in SITE.rglob("*") if path.is_file()}
    assert {"node.key", "node.pub", "ca.crt", "signing.pub", "card.toml", "outbound.toml", "README.md"} <= site
    assert not {path for path in site if path.endswith(".key")} - {"node.key"}
    assert stat.S_IMODE((SITE / "node.key").stat().st_mode) == 0o600
    assert tomllib.loads((SITE / "site.toml").read_text())["server"] == "fl.example.org:8443"
    assert "location /v1/fleet/" in Path("d/coordinator/nginx.conf").read_text()
    assert Path("d/coordinator/nginx.conf").read_text().count("location") == 2
    assert_error(made(*INIT), "exists and nothing is overwritten")


def test_the_certificate_names_the_server(made: Command) -> None:
    certificate = ssl._ssl._test_decode_cert("d/coordinator/certs/server.crt")  # type: ignore[attr-defined]
    names = {value for _, value in certificate["subjectAltName"]}
    assert names == {"fl.example.org", "192.0.2.7", "localhost", "127.0.0.1"}


def test_the_policy_drafted_for_gpfl_asks_for_a_secure_sum_and_says_why(made: Command) -> None:
    text = (SITE / "outbound.toml").read_text()
    assert tomllib.loads(text)["secure_sum"] is True
    assert "label proportions exactly" in text
    assert "alpha_levels = 1 under [method]" in text
    result = made("deploy", "site", "dry-run", SITE)
    assert result.code == 0, result.err
    assert "outbound.secure_sum is true" in result.out


@pytest.mark.parametrize(
    ("method", "reveals", "secure_sum"),
    [
        ({"name": "gpfl"}, True, True),
        ({"name": "gpfl", "valve_gradient": "global"}, False, True),  # the embeddings allow a close guess
        ({"name": "gpfl", "alpha_levels": 1}, False, True),
        ({"name": "gpfl", "alpha_levels": 4}, True, True),
        ({"name": "gpfl", "share_valve": False}, False, True),
        ({"name": "gpfl", "without": ["pci"]}, False, True),
        ({"name": "gpfl", "without": ["cov"]}, False, True),
        ({"name": "gpfl", "without": ["gce"]}, False, False),
        ({"name": "fedper"}, False, False),
    ],
    ids=str,
)
def test_policies_ask_for_a_secure_sum_where_uploads_reveal_label_proportions(
    made: Command, method: dict[str, object], reveals: bool, secure_sum: bool
) -> None:
    card = CoordinatorFolder(Path("d/coordinator")).card
    card = dataclasses.replace(card, config={**card.config, "method": method})
    assert reveals_label_proportions(card) == reveals
    assert draft_policy(card)["secure_sum"] == secure_sum


def test_dry_run_lists_what_would_leave(made: Command) -> None:
    policy = SITE / "outbound.toml"
    policy.write_text(policy.read_text().replace("secure_sum = true", "secure_sum = false"))
    result = made("deploy", "site", "dry-run", SITE)
    assert result.code == 0, result.err
    assert "age: count, mean, sum of squared deviations, whether values are missing" in result.out
    for tensor in ("base", "cov", "gce"):
        assert tensor in result.out
    assert "head" not in result.out
    assert "total variation distance" in result.out
    assert "allows all of this to leave" in result.out
    assert not (SITE / "state").exists()


def test_check_says_what_fits_and_accepts_the_card(made: Command) -> None:
    result = made("deploy", "site", "check", SITE)
    assert "They fit the data card" in result.out
    assert "only one client" not in result.out  # in its files; the run has more
    assert "Not accepted yet" in result.out
    assert_error(made("deploy", "site", "start", SITE), "is not accepted")
    assert "Accepted." in made("deploy", "site", "check", SITE, "--accept").out
    assert "Not accepted" not in made("deploy", "site", "check", SITE).out


def test_check_of_other_data_names_what_does_not_fit(made: Command) -> None:
    Path("other.csv").write_text((SITE / "data" / "east.csv").read_text().replace(",ill", ",sick"))
    assert_error(made("deploy", "site", "check", SITE, "--data", "other.csv"), "'sick'", "not among the classes")
    assert_error(made("deploy", "site", "check", SITE, "--data", "nothing.csv"), "there is no file or folder nothing.csv")


def test_a_new_card_must_be_accepted_anew(made: Command) -> None:
    made("deploy", "site", "check", SITE, "--accept")
    assert_error(
        made("deploy", "card", "d/coordinator", "--config", "run.toml", "--name", "run"), "there is a run 'run' already"
    )
    assert made("deploy", "card", "d/coordinator", "--config", "run.toml", "--name", "second").code == 0
    for name in ("card.toml", "card.sig"):
        shutil.copy(Path("d/coordinator", name), SITE / name)
    assert "run 'second'" in made("deploy", "site", "check", SITE).out
    assert_error(made("deploy", "site", "start", SITE), "is not accepted")
    assert "still names another card" in made("deploy", "site", "check", SITE, "--accept").out


@pytest.mark.filterwarnings("ignore::DeprecationWarning:pathspec", "ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_app_that_flower_sends_to_sites_holds_no_code(made: Command) -> None:
    content = build_fab_from_disk(Path("d/coordinator/app"))
    with zipfile.ZipFile(io.BytesIO(content)) as fab:
        assert {Path(name).suffix for name in fab.namelist()} & {".py", ".pyc", ".so"} == set()
        assert "gpfl.deploy.flower:client_app" in fab.read("pyproject.toml").decode()
    assert len(content) < 10_000


def test_renew_makes_another_certificate_of_the_same_authority(made: Command) -> None:
    before = Path("d/coordinator/certs/server.crt").read_bytes()
    keys.make_server_certificate(Path("d/coordinator/certs"), ["localhost"], days=-1)
    assert_error(made("deploy", "server", "d/coordinator"), "has expired: gpfl deploy renew d/coordinator")
    result = made("deploy", "renew", "d/coordinator")
    assert result.code == 0, result.err
    assert Path("d/coordinator/certs/server.crt").read_bytes() != before
    context = ssl.create_default_context(cafile="d/coordinator/certs/ca.crt")
    context.load_cert_chain("d/coordinator/certs/server.crt", "d/coordinator/certs/server.key")


def test_a_node_key_is_replaced_by_its_public_part_only(made: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def call(self: Control, *arguments: str) -> dict[str, object]:
        if arguments[1] == "list":
            return {"nodes": [{"node-id": "1", "status": "online"}, {"node-id": "2", "status": "offline"}]}
        calls.append(arguments)
        return {"node-id": 99}

    monkeypatch.setattr(Control, "call", call)
    nodes = {site: str(number) for number, site in enumerate(deployment.SITES)}
    Path("d/coordinator/nodes.json").write_text(json.dumps(nodes))
    old = (SITE / "node.pub").read_bytes()
    assert made("deploy", "site", "new-key", SITE).code == 0
    assert (SITE / "node.pub").read_bytes() != old
    replace = ("deploy", "register", "d/coordinator", "--site", "east", "--key")
    assert_error(made(*replace, SITE / "node.key"), "is not the public part of a node key")
    assert made(*replace, SITE / "node.pub").code == 0
    assert [arguments[:3] for arguments in calls] == [("supernode", "unregister", "0"), ("supernode", "register", calls[1][2])]
    assert json.loads(Path("d/coordinator/nodes.json").read_text())["east"] == "99"
    assert Path("d/coordinator/sites/east.pub").read_bytes() == (SITE / "node.pub").read_bytes()


def test_status_without_a_server_shows_what_is_on_disk(made: Command) -> None:
    log = CoordinatorFolder(Path("d/coordinator")).log
    log.parent.mkdir()
    log.write_text("2026-01-01T00:00:00+00:00 round 3: east: not connected\n")
    result = made("deploy", "status", "d/coordinator")
    assert result.out.count("server not running") == 3
    assert "round 3: east: not connected (2026-01-01T00:00:00+00:00)" in result.out
    assert "not finished" in result.out


def test_a_run_that_stopped_by_itself_is_not_started_again(made: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CoordinatorFolder(Path("d/coordinator"))
    submitted = []

    def submit(self: Control) -> str:
        submitted.append(len(submitted))
        folder.log.parent.mkdir(exist_ok=True)
        reason = "round 2: 1 upload from 3 sites" if len(submitted) == 2 else ""
        with folder.log.open("a") as log:
            log.write(f"now stopped: {reason}\n" if reason else "now round 1: 3 of 3 sites answered\n")
        return str(len(submitted))

    monkeypatch.setattr(Control, "submit", submit)
    monkeypatch.setattr("gpfl.deploy.supervise.is_listening", lambda port: True)
    monkeypatch.setattr(Control, "status", lambda self, run: "finished:failed")
    monkeypatch.setattr("gpfl.deploy.supervise.STATUS_SECONDS", 0.0)
    (Path("d/coordinator") / "state").mkdir()
    with pytest.raises(GpflError, match="run 'run' stopped: round 2: 1 upload from 3 sites"):
        finish_run(folder, lambda line: None)
    assert submitted == [0, 1]  # the server died under the first


def test_a_run_that_the_superlink_does_not_know_is_submitted_again(made: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CoordinatorFolder(Path("d/coordinator"))
    (folder.path / "state").mkdir()
    (folder.path / "state" / "run.json").write_text('{"run": "7"}')
    folder.run.mkdir(parents=True)
    calls: list[str] = []

    def call(self: Control, command: str, *arguments: str) -> dict[str, object]:
        calls.append(command)
        if command == "run":
            (folder.run / "summary.json").write_text("{}")
            return {"run-id": "9"}
        return (
            {"runs": [{"run-id": "8", "status": "running"}]}
            if command == "list"
            else {"nodes": [{"node-id": "1", "status": ""}]}
        )

    monkeypatch.setattr(Control, "call", call)
    monkeypatch.setattr("gpfl.deploy.supervise.is_listening", lambda port: True)
    Path("d/coordinator/nodes.json").write_text(json.dumps(dict.fromkeys(deployment.SITES, "1")))
    finish_run(folder, lambda line: None)
    assert calls == ["list", "supernode", "run"]
    assert json.loads((folder.path / "state" / "run.json").read_text()) == {"run": "9"}


CONFIG_FAULTS = {
    "neither data.schema nor data.name": {"data": {"missing": "mean"}},
    "leave partition.name and partition.clients out": {"partition": {"name": "dirichlet"}},
}


@pytest.mark.parametrize("reason", CONFIG_FAULTS)
def test_init_rejects_configs_that_sites_cannot_share(reason: str, command: Command) -> None:
    deployment.write_data(Path("pooled").absolute())
    config = {**deployment.CONFIG, "data": {"schema": "schema.toml"}, **CONFIG_FAULTS[reason]}
    Path("run.toml").write_text(toml.dump(config))
    assert_error(command(*INIT), reason)
    assert not Path("d").exists()
