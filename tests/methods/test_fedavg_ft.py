"""FedAvg with fine-tuning: its limiting cases, what fine-tuning leaves unchanged, and numbers computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation, toy_table
from methods.test_identities import EVERYONE, first_state, make_engine, same
from methods.test_plain import CASES, CLASSES, LIMIT, ROUNDS, LibraryRun, evaluate, plain_run
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Batch, ClientInfo, LossTerms
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.defences import DefenceConfig, defend
from gpfl.engine import ENGINES, RunSpec
from gpfl.methods.fedavg import FedAvg
from gpfl.methods.fedavg_ft import FedAvgFT
from gpfl.models.custom import net_from_module
from gpfl.privacy.membership import infer_memberships
from gpfl.training.run_dir import RunDir

engines = pytest.mark.parametrize("engine", ENGINES)
SETTINGS = {"net": "mlp", "lr": 0.1, "engine": "loop"}


# Training is FedAvg's.


@engines
def test_shared_states_are_those_of_fedavg_to_the_bit(engine: str) -> None:
    tuned, plain = LibraryRun(FedAvgFT(), engine, epochs=2), LibraryRun(FedAvg(), engine, epochs=2)
    assert same(tuned.shared, plain.shared)
    assert tuned.private == plain.private == {}
    assert np.abs(tuned.evaluation.loss_sum - plain.evaluation.loss_sum).min() > 1e-2


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_evaluation_in_every_round_does_not_change_training(engine: str) -> None:
    runs = {
        (method, eval_every): gpfl.fit(
            method, toy_federation(), rounds=4, client_fraction=0.5, eval_every=eval_every, **{**SETTINGS, "engine": engine}
        )
        for method, eval_every in (("fedavg-ft", 1), ("fedavg-ft", 4), ("fedavg", 1))
    }
    states = [result.outcome.last.shared for result in runs.values()]
    assert same(states[0], states[1])
    assert same(states[0], states[2])
    sparse, dense = runs["fedavg-ft", 4], runs["fedavg-ft", 1]
    assert [line["round"] for line in sparse.history] == [0, 4]
    assert sparse.history[-1]["client_accuracies"] == dense.history[-1]["client_accuracies"]
    assert sparse.history[-1]["loss"] == dense.history[-1]["loss"]


@engines
def test_no_epochs_of_fine_tuning_are_fedavg(engine: str) -> None:
    untuned, plain = LibraryRun(FedAvgFT(ft_epochs=0), engine), LibraryRun(FedAvg(), engine)
    assert same(untuned.shared, plain.shared)
    assert untuned.evaluation.loss_sum.tolist() == plain.evaluation.loss_sum.tolist()
    assert untuned.evaluation.correct.tolist() == plain.evaluation.correct.tolist()


# Fine-tuning.


@engines
@pytest.mark.parametrize(("parts", "moved", "frozen"), [("head", "head", "base"), ("base", "base", "head")])
def test_fine_tuning_of_one_part_leaves_the_other_equal_to_the_bit(parts: str, moved: str, frozen: str, engine: str) -> None:
    runner = make_engine(FedAvgFT(ft_parts=parts), engine)
    shared, private = first_state(runner)
    models = runner.personal_weights(shared, private, EVERYONE, 1)
    for model in models:
        assert same(tree.branch(model, frozen), tree.branch(shared, frozen))
        assert not same(tree.branch(model, moved), tree.branch(shared, moved))
    assert not same(models[0], models[1])


@pytest.mark.parametrize("wrong", [{"ft_epochs": 3}, {"ft_parts": "head"}, {"ft_parts": "base"}, {"ft_lr": 0.04}])
def test_comparison_with_the_plain_computation_detects_a_wrong_option(wrong: dict[str, object]) -> None:
    options = CASES["fedavg-ft"][1]
    ours = LibraryRun(FedAvgFT(**options))
    expected = evaluate(ours.world, plain_run(ours, {**options, **wrong}))
    assert max(abs(ours.evaluation.loss_sum[client] - loss) for client, (_, loss) in enumerate(expected)) > 100 * LIMIT


class ScalarFT(FedAvgFT):
    """Fine-tuning of h·b·x, the first logit, with the loss ½(hbx − y)²."""

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        error = self.logits(model, batch.x)[..., 0] - batch.y
        return {"ce": batch.mean(error**2) / 2}


def scalar_federation() -> gpfl.Federation:
    """Return a client with the sample (1, 2), and one with three samples (2, 2)."""
    parts = {}
    for name, x, n in (("one", 1.0, 1), ("three", 2.0, 3)):
        sample = np.full((n, 1), x, dtype=np.float32), np.full(n, 2)
        parts[name] = (*sample, *sample)
    return gpfl.federate(parts)


@engines
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("all", [(1.179553223, 0.824005127), (1.161962891, 0.796020508)]),
        ("head", [(1.09375, 0.824005127), (1.09375, 0.796020508)]),
    ],
)
def test_fine_tuned_weights_are_those_computed_by_hand(parts: str, expected: list[tuple[float, float]], engine: str) -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[1].weight.copy_(torch.tensor([[0.5], [0.0], [0.0]]))
    federation = scalar_federation()
    built = net_from_module(net, federation.table.inputs(torch.arange(2)), 3)
    method = ScalarFT(ft_epochs=1, ft_parts=parts).bind(built, lr=0.1, epochs=1)
    runner = ENGINES[engine](RunSpec(method, federation, Schedule(seed=0, rounds=1)))
    shared, private = method.init(0)
    shared = method.aggregate(shared, runner.train(shared, tree.repeat(private, 2), [0, 1], 0).mean)
    assert weights_of(shared) == pytest.approx((1.09375, 0.6875), abs=1e-6)
    for model, (b, h) in zip(runner.personal_weights(shared, {}, [0, 1], 1), expected, strict=True):
        assert weights_of(model) == pytest.approx((b, h), abs=1e-6)


def weights_of(state: Tree) -> tuple[float, float]:
    return float(tree.flatten(state)["base/0.weight"]), float(tree.flatten(state)["head/weight"][0])


@engines
def test_predictions_of_an_engine_are_those_of_fine_tuned_models(engine: str) -> None:
    runner = make_engine(FedAvgFT(), engine)
    shared, private = first_state(runner)
    logits = runner.predict(shared, private, 1, "test")
    for client, weights in enumerate(runner.personal_weights(shared, private, EVERYONE, 1)):
        x = runner.federation.table.inputs(torch.from_numpy(runner.federation.shards[client].test))
        expected = runner.method.logits(Model(runner.method.net, weights), x)
        assert float((logits[client] - expected).abs().max()) < LIMIT


@engines
def test_batch_norm_statistics_move_in_the_copy_alone(engine: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    runner = make_engine(FedAvgFT(ft_parts="head"), engine, net)
    shared, private = first_state(runner)
    before = tree.clone(private)
    models = runner.personal_weights(shared, private, EVERYONE, 1)
    assert same(private, before)
    for client, model in enumerate(models):
        assert same(tree.branch(model, "base"), tree.branch(shared, "base"))
        own = tree.branch(tree.take(private, client), "batch_norm_stats")
        assert not same(tree.branch(model, "batch_norm_stats"), own)


def test_batches_of_fine_tuning_are_a_function_of_seed_round_and_client() -> None:
    runner = make_engine(FedAvgFT(ft_epochs=1))
    phases, train = runner.method.final_phases(), runner.federation.shards[0].train

    def order(schedule: Schedule, round: int, client: int) -> list[int]:
        return schedule.plan(phases, train, round, client)[0].ravel().tolist()

    schedule = runner.schedule.for_final_phases()
    assert order(schedule, 2, 0) == order(schedule, 2, 0)
    others = [order(schedule, 3, 0), order(schedule, 2, 1), order(runner.schedule, 2, 0)]
    assert all(sorted(other) == sorted(order(schedule, 2, 0)) for other in others)
    assert all(other != order(schedule, 2, 0) for other in others)


# Models that are reported, saved and made for new clients.


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_saved_models_are_the_fine_tuned_ones_that_were_evaluated(tmp_path: Path, engine: str) -> None:
    federation = toy_federation()
    result = gpfl.fit("fedavg-ft", federation, rounds=3, out=tmp_path / "run", **{**SETTINGS, "engine": engine})
    reopened = gpfl.load(tmp_path / "run", federation=federation)
    weights = [tree.flatten(client.weights) for client in result.clients]
    assert not torch.equal(weights[0]["head/weight"], weights[1]["head/weight"])
    for position, (client, again) in enumerate(zip(result.clients, reopened.clients, strict=True)):
        shard = federation.shards[position]
        x, y = federation.table.x[shard.test], federation.table.y[shard.test]
        assert client.score(x, y) == result.history[-1]["client_accuracies"][client.name]
        loaded = gpfl.load_model(tmp_path / "run" / "models" / f"client-{position}.safetensors")
        assert np.abs(loaded.logits(x) - client.logits(x)).max() < LIMIT
        assert np.abs(again.logits(x) - client.logits(x)).max() < LIMIT


def test_round_is_selected_by_validation_after_fine_tuning(tmp_path: Path) -> None:
    federation = gpfl.federate(toy_table(160, classes=4, seed=3), clients=4, classes_per_client=3, validation_fraction=0.3)
    result = gpfl.fit("fedavg-ft", federation, rounds=4, select="validation", out=tmp_path / "run", **SETTINGS)
    best = max(result.history, key=lambda line: line["validation_accuracy"])
    assert result.summary["selected_round"] == best["round"]
    correct = 0.0
    for client, shard in zip(result.clients, federation.shards, strict=True):
        x, y = federation.table.x[shard.validation], federation.table.y[shard.validation]
        correct += client.score(x, y) * len(y)
    total = federation.n_samples("validation").sum()
    assert correct / total == pytest.approx(best["validation_accuracy"])


def test_run_killed_in_the_middle_resumes_exactly(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {**SETTINGS, "rounds": 5, "client_fraction": 0.5, "checkpoint_every": 2}

    class Stop(gpfl.Callback):
        def on_evaluate(self, record: dict[str, object]) -> None:
            if record["round"] == 3:
                raise KeyboardInterrupt

    full = gpfl.fit("fedavg-ft", federation, out=tmp_path / "full", **settings)
    with pytest.raises(KeyboardInterrupt):
        gpfl.fit("fedavg-ft", federation, out=tmp_path / "cut", callbacks=[Stop()], **settings)
    resumed = gpfl.resume(tmp_path / "cut", federation=federation)
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in full.history]
    assert len(RunDir(tmp_path / "cut").read_metrics()) == 6
    for first, second in zip(full.clients, resumed.clients, strict=True):
        assert same(first.weights, second.weights)


def test_new_client_gets_a_fine_tuned_copy_of_the_global_model() -> None:
    table = toy_table(150)
    x, y = table.x.numpy(), table.y.numpy()
    own = np.flatnonzero(y < 2)
    tuned, plain = (gpfl.fit(name, toy_federation(), rounds=1, **SETTINGS) for name in ("fedavg-ft", "fedavg"))
    shared = tuned.outcome.selected.shared
    models = [result.personalize(x[own[:40]], y[own[:40]]) for result in (tuned, plain)]
    assert same(models[1].weights, shared)
    assert not same(models[0].weights, shared)
    assert models[0].score(x[own[40:]], y[own[40:]]) > models[1].score(x[own[40:]], y[own[40:]])


def test_membership_is_inferred_from_the_fine_tuned_model() -> None:
    losses_by_method = {}
    for name in ("fedavg-ft", "fedavg"):
        result = gpfl.fit(name, toy_federation(), rounds=2, **SETTINGS)
        attacks = infer_memberships(result.engine, result.outcome.last, [2, 0])
        assert [attack.client for attack in attacks] == ["2", "0"]
        losses_by_method[name] = attacks
    for tuned, plain in zip(losses_by_method["fedavg-ft"], losses_by_method["fedavg"], strict=True):
        assert tuned.train_loss < plain.train_loss


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_per_example_defence_does_not_reach_fine_tuning(engine: str) -> None:
    plain = make_engine(FedAvgFT(), engine)
    defence = DefenceConfig(example_clip=0.1, example_noise=1.0)
    defended = ENGINES[engine](RunSpec(defend(plain.method, defence, seed=0, min_clients=4), plain.federation, plain.schedule))
    shared, private = first_state(plain)
    assert not same(plain.train(shared, private, EVERYONE, 0).mean, defended.train(shared, private, EVERYONE, 0).mean)
    models = (each.personal_weights(shared, private, EVERYONE, ROUNDS) for each in (plain, defended))
    assert all(same(first, second) for first, second in zip(*models, strict=True))


def test_fine_tuning_that_diverges_stops_the_run() -> None:
    with pytest.raises(
        gpfl.GpflError, match=r"round 0: the model of client 0 has loss nan.*lower the learning rate of fine-tuning"
    ):
        gpfl.fit("fedavg-ft", toy_federation(), rounds=1, ft_lr=1e30, **SETTINGS)
