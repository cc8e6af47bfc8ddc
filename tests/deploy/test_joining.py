"""Sites that join a run between rounds, and sites that leave it, with workers called directly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import deployment as d
import numpy as np
import pytest
from direct_sites import assert_equal, simulate

import gpfl
from gpfl.core.local_round import Schedule
from gpfl.data.preprocessing import client_statistics
from gpfl.deploy.messages import Answer, RoundRequest, Transport
from gpfl.deploy.roster import Roster
from gpfl.deploy.server import Connect, CoordinatorFolder, run_coordinator
from gpfl.deploy.worker import SiteFolder, Worker
from gpfl.errors import GpflError
from gpfl.federation.preprocessing import FederatedPreprocessing
from gpfl.io import toml
from gpfl.io.tensors import unpack_tensors
from gpfl.training.result import Result

pytest.importorskip("cryptography", reason="needs gpfl[flower]")

from gpfl.deploy import keys

ROUNDS, FIRST = 4, 2
"""Rounds, and the round from which on the last site trains: it is heard of in the one before."""
TRAIN = {"train": {"rounds": ROUNDS, "lr": 0.1}}


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorFolder, "nodes", lambda self: {0: 11, 1: 12, 2: 13})


def configure(folder: Path, **settings: object) -> Path:
    coordinator = folder / "d" / "coordinator"
    path = coordinator / "deployment.toml"
    path.write_text(toml.dump({**toml.read(path), **settings}))
    return coordinator


def connect_some(workers: list[Worker], site: int, present: tuple[int, int]) -> Connect:
    """Return a transport by which one site can be reached in rounds from `present[0]` to before `present[1]`, -1 = before 0."""

    def connect(*arguments: object) -> Transport:
        def send(messages: Mapping[int, bytes]) -> dict[int, Answer]:
            content = [unpack_tensors(each[keys.SIGNATURE_BYTES :], "the request") for each in messages.values()]
            rounds = [RoundRequest.parse(header, flat).round for flat, header in content if header["kind"] == "round"]
            now = max(rounds, default=-1)
            return {
                client: Answer(workers[client].answer(message))
                if client != site or present[0] <= now < present[1]
                else Answer(error="not connected")
                for client, message in messages.items()
            }

        return send

    return connect


def averaged(coordinator: Path) -> list[list[str]]:
    lines = (coordinator / "runs" / "test" / "clients.jsonl").read_text().splitlines()
    return [json.loads(line)["averaged"] for line in lines]


def simulate_late(folder: Path, card: d.DataCard, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Return the simulation in which the last client is not sampled before round `FIRST`, nor its statistics merged."""
    reading = {**card.reading, **card.split}
    whole = gpfl.federate(folder / "pooled", schema=str(folder / "schema.toml"), **reading)  # type: ignore[arg-type]
    raw, fitted = whole.table.raw, whole.preprocessing
    assert raw is not None
    assert fitted is not None
    statistics = {s.name: client_statistics(raw, s.train, fitted.options) for s in whole.shards}
    first = {name: statistics[name] for name in d.SITES[:2]}
    merged = FederatedPreprocessing.merge(fitted.federated.schema, first, fitted.options)
    everyone = dataclasses.replace(merged, statistics=statistics, clients=dict.fromkeys(statistics, merged.federated))
    table = everyone.encode(whole.table, {s.name: s.samples for s in whole.shards})
    federation = gpfl.Federation(table, whole.shards, {}, everyone)
    honest, late = Schedule.sample_clients, len(federation) - 1

    def sample(self: Schedule, number: int, clients: int) -> list[int]:
        return [client for client in honest(self, number, clients) if client != late or number >= FIRST]

    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "sample_clients", sample)
        return simulate(federation, card.config)


def test_a_site_joins_between_rounds_as_a_client_that_was_not_sampled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = d.make(tmp_path, TRAIN)
    coordinator = configure(tmp_path, start_clients=2, min_clients=2)
    workers = d.make_workers(tmp_path)
    outcome = run_coordinator(coordinator, connect_some(workers, 2, (FIRST - 1, 99)))
    assert averaged(coordinator) == [["east", "north"]] * FIRST + [list(d.SITES)] * (ROUNDS - FIRST)
    expected = simulate_late(tmp_path, card, monkeypatch)
    assert_equal(outcome.last.shared, expected.outcome.last.shared)
    for worker, model in zip(workers, expected.clients, strict=True):
        assert_equal(worker.model_site().model().weights, model.weights)
    accuracies = [list(record["client_accuracies"]) for record in outcome.history]  # type: ignore[call-overload]
    assert accuracies == [["east", "north"]] * FIRST + [list(d.SITES)] * (ROUNDS - FIRST + 1)
    log = CoordinatorFolder(coordinator).log.read_text()
    assert "before round 0: south: not connected" in log
    assert "before round 0: 2 of 3 sites described their samples" in log
    assert "sites of the run: east, north, south" in log
    manifest = (coordinator / "runs" / "test" / "federation.toml").read_text()
    assert manifest.count("[[client]]") == 3
    assert set(json.loads((coordinator / "runs" / "test" / "preprocessing.json").read_text())["sent"]) == set(d.SITES)


def test_a_site_that_joined_stays_when_the_coordinator_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = d.make(tmp_path, TRAIN)
    coordinator = configure(tmp_path, start_clients=2, min_clients=2)
    workers = d.make_workers(tmp_path)
    honest = connect_some(workers, 2, (FIRST - 1, 99))

    def die_in_round_three(*arguments: object) -> Transport:
        send = honest({}, 0.0, 0.0, 0)

        def ask(messages: Mapping[int, bytes]) -> Mapping[int, Answer]:
            flat, header = unpack_tensors(messages[0][keys.SIGNATURE_BYTES :], "the request")
            if header["kind"] == "round" and RoundRequest.parse(header, flat).round == 3:
                raise KeyboardInterrupt
            return send(messages)

        return ask

    with pytest.raises(KeyboardInterrupt):
        run_coordinator(coordinator, die_in_round_three)
    outcome = run_coordinator(coordinator, connect_some(d.make_workers(tmp_path), 2, (0, 99)))  # new processes at the sites too
    assert_equal(outcome.last.shared, simulate_late(tmp_path, card, monkeypatch).outcome.last.shared)


def test_a_site_joins_secure_sums(tmp_path: Path) -> None:
    folder, config = tmp_path, {**TRAIN, "method": {"name": "fedavg"}}
    rows = d.make_rows()
    d.make(folder, config, {}, secure_sum=True)
    card = d.DataCard.make(
        "four",
        (*d.SITES, "west"),
        {**d.CONFIG, **config, "data": {"schema": str(folder / "schema.toml"), "missing": "mean"}},
        secure_sum=True,
    )
    d.make_deployment(folder / "e", card, ["localhost"])
    sites = []
    for k, name in enumerate(card.sites):
        site = SiteFolder(folder / "e" / "sites" / name)
        d.write_rows(site.path / "data" / "rows.csv", rows[k::4], d.COLUMNS)
        site.accept()
        sites.append(Worker(site))
    coordinator = folder / "e" / "coordinator"
    path = coordinator / "deployment.toml"
    path.write_text(toml.dump({**toml.read(path), "start_clients": 3, "min_clients": 3}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoordinatorFolder, "nodes", lambda self: dict(enumerate(range(4))))
        outcome = run_coordinator(coordinator, connect_some(sites, 1, (FIRST - 1, 99)))
    lines = (coordinator / "runs" / "four" / "clients.jsonl").read_text().splitlines()
    joined = ["east", "south", "west", "north"]
    assert [json.loads(line)["averaged"] for line in lines] == [joined[:3]] * FIRST + [joined] * (ROUNDS - FIRST)
    assert np.isfinite(outcome.summary["last_accuracy"])  # type: ignore[arg-type]


def test_a_site_takes_only_rosters_that_let_others_join(tmp_path: Path) -> None:
    card = d.make(tmp_path, TRAIN)
    coordinator = configure(tmp_path, start_clients=2, min_clients=2)
    workers = d.make_workers(tmp_path)
    run_coordinator(coordinator, connect_some(workers, 2, (FIRST - 1, 99)))
    site = workers[0].model_site()
    first = Roster.from_json(site.roster.to_json())
    assert (list(first.sites), first.first) == (list(d.SITES), first.origin)
    others = {
        "statistics": dataclasses.replace(first, preprocessing={**first.preprocessing, "statistics": {}}),
        "sizes": dataclasses.replace(first, sites={**first.sites, "north": (1, 1, 1)}),
        "fewer": dataclasses.replace(first, sites={name: first.sites[name] for name in ("east", "south")}),
        "stranger": first.join("west", (1, 0, 1), ""),
    }
    key = coordinator / "signing.key"
    log: list[str] = []
    worker = d.make_workers(tmp_path, log.append)[0]
    for roster in others.values():
        request = RoundRequest(
            roster=roster.digest, client=0, round=0, accepted=0, train=True, splits=(), agreement=roster.to_json(), shared={}
        )
        with pytest.raises(GpflError, match="the roster is not that of the data card"):
            gpfl.deploy.messages.RoundReply.unpack(worker.answer(keys.sign(request.pack(), key)))
    assert sum("changes what was agreed on" in line for line in log) == 3
    assert sum("not on the data card" in line for line in log) == 1
    assert card.sites == d.SITES


def test_a_site_that_leaves_keeps_its_model(tmp_path: Path) -> None:
    card = d.make(tmp_path, TRAIN)
    coordinator = configure(tmp_path, min_clients=2)
    workers = d.make_workers(tmp_path)
    outcome = run_coordinator(coordinator, connect_some(workers, 1, (-1, FIRST + 1)))
    assert averaged(coordinator) == [list(d.SITES)] * (FIRST + 1) + [["east", "south"]] * (ROUNDS - FIRST - 1)
    assert outcome.summary["rounds"] == ROUNDS
    shorter = dataclasses.replace(card, config={**card.config, "train": {**card.config["train"], "rounds": FIRST}})
    expected = d.simulate_files(tmp_path, shorter).clients[1]  # the last shared state that it received
    model = Worker(SiteFolder(tmp_path / "d" / "sites" / "north")).model_site().model()
    assert model.name == "north"
    assert_equal(model.weights, expected.weights)


def test_a_site_that_claims_a_billion_samples_is_not_let_in(tmp_path: Path) -> None:
    d.make(tmp_path, TRAIN)
    coordinator = configure(tmp_path, start_clients=2, min_clients=2)
    workers = d.make_workers(tmp_path)
    workers[1]._description = dataclasses.replace(workers[1]._description, sizes=(10**9, 0, 10))
    run_coordinator(coordinator, d.connect_directly(workers))
    assert averaged(coordinator) == [["east", "south"]] * ROUNDS
    log = CoordinatorFolder(coordinator).log.read_text()
    claim = "it claims 1,000,000,010 samples; the limit, max_samples in deployment.toml, is 1,000,000"
    assert f"before round 0: north: {claim}" in log
    assert log.count(f"north is not in the run: {claim}") == 1
