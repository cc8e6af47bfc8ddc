"""Secure sums: the mean is that of plain uploads, single uploads are noise, and no upload is summed twice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import deployment as d
import numpy as np
import pytest
import torch
from conftest import toy_federation
from direct_sites import assert_equal, make_sites, roster_of

from gpfl.core import tree
from gpfl.defences.aggregation import FRACTION_BITS, MAX_VALUE, from_integers
from gpfl.errors import GpflError
from gpfl.methods import METHODS

pytest.importorskip("cryptography", reason="needs gpfl[flower]")

from gpfl.defences.accounting import gaussian_epsilon
from gpfl.deploy import keys
from gpfl.deploy.messages import Answer, RoundReply, RoundRequest, Transport
from gpfl.deploy.secure_sum import Masker, SumContext, sum_is_plausible, sum_masked
from gpfl.deploy.server import Connect, CoordinatorFolder, run_coordinator
from gpfl.deploy.worker import Worker
from gpfl.io.tensors import unpack_tensors

STEP = 2.0**-FRACTION_BITS
CONTEXT = SumContext("roster", 4, 0, (0, 1, 2))


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorFolder, "nodes", lambda self: {0: 11, 1: 12, 2: 13})


@pytest.fixture
def maskers(tmp_path: Path) -> list[Masker]:
    paths = [tmp_path / f"{k}.key" for k in range(3)]
    for path in paths:
        keys.make_mask_key(path)
    public = {k: keys.public_mask_key(path) for k, path in enumerate(paths)}
    return [Masker(path, public, k) for k, path in enumerate(paths)]


def uploads() -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    return [
        {"a": torch.from_numpy(rng.normal(size=(300, 40)).astype(np.float32)), "b": torch.tensor(float(k))} for k in range(3)
    ]


def test_masked_uploads_sum_to_the_weighted_mean(maskers: list[Masker]) -> None:
    weights = [0.5, 0.2, 0.3]
    parts = uploads()
    masked = [m.mask(part, w, CONTEXT) for m, part, w in zip(maskers, parts, weights, strict=True)]
    mean = {path: from_integers(total) for path, total in sum_masked(masked, parts[0]).items()}
    for path in ("a", "b"):
        expected = sum(w * part[path].double() for w, part in zip(weights, parts, strict=True))
        rounding = expected.abs() * 2.0**-24  # to float32
        assert ((mean[path].double() - expected).abs() <= 1.5 * STEP + rounding).all()
        assert (mean[path].shape, mean[path].dtype) == (parts[0][path].shape, torch.float32)


def test_a_masked_upload_looks_like_noise_and_is_another_one_each_time(maskers: list[Masker]) -> None:
    zeros = {"a": torch.zeros(300, 40)}
    contexts = [
        CONTEXT,
        dataclasses.replace(CONTEXT, round=5),
        dataclasses.replace(CONTEXT, attempt=1),
        dataclasses.replace(CONTEXT, roster="other"),
    ]
    masked = [maskers[0].mask(zeros, 1.0, context)["a"].numpy() for context in contexts]
    for each in masked:
        bits = np.unpackbits(each.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
    assert len({each.tobytes() for each in masked}) == 4
    # Without one site, the sum of the others is noise as well.
    two = sum_masked([m.mask(zeros, 1.0, CONTEXT) for m in maskers[:2]], zeros)
    assert from_integers(two["a"]).abs().median() > 1e6
    assert not sum_is_plausible(two["a"])


def test_entries_that_do_not_fit_are_errors(maskers: list[Masker]) -> None:
    for value in (MAX_VALUE * 2, float("nan"), float("inf")):
        with pytest.raises(GpflError, match="'a' has an entry beyond"):
            maskers[0].mask({"a": torch.tensor([value])}, 1.0, CONTEXT)
    with pytest.raises(GpflError, match="needs 3 sites"):
        maskers[0].mask({"a": torch.zeros(1)}, 1.0, dataclasses.replace(CONTEXT, cohort=(0, 1)))


def spy(workers: list[Worker], change: Callable[[int, RoundRequest, bytes], Answer | None]) -> Connect:
    """Return a transport that calls workers and lets `change` replace an answer."""

    def connect(*arguments: object) -> Transport:
        def send(messages: Mapping[int, bytes]) -> dict[int, Answer]:
            answers = {}
            for client, signed in messages.items():
                reply = workers[client].answer(signed)
                flat, header = unpack_tensors(signed[keys.SIGNATURE_BYTES :], "the request")
                found = change(client, RoundRequest.parse(header, flat), reply) if header["kind"] == "round" else None
                answers[client] = found or Answer(reply)
            return answers

        return send

    return connect


@pytest.mark.parametrize(
    "method", [{"name": "gpfl"}, {"name": "gpfl", "valve_upload": "low_rank"}, {"name": "fedproto"}], ids=str
)
def test_secure_sums_are_the_simulated_ones_to_the_bit_and_plain_means_to_the_step(
    method: dict[str, object], tmp_path: Path
) -> None:
    config = {"method": method}
    card = d.make(tmp_path, config, {}, secure_sum=True)
    sent: list[dict[str, torch.Tensor]] = []

    def record(client: int, request: RoundRequest, reply: bytes) -> None:
        sent.append(RoundReply.unpack(reply).upload)

    outcome = run_coordinator(tmp_path / "d" / "coordinator", spy(d.make_workers(tmp_path), record))
    expected = d.simulate_files(tmp_path, card).outcome
    assert_equal(outcome.last.shared, expected.last.shared)
    assert [r["bytes_up"] for r in outcome.history] == [r["bytes_up"] for r in expected.history]
    card.config["train"]["secure_sum"] = False
    plain = d.simulate_files(tmp_path, card).outcome
    for path, tensor in tree.flatten(outcome.last.shared).items():
        assert (tensor - tree.flatten(plain.last.shared)[path]).abs().max() < 2e-6, path
    assert {tensor.dtype for upload in sent for tensor in upload.values()} == {torch.int64}


def test_every_method_uploads_what_a_sum_can_hold(tmp_path: Path) -> None:
    """All methods are aggregated by weighted means, which is all that a secure sum offers."""
    federation = toy_federation()
    for name in METHODS:
        roster = roster_of(federation, {"method": {"name": name}, "train": {"rounds": 1}})
        site = make_sites(roster, federation, tmp_path / name)[0]
        shared = tree.flatten(site.spec.method.init(3)[0])
        request = RoundRequest(roster=roster.digest, client=0, round=0, accepted=0, train=True, splits=(), shared=shared)
        for tensor in site.run_round(request).upload.values():
            assert tensor.is_floating_point()
            assert tensor.abs().max() < MAX_VALUE
        assert 0 < site.upload_weight(range(4)) < 1


NOISY: d.Sections = {
    "method": {"name": "fedavg"},
    "train": {"rounds": 2, "lr": 0.1},
    "defence": {"clip": 1.0, "noise": 2.0},
}


def test_a_round_that_lost_a_site_is_repeated_with_new_uploads_which_all_count(tmp_path: Path) -> None:
    d.make(tmp_path, NOISY, {}, secure_sum=True)
    settings = tmp_path / "d" / "coordinator" / "deployment.toml"
    settings.write_text(settings.read_text().replace("min_clients = 3", "min_clients = 2"))
    requests: list[tuple[int, int, tuple[int, ...]]] = []

    def lose(client: int, request: RoundRequest, reply: bytes) -> Answer | None:
        requests.append((request.round, request.attempt, request.cohort))
        lost = client == 2 and (request.round, request.attempt) == (1, 0) and request.train
        return Answer(error="not connected") if lost else None

    outcome = run_coordinator(tmp_path / "d" / "coordinator", spy(d.make_workers(tmp_path), lose))
    assert {entry for entry in requests if entry[0] == 1} == {(1, 0, (0, 1, 2)), (1, 1, (0, 1, 2))}
    assert tree.is_finite(outcome.last.shared)
    records = (tmp_path / "d" / "coordinator" / "runs" / "test" / "clients.jsonl").read_text().splitlines()
    assert [json.loads(line)["averaged"] for line in records] == [list(d.SITES)] * 2
    epsilons = [gaussian_epsilon(1 / np.sqrt(3), uploads, 1e-5) for uploads in (1, 3)]
    assert [json.loads(line)["uploads"]["east"] for line in records] == [1, 3]
    assert [json.loads(line)["epsilon"]["east"] for line in records] == pytest.approx(epsilons)
    privacy = outcome.summary["privacy"]
    assert privacy["client"]["epsilon_of_all_uploads"] == pytest.approx(epsilons[1])  # type: ignore[index]
    assert "operating system" in privacy["noise_source"]  # type: ignore[index]
    ledger = next((tmp_path / "d" / "sites" / "east" / "state").glob("uploads-*.json"))
    assert len(json.loads(ledger.read_text())) == 3  # two rounds and a repetition


def test_the_budget_of_a_site_counts_uploads_of_lost_rounds(tmp_path: Path) -> None:
    planned = gaussian_epsilon(1 / np.sqrt(3), 2, 1e-5)
    d.make(tmp_path, NOISY, {"max_epsilon": planned * 1.01}, secure_sum=True)
    log: list[str] = []

    def lose(client: int, request: RoundRequest, reply: bytes) -> Answer | None:
        lost = client == 2 and (request.round, request.attempt) == (1, 0) and request.train
        return Answer(error="not connected") if lost else None

    with pytest.raises(GpflError, match=r"round 1: no secure sum.*the site's policy refuses it \(max_epsilon\)"):
        run_coordinator(tmp_path / "d" / "coordinator", spy(d.make_workers(tmp_path, log.append), lose))
    assert any("3 uploads, of which 2 were made, have ε" in line for line in log)
    assert any(f"trained (upload 2, ε = {planned:.3g} of all uploads)" in line for line in log)


def first_request(folder: Path) -> tuple[Worker, RoundRequest, Path]:
    """Return a worker, the first request to train that it got, and the coordinator's key."""
    d.make(folder, {}, {}, secure_sum=True)
    workers, found = d.make_workers(folder), list[RoundRequest]()

    def keep(client: int, request: RoundRequest, reply: bytes) -> Answer:
        if client == 0 and not found:
            found.append(request)
        return Answer(error="not connected")

    with pytest.raises(GpflError, match="no site was evaluated"):
        run_coordinator(folder / "d" / "coordinator", spy(workers, keep))
    return workers[0], found[0], folder / "d" / "coordinator" / "signing.key"


def test_the_same_request_gets_the_same_bytes_and_no_other_upload_under_the_same_masks(tmp_path: Path) -> None:
    worker, request, key = first_request(tmp_path)

    def ask(**changes: object) -> RoundReply:
        message = dataclasses.replace(request, **changes).pack()  # type: ignore[arg-type]
        return RoundReply.unpack(worker.answer(keys.sign(message, key)))

    again = ask()
    for path, tensor in ask(splits=()).upload.items():
        assert torch.equal(tensor, again.upload[path])
    shifted = {path: tensor + 0.1 for path, tensor in request.shared.items()}
    for changes in ({"shared": shifted}, {"cohort": (0, 1)}, {"cohort": ()}, {"cohort": (1, 2)}, {"cohort": (0, 1, 1)}):
        with pytest.raises(GpflError, match="the secure sum is not one that the site takes part in"):
            ask(**changes)
    assert again.uploads == 1
    other = ask(attempt=1)
    assert other.uploads == 2
    assert not any(torch.equal(tensor, again.upload[path]) for path, tensor in other.upload.items())


def test_a_site_notices_that_another_ones_mask_key_has_changed(tmp_path: Path) -> None:
    worker, _, _ = first_request(tmp_path)
    state = worker.folder.path / "state" / "mask_keys.json"
    known = json.loads(state.read_text())
    state.write_text(json.dumps({**known, "north": "0" * 64}))
    log: list[str] = []
    with pytest.raises(GpflError, match=r"no secure sum of 3 sites or more \(east: the roster is not that"):
        run_coordinator(tmp_path / "d" / "coordinator", spy(d.make_workers(tmp_path, log.append), lambda *rest: None))
    assert any("the mask key of north is not that of" in line for line in log)


def test_two_sites_cannot_have_a_secure_sum(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(d.SCHEMA)
    with pytest.raises(GpflError, match="a secure sum needs 3 sites; there are 2"):
        d.DataCard.make("two", ("a", "b"), {"data": {"schema": str(tmp_path / "schema.toml")}}, secure_sum=True)
