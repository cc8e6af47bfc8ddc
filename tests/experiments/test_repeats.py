"""Repeated splits: paired seeds, whole groups, statistics of training samples, files that resume, and scores of methods."""

from __future__ import annotations

import dataclasses
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from synthetic_repeats import repeated_results

import gpfl
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.table import DataSource
from gpfl.experiments import repeats
from gpfl.experiments.compare import parse_methods
from gpfl.experiments.repeats import RepeatedResults, SplitDrawer, compare_pairs, run_repeats, score_clients, score_methods
from gpfl.experiments.statistics import corrected_t_test, holm_correction
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback


class Hospitals(DataSource):
    """Patients of three hospitals, two visits each, with numbers that need scaling."""

    @property
    def defaults(self) -> dict[str, dict[str, object]]:
        return {"partition": {"name": "natural"}, "net": {"name": "mlp", "hidden": [4]}, "train": {"rounds": 2, "lr": 0.1}}

    def read(self) -> gpfl.Table:
        rng = np.random.default_rng(0)
        sizes = (40, 60, 30)
        hospital = np.repeat(np.arange(3), sizes)
        values = rng.normal(10.0, 5.0, (sum(sizes), 3))
        labels = (values[:, 0] + rng.normal(0, 5, len(values)) > 10).astype(int)
        schema = Schema(tuple(ColumnSchema(name) for name in ("age", "weight", "dose")))
        groups = np.arange(len(values)) // 2
        return gpfl.Table(
            RawColumns(schema, values),
            labels,
            name="hospitals",
            client_ids=hospital,
            client_names=list("abc"),
            group_ids=groups,
        )


@pytest.fixture
def hospitals(monkeypatch: pytest.MonkeyPatch) -> configs.ConfigDict:
    source = Hospitals(name="hospitals", description="made")
    monkeypatch.setitem(configs.DATASETS, "hospitals", source)
    return {"data": {"name": "hospitals"}, "run": {"engine": "vmap"}}


def run(settings: configs.ConfigDict, methods: str, repeats: int, out: Path | None = None) -> RepeatedResults:
    return run_repeats(settings, parse_methods(methods), repeats, out, lambda label: Callback())


def test_all_methods_see_the_same_splits_and_every_repeat_another(hospitals: configs.ConfigDict) -> None:
    results = run(hospitals, "local,fedavg", 3)
    local, fedavg = results.records["local"], results.records["fedavg"]
    assert [local[k].split for k in range(3)] == [fedavg[k].split for k in range(3)]
    assert len({local[k].split for k in range(3)}) == 3
    assert [(local[k].seed, local[k].partition_seed) for k in range(3)] == [(0, 1), (1, 2), (2, 3)]


def test_samples_of_a_group_stay_together_in_every_repeat(hospitals: configs.ConfigDict) -> None:
    draw = SplitDrawer(configs.resolve_config({**hospitals, "method": {"name": "local"}}))
    for repeat in range(4):
        federation = draw(repeat)
        groups = federation.table.group_ids
        assert groups is not None
        for shard in federation.shards:
            assert not set(groups[shard.train]) & set(groups[shard.test])


def test_preprocessing_is_fitted_to_the_training_samples_of_each_repeat(hospitals: configs.ConfigDict) -> None:
    draw = SplitDrawer(configs.resolve_config({**hospitals, "method": {"name": "local"}}))
    for repeat in range(2):
        federation = draw(repeat)
        x = federation.table.x.numpy()[np.concatenate([shard.train for shard in federation.shards])]
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(x.std(0), 1, atol=1e-5)


def without_time(results: RepeatedResults) -> list[dict[str, object]]:
    return [
        {**dataclasses.asdict(record), "seconds": 0, "metrics": {}}
        for records in results.records.values()
        for record in records.values()
    ]


@pytest.mark.parametrize("validation_fraction", [0.0, 0.2])
def test_repeats_at_once_equal_one_after_another(hospitals: configs.ConfigDict, validation_fraction: float) -> None:
    hospitals = {**hospitals, "partition": {"validation_fraction": validation_fraction}}
    hospitals["train"] = {"rounds": 3, "client_fraction": 0.7}
    methods = "local,fedavg-ft,gpfl"
    stacked = run(hospitals, methods, 3)
    single = run({**hospitals, "run": {"engine": "loop"}}, methods, 3)
    assert without_time(stacked) == without_time(single)
    for method in stacked.methods:
        for split in ("test", "validation") if validation_fraction else ("test",):
            for client in (None, *stacked.clients):
                for metric in ("accuracy", "log_loss"):
                    own, expected = (each.values(method, metric, split=split, client=client) for each in (stacked, single))
                    np.testing.assert_allclose(own, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({}, [0, 3]),
        ({"run": {"select": "test"}}, [0, 1, 2, 3]),
        ({"partition": {"validation_fraction": 0.2}}, [0, 1, 2, 3]),
        ({"partition": {"validation_fraction": 0.2}, "run": {"select": "last"}}, [0, 3]),
        ({"train": {"rounds": 3, "patience": 9}}, [0, 1, 2, 3]),
    ],
)
def test_rounds_are_evaluated_where_they_can_be_reported(
    hospitals: configs.ConfigDict, settings: configs.ConfigDict, rounds: list[int]
) -> None:
    class Record(Callback):
        def on_evaluate(self, record: dict[str, object]) -> None:
            evaluated.append(record["round"])

    evaluated: list[object] = []
    run_repeats({**hospitals, "train": {"rounds": 3}, **settings}, parse_methods("local"), 2, None, lambda label: Record())
    assert sorted(evaluated) == sorted(2 * rounds)


def test_categories_that_differ_between_repeats_give_groups_of_their_own(
    hospitals: configs.ConfigDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: Hospitals) -> gpfl.Table:
        table = real(self)
        assert table.raw is not None
        columns = (*table.raw.schema.columns[:2], ColumnSchema("ward", "categorical", tuple("uvwxyz")))
        values = table.raw.values.copy()
        values[:, 2] = 0
        values[::23, 2] = 1 + np.arange(len(values[::23])) % 5
        return gpfl.Table(
            RawColumns(Schema(columns), values),
            table.y,
            name="hospitals",
            client_ids=table.client_ids,
            client_names=table.client_names,
        )

    real = Hospitals.read
    monkeypatch.setattr(Hospitals, "read", read)
    calls: list[int] = []
    execute = repeats.execute_trials
    monkeypatch.setattr(repeats, "execute_trials", lambda runs: calls.append(len(runs)) or execute(runs))
    stacked = run(hospitals, "fedavg", 6)
    assert 1 < len(calls) < 6
    single = run({**hospitals, "run": {"engine": "loop"}}, "fedavg", 6)
    np.testing.assert_allclose(stacked.values("fedavg", "log_loss"), single.values("fedavg", "log_loss"), rtol=1e-4)


def test_repeats_at_once_share_the_time(hospitals: configs.ConfigDict) -> None:
    start = time.perf_counter()
    results = run(hospitals, "fedavg", 8)
    assert 0 < sum(record.seconds for record in results.records["fedavg"].values()) <= time.perf_counter() - start


@pytest.mark.parametrize("split", ["test", "train"])
def test_recorded_metrics_are_those_of_an_evaluation(split: str) -> None:
    federation = gpfl.federate("digits", partition="pathological", clients=30, classes_per_client=1, seed=2)
    result = gpfl.fit("local", federation, net="mlp", rounds=2)
    report = result.evaluate(split, n_resamples=0)
    overall, clients = result.metric_values(split)
    assert overall == pytest.approx(report.overall.values, abs=1e-12)
    assert clients == {name: pytest.approx(client.values, abs=1e-12) for name, client in report.clients.items()}
    assert any(values["auroc"] is None for values in clients.values())


# Scores and pairs of methods, worked out by hand.

SCORES = {
    "local": {"a": [0.7, 0.8, 0.9], "b": [0.5, 0.6, 0.7]},  # 0.6, 0.7, 0.8
    "gpfl": {"a": [0.7, 0.9, 0.7], "b": [0.7, 0.7, 0.7]},  # 0.7, 0.8, 0.7
    "fedavg": {"a": [0.1, 0.2, 0.1], "b": [0.1, 0.2, 0.1]},
}


def test_methods_are_ordered_by_mean_with_ranks_and_the_repeats_in_which_none_is_better() -> None:
    scores = score_methods(repeated_results(SCORES), "accuracy")
    assert [(score.method, score.best_in) for score in scores] == [("gpfl", 2), ("local", 1), ("fedavg", 0)]
    assert [score.mean_rank for score in scores] == pytest.approx([4 / 3, 5 / 3, 3])
    assert scores[0].values.tolist() == pytest.approx([0.7, 0.8, 0.7])


def test_differences_are_paired_by_repeat_and_tested_with_the_ratio_of_test_to_other_samples() -> None:
    pairs = compare_pairs(repeated_results(SCORES), "accuracy", list(combinations(["gpfl", "local", "fedavg"], 2)))
    assert [(pair.one, pair.other) for pair in pairs] == [("gpfl", "local"), ("gpfl", "fedavg"), ("local", "fedavg")]
    first = pairs[0]
    expected = corrected_t_test([0.1, 0.1, -0.1], 20 / 60)
    assert (first.test.mean, first.test.low, first.test.high, first.test.p) == pytest.approx(
        (expected.mean, expected.low, expected.high, expected.p)
    )
    assert [pair.corrected_p for pair in pairs] == pytest.approx(holm_correction([pair.test.p for pair in pairs]))


def test_wins_count_repeats_and_clients_without_ties() -> None:
    pair = compare_pairs(repeated_results(SCORES), "accuracy", [("gpfl", "local")])[0]
    assert (pair.wins, pair.losses) == (2, 1)
    assert (pair.client_wins, pair.client_losses) == pytest.approx((3 / 3, 1 / 3))  # a: 0, 1, -1; b: 1, 1, 0


def test_lower_losses_win() -> None:
    results = repeated_results(SCORES, "log_loss")
    assert [score.method for score in score_methods(results, "log_loss")] == ["fedavg", "local", "gpfl"]
    pair = compare_pairs(results, "log_loss", [("gpfl", "local")])[0]
    assert (pair.wins, pair.losses, pair.test.mean > 0) == (1, 2, True)


def test_client_scores_count_ties_for_all_and_leave_out_undefined_repeats() -> None:
    test = {
        "local": {"a": [0.5, None, 0.7], "b": [0.1, 0.1, 0.1]},
        "gpfl": {"a": [0.5, None, 0.6], "b": [0.1, 0.1, 0.1]},
    }
    scores = score_clients(repeated_results(test, "auroc"), "auroc")
    assert scores["a"]["local"].mean == pytest.approx(0.6)
    assert (scores["a"]["local"].best_in, scores["a"]["gpfl"].best_in) == (2, 1)


def test_clients_of_a_synthetic_partition_differ_between_repeats() -> None:
    assert score_clients(repeated_results(SCORES, partition="dirichlet"), "accuracy") == {}
