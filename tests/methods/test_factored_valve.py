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
from gpfl.engine.guard import Guard, update_norm
from gpfl.engine.sharded import Sharded
from gpfl.errors import GpflError
from gpfl.methods.factored_valve import build_valve, encode_valve, encoded_bytes
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
        decoded = bound.decode_upload(shared, sent)
        shared = bound.aggregate(shared, sent)
        results.append((decoded, private))
    return results


def difference(a: Tree, b: Tree) -> float:
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1)) for x, y in tree.zip_leaves(a, b))


def assert_same_rounds(options: dict[str, object], case: Case, lr: float = 0.05, rounds: int = 1) -> None:
    """Assert that all ways to train and to send V give the same rounds."""
    expected = run_rounds(GPFL(**options, valve="full"), case, lr, rounds)  # type: ignore[arg-type]
    is_encodable = options.get("cond_source") != "stale_local" and case.net.width > CLASSES
    for valve_upload in ("full", *(("low_rank",) if is_encodable else ())):
        method = GPFL(**options, valve="factored", valve_upload=valve_upload)  # type: ignore[arg-type]
        for actual, full in zip(run_rounds(method, case, lr, rounds), expected, strict=True):
            for a, b in zip(actual, full, strict=True):
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
    scale = str(rng.choice(["sum", "mean"]))
    assert_same_rounds({"lam": 0.02, "mu": mu, "reg": reg, "p_scale": scale}, case, lr)


@pytest.mark.parametrize(
    "options",
    [
        {"valve_gradient": "global"},
        {"valve_gradient": "global", "without": ("pci",)},
        {"guidance": "embeddings"},
        {"alpha_levels": 1},
        {"alpha_noise": 0.1},
        {"p_scale": "mean", "alpha_levels": 4},
    ],
    ids=str,
)
def test_variants_train_and_send_the_full_valve(options: dict[str, object]) -> None:
    assert_same_rounds({"lam": 0.01, "mu": 0.1, **options}, make_case("mlp", 20), rounds=2)


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


@pytest.mark.parametrize("upload", ["full", "low_rank"])
@pytest.mark.parametrize("engine", [*ENGINES, "sharded"])
def test_every_engine_trains_the_factored_valve_as_the_loop_trains_the_full_one(
    engine: str, upload: str, float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine in ("vmap", "workers"):
        monkeypatch.setattr(ENGINES[engine], "min_calls_to_trace", 0)
    expected = full_rounds()
    actual = train_rounds(make_engine(engine, GPFL(lam=0.01, mu=0.1, valve="factored", valve_upload=upload)))
    for a, b in zip(actual, expected, strict=True):
        assert all(leaf.dtype == torch.float64 for leaf in tree.leaves(a))
        assert difference(a, b) < LIMIT


def test_local_state_holds_no_matrix_of_the_valve() -> None:
    case = make_case("cnn4")
    for valve, largest in (("factored", 10 * 16), ("full", 16 * 16)):
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


# Uploads of low rank.


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, CLASSES),
        ({"p_scale": "mean", "reg": "norm"}, CLASSES),
        ({"valve_gradient": "global"}, 1),
        ({"without": ("pci",)}, 2),
        ({"without": ("gce",)}, 2),
    ],
    ids=str,
)
def test_the_mean_of_encoded_uploads_is_that_of_full_ones(options: dict[str, object], rows: int) -> None:
    """With clients of other class counts, weights and numbers of steps, hence other d."""
    case, means, sizes = make_case("mlp", steps=20), [], []
    for valve_upload in ("low_rank", "full"):
        method = GPFL(lam=0.01, mu=0.1, valve_upload=valve_upload, **options).bind(case.net, lr=0.05, epochs=1)  # type: ignore[arg-type]
        shared, private = (tree.map_leaves(lambda t: t.double(), state) for state in method.init(0))
        uploads = []
        for counts, steps in (([5.0, 3.0, 0.0], 20), ([1.0, 1.0, 6.0], 7), ([0.0, 0.0, 4.0], 11)):
            client = ClientInfo(*(torch.tensor(v).double() for v in (sum(counts), counts, 0.0, 1.0)))
            state = method.download(shared, private, client)
            for step, x in enumerate(case.x[:steps]):
                batch = Batch(x.double(), (torch.arange(len(x)) + step) % CLASSES, torch.ones(len(x)))
                state, _ = method.step(shared, state, batch, client)
            uploads.append(method.upload(shared, state, private, client)[0])
        mean = tree.map_leaves(lambda a, b, c: 0.5 * a + 0.3 * b + 0.2 * c, *uploads)
        sizes.append(upload_bytes(method, mean))
        assert sizes[-1] == tree.count_bytes(mean)
        means.append(method.aggregate(shared, mean))
    assert means[0].keys() == means[1].keys()
    assert difference(means[0], means[1]) < LIMIT
    width, number = case.net.width, torch.float64.itemsize
    assert sizes[1] - sizes[0] == number * (2 * width * (width - rows) - 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"valve": "full"}, "method.valve 'full' trains V entry by entry"),
        ({"cond_source": "stale_local"}, "embeddings that the server does not have"),
        ({"cond_source": "stale_local", "valve_gradient": "global"}, "embeddings that the server does not have"),
    ],
)
def test_a_valve_that_cannot_be_encoded_is_an_error(options: dict[str, object], reason: str) -> None:
    with pytest.raises(GpflError, match=f"'low_rank', but .*{reason}"):
        GPFL(valve_upload="low_rank", **options).bind(make_case("mlp").net, lr=0.1, epochs=1)  # type: ignore[arg-type]


def test_an_encoding_that_is_not_smaller_is_an_error() -> None:
    net = net_from_architecture(MLP(hidden=(CLASSES,)), "mlp", torch.randn(2, 5), CLASSES)
    with pytest.raises(GpflError, match="no smaller with 3 classes and features of width 3: set"):
        GPFL(valve_upload="low_rank").bind(net, lr=0.1, epochs=1)
    GPFL(valve_upload="low_rank", valve_gradient="global").bind(net, lr=0.1, epochs=1)  # one column in place of three


@pytest.mark.parametrize("options", [{"without": ("cov",)}, {"share_valve": False}], ids=str)
def test_without_a_valve_in_uploads_its_form_has_no_effect(options: dict[str, object]) -> None:
    runs = [gpfl.fit("gpfl", toy_federation(), rounds=1, seed=3, valve_upload=form, **options) for form in ("full", "low_rank")]
    assert runs[0].summary["bytes_up"] == runs[1].summary["bytes_up"]
    assert difference(runs[0].outcome.last.shared, runs[1].outcome.last.shared) == 0


@pytest.mark.parametrize("defence", [{"clip": 1.0}, {"bits": 8}, {"top_k": 0.1}, {"example_clip": 1.0}], ids=str)
def test_defences_need_the_entries_of_the_valve(defence: dict[str, float]) -> None:
    method = GPFL(valve_upload="low_rank").bind(make_case("mlp").net, lr=0.1, epochs=1)
    with pytest.raises(GpflError, match="act on the entries of V: set it to 'full'"):
        defend(method, DefenceConfig(**defence), seed=0, min_clients=1)  # type: ignore[arg-type]


def test_the_norm_of_an_encoded_update_is_that_of_the_full_one() -> None:
    case, norms = make_case("mlp", steps=10), []
    client = ClientInfo(*(torch.tensor(v) for v in (8.0, [5.0, 3.0, 0.0], 0.0, 1.0)))
    for valve_upload in ("full", "low_rank"):
        method = GPFL(valve_upload=valve_upload).bind(case.net, lr=0.05, epochs=1)
        shared, private = method.init(0)
        state = method.download(shared, private, client)
        for x in case.x:
            state, _ = method.step(shared, state, Batch(x, torch.arange(len(x)) % 2, torch.ones(len(x))), client)
        upload, _ = method.upload(shared, state, private, client)
        norms.append(update_norm(tree.flatten(upload), tree.flatten(shared), method))
        guard = Guard(tree.flatten(upload), method, max_norm_ratio=1.5)
        assert not guard.find_faults(dict.fromkeys(range(3), tree.flatten(upload)), tree.flatten(shared))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
