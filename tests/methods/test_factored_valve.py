"""The factored valve computes what the full one does, in float64, on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Batch, ClientInfo
from gpfl.core.net import InputSpec, Net
from gpfl.core.tree import Tree
from gpfl.defences import DefenceConfig, defend, upload_bytes
from gpfl.defences.per_example import PerExampleGradient
from gpfl.engine import ENGINES, RunSpec
from gpfl.engine.distributed import ProcessGroup
from gpfl.engine.sharded import Sharded
from gpfl.errors import GpflError
from gpfl.methods.factored_valve import BRANCHES, build_valve, encode_valve, encoded_bytes
from gpfl.methods.gpfl import GPFL
from gpfl.models.architectures import CNN4, HARCNN, MLP, FastText, net_from_architecture

LIMIT = 1e-10
CLASSES = 3
PROTOCOLS: dict[str, dict[str, object]] = {
    "corrected": {},
    "paper": {"p_scale": "mean", "mlg_norm": "sample_mean", "reg": "norm"},
    "reference": {"cond_source": "stale_local"},
}
ABLATIONS = {name: {"without": name.split(",")} for name in ("pci", "mlg", "gce", "pci,mlg")}


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make engines run in float64; nets must be built before."""
    convert = InputSpec.to_net
    monkeypatch.setattr(InputSpec, "to_net", lambda spec, x: to_float64(convert(spec, x)))
    yield
    torch.set_default_dtype(torch.float32)


def to_float64(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() and torch.get_default_dtype() == torch.float64 else x


@dataclass
class Case:
    """A small net and inputs for it."""

    net: Net
    x: Tensor  # (steps, batch, …)


def make_case(name: str, steps: int = 100, batch: int = 4) -> Case:
    rng = torch.Generator().manual_seed(1)
    if name == "fasttext":
        x = torch.randint(0, 20, (steps, batch, 6), generator=rng)
        return Case(net_from_architecture(FastText(hidden=8, vocabulary=20), name, x[0], CLASSES), x)
    shape, architecture = {
        "cnn4": ((1, 8, 8), CNN4(channels=(2, 3), hidden=16)),
        "harcnn": ((2, 1, 36), HARCNN()),
        "mlp": ((6,), MLP(hidden=(12,))),
    }[name]
    x = torch.randn((steps, batch, *shape), generator=rng)
    return Case(net_from_architecture(architecture, name, x[0], CLASSES), x)


def run_rounds(method: GPFL, case: Case, lr: float = 0.05, rounds: int = 1) -> list[tuple[Tree, Tree]]:
    """Return what one client uploads and keeps in each round over all of a case's steps."""
    bound = method.bind(case.net, lr=lr, epochs=1)
    shared, private = (tree.map_leaves(lambda t: t.double(), state) for state in bound.init(0))
    results = []
    for number in range(rounds):
        client = ClientInfo(*(torch.tensor(v).double() for v in (8.0, [5.0, 3.0, 0.0], number, rounds, 0.0)))
        local_state = bound.download(shared, private, client)
        for step, x in enumerate(case.x):
            y = (torch.arange(x.shape[0]) + step) % 2
            x = x.double() if x.is_floating_point() else x
            local_state, _ = bound.step(shared, local_state, Batch(x, y, torch.ones(len(x))), client)
        sent, private = bound.upload(shared, local_state, private, client)
        shared = bound.aggregate(shared, sent)
        results.append((sent, private))
    return results


def difference(a: Tree, b: Tree) -> float:
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1)) for x, y in tree.zip_leaves(a, b))


def assert_same_rounds(options: dict[str, object], case: Case, lr: float = 0.05, rounds: int = 1) -> None:
    runs = [run_rounds(GPFL(**options, valve=valve), case, lr, rounds) for valve in ("factored", "full")]  # type: ignore[arg-type]
    for factored, full in zip(*runs, strict=True):
        for a, b in zip(factored, full, strict=True):
            assert tree.is_finite(b)
            assert difference(a, b) < LIMIT


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("net", ["cnn4", "fasttext", "mlp", pytest.param("harcnn", marks=pytest.mark.slow)])
def test_100_steps_of_every_protocol_are_those_of_the_full_valve(net: str, protocol: str) -> None:
    rounds = 2 if protocol == "reference" else 1  # its contexts are zero in the first
    assert_same_rounds({"lam": 0.01, "mu": 0.1, **PROTOCOLS[protocol]}, make_case(net, 100 // rounds), rounds=rounds)


@pytest.mark.parametrize("without", ABLATIONS)
@pytest.mark.parametrize("net", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn4", "harcnn", "fasttext"))])
def test_100_steps_of_every_ablation_with_a_valve_are_those_of_the_full_valve(net: str, without: str) -> None:
    assert_same_rounds({"lam": 0.01, "mu": 0.1, "without": tuple(without.split(","))}, make_case(net))


@pytest.mark.parametrize("seed", range(8))
def test_random_widths_batches_steps_rates_and_decays_give_the_full_valve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, batch, steps = int(rng.integers(1, 40)), int(rng.integers(1, 12)), int(rng.integers(1, 40))
    lr, mu = float(10 ** rng.uniform(-3, -1)), float(rng.choice([0.0, 10 ** rng.uniform(-3, 0.5)]))
    x = torch.randn((steps, batch, 5), generator=torch.Generator().manual_seed(seed))
    case = Case(net_from_architecture(MLP(hidden=(width,)), "mlp", torch.randn(2, 5), CLASSES), x)
    reg = str(rng.choice(["wd", "norm"]))
    assert_same_rounds({"lam": 0.02, "mu": mu, "reg": reg}, case, lr)


def make_engine(name: str, method: GPFL) -> gpfl.engine.Engine:
    federation = toy_federation((14, 9))
    net = net_from_architecture(MLP(hidden=(9,)), "mlp", federation.table.inputs(torch.arange(2)), 3)
    spec = RunSpec(method.bind(net, lr=0.05, epochs=50), federation, Schedule(seed=0, rounds=2))
    engine = Sharded(spec, ENGINES["loop"](spec), ProcessGroup()) if name == "sharded" else ENGINES[name](spec)
    for each in (engine, getattr(engine, "_local_engine", engine)):
        each._label_counts, each._n_samples = each._label_counts.double(), each._n_samples.double()
    return engine


def train_rounds(engine: gpfl.engine.Engine) -> tuple[Tree, Tree]:
    torch.set_default_dtype(torch.float64)
    shared, private = (tree.map_leaves(lambda t: t.double(), state) for state in engine.method.init(0))
    private = tree.repeat(private, 2)
    for number in range(2):
        result = engine.train(shared, private, range(2), number)
        shared, private = engine.method.aggregate(shared, result.mean), result.private
    torch.set_default_dtype(torch.float32)
    return shared, private


@cache
def full_rounds() -> tuple[Tree, Tree]:
    return train_rounds(make_engine("loop", GPFL(lam=0.01, mu=0.1, valve="full")))


@pytest.mark.parametrize("engine", [*ENGINES, "sharded"])
def test_every_engine_trains_the_factored_valve_as_the_loop_trains_the_full_one(
    engine: str, float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine in ("vmap", "workers"):
        monkeypatch.setattr(ENGINES[engine], "min_calls_to_trace", 0)
    expected = full_rounds()
    actual = train_rounds(make_engine(engine, GPFL(lam=0.01, mu=0.1, valve="factored")))
    for a, b in zip(actual, expected, strict=True):
        assert all(leaf.dtype == torch.float64 for leaf in tree.leaves(a))
        assert difference(a, b) < LIMIT


def test_local_state_holds_no_matrix_of_the_valve() -> None:
    case = make_case("cnn4")
    for valve, largest in (("factored", 4 * 16), ("full", 16 * 16)):
        method = GPFL(valve=valve).bind(case.net, lr=0.1, epochs=1)
        shared, private = method.init(0)
        client = ClientInfo(*(torch.tensor(v) for v in (8.0, [5.0, 3.0, 0.0], 0.0, 1.0)))
        local_state = method.download(shared, private, client)
        assert max(t.numel() for t in tree.leaves(tree.pick(local_state, ("cov", "valve")))) == largest


def test_per_example_gradients_are_those_of_the_full_valve() -> None:
    net, defence = make_case("mlp").net, DefenceConfig(example_clip=1.0)
    auto = defend(GPFL(mlg_norm="sample_mean").bind(net, lr=0.1, epochs=1), defence, seed=0, min_clients=1)
    assert not auto.method.uses_factored_valve  # type: ignore[attr-defined]
    uploads = defend(GPFL().bind(net, lr=0.1, epochs=1), DefenceConfig(clip=1.0), seed=0, min_clients=1)
    assert uploads.method.uses_factored_valve  # type: ignore[attr-defined]


def test_per_example_gradients_of_a_factored_valve_are_an_error() -> None:
    case = make_case("mlp")
    method = GPFL(valve="factored").bind(case.net, lr=0.1, epochs=1)
    shared, private = method.init(0)
    client = ClientInfo(*(torch.tensor(v) for v in (8.0, [5.0, 3.0, 0.0], 0.0, 1.0)))
    local_state = method.download(shared, private, client)
    clipped = method.replace(gradient=PerExampleGradient(torch.zeros(2), bound=1.0, std=0.0))
    with pytest.raises(GpflError, match="use 'auto' or 'full'"):
        clipped.step(shared, local_state, Batch(case.x[0], torch.zeros(4, dtype=torch.int64), torch.ones(4)), client)


def test_a_mean_of_valves_is_a_linear_function_of_matrices_as_wide_as_there_are_classes() -> None:
    """With M = A 1ᵀ/U + B αᵀ, V = d V₀ + M Ĉ, and so is the mean of several with those of d and M."""
    case, counts = make_case("mlp", steps=20), [[5.0, 3.0, 0.0], [1.0, 1.0, 6.0]]
    method = GPFL(lam=0.01, mu=0.1).bind(case.net, lr=0.05, epochs=1)
    shared, private = (tree.map_leaves(lambda t: t.double(), state) for state in method.init(0))
    embeddings, sent = tree.leaf(tree.branch(shared, "gce"), "weight"), tree.branch(shared, "cov")
    valves, scales, mixes = [], [], []
    for each in counts:
        labels, one = torch.tensor(each).double(), torch.ones(()).double()
        client = ClientInfo(labels.sum(), labels, one, one)
        state = method.download(shared, private, client)
        for step, x in enumerate(case.x):
            batch = Batch(x.double(), (torch.arange(len(x)) + step) % CLASSES, torch.ones(len(x)))
            state, _ = method.step(shared, state, batch, client)
        valves.append(tree.branch(method.upload(shared, state, private, client)[0], "cov"))
        weights = torch.stack([torch.full_like(labels, 1 / CLASSES), labels / labels.sum()])  # of g and p_i in Ĉ
        factors = tree.leaf(tree.branch(state, "cov"), "factors")  # (branches, contexts, width)
        mixes.append(factors.transpose(1, 2) @ weights)
        scales.append(tree.leaf(tree.branch(state, "valve"), "scale"))
    scale, mix = sum(scales) / 2, sum(mixes) / 2
    for i, branch in enumerate(BRANCHES):
        name = f"{branch}.linear.weight"
        mean = (tree.leaf(valves[0], name) + tree.leaf(valves[1], name)) / 2
        assert float((scale * tree.leaf(sent, name) + mix[i] @ embeddings - mean).abs().max()) < LIMIT


# Uploads as factors.


@pytest.mark.parametrize(("options", "n_contexts"), [({}, 2), ({"valve_gradient": "global"}, 1)])
def test_the_encoded_valve_gives_the_upload_to_the_bit(options: dict[str, object], n_contexts: int) -> None:
    case = make_case("mlp", steps=5)
    method = GPFL(**options).bind(case.net, lr=0.05, epochs=1)
    shared, private = method.init(0)
    counts, one = torch.tensor([5.0, 10, 5]), torch.ones(())
    client = ClientInfo(counts.sum(), counts, one, one)
    state = method.download(shared, private, client)
    for x in case.x:
        state, _ = method.step(shared, state, Batch(x, torch.arange(len(x)) % CLASSES, torch.ones(len(x))), client)
    upload, _ = method.upload(shared, state, private, client)
    cov, valve, contexts = (tree.branch(state, part) for part in ("cov", "valve", "context"))
    code = encode_valve(cov, valve, contexts, n_contexts)
    built = build_valve(tree.branch(shared, "cov"), code)
    assert all(torch.equal(a, b) for a, b in tree.zip_leaves(built, tree.branch(upload, "cov")))
    assert tree.count_bytes(code) == encoded_bytes(case.net.width, n_contexts)
    expected = tree.count_bytes(upload) - tree.count_bytes(tree.branch(upload, "cov")) + tree.count_bytes(code)
    assert upload_bytes(method.replace(valve_upload="factors"), upload) == expected < upload_bytes(method, upload)
    assert upload_bytes(method.replace(valve_upload="factors", valve="full"), upload) == tree.count_bytes(upload)
    clipped = defend(method.replace(valve_upload="factors"), DefenceConfig(bits=8), seed=0, min_clients=1)
    assert upload_bytes(clipped, upload) == upload_bytes(clipped.replace(valve_upload="full"), upload)


def test_factors_of_a_valve_trained_on_the_global_route_hold_no_personal_context() -> None:
    method = GPFL(valve_gradient="global").bind(make_case("mlp").net, lr=0.05, epochs=1)
    shared, private = method.init(0)
    counts, one = torch.tensor([5.0, 10, 5]), torch.ones(())
    state = method.download(shared, private, ClientInfo(counts.sum(), counts, one, one))
    cov, valve, contexts = (tree.branch(state, part) for part in ("cov", "valve", "context"))
    code = encode_valve(cov, valve, contexts, method.n_trained_contexts)
    assert torch.equal(tree.leaf(code, "contexts"), tree.leaf(contexts, "g")[None])
