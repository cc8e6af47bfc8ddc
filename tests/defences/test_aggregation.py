"""Rules of aggregation and simulated secure sums, against plain NumPy, on every engine, and under attack."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command, metrics_without_time, toy_federation
from direct_sites import assert_equal
from scipy.stats import trim_mean

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.tree import Tree
from gpfl.defences.aggregation import FRACTION_BITS, MAX_VALUE, Aggregation, krum
from gpfl.engine import ENGINES
from gpfl.engine.base import Engine
from gpfl.engine.vmap import Vmap
from gpfl.errors import GpflError
from gpfl.training.config import resolve_config
from gpfl.training.execute import PreparedRun, execute
from gpfl.training.prepare import prepare

SIZES = (41, 27, 33, 31, 29)
RULES = {
    "mean": Aggregation(),
    "trimmed mean": Aggregation(rule="trimmed_mean"),
    "median": Aggregation(rule="median"),
    "krum": Aggregation(rule="krum"),
    "secure sum": Aggregation(secure_sum=True),
}


def stacked(clients: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(clients)
    return {"a": rng.normal(size=(clients, 30, 4)), "b": rng.normal(size=clients)}


def combine(aggregation: Aggregation, uploads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = aggregation.combine({path: torch.from_numpy(values) for path, values in uploads.items()})
    return {path: values.numpy() for path, values in tree.flatten(found).items()}


@pytest.mark.parametrize("clients", [3, 4, 7, 10])
def test_median_and_trimmed_mean_are_those_of_numpy_and_scipy(clients: int) -> None:
    uploads = stacked(clients)
    for path, values in combine(Aggregation(rule="median"), uploads).items():
        np.testing.assert_allclose(values, np.median(uploads[path], axis=0), rtol=1e-14)
    for fraction in (0.1, 0.2, 0.3):
        # SciPy rounds the number of values to leave out down, gpfl up, but leaves one or two.
        count = min(int(np.ceil(fraction * clients - 1e-9)), (clients - 1) // 2)
        found = combine(Aggregation(rule="trimmed_mean", trim_fraction=fraction), uploads)
        for path, values in found.items():
            expected = trim_mean(uploads[path], (count + 1e-9) / clients, axis=0)
            np.testing.assert_allclose(values, expected, rtol=1e-13)


@pytest.mark.parametrize(("clients", "byzantine"), [(3, 0), (5, 1), (10, 3)])
def test_krum_chooses_the_upload_nearest_to_its_nearest_others(clients: int, byzantine: int) -> None:
    uploads = stacked(clients)
    vectors = np.concatenate([values.reshape(clients, -1) for values in uploads.values()], axis=1)
    scores = []
    for i in range(clients):
        distances = sorted(np.sum((vectors[i] - vectors[j]) ** 2) for j in range(clients) if j != i)
        scores.append(sum(distances[: clients - byzantine - 2]))
    chosen = int(np.argmin(scores))
    found = combine(Aggregation(rule="krum", byzantine=byzantine), uploads)
    assert all((values == uploads[path][chosen]).all() for path, values in found.items())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_an_upload_with_nonsense_is_left_out(value: float) -> None:
    uploads = stacked(5)
    uploads["a"][2, 0, 0] = value
    for rule in ("median", "trimmed_mean", "krum"):
        assert np.isfinite(combine(Aggregation(rule=rule), uploads)["a"]).all()
    assert krum({path: torch.from_numpy(values) for path, values in uploads.items()}, 1) != 2


# Engines.


def make(engine: str, aggregation: Aggregation, method: str = "gpfl", sizes: tuple[int, ...] = SIZES) -> Engine:
    federation = toy_federation(sizes)
    values = {"run": {"seed": 3, "device": "cpu"}, "method": {"name": method}, "train": {"rounds": 2, "lr": 0.05}}
    _, spec = prepare(resolve_config(values, federation=federation), federation)
    return ENGINES[engine](dataclasses.replace(spec, aggregation=aggregation))


def train(engine: Engine) -> Tree:
    shared, private = engine.method.init(3)
    clients = range(len(engine.federation))
    return engine.train(shared, tree.repeat(private, len(clients)), clients, 0).mean


def all_uploads(engine: Engine) -> dict[str, np.ndarray]:
    """Return the uploads of round 0 and, under "weights", the weights of the clients."""
    shared, private = engine.method.init(3)
    clients = range(len(engine.federation))
    info = engine.client_info(clients, 0)
    table = engine.federation.table
    uploads = [local_round(engine.method, shared, private, table, engine.plan(c, 0), info.select(c)).upload for c in clients]
    return {path: np.stack([tree.flatten(u)[path].numpy() for u in uploads]) for path in tree.flatten(uploads[0])}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", ["vmap", "workers"])
def test_engines_aggregate_alike_in_chunks_as_well(rule: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vmap, "chunk_size", 2)
    monkeypatch.setattr("gpfl.engine.workers.available_cores", lambda: 2)
    expected, found = (tree.flatten(train(make(name, RULES[rule]))) for name in ("loop", engine))
    for path, values in expected.items():
        assert (values - found[path]).abs().max() < 1e-5


def test_the_loop_aggregates_what_numpy_does() -> None:
    engine = make("loop", RULES["median"])
    uploads = all_uploads(engine)
    for path, values in tree.flatten(train(engine)).items():
        np.testing.assert_array_equal(values.numpy(), np.median(uploads[path], axis=0))
    weights = engine.federation.n_samples("train") / engine.federation.n_samples("train").sum()
    for path, values in tree.flatten(train(make("loop", RULES["secure sum"]))).items():
        weighted = np.float64(uploads[path]) * np.float32(weights).reshape(-1, *[1] * (uploads[path].ndim - 1))
        whole = np.rint(weighted * 2.0**FRACTION_BITS).astype(np.int64)
        np.testing.assert_array_equal(values.numpy(), np.float32(whole.sum(0) / 2.0**FRACTION_BITS))
        steps = len(weights) * 2.0 ** -(FRACTION_BITS + 1)
        assert (np.abs(values.numpy() - weighted.sum(0)) <= steps + 2.0**-24 * np.abs(weighted.sum(0))).all()


def test_an_upload_that_a_secure_sum_cannot_hold_makes_the_mean_nan() -> None:
    engine = make("loop", RULES["secure sum"])
    uploads = engine.new_aggregator(engine_request(engine))
    for client in range(len(SIZES)):
        uploads.add(client, {"a": torch.tensor([MAX_VALUE * (20 if client == 1 else 1e-3), 1.0])})
    assert torch.isnan(tree.leaf(uploads.result(), "a")).all()


def engine_request(engine: Engine) -> gpfl.engine.base.TrainRequest:
    clients = range(len(engine.federation))
    return gpfl.engine.base.TrainRequest({}, {}, clients, 0, engine.schedule, clients, engine.method)


# Runs.


def test_secure_sums_are_counted_as_sent_and_cost_no_accuracy() -> None:
    settings = {"method": "gpfl", "rounds": 3, "lr": 0.05, "seed": 3, "device": "cpu"}
    plain, secure = (gpfl.fit(federation=toy_federation(SIZES), secure_sum=on, **settings) for on in (False, True))
    assert secure.history[-1]["bytes_up"] == 2 * plain.history[-1]["bytes_up"]
    for a, b in tree.zip_leaves(plain.outcome.last.shared, secure.outcome.last.shared):
        assert (a - b).abs().max() < 1e-5


def test_a_run_with_a_median_resumes_exactly(command: Command, tmp_path: Path) -> None:
    flags = (
        "--data",
        "toy",
        "--aggregation",
        "median",
        "--engine",
        "loop",
        "--client-fraction",
        "0.8",
        "--checkpoint-every",
        1,
    )
    assert command("run", *flags, "--rounds", 4, "--out", "whole").code == 0
    assert command("run", *flags, "--rounds", 4, "--out", "cut").code == 0
    (tmp_path / "cut" / "summary.json").unlink()
    assert 'aggregation = "median"' in (tmp_path / "cut" / "config.toml").read_text()
    assert command("resume", "cut").code == 0
    assert metrics_without_time(tmp_path / "whole") == metrics_without_time(tmp_path / "cut")


ATTACKS = {"sign-flipped": lambda update: -10 * update, "shifted": lambda update: update + 3}


@pytest.mark.parametrize("attack", ATTACKS)
def test_robust_rules_withstand_a_malicious_client_and_the_mean_does_not(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from poison import poison

    federation = toy_federation((40,) * 5)
    accuracies = {}
    for rule in ("mean", "trimmed_mean", "median", "krum"):
        values = {
            "run": {"seed": 3, "device": "cpu", "engine": "loop"},
            "method": {"name": "fedavg"},
            "train": {"rounds": 8, "lr": 0.1, "aggregation": rule},
        }
        config, spec = prepare(resolve_config(values, federation=federation), federation)
        spec = dataclasses.replace(spec, method=poison(spec.method, 2, ATTACKS[attack]))
        try:
            history = execute(PreparedRun(config, spec), ENGINES["loop"](spec)).history
            honest = {name: value for name, value in history[-1]["client_accuracies"].items() if name != "2"}
            accuracies[rule] = float(np.mean(list(honest.values())))
        except GpflError:  # the run diverged
            accuracies[rule] = 0.0
    assert accuracies["mean"] < 0.7
    assert min(accuracies[rule] for rule in ("trimmed_mean", "median", "krum")) > 0.9


REFUSED = {
    "secure": ({"aggregation": "median", "secure_sum": True}, {}, "in a secure sum the server sees none"),
    "prototypes": ({"aggregation": "median"}, {"method": {"name": "fedproto"}}, "fedproto uploads prototypes"),
    "krum": ({"aggregation": "krum", "krum_byzantine": 2}, {}, r"needs 7 clients in each round \(2f \+ 3\).*may be 5"),
    "sampled": ({"aggregation": "median", "client_fraction": 0.4}, {}, "needs 3 clients in each round; there may be 2"),
    "few": ({"secure_sum": True, "client_fraction": 0.4}, {}, "a secure sum needs 3 clients in each round"),
    "bits": ({"secure_sum": True}, {"defence": {"bits": 8}}, "uploads cannot be compressed"),
    "factors": ({"secure_sum": True}, {"method": {"name": "gpfl", "valve_upload": "factors"}}, "uploads cannot be compressed"),
    "low rank": (
        {"aggregation": "median"},
        {"method": {"name": "gpfl", "valve_upload": "low_rank"}},
        "compares the entries of V",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    train, other, reason = REFUSED[case]
    federation = toy_federation(SIZES)
    with pytest.raises(GpflError, match=reason):
        prepare(resolve_config({"train": train, **other}, federation=federation), federation)


def test_a_method_that_uploads_nothing_takes_any_rule() -> None:
    federation = toy_federation(SIZES)
    runs = [gpfl.fit("local", federation, rounds=1, aggregation=rule, seed=3).outcome for rule in ("mean", "krum")]
    assert_equal(runs[0].last.private, runs[1].last.private)
