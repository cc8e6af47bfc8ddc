"""Faults of sites: what the coordinator drops, and how a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from bad_replies import BAD_REPLIES, claim_samples
from conftest import toy_federation
from direct_sites import assert_equal, direct, make_sites, roster_of, simulate

from gpfl.core import tree
from gpfl.deploy.coordinator import coordinate
from gpfl.deploy.messages import Answer, RoundReply, RoundRequest, Transport
from gpfl.deploy.roster import Roster, SiteData
from gpfl.deploy.site import Site
from gpfl.errors import GpflError
from gpfl.io.tensors import unpack_tensors

FEDERATION = toy_federation()
SECTIONS: dict[str, dict[str, object]] = {"method": {"name": "gpfl"}, "train": {"rounds": 3, "lr": 0.05}}


@pytest.fixture
def roster() -> Roster:
    return roster_of(FEDERATION, SECTIONS)


@pytest.fixture
def sites(roster: Roster, tmp_path: Path) -> list[Site]:
    return make_sites(roster, FEDERATION, tmp_path)


def tamper(sites: list[Site], client: int, change: Callable[[RoundReply], Answer], round: int = 1) -> Transport:
    """Change the reply of one client in one round."""
    honest = direct(sites)

    def send(messages: Mapping[int, bytes]) -> Mapping[int, Answer]:
        answers = dict(honest(messages))
        for k, message in messages.items():
            flat, header = unpack_tensors(message, "the request")
            if k == client and RoundRequest.parse(header, flat).round == round:
                answers[k] = change(RoundReply.unpack(answers[k].payload))
        return answers

    return send


FAULTS: dict[str, tuple[Callable[[RoundReply], Answer], str]] = {
    **{name: (lambda reply, bad=bad: Answer(bad(reply)), reason) for name, (bad, reason) in BAD_REPLIES.items()},
    "silent": (lambda reply: Answer(error="not connected"), "not connected"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_upload_is_dropped_and_named(name: str, roster: Roster, sites: list[Site], tmp_path: Path) -> None:
    change, reason = FAULTS[name]
    outcome = coordinate(roster, tamper(sites, 1, change), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert [record["averaged"] for record in records] == [list("0123"), list("023"), list("0123")]
    assert reason in records[1]["dropped"]["1"]
    assert tree.is_finite(outcome.last.shared)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_dropped_client_trains_on_from_its_last_accepted_state(roster: Roster, sites: list[Site], tmp_path: Path) -> None:
    """Its private state must not keep what the dropped round did to it."""
    asked: list[int] = []
    honest = tamper(sites, 1, lambda reply: Answer(error="lost on the way"))

    def send(messages: Mapping[int, bytes]) -> Mapping[int, Answer]:
        flat, header = unpack_tensors(messages[1], "the request")
        asked.append(RoundRequest.parse(header, flat).accepted)
        return honest(messages)

    coordinate(roster, send, tmp_path / "run")
    assert asked == [0, 1, 1, 3]  # rounds 0, 1 (lost), 2, and the last evaluation


def test_an_implausible_score_does_not_count(roster: Roster, sites: list[Site], tmp_path: Path) -> None:
    def boast(reply: RoundReply) -> Answer:
        return Answer(claim_samples(reply))

    outcome = coordinate(roster, tamper(sites, 1, boast), tmp_path / "run")
    assert [len(record["client_accuracies"]) for record in outcome.history] == [4, 3, 4, 4]  # type: ignore[arg-type]


def test_sites_of_which_none_answers_are_asked_again(roster: Roster, sites: list[Site], tmp_path: Path) -> None:
    honest, requests = direct(sites), []

    def send(messages: Mapping[int, bytes]) -> Mapping[int, Answer]:
        requests.append(messages)
        return {k: Answer(error="not connected") for k in messages} if len(requests) == 1 else honest(messages)

    log: list[str] = []
    outcome = coordinate(roster, send, tmp_path / "run", log=log.append)
    assert "round 0: no site answered" in " ".join(log)
    assert_equal(outcome.last.shared, simulate(FEDERATION, SECTIONS).outcome.last.shared)


def test_too_few_uploads_end_the_run_with_the_reasons(roster: Roster, sites: list[Site], tmp_path: Path) -> None:
    send = tamper(sites, 1, lambda reply: Answer(error="not connected"))
    with pytest.raises(GpflError, match=r"round 1: 3 uploads from 4 sites \(1: not connected\), and min_clients is 4"):
        coordinate(roster, send, tmp_path / "run", min_clients=4)


class CoordinatorDiedError(Exception):
    pass


@pytest.mark.parametrize("request_number", [1, 2, 3])
def test_a_run_resumes_after_its_coordinator_died(
    request_number: int, roster: Roster, sites: list[Site], tmp_path: Path
) -> None:
    requests = 0

    def die(messages: Mapping[int, bytes]) -> Mapping[int, Answer]:
        nonlocal requests
        answers = direct(sites)(messages)  # the sites have trained already
        requests += 1
        if requests == request_number + 1:
            raise CoordinatorDiedError
        return answers

    with pytest.raises(CoordinatorDiedError):
        coordinate(roster, die, tmp_path / "run")
    outcome = coordinate(roster, direct(sites), tmp_path / "run")
    expected = simulate(FEDERATION, SECTIONS)
    assert_equal(outcome.last.shared, expected.outcome.last.shared)
    assert [r["accuracy"] for r in outcome.history] == [r["accuracy"] for r in expected.history]
    assert coordinate(roster, die, tmp_path / "run").summary["rounds"] == 3  # a finished run asks nobody


def test_a_site_refuses_requests_that_are_not_for_it(roster: Roster, sites: list[Site]) -> None:
    shared = tree.flatten(sites[0].spec.method.init(3)[0])
    values = {"roster": roster.digest, "client": 0, "round": 0, "accepted": 0, "train": True, "splits": (), "shared": shared}
    sites[0].run_round(RoundRequest(**values))  # type: ignore[arg-type]
    wrong: dict[str, tuple[object, str]] = {
        "roster": ("0" * 64, "another roster"),
        "client": (1, "client 1"),
        "round": (99, "round 99"),
        "accepted": (1, "round 0 after 1"),
        "shared": ({}, "shared state"),
    }
    for key, (value, reason) in wrong.items():
        with pytest.raises(GpflError, match=reason):
            sites[0].run_round(RoundRequest(**{**values, key: value}))  # type: ignore[arg-type]


def test_noise_is_not_that_of_the_seed(tmp_path: Path) -> None:
    sections = {**SECTIONS, "defence": {"clip": 1.0, "noise": 0.5}}
    roster = roster_of(FEDERATION, sections)
    site = make_sites(roster, FEDERATION, tmp_path)[0]
    own = Site(roster, "0", SiteData(FEDERATION.table, FEDERATION.shards[0]), tmp_path / "own")
    shared = tree.flatten(site.spec.method.init(3)[0])
    request = RoundRequest(roster=roster.digest, client=0, round=0, accepted=0, train=True, splits=(), shared=shared)
    uploads = [own.run_round(request).upload, own.run_round(request).upload, site.run_round(request).upload]
    path = next(iter(uploads[0]))
    assert not torch.equal(uploads[0][path], uploads[1][path])  # new noise for each upload
    assert torch.equal(uploads[2][path], site.run_round(request).upload[path])  # the key of the test
