"""Every engine gives the plain engine's numbers, however it traces, packs, cuts and shares the work out."""

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

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.core.net import Net
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES, RunSpec, workers
from gpfl.engine.base import Engine, EvalRequest, RoundResult, TrainRequest
from gpfl.engine.compiler.program import Program
from gpfl.engine.vmap import Vmap
from gpfl.engine.workers import Workers
from gpfl.errors import DivergenceError
from gpfl.methods import METHODS
from gpfl.methods.fedavg import FedAvg
from gpfl.models.architecture import net_from_architecture
from gpfl.models.fasttext import FastText
from gpfl.models.splitting import net_from_module
from gpfl.training import api
from gpfl.training import config as configs

LIMIT = 1e-5
ROUNDS = 3
SIZES = (41, 27, 33, 31, 9)  # 30, 20, 24, 23 and 6 training rows
fast = pytest.mark.parametrize("engine", ["vmap", "workers"])

Build = Callable[[], tuple[gpfl.Federation, Net]]


@pytest.fixture(autouse=True)
def _all_traced_on_three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vmap, "trace_from", 0)
    monkeypatch.setattr(Workers, "trace_from", 0)
    monkeypatch.setattr(workers, "cores", lambda: 3)


# Federations and nets.


def with_net(federation: gpfl.Federation, build: Callable[[], nn.Module]) -> tuple[gpfl.Federation, Net]:
    return federation, net_from_module(build, federation.table.inputs(torch.arange(2)), federation.table.classes)


def layered() -> tuple[gpfl.Federation, Net]:
    return with_net(toy_federation(SIZES), lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))


def normalised() -> tuple[gpfl.Federation, Net]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    return with_net(toy_federation(SIZES), build)


def convolved() -> tuple[gpfl.Federation, Net]:
    def build() -> nn.Module:
        first = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(3, 4, (1, 3), stride=(1, 2), dilation=(1, 1)), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*first, *second, nn.Linear(12, 3))

    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(n, 2, 6, 6)).astype(np.float32), np.arange(n) % 3) for n in SIZES[:4]]
    return with_net(gpfl.federate(clients), build)


def written() -> tuple[gpfl.Federation, Net]:
    """Texts of which most is padding, and words that come many times."""
    draw = np.random.default_rng(0)
    rows = sum(SIZES)
    words = draw.integers(1, 12, size=(rows, 7)) * (np.arange(7) < draw.integers(1, 7, size=(rows, 1)))
    table = gpfl.Table(words, np.arange(rows) % 3, kind="tokens", vocabulary=15)
    federation = gpfl.federate(table, partition="dirichlet", clients=4, beta=5.0, min_samples=12, seed=1)
    architecture = FastText(hidden=5).fit_input(table.input_spec)
    return federation, net_from_architecture(architecture, "fasttext", table.inputs(torch.arange(2)), 3)


NETS: dict[str, Build] = {"layered": layered, "normalised": normalised, "convolved": convolved, "written": written}


# Runs.


def make(engine: str, method: Method, build: Build, **schedule: object) -> Engine:
    federation, net = build()
    bound = method.bind(
        net, lr=0.05, epochs=int(schedule.pop("epochs", 1)), batch_norm=str(schedule.pop("batch_norm", "local"))
    )
    compiled = str(schedule.pop("compile", "off"))
    whole = Schedule(**{"seed": 3, "rounds": ROUNDS, "client_fraction": 0.8, **schedule})  # type: ignore[arg-type]
    return ENGINES[engine](RunSpec(bound, federation, whole, compile=compiled))


def start(engine: Engine) -> tuple[Tree, Tree]:
    shared, private = engine.method.init(0)
    return shared, tree.repeat(private, len(engine.federation))


def cohort_of(engine: Engine, number: int) -> list[int]:
    return [client for client in engine.schedule.sample_clients(number, len(engine.federation)) if engine.can_train(client)]


class Run:
    """The states after some rounds, and the terms of each."""

    def __init__(self, engine: Engine, rounds: int = ROUNDS) -> None:
        self.engine, self.terms = engine, []
        self.shared, self.private = start(engine)
        for number in range(rounds):
            clients = cohort_of(engine, number)
            index = torch.tensor(clients)
            cohort = engine.train(self.shared, tree.take(self.private, index), clients, number)
            self.terms.append(cohort.terms)
            self.shared = engine.method.aggregate(self.shared, cohort.mean)
            tree.index_copy_(self.private, index, cohort.private)

    @property
    def flat(self) -> dict[str, Tensor]:
        terms = {str(number): values for number, values in enumerate(self.terms)}
        return tree.flatten({"shared": self.shared, "private": self.private, "terms": terms})  # type: ignore[dict-item]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = LIMIT) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert float((value - expected[name]).abs().max()) <= limit, name


def assert_judges_alike(run: Run, other: Engine) -> None:
    for part in ("train", "test"):
        mine, theirs = (engine.evaluate(run.shared, run.private, ROUNDS, part) for engine in (run.engine, other))
        assert mine.correct.tolist() == theirs.correct.tolist()
        assert mine.rows.tolist() == theirs.rows.tolist()
        np.testing.assert_allclose(mine.loss_sum, theirs.loss_sum, rtol=LIMIT, atol=LIMIT)


def assert_like_loop(engine: str, method: Method, build: Build, **schedule: object) -> None:
    plain = Run(make("loop", method, build, **schedule))
    other = make(engine, method, build, **schedule)
    assert_close(Run(other).flat, plain.flat)
    assert_judges_alike(plain, other)
    if type(other).trace_from == 0 and method.name in METHODS:
        assert all(program.traced for program in programs_of(other))


def programs_of(engine: Engine) -> list[Program]:
    found = [*engine._programs.values(), *(engine._judging._programs.values() if isinstance(engine, Vmap) else ())]
    assert found or (isinstance(engine, Vmap) and engine.chunk == 1)
    return [program for lanes in found for program in (lanes if isinstance(lanes, list) else [lanes])]


@fast
@pytest.mark.parametrize("method", METHODS)
def test_traced_steps_give_the_numbers_of_plain_ones(method: str, engine: str) -> None:
    assert_like_loop(engine, METHODS[method](), layered)


@pytest.mark.parametrize("compiled", ["on", "off"])
@pytest.mark.parametrize(("method", "net"), [("gpfl", "convolved"), ("perfedavg", "convolved"), ("fedavg", "written")])
def test_programs_of_a_gpu_give_the_same_numbers(method: str, net: str, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "products_on", ("cpu",))
    assert_like_loop("vmap", METHODS[method](), NETS[net], compile=compiled)


@fast
@pytest.mark.parametrize("method", ["fedavg", "gpfl", "perfedavg", "fedphp"])
def test_batch_norm_gives_the_same_numbers(method: str, engine: str) -> None:
    assert_like_loop(engine, METHODS[method](), normalised, drop_last=method == "gpfl", batch_norm="average")


@fast
@pytest.mark.parametrize("method", ["local", "gpfl", "pfedme"])
def test_words_give_the_same_numbers(method: str, engine: str) -> None:
    assert_like_loop(engine, METHODS[method](), written, drop_last=False)


@fast
def test_convolutions_give_the_same_numbers(engine: str) -> None:
    assert_like_loop(engine, METHODS["fedrep"](), convolved, epochs=2)


@pytest.mark.parametrize(
    ("chunk", "slots", "traced"),
    [(128, 1, False), (128, 2, True), (3, 2, True), (3, 2, False), (1, 64, False), (3, 64, False), (2, 1, False)],
)
def test_chunks_and_slots_change_nothing(chunk: int, slots: int, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("chunk", chunk), ("slots", slots), ("trace_from", 0 if traced else 10**9)):
        monkeypatch.setattr(Vmap, name, value)
    assert_like_loop("vmap", METHODS["ditto"](), layered, epochs=2)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_number_of_threads_changes_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: threads)
    assert_like_loop("workers", METHODS["ditto"](), layered)


def test_segments_of_a_plan_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpfl.engine import batched_evaluation as judging
    from gpfl.engine import vmap

    monkeypatch.setattr(vmap, "SEGMENT", 2)
    monkeypatch.setattr(judging, "SEGMENT", 1)
    monkeypatch.setattr(judging, "JUDGED", 1)  # blocks of 16 rows
    monkeypatch.setattr(Vmap, "slots", 2)
    assert_like_loop("vmap", METHODS["fedavg"](), layered, epochs=2)


def test_cohort_with_more_steps_than_the_first_one_fits() -> None:
    """As many slots as clients, and the client with most steps comes late."""
    clients = toy_federation((41, 41, 41, 56))
    build = lambda: with_net(clients, lambda: nn.Sequential(nn.Linear(6, 3)))  # noqa: E731
    late = next(seed for seed in range(99) if 3 not in Schedule(seed=seed, rounds=3, client_fraction=0.75).sample_clients(0, 4))
    loop, vmap = (make(name, FedAvg(), build, seed=late, client_fraction=0.75) for name in ("loop", "vmap"))
    assert len(vmap.plan(3, 0)[0]) > len(vmap.plan(0, 0)[0])
    assert_close(Run(vmap).flat, Run(loop).flat)


@fast
@pytest.mark.parametrize("net", ["layered", "normalised"])
def test_same_seed_gives_the_same_bits(net: str, engine: str) -> None:
    first, second = (Run(make(engine, METHODS["fedavg"](), NETS[net])).flat for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@fast
def test_another_seed_gives_other_numbers(engine: str) -> None:
    first, second = (Run(make(engine, METHODS["fedavg"](), layered, seed=seed), 1).flat for seed in (3, 4))
    assert not torch.equal(first["shared/head/weight"], second["shared/head/weight"])


# Trials at once, and parts of a cohort.


def flat(cohort: RoundResult) -> dict[str, Tensor]:
    return tree.flatten({"mean": cohort.mean, "private": cohort.private, "terms": dict(cohort.terms)})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "net"), [("gpfl", "layered"), ("perfedavg", "normalised")])
def test_rounds_of_several_trials_at_once_are_those_of_each_alone(
    method: str, net: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vmap, "slots", 2)
    machine = make(engine, METHODS[method](), NETS[net])
    trials = []
    for seed in (3, 4, 5):
        schedule = dataclasses.replace(machine.schedule, seed=seed)
        shared, private = machine.method.init(seed)
        clients = [c for c in schedule.sample_clients(1, len(machine.federation)) if machine.can_train(c)]
        trials.append(TrainRequest(shared, tree.repeat(private, len(clients)), clients, 1, schedule, clients, machine.method))

    plain = make("loop", METHODS[method](), NETS[net])
    for together, alone in zip(machine.train_rounds(trials), map(plain.train_round, trials), strict=True):
        assert_close(flat(together), flat(alone))


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_of_a_cohort_sum_to_the_whole(engine: str) -> None:
    machine = make(engine, METHODS["fedrep"](), layered)
    shared, private = start(machine)
    whole = machine.train(shared, private, range(5), 0)
    parts = [[0, 3], [1, 2, 4]]
    found = [
        machine.train_round(
            TrainRequest(shared, tree.take(private, torch.tensor(own)), own, 0, machine.schedule, range(5), machine.method)
        )
        for own in parts
    ]
    total = tree.map_leaves(torch.add, found[0].mean, found[1].mean)
    assert_close(tree.flatten(total), tree.flatten(whole.mean))
    for own, part in zip(parts, found, strict=True):
        assert_close(tree.flatten(part.private), tree.flatten(tree.take(whole.private, torch.tensor(own))))
    everyone = machine.evaluate(shared, whole.private, 1, "test")
    own = torch.tensor(parts[1])
    scores = machine.evaluate_clients(EvalRequest(shared, tree.take(whole.private, own), parts[1], 1, "test"))
    assert scores.correct.tolist() == everyone.correct[parts[1]].tolist()


# What is given stays as it is.


@fast
def test_inputs_and_rows_of_a_client_are_not_changed(engine: str) -> None:
    machine = make(engine, METHODS["fedphp"](), normalised)
    state, table = start(machine), machine.federation.table
    kept = copy.deepcopy((state, table.x, table.y))
    clients = cohort_of(machine, 0)
    cohort = machine.train(state[0], tree.take(state[1], torch.tensor(clients)), clients, 0)
    first = copy.deepcopy(cohort)
    machine.evaluate(*state, 0, "test")
    machine.train(state[0], tree.take(state[1], torch.tensor(clients)), clients, 1)
    assert torch.equal(table.x, kept[1])
    assert torch.equal(table.y, kept[2])
    for mine, theirs in ((state[0], kept[0][0]), (state[1], kept[0][1]), (cohort.mean, first.mean)):
        assert_close(tree.flatten(mine), tree.flatten(theirs), 0.0)
    assert_close(tree.flatten(cohort.private), tree.flatten(first.private), 0.0)
    assert_close(dict(cohort.terms), dict(first.terms), 0.0)


@fast
def test_rows_that_may_not_be_written_are_read(engine: str) -> None:
    federation, net = layered()
    x = federation.table.x.numpy()
    x.setflags(write=False)
    before = x.copy()
    run = Run(make(engine, METHODS["fedavg"](), lambda: (federation, net)), 1)
    assert np.array_equal(x, before)
    assert tree.is_finite(run.shared)


# What methods may do.


class Reversed(FedAvg):
    """FedAvg with a memory that holds the state before the last step, and trees whose keys change their order."""

    name = "reversed"

    def init(self, seed: int) -> tuple[Tree, Tree]:
        shared, private = super().init(seed)
        return shared, {**private, "past": tree.map_leaves(torch.zeros_like, tree.branch(shared, "head"))}

    def step(self, shared, local_state, batch, client):
        after, terms = super().step(shared, local_state, batch, client)
        after["past"] = local_state["head"]
        return backwards(after), terms

    def upload(self, shared, local_state, private, client):
        sent, kept = super().upload(shared, local_state, private, client)
        return sent, backwards(kept)

    def aggregate(self, shared, mean):
        return backwards(super().aggregate(shared, mean))


def backwards(given: Tree) -> Tree:
    return {key: backwards(value) if isinstance(value, dict) else value for key, value in reversed(given.items())}


@fast
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "plain"])
def test_order_of_keys_and_state_that_moves_change_nothing(engine: str, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES[engine], "trace_from", 0 if traced else 10**9)

    def build() -> tuple[gpfl.Federation, Net]:  # layers of one shape: what is mistaken for another fits
        return with_net(
            toy_federation(SIZES), lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
        )

    assert_like_loop(engine, Reversed(), build)


class Branching(nn.Module):
    """A layer that looks at the numbers of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.relu() if float(row.detach().sum()) > 0 else row.tanh() for row in x])


class Masked(nn.Module):
    """A layer that squares as many numbers as there are above a limit."""

    def forward(self, x: Tensor) -> Tensor:
        out, large = x.clone(), x.detach() > 0.1
        out[large] = x[large] ** 2
        return out


class Distinct(nn.Module):
    """A layer that divides each row by the number of its distinct entries."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row / row.detach().round().unique().numel() for row in x])


@pytest.mark.parametrize("layer", [Branching, Masked, Distinct])
def test_net_that_cannot_be_traced_runs_on_threads(layer: type[nn.Module]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), layer(), nn.Linear(8, 3))

    loop, threads = (make(name, FedAvg(), lambda: with_net(toy_federation(SIZES), build)) for name in ("loop", "workers"))
    assert_close(Run(threads).flat, Run(loop).flat)


@pytest.mark.parametrize("engine", ENGINES)
def test_part_without_rows_has_no_scores(engine: str) -> None:
    machine = make(engine, METHODS["perfedavg"](), layered)
    assert machine.federation.n_samples("validation").sum() == 0
    scores = machine.evaluate(*start(machine), 0, "validation")
    assert scores.correct.tolist() == scores.loss_sum.tolist() == [0.0] * len(SIZES)


class Slow(nn.Module):
    """Waits in its pass until another thread is in its own, where there is one: weights of the two would be mixed up."""

    meeting: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.meeting is not None:
            try:
                self.meeting.wait(0.2)
            except threading.BrokenBarrierError:
                self.meeting.reset()
        return x


def test_threads_do_not_share_the_modules_that_weights_are_put_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "trace_from", 10**9)

    def build() -> tuple[gpfl.Federation, Net]:
        def layers() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), Slow(), nn.Linear(8, 8), Slow(), nn.Linear(8, 3))

        return with_net(toy_federation((14, 14)), layers)

    loop, threads = (make(name, METHODS["local"](), build, client_fraction=1.0) for name in ("loop", "workers"))
    plain = Run(loop)
    monkeypatch.setattr(Slow, "meeting", threading.Barrier(2))
    mixed = Run(threads)
    assert_close(mixed.flat, plain.flat)
    scores = threads.evaluate(plain.shared, plain.private, ROUNDS, "test")
    monkeypatch.setattr(Slow, "meeting", None)
    assert scores.loss_sum == pytest.approx(loop.evaluate(plain.shared, plain.private, ROUNDS, "test").loss_sum, abs=LIMIT)


@fast
def test_threads_of_torch_are_given_back(engine: str) -> None:
    before = torch.get_num_threads()
    machine = make(engine, METHODS["fedavg"](), layered)
    Run(machine, 1)
    machine.evaluate(*start(machine), 0, "test")
    assert torch.get_num_threads() == before


VALUES = {
    "gpfl": ("lam", "mu", "lr"),
    "fedprox": ("mu", "lr"),
    "ditto": ("lam", "lr"),
    "pfedme": ("beta", "lr"),
    "fedphp": ("lr",),
}


@pytest.mark.parametrize("name", VALUES)
def test_trials_with_other_numbers_run_at_once_as_each_alone(name: str) -> None:
    federation = toy_federation((31, 12, 25))
    runs = []
    for factor in (1.0, 0.5, 0.2):
        given: configs.ConfigDict = {
            "method": {"name": name},
            "train": {"rounds": 3, "lr": 0.1 * factor},
            "net": {"name": "mlp", "hidden": [8]},
            "run": {"engine": "vmap"},
        }
        config, setting = api.prepare(configs.resolve_config(given, federation=federation), federation, None, None)
        changed = {key: getattr(setting.method, key) * factor for key in VALUES[name]}
        method = setting.method.replace(**changed)
        runs.append(api.PreparedRun(config, dataclasses.replace(setting, method=method)))
    together = api.execute_trials(runs)
    for run, result in zip(runs, together, strict=True):
        alone = api.execute(run, ENGINES["vmap"](run.setting))
        assert [line["loss"] for line in result.history] == pytest.approx([line["loss"] for line in alone.history], abs=1e-5)
        for one, other in zip(result.clients, alone.clients, strict=True):
            x = federation.table.x
            assert np.abs(one.logits(x) - other.logits(x)).max() < 1e-5
    losses = [result.history[-1]["loss"] for result in together]
    assert len(set(losses)) == 3, "the numbers make a difference"


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_trial_that_diverges_does_not_stop_the_others(engine: str) -> None:
    federation = toy_federation((31, 12, 25))
    runs = []
    for lr in (1e30, 0.1, 1e30):
        given: configs.ConfigDict = {"method": {"name": "fedavg"}, "train": {"rounds": 3, "lr": lr}, "run": {"engine": engine}}
        runs.append(api.PreparedRun(*api.prepare(configs.resolve_config(given, federation=federation), federation, None, None)))
    first, second, third = api.execute_trials(runs)
    assert isinstance(first, DivergenceError)
    assert isinstance(third, DivergenceError)
    assert "lower train.lr (--lr or --set train.lr=…, now 1e+30)" in str(first)
    alone = api.execute(runs[1], ENGINES[engine](runs[1].setting))
    assert isinstance(second, gpfl.Result)
    assert [line["loss"] for line in second.history] == pytest.approx([line["loss"] for line in alone.history], abs=1e-5)


def test_trial_that_is_left_alone_goes_on_with_its_own_numbers() -> None:
    first = make("vmap", FedAvg(), layered)
    shared, private = start(first)
    for lr, clients in ((0.05, [0, 1]), (0.01, [0, 1]), (0.01, [2])):  # one client alone runs another way
        method = first.method.replace(lr=lr)
        asked = TrainRequest(shared, tree.take(private, torch.tensor(clients)), clients, 0, first.schedule, clients, method)
        plain = make("loop", FedAvg(), layered)
        plain.method = plain.method.replace(lr=lr)
        assert_close(flat(first.train_round(asked)), flat(plain.train_round(asked)))
        for trial in first.train_rounds([asked, asked]):
            assert_close(flat(trial), flat(plain.train_round(asked)))


def test_rehearsal_traces_nothing() -> None:
    machine = make("vmap", FedAvg(), layered, compile="on")
    assert isinstance(machine, Vmap)
    machine.check_vmappable()
    assert not any(program.traced for program in programs_of(machine))


def test_trials_that_differ_in_more_than_numbers_cannot_run_at_once() -> None:
    federation = toy_federation((31, 12))
    runs = []
    for reg in ("wd", "norm"):
        given: configs.ConfigDict = {"method": {"name": "gpfl", "reg": reg}, "train": {"rounds": 1}, "run": {"engine": "vmap"}}
        runs.append(api.PreparedRun(*api.prepare(configs.resolve_config(given, federation=federation), federation, None, None)))
    with pytest.raises(gpfl.GpflError, match="trials that run at once must have the same reg, not 'wd' and others"):
        api.execute_trials(runs)
