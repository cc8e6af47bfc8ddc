"""Every engine computes the numbers of the loop, however it traces, packs, chunks and distributes the work."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.core.net import Net
from gpfl.core.precision import matmul_precision
from gpfl.core.tree import Tree
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.engine import ENGINES, RunSpec, workers
from gpfl.engine.base import Engine, EvalRequest, RoundResult, TrainRequest
from gpfl.engine.compiler.program import Program
from gpfl.engine.vmap import Vmap
from gpfl.engine.workers import Workers
from gpfl.errors import DivergenceError
from gpfl.methods import METHODS
from gpfl.methods.fedavg import FedAvg
from gpfl.models.architectures import FastText, net_from_architecture
from gpfl.models.custom import net_from_module
from gpfl.training import config as configs
from gpfl.training.execute import PreparedRun, execute, execute_trials
from gpfl.training.prepare import prepare

LIMIT = 1e-5
ROUNDS = 3
SIZES = (41, 27, 33, 31, 9)  # 30, 20, 24, 23 and 6 training samples
fast_engines = pytest.mark.parametrize("engine", ["vmap", "workers"])

Build = Callable[[], tuple[gpfl.Federation, Net]]


@pytest.fixture(autouse=True)
def _trace_everything_on_three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vmap, "min_calls_to_trace", 0)
    monkeypatch.setattr(Workers, "min_calls_to_trace", 0)
    monkeypatch.setattr(workers, "available_cores", lambda: 3)


# Federations and nets.


def with_net(federation: gpfl.Federation, build: Callable[[], nn.Module]) -> tuple[gpfl.Federation, Net]:
    return federation, net_from_module(build, federation.table.inputs(torch.arange(2)), federation.table.classes)


def linear_net() -> tuple[gpfl.Federation, Net]:
    return with_net(toy_federation(SIZES), lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))


def batch_norm_net() -> tuple[gpfl.Federation, Net]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    return with_net(toy_federation(SIZES), build)


def conv_net() -> tuple[gpfl.Federation, Net]:
    def build() -> nn.Module:
        first = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(3, 4, (1, 3), stride=(1, 2), dilation=(1, 1)), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*first, *second, nn.Linear(12, 3))

    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 2, 6, 6)).astype(np.float32), np.arange(n) % 3) for n in SIZES[:4]]
    return with_net(gpfl.federate(clients), build)


def text_net() -> tuple[gpfl.Federation, Net]:
    """Texts that are mostly padding, with words that repeat."""
    rng = np.random.default_rng(0)
    n = sum(SIZES)
    words = rng.integers(1, 12, size=(n, 7)) * (np.arange(7) < rng.integers(1, 7, size=(n, 1)))
    table = gpfl.Table(words, np.arange(n) % 3, kind="tokens", vocabulary=15)
    federation = gpfl.federate(table, partition="dirichlet", clients=4, beta=5.0, min_samples=12, seed=1)
    architecture = FastText(hidden=5).fit_input(table.input_spec)
    return federation, net_from_architecture(architecture, "fasttext", table.inputs(torch.arange(2)), 3)


NETS: dict[str, Build] = {"linear": linear_net, "batch norm": batch_norm_net, "conv": conv_net, "text": text_net}


# Runs.


def make(engine: str, method: Method, build: Build, **schedule: object) -> Engine:
    federation, net = build()
    bound = method.bind(
        net, lr=0.05, epochs=int(schedule.pop("epochs", 1)), batch_norm=str(schedule.pop("batch_norm", "local"))
    )
    compiled = str(schedule.pop("compile", "off"))
    full = Schedule(**{"seed": 3, "rounds": ROUNDS, "client_fraction": 0.8, **schedule})  # type: ignore[arg-type]
    return ENGINES[engine](RunSpec(bound, federation, full, compile=compiled))


def initial_state(engine: Engine) -> tuple[Tree, Tree]:
    shared, private = engine.method.init(0)
    return shared, tree.repeat(private, len(engine.federation))


def cohort_of(engine: Engine, round_: int) -> list[int]:
    return [client for client in engine.schedule.sample_clients(round_, len(engine.federation)) if engine.can_train(client)]


class Run:
    """The state after some rounds, and the loss terms of each round."""

    def __init__(self, engine: Engine, rounds: int = ROUNDS) -> None:
        self.engine, self.terms = engine, []
        self.shared, self.private = initial_state(engine)
        for round_ in range(rounds):
            clients = cohort_of(engine, round_)
            index = torch.tensor(clients)
            result = engine.train(self.shared, tree.take(self.private, index), clients, round_)
            self.terms.append(result.terms)
            self.shared = engine.method.aggregate(self.shared, result.mean)
            tree.index_copy_(self.private, index, result.private)

    @property
    def flat(self) -> dict[str, Tensor]:
        terms = {str(round_): values for round_, values in enumerate(self.terms)}
        return tree.flatten({"shared": self.shared, "private": self.private, "terms": terms})  # type: ignore[dict-item]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = LIMIT) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert float((value - expected[name]).abs().max()) <= limit, name


def assert_same_evaluation(run: Run, other: Engine) -> None:
    for split in ("train", "test"):
        expected, found = (engine.evaluate(run.shared, run.private, ROUNDS, split) for engine in (run.engine, other))
        assert found.correct.tolist() == expected.correct.tolist()
        assert found.n_samples.tolist() == expected.n_samples.tolist()
        np.testing.assert_allclose(found.loss_sum, expected.loss_sum, rtol=LIMIT, atol=LIMIT)
        assert_same_logits(run, other, split)


def assert_same_logits(run: Run, other: Engine, split: str) -> None:
    """The logits are those of the loop and of the scores, without padding."""
    expected, found = (engine.predict(run.shared, run.private, ROUNDS, split) for engine in (run.engine, other))
    scores, federation = run.engine.evaluate(run.shared, run.private, ROUNDS, split), other.federation
    for client, shard in enumerate(federation.shards):
        y = federation.table.y[torch.from_numpy(shard.split(split))]
        assert found[client].shape == (len(y), federation.table.classes)
        torch.testing.assert_close(found[client], expected[client], rtol=0, atol=LIMIT)
        assert int((found[client].argmax(1) == y).sum()) == scores.correct[client]
        assert float(cross_entropy(found[client], y, reduction="sum")) == pytest.approx(scores.loss_sum[client], rel=LIMIT)


def assert_matches_loop(engine: str, method: Method, build: Build, **schedule: object) -> None:
    loop = Run(make("loop", method, build, **schedule))
    other = make(engine, method, build, **schedule)
    assert_close(Run(other).flat, loop.flat)
    assert_same_evaluation(loop, other)
    if type(other).min_calls_to_trace == 0 and method.name in METHODS:
        assert all(program.traced for program in programs_of(other))


def programs_of(engine: Engine) -> list[Program]:
    found = [*engine._programs.values(), *(engine._evaluator._programs.values() if isinstance(engine, Vmap) else ())]
    if engine.method.final_phases():
        found += engine._final_engine._programs.values()
    assert found or (isinstance(engine, Vmap) and engine.chunk_size == 1)
    return [program for entry in found for program in (entry if isinstance(entry, list) else [entry])]


@fast_engines
@pytest.mark.parametrize("method", METHODS)
def test_traced_steps_match_the_loop(method: str, engine: str) -> None:
    assert_matches_loop(engine, METHODS[method](), linear_net)


@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize(("method", "net"), [("gpfl", "conv"), ("perfedavg", "conv"), ("fedavg", "text")])
def test_matmul_convolutions_match_the_loop(method: str, net: str, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "matmul_devices", ("cpu",))
    assert_matches_loop("vmap", METHODS[method](), NETS[net], compile=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_steps_match_the_loop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.engine.compiler.matmul_passes.MIN_EXPANDED_SIZE", 1)  # otherwise only for wide nets
    assert_matches_loop("vmap", METHODS[method](), linear_net, compile="on")


@pytest.mark.slow
@fast_engines
@pytest.mark.parametrize(("method", "net"), [("gpfl", "conv"), ("fedavg", "text"), ("fedphp", "batch norm")])
def test_compiled_steps_of_other_nets_match_the_loop(method: str, net: str, engine: str) -> None:
    assert_matches_loop(engine, METHODS[method](), NETS[net], compile="on", batch_norm="average")


@fast_engines
@pytest.mark.parametrize("method", ["fedavg", "gpfl", "perfedavg", "fedphp", "fedavg-ft"])
def test_batch_norm_matches_the_loop(method: str, engine: str) -> None:
    assert_matches_loop(engine, METHODS[method](), batch_norm_net, drop_last=method == "gpfl", batch_norm="average")


@fast_engines
@pytest.mark.parametrize("method", ["local", "gpfl", pytest.param("pfedme", marks=pytest.mark.slow)])
def test_embeddings_match_the_loop(method: str, engine: str) -> None:
    assert_matches_loop(engine, METHODS[method](), text_net, drop_last=False)


@fast_engines
def test_convolutions_match_the_loop(engine: str) -> None:
    assert_matches_loop(engine, METHODS["fedrep"](), conv_net, epochs=2)


@fast_engines
@pytest.mark.parametrize(
    ("method", "net"), [("gpfl", "linear"), ("gpfl", "conv"), ("fedphp", "batch norm"), ("fedavg", "text")]
)
def test_bf16_on_a_cpu_agrees_with_the_loop_repeats_and_is_close_to_float32(method: str, net: str, engine: str) -> None:
    exact = Run(make("loop", METHODS[method](), NETS[net])).flat
    with matmul_precision("bf16"):
        loop, first, second = (Run(make(name, METHODS[method](), NETS[net])).flat for name in ("loop", engine, engine))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_close(first, loop, limit=0.02)
    assert_close(loop, exact, limit=0.05)
    weights = [name for name in exact if name.startswith("shared/")]
    assert all(loop[name].dtype == exact[name].dtype for name in exact)
    assert max(float((loop[name] - exact[name]).abs().max()) for name in weights) > 1e-5  # the products were rounded


@pytest.mark.parametrize(
    ("chunk_size", "slots", "traced"),
    [(128, 1, False), (128, 2, True), (3, 2, True), (3, 2, False), (1, 64, False), (3, 64, False), (2, 1, False)],
)
def test_chunks_and_slots_do_not_change_results(
    chunk_size: int, slots: int, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("chunk_size", chunk_size), ("max_slots", slots), ("min_calls_to_trace", 0 if traced else 10**9)):
        monkeypatch.setattr(Vmap, name, value)
    assert_matches_loop("vmap", METHODS["ditto"](), linear_net, epochs=2)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_number_of_threads_does_not_change_results(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "available_cores", lambda: threads)
    assert_matches_loop("workers", METHODS["ditto"](), linear_net)


def test_segments_of_a_plan_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpfl.engine import batched_evaluation, vmap

    monkeypatch.setattr(vmap, "SEGMENT", 2)
    monkeypatch.setattr(batched_evaluation, "SEGMENT", 1)
    monkeypatch.setattr(batched_evaluation, "GROUP_SAMPLES", 1)  # batches of 16
    monkeypatch.setattr(Vmap, "max_slots", 2)
    assert_matches_loop("vmap", METHODS["fedavg"](), linear_net, epochs=2)


def test_later_cohort_may_have_more_steps_than_the_first() -> None:
    """As many slots as clients, and the client with most steps is not in the first round."""
    clients = toy_federation((41, 41, 41, 56))
    build = lambda: with_net(clients, lambda: nn.Sequential(nn.Linear(6, 3)))  # noqa: E731
    late = next(seed for seed in range(99) if 3 not in Schedule(seed=seed, rounds=3, client_fraction=0.75).sample_clients(0, 4))
    loop, vmap = (make(name, FedAvg(), build, seed=late, client_fraction=0.75) for name in ("loop", "vmap"))
    assert len(vmap.plan(3, 0)[0]) > len(vmap.plan(0, 0)[0])
    assert_close(Run(vmap).flat, Run(loop).flat)


@fast_engines
@pytest.mark.parametrize("net", ["linear", "batch norm"])
def test_same_seed_repeats_a_run_to_the_bit(net: str, engine: str) -> None:
    first, second = (Run(make(engine, METHODS["fedavg"](), NETS[net])).flat for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@fast_engines
def test_seeds_give_different_results(engine: str) -> None:
    first, second = (Run(make(engine, METHODS["fedavg"](), linear_net, seed=seed), 1).flat for seed in (3, 4))
    assert not torch.equal(first["shared/head/weight"], second["shared/head/weight"])


# Concurrent trials, and cohorts in several requests.


def flat(result: RoundResult) -> dict[str, Tensor]:
    return tree.flatten({"mean": result.mean, "private": result.private, "terms": dict(result.terms)})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "net"), [("gpfl", "linear"), ("perfedavg", "batch norm")])
def test_concurrent_rounds_match_those_of_each_trial_alone(
    method: str, net: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vmap, "max_slots", 2)
    runner = make(engine, METHODS[method](), NETS[net])
    trials = []
    for seed in (3, 4, 5):
        schedule = dataclasses.replace(runner.schedule, seed=seed)
        shared, private = runner.method.init(seed)
        clients = [c for c in schedule.sample_clients(1, len(runner.federation)) if runner.can_train(c)]
        trials.append(TrainRequest(shared, tree.repeat(private, len(clients)), clients, 1, schedule, clients, runner.method))

    loop = make("loop", METHODS[method](), NETS[net])
    for concurrent, alone in zip(runner.train_rounds(trials), map(loop.train_round, trials), strict=True):
        assert_close(flat(concurrent), flat(alone))


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_for_parts_of_a_cohort_sum_to_the_round(engine: str) -> None:
    runner = make(engine, METHODS["fedrep"](), linear_net)
    shared, private = initial_state(runner)
    full = runner.train(shared, private, range(5), 0)
    parts = [[0, 3], [1, 2, 4]]
    results = [
        runner.train_round(
            TrainRequest(shared, tree.take(private, torch.tensor(part)), part, 0, runner.schedule, range(5), runner.method)
        )
        for part in parts
    ]
    total = tree.map_leaves(torch.add, results[0].mean, results[1].mean)
    assert_close(tree.flatten(total), tree.flatten(full.mean))
    for part, result in zip(parts, results, strict=True):
        assert_close(tree.flatten(result.private), tree.flatten(tree.take(full.private, torch.tensor(part))))
    all_scores = runner.evaluate(shared, full.private, 1, "test")
    index = torch.tensor(parts[1])
    scores = runner.evaluate_clients(EvalRequest(shared, tree.take(full.private, index), parts[1], 1, "test"))
    assert scores.correct.tolist() == all_scores.correct[parts[1]].tolist()


# Inputs are not modified.


@fast_engines
def test_states_and_samples_are_not_modified(engine: str) -> None:
    runner = make(engine, METHODS["fedphp"](), batch_norm_net)
    state, table = initial_state(runner), runner.federation.table
    before = copy.deepcopy((state, table.x, table.y))
    clients = cohort_of(runner, 0)
    result = runner.train(state[0], tree.take(state[1], torch.tensor(clients)), clients, 0)
    first = copy.deepcopy(result)
    runner.evaluate(*state, 0, "test")
    runner.train(state[0], tree.take(state[1], torch.tensor(clients)), clients, 1)
    assert torch.equal(table.x, before[1])
    assert torch.equal(table.y, before[2])
    for now, then in ((state[0], before[0][0]), (state[1], before[0][1]), (result.mean, first.mean)):
        assert_close(tree.flatten(now), tree.flatten(then), 0.0)
    assert_close(tree.flatten(result.private), tree.flatten(first.private), 0.0)
    assert_close(dict(result.terms), dict(first.terms), 0.0)


@fast_engines
def test_rows_that_may_not_be_text_net_are_read(engine: str) -> None:
    federation, net = linear_net()
    x = federation.table.x.numpy()
    x.setflags(write=False)
    before = x.copy()
    run = Run(make(engine, METHODS["fedavg"](), lambda: (federation, net)), 1)
    assert np.array_equal(x, before)
    assert tree.is_finite(run.shared)


# Unusual methods and nets.


class KeyReversingFedAvg(FedAvg):
    """FedAvg that also stores the head before the last step, with trees whose keys change their order."""

    name = "key-reversing"

    def init(self, seed: int) -> tuple[Tree, Tree]:
        shared, private = super().init(seed)
        return shared, {**private, "past": tree.map_leaves(torch.zeros_like, tree.branch(shared, "head"))}

    def step(self, shared, local_state, batch, client):
        after, terms = super().step(shared, local_state, batch, client)
        after["past"] = local_state["head"]
        return reverse_keys(after), terms

    def upload(self, shared, local_state, private, client):
        sent, kept = super().upload(shared, local_state, private, client)
        return sent, reverse_keys(kept)

    def aggregate(self, shared, mean):
        return reverse_keys(super().aggregate(shared, mean))


def reverse_keys(state: Tree) -> Tree:
    return {key: reverse_keys(value) if isinstance(value, dict) else value for key, value in reversed(state.items())}


@fast_engines
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "untraced"])
def test_key_order_and_state_that_moves_between_keys_do_not_matter(
    engine: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENGINES[engine], "min_calls_to_trace", 0 if traced else 10**9)

    def build() -> tuple[gpfl.Federation, Net]:  # layers of one shape: one mistaken for another would fit
        return with_net(
            toy_federation(SIZES), lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
        )

    assert_matches_loop(engine, KeyReversingFedAvg(), build)


class Branching(nn.Module):
    """A layer that branches on the values of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.relu() if float(row.detach().sum()) > 0 else row.tanh() for row in x])


class Masked(nn.Module):
    """A layer that squares the entries above a limit, whose number varies."""

    def forward(self, x: Tensor) -> Tensor:
        out, large = x.clone(), x.detach() > 0.1
        out[large] = x[large] ** 2
        return out


class Distinct(nn.Module):
    """A layer that divides each row by the number of its distinct entries."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row / row.detach().round().unique().numel() for row in x])


@pytest.mark.parametrize("layer", [Branching, Masked, Distinct])
def test_workers_run_nets_that_cannot_be_traced(layer: type[nn.Module]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), layer(), nn.Linear(8, 3))

    loop, threads = (make(name, FedAvg(), lambda: with_net(toy_federation(SIZES), build)) for name in ("loop", "workers"))
    assert_close(Run(threads).flat, Run(loop).flat)


@pytest.mark.parametrize("engine", ENGINES)
def test_split_without_samples_has_zero_scores(engine: str) -> None:
    runner = make(engine, METHODS["perfedavg"](), linear_net)
    assert runner.federation.n_samples("validation").sum() == 0
    scores = runner.evaluate(*initial_state(runner), 0, "validation")
    assert scores.correct.tolist() == scores.loss_sum.tolist() == [0.0] * len(SIZES)
    assert [logits.shape for logits in runner.predict(*initial_state(runner), 0, "validation")] == [(0, 3)] * len(SIZES)


class Slow(nn.Module):
    """A layer that waits until a second thread is in its forward too: shared modules would mix up their weights."""

    meeting: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.meeting is not None:
            try:
                self.meeting.wait(0.2)
            except threading.BrokenBarrierError:
                self.meeting.reset()
        return x


def test_threads_do_not_share_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "min_calls_to_trace", 10**9)

    def build() -> tuple[gpfl.Federation, Net]:
        def layers() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), Slow(), nn.Linear(8, 8), Slow(), nn.Linear(8, 3))

        return with_net(toy_federation((14, 14)), layers)

    loop, threads = (make(name, METHODS["local"](), build, client_fraction=1.0) for name in ("loop", "workers"))
    expected = Run(loop)
    monkeypatch.setattr(Slow, "meeting", threading.Barrier(2))
    assert_close(Run(threads).flat, expected.flat)
    scores = threads.evaluate(expected.shared, expected.private, ROUNDS, "test")
    monkeypatch.setattr(Slow, "meeting", None)
    assert scores.loss_sum == pytest.approx(
        loop.evaluate(expected.shared, expected.private, ROUNDS, "test").loss_sum, abs=LIMIT
    )


@fast_engines
def test_number_of_torch_threads_is_restored(engine: str) -> None:
    before = torch.get_num_threads()
    runner = make(engine, METHODS["fedavg"](), linear_net)
    Run(runner, 1)
    runner.evaluate(*initial_state(runner), 0, "test")
    assert torch.get_num_threads() == before


HYPERPARAMETERS = {
    "gpfl": ("lam", "mu", "lr"),
    "fedprox": ("mu", "lr"),
    "ditto": ("lam", "lr"),
    "pfedme": ("beta", "lr"),
    "fedphp": ("lr",),
    "fedavg-ft": ("lr", "ft_lr"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("pfedme", "fedphp") else n for n in HYPERPARAMETERS]
)
def test_concurrent_trials_with_other_hyperparameters_match_each_alone(name: str) -> None:
    federation = toy_federation((31, 12, 25))
    runs = []
    for factor in (1.0, 0.5, 0.2):
        sections: configs.ConfigDict = {
            "method": {"name": name},
            "train": {"rounds": 3, "lr": 0.1 * factor},
            "net": {"name": "mlp", "hidden": [8]},
            "run": {"engine": "vmap"},
        }
        config, spec = prepare(configs.resolve_config(sections, federation=federation), federation, None, None)
        changed = {key: getattr(spec.method, key) * factor for key in HYPERPARAMETERS[name]}
        method = spec.method.replace(**changed)
        runs.append(PreparedRun(config, dataclasses.replace(spec, method=method)))
    results = execute_trials(runs)
    for run, result in zip(runs, results, strict=True):
        alone = execute(run, ENGINES["loop"](run.spec))
        assert [line["loss"] for line in result.history] == pytest.approx([line["loss"] for line in alone.history], abs=1e-5)
        for model, expected in zip(result.clients, alone.clients, strict=True):
            x = federation.table.x
            assert np.abs(model.logits(x) - expected.logits(x)).max() < 1e-5
    losses = [result.history[-1]["loss"] for result in results]
    assert len(set(losses)) == 3, "the hyperparameters make a difference"


@pytest.mark.parametrize("name", ["gpfl", pytest.param("ditto", marks=pytest.mark.slow), "fedavg-ft", "local"])
def test_concurrent_trials_on_other_splits_and_encodings_match_each_alone(name: str) -> None:
    rng = np.random.default_rng(0)
    raw = RawColumns(Schema((ColumnSchema("age"), ColumnSchema("dose"), ColumnSchema("weight"))), rng.normal(9, 4, (130, 3)))
    labels = (raw.values[:, 0] + rng.normal(0, 4, 130) > 9).astype(int)
    table = gpfl.Table(raw, labels, client_ids=np.repeat(np.arange(3), (40, 60, 30)), client_names=list("abc"))
    runs = []
    for k in range(3):
        federation = gpfl.federate(table, partition="natural", seed=k, test_fraction=0.2 + 0.1 * k, validation_fraction=0.2)
        sections: configs.ConfigDict = {
            "method": {"name": name},
            "train": {"rounds": 3, "lr": 0.1, "client_fraction": (0.4, 1.0)},
            "net": {"name": "mlp", "hidden": [8]},
            "run": {"engine": "vmap", "seed": k},
        }
        runs.append(PreparedRun(*prepare(configs.resolve_config(sections, federation=federation), federation)))
    results = execute_trials(runs)
    for run, result in zip(runs, results, strict=True):
        assert isinstance(result, gpfl.Result)
        alone = execute(run, ENGINES["loop"](run.spec))
        for key in ("loss", "validation_accuracy", "bytes_up", "participants"):
            assert [line.get(key) for line in result.history] == pytest.approx(
                [line.get(key) for line in alone.history], abs=1e-5
            )
        x = run.spec.federation.table.x
        for model, expected in zip(result.clients, alone.clients, strict=True):
            assert np.abs(model.logits(x) - expected.logits(x)).max() < 1e-5
            assert model.preprocessor == expected.preprocessor
        for split in ("train", "validation", "test"):
            own, reference = (each.evaluate(split, n_resamples=0).overall.values for each in (result, alone))
            assert own == pytest.approx(reference, abs=1e-5)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_diverging_trial_does_not_stop_the_others(engine: str) -> None:
    federation = toy_federation((31, 12, 25))
    runs = []
    for lr in (1e30, 0.1, 1e30):
        sections: configs.ConfigDict = {
            "method": {"name": "fedavg"},
            "train": {"rounds": 3, "lr": lr},
            "run": {"engine": engine},
        }
        runs.append(PreparedRun(*prepare(configs.resolve_config(sections, federation=federation), federation, None, None)))
    first, second, third = execute_trials(runs)
    assert isinstance(first, DivergenceError)
    assert isinstance(third, DivergenceError)
    assert "lower train.lr (--lr or --set train.lr=…, now 1e+30)" in str(first)
    alone = execute(runs[1], ENGINES[engine](runs[1].spec))
    assert isinstance(second, gpfl.Result)
    assert [line["loss"] for line in second.history] == pytest.approx([line["loss"] for line in alone.history], abs=1e-5)


def test_last_remaining_trial_keeps_its_hyperparameters() -> None:
    first = make("vmap", FedAvg(), linear_net)
    shared, private = initial_state(first)
    for lr, clients in ((0.05, [0, 1]), (0.01, [0, 1]), (0.01, [2])):  # a single client is not stacked
        method = first.method.replace(lr=lr)
        request = TrainRequest(shared, tree.take(private, torch.tensor(clients)), clients, 0, first.schedule, clients, method)
        loop = make("loop", FedAvg(), linear_net)
        loop.method = loop.method.replace(lr=lr)
        assert_close(flat(first.train_round(request)), flat(loop.train_round(request)))
        for trial in first.train_rounds([request, request]):
            assert_close(flat(trial), flat(loop.train_round(request)))


def test_check_for_vmap_traces_nothing() -> None:
    runner = make("vmap", FedAvg(), linear_net, compile="on")
    assert isinstance(runner, Vmap)
    runner.check_vmappable()
    assert not any(program.traced for program in programs_of(runner))


def test_trials_that_differ_in_more_than_floats_cannot_run_concurrently() -> None:
    federation = toy_federation((31, 12))
    runs = []
    for reg in ("wd", "norm"):
        sections: configs.ConfigDict = {
            "method": {"name": "gpfl", "reg": reg},
            "train": {"rounds": 1},
            "run": {"engine": "vmap"},
        }
        runs.append(PreparedRun(*prepare(configs.resolve_config(sections, federation=federation), federation, None, None)))
    with pytest.raises(gpfl.GpflError, match="concurrent trials must have the same reg, not 'wd' and others"):
        execute_trials(runs)
