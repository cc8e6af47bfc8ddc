"""Our numbers next to the paper's: their arithmetic on summaries made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from toy_results import COLUMNS, LABELS, PAPER, RUN, toy_plan, toy_results, toy_trials

from gpfl.errors import GpflError
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import PaperValue, load_experiments
from gpfl.experiments.grid import TableResults
from gpfl.experiments.stored_runs import Trials
from gpfl.report.comparison import Entry, compare_column, compare_columns


def entry(results: TableResults, label: str) -> Entry:
    return next(one for one in compare_column(results, COLUMNS[0]).entries if one.label == label)


def ranks(results: TableResults) -> dict[str, tuple[float | None, float | None]]:
    return {one.label: (one.rank, one.paper_rank) for one in compare_column(results, COLUMNS[0]).entries}


def test_ours_is_the_mean_and_the_population_deviation_over_trials() -> None:
    one = entry(toy_results(RUN), "fedavg")
    assert one.ours is not None
    assert (one.ours.mean, one.ours.std, one.ours.n) == (pytest.approx(41.0), pytest.approx(np.std([40, 42])), 2)
    assert one.last_rounds is not None
    assert one.last_rounds.mean == pytest.approx(39.0)
    assert one.difference == pytest.approx(1.0)
    assert (one.status, one.n_trials) == ("run", 2)
    assert entry(toy_results(RUN), "ditto").status == "not run"


@pytest.mark.parametrize(("ours", "far"), [(61.0, False), (59.0, False), (61.01, True), (58.99, True), (60.0, False)])
def test_difference_is_far_beyond_two_of_the_papers_deviations(ours: float, far: bool) -> None:
    assert entry(toy_results({("toy/whole", "gpfl"): toy_trials("gpfl", ours)}), "gpfl").is_far == far


def test_nothing_is_far_where_the_paper_prints_no_deviation() -> None:
    assert entry(toy_results({("toy/whole", "fedper"): toy_trials("fedper", 99.0)}), "fedper").is_far is None


def test_ranks_go_by_our_means_and_by_the_papers_among_the_same_methods() -> None:
    results = toy_results(RUN)
    assert ranks(results) == {"fedavg": (3, 3), "ditto": (None, None), "fedper": (2, 2), "gpfl": (1, 1)}
    tied = toy_results({**RUN, ("toy/whole", "ditto"): toy_trials("ditto", 52.0)})
    assert entry(tied, "ditto").rank == entry(tied, "fedper").rank == 2.5


def test_method_that_the_paper_lacks_takes_no_rank_from_the_others() -> None:
    own = {("toy/whole", "mine"): toy_trials("mine", 70.0, 70.0)}
    results = toy_results(RUN)
    results = replace(results, rows=(*results.rows, MethodVariant("mine", {"name": "mine"})), trials={**results.trials, **own})
    assert ranks(results) == {**ranks(toy_results(RUN)), "mine": (None, None)}
    column = compare_column(results, COLUMNS[0])
    assert [one.label for one in column.entries if column.is_best(one)] == ["mine"]
    alone = replace(results, trials=own)
    assert (entry(alone, "mine").rank, entry(alone, "gpfl").paper_rank) == (None, 1)
    without = replace(results.experiment, paper={key: number for key, number in PAPER.items() if key[1] != "fedper"})
    assert ranks(replace(results, experiment=without))["fedper"] == (None, None)
    assert ranks(replace(results, experiment=without))["fedavg"] == (2, 2)
    nothing = replace(results.experiment, paper={})
    assert [ranks(replace(results, experiment=nothing))[label][0] for label in (*LABELS, "mine")] == [3, None, 2, 1, None]


def test_pairs_of_methods_are_compared_with_the_papers_order() -> None:
    assert compare_column(toy_results(RUN), COLUMNS[0]).ordered_pairs() == (3, 3)
    turned = toy_results({**RUN, ("toy/whole", "ditto"): toy_trials("ditto", 30.0)})
    assert compare_column(turned, COLUMNS[0]).ordered_pairs() == (4, 6)
    level = toy_results({**RUN, ("toy/whole", "ditto"): toy_trials("ditto", 52.0)})
    assert compare_column(level, COLUMNS[0]).ordered_pairs() == (5, 6)
    assert compare_column(toy_results(RUN), COLUMNS[1]).ordered_pairs() == (0, 0)


def test_pairs_are_compared_where_the_printed_digits_tell_which_is_better() -> None:
    experiment = load_experiments()["feature-shift"]
    [column] = experiment.columns
    run = {
        (column.key, row.label): toy_trials(row.label, experiment.paper[column.key, row.label].mean) for row in experiment.rows
    }
    results = TableResults(experiment, toy_plan(seeds=(0,)), run, columns=experiment.columns, rows=experiment.rows)
    assert compare_column(results, column).ordered_pairs() == (21, 21), "of 55 pairs"


def test_number_that_the_paper_does_not_print_has_no_rank() -> None:
    about = {cell: PaperValue(p.mean, interval=(p.mean - 0.3, p.mean + 0.3)) for cell, p in PAPER.items()}
    about["toy/whole", "ditto"] = PaperValue(40.5, interval=(40.2, 41.0))  # too near FedAvg's 40 to say which is better
    results = toy_results({**RUN, ("toy/whole", "ditto"): toy_trials("ditto", 30.0)})
    results = replace(results, experiment=replace(results.experiment, paper=about))
    assert {paper for _, paper in ranks(results).values()} == {None}
    assert compare_column(results, COLUMNS[0]).ordered_pairs() == (5, 5)


def test_equal_results_share_a_rank_however_they_were_added_up() -> None:
    one, other = toy_trials("fedavg", 10.0, 20.0, 30.0), toy_trials("gpfl", 30.0, 20.0, 10.0)
    assert one.mean("best_accuracy") != other.mean("best_accuracy")
    column = compare_column(toy_results({("toy/whole", "fedavg"): one, ("toy/whole", "gpfl"): other}), COLUMNS[0])
    assert [e.rank for e in column.entries if e.trials] == [1.5, 1.5]
    assert [e.label for e in column.entries if column.is_best(e)] == ["fedavg", "gpfl"]
    assert column.ordered_pairs() == (0, 1)


def test_fairness_is_deviation_and_coefficient_and_less_is_better() -> None:
    run = {
        ("toy/whole", "fedavg"): toy_trials("fedavg", 40.0, std=0.08, cov=0.2),
        ("toy/whole", "gpfl"): toy_trials("gpfl", 60.0, 60.0, std=0.09, cov=0.15),
    }
    results = toy_results(run, "fairness")
    fair = {key: PaperValue(8.5, cov=14.0 if key[1] == "gpfl" else 21.0) for key in PAPER}
    results = replace(results, experiment=replace(results.experiment, paper=fair))
    one, other = entry(results, "gpfl"), entry(results, "fedavg")
    assert (one.rank, other.rank) == (1, 2)
    assert (one.difference, one.cov_difference) == (pytest.approx(0.5), pytest.approx(1.0))
    assert (other.difference, other.cov_difference) == (pytest.approx(-0.5), pytest.approx(-1.0))
    assert compare_column(results, COLUMNS[0]).ordered_pairs() == (1, 1)


def test_trials_of_fewer_than_ten_rounds_have_no_mean_of_the_last_ten() -> None:
    for rounds, has_mean in ((9, False), (10, True)):
        one = entry(toy_results({("toy/whole", "gpfl"): toy_trials("gpfl", 60.5, rounds=rounds)}), "gpfl")
        assert (one.last_rounds is not None) == has_mean


def test_methods_are_tested_against_gpfl_with_holms_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = []

    def paired(one: Trials, other: Trials, *, spread: bool) -> object:
        tested.append((one.method, other.method))
        assert not spread
        clients, seeds = {"fedavg": (0.01, None), "fedper": (0.04, 0.03)}[one.method]
        return SimpleNamespace(clients=SimpleNamespace(p=clients), seeds=SimpleNamespace(p=seeds))

    monkeypatch.setattr("gpfl.experiments.statistics.compare_paired", paired)
    results = toy_results(RUN)
    assert entry(results, "fedavg").p == pytest.approx(0.02)  # the smallest of two, twice
    assert entry(results, "fedper").p == pytest.approx(0.04)
    assert (entry(results, "fedavg").seeds_p, entry(results, "fedper").seeds_p) == (None, pytest.approx(0.03))
    assert entry(results, "gpfl").p is None
    assert set(tested) == {("fedavg", "gpfl"), ("fedper", "gpfl")}


def test_where_gpfl_was_not_run_the_best_method_is_the_reference() -> None:
    rest = toy_results({key: value for key, value in RUN.items() if key[1] != "gpfl"})
    assert [column.reference for column in compare_columns(rest)] == ["fedper", ""]


def test_method_that_cannot_be_tested_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def paired(one: Trials, other: Trials, *, spread: bool) -> object:
        raise GpflError("no seed in common") if one.method == "fedavg" else FileNotFoundError(2, "gone", "metrics.jsonl")

    monkeypatch.setattr("gpfl.experiments.statistics.compare_paired", paired)
    column = compare_column(toy_results(RUN), COLUMNS[0])
    assert column.untested == {"fedavg": "no seed in common", "fedper": "metrics.jsonl cannot be read (gone)"}
    assert all(one.p is None for one in column.entries)


def test_entry_without_numbers_has_no_score() -> None:
    one = Entry("gpfl")
    assert (one.ours, one.difference, one.is_far, one.n_trials) == (None, None, None, 0)
    assert math.isnan(one.score)
    assert math.isnan(one.paper_score)
