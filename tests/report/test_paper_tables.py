"""Tables beside the paper's: their arithmetic on summaries made by hand, and what is written."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from gpfl.experiments import definitions as studies
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Experiment, PaperValue, TableColumn
from gpfl.experiments.features import FeatureMetrics
from gpfl.experiments.results import TableResults
from gpfl.experiments.trials import Trials
from gpfl.report import comparison as beside
from gpfl.report import latex, paper_tables, wording
from gpfl.report.features import Measured
from gpfl.report.screen import Screen, Strip

ORIGIN = paper_tables.Origin("gpfl reproduce toys --seeds 0,1", "abc1234")
FACTS = {"device": "a GPU", "gpfl": "1.0", "torch": "2.0", "best_round": 7, "rounds": 30, "seconds": 2.0}
LABELS = ("fedavg", "ditto", "fedper", "gpfl")
COLUMNS = (
    TableColumn("toy/whole", "Whole", "toys", {"data": {"name": "toy"}}, note="a note"),
    TableColumn("toy/10of50", "N = 10|50", "some", {"data": {"name": "toy"}}),
)
PAPER = {
    ("toy/whole", "fedavg"): PaperValue(40.0, 0.5),
    ("toy/whole", "ditto"): PaperValue(50.0, 0.5),
    ("toy/whole", "fedper"): PaperValue(45.0),
    ("toy/whole", "gpfl"): PaperValue(60.0, 0.5),
}


def trials(label: str, *accuracies: float, **more: float) -> Trials:
    """Trials with these accuracies in percent; a deviation of clients of a tenth of them."""
    summaries: list[dict[str, object]] = [
        {
            **FACTS,
            "seed": seed,
            "best_accuracy": value / 100,
            "last_ten_accuracy": value / 100 - 0.02,
            "std": value / 1000,
            "cov": 0.1,
            **more,
        }
        for seed, value in enumerate(accuracies)
    ]
    return Trials(label, [Path("nowhere") / str(seed) for seed in range(len(accuracies))], summaries)


def results(found: Mapping[tuple[str, str], Trials], measure: str = "accuracy", **more: object) -> TableResults:
    rows = tuple(MethodVariant(label, {"name": label}) for label in LABELS)
    remarks = {("toy/whole", "ditto"): "The paper has two numbers."}
    table = Experiment("toys", "Toys", "Accuracy (%) & more of β.", measure, rows, COLUMNS, PAPER, remarks)
    keys = {(column.key, row.label): found.get((column.key, row.label)) for column in COLUMNS for row in rows}
    made = TableResults(
        table, "paper", 300, 100, (0, 1), keys, columns=COLUMNS, rows=rows, commits={("toy/whole", "gpfl"): ("abc1234",)}
    )
    return replace(made, **more)  # type: ignore[arg-type]


RUN = {
    ("toy/whole", "fedavg"): trials("fedavg", 40.0, 42.0),
    ("toy/whole", "fedper"): trials("fedper", 52.0, 52.0),
    ("toy/whole", "gpfl"): trials("gpfl", 60.5, 61.5),
}
VALIDATED = {**RUN, ("toy/whole", "gpfl"): trials("gpfl", 61.0, 61.0, validation_best_accuracy=0.605)}


def entry(found: TableResults, label: str, key: str = "toy/whole") -> beside.Entry:
    [block] = [block for block in beside.blocks(found) if block.column.key == key]
    return next(one for one in block.entries if one.label == label)


# Arithmetic.


def test_ours_is_the_mean_and_the_population_deviation_over_trials() -> None:
    one = entry(results(RUN), "fedavg")
    assert one.accuracy is not None
    assert (one.accuracy.mean, one.accuracy.std) == (pytest.approx(41.0), pytest.approx(np.std([40, 42])))
    assert one.last_ten is not None
    assert one.last_ten.mean == pytest.approx(39.0)
    assert one.difference == pytest.approx(1.0)
    assert wording.ours(one) == "41.00 ± 1.00"
    assert wording.theirs(one.paper) == "40.00 ± 0.50"
    assert wording.ours(entry(results({("toy/whole", "gpfl"): trials("gpfl", 61.234)}), "gpfl")) == "61.23"


@pytest.mark.parametrize(
    ("ours", "far"), [(61.0, False), (59.0, False), (61.01, True), (58.99, True), (60.0, False)], ids=lambda value: str(value)
)
def test_difference_beyond_two_of_the_papers_deviations_is_marked(ours: float, far: bool) -> None:
    one = entry(results({("toy/whole", "gpfl"): trials("gpfl", ours)}), "gpfl")
    assert one.far == far
    assert (wording.MARK in wording.difference(one)) == far


def test_nothing_is_marked_where_the_paper_prints_no_deviation() -> None:
    one = entry(results({("toy/whole", "fedper"): trials("fedper", 99.0)}), "fedper")
    assert not one.far
    assert wording.difference(one) == "+54.00"
    assert wording.theirs(one.paper) == "45.00"


def test_ranks_go_by_our_means_and_beside_them_by_the_papers() -> None:
    found = results(RUN)
    assert {label: entry(found, label).rank for label in LABELS} == {"fedavg": 3, "ditto": None, "fedper": 2, "gpfl": 1}
    assert {label: entry(found, label).paper_rank for label in LABELS} == {"fedavg": 3, "ditto": None, "fedper": 2, "gpfl": 1}
    tied = results({**RUN, ("toy/whole", "ditto"): trials("ditto", 52.0)})
    assert entry(tied, "ditto").rank == entry(tied, "fedper").rank == 2.5
    assert wording.place(2.5) == "2.5"


def test_method_that_the_paper_does_not_have_takes_no_rank_from_the_others() -> None:
    own = {("toy/whole", "mine"): trials("mine", 70.0, 70.0)}
    found = results(RUN)
    found = replace(found, rows=(*found.rows, MethodVariant("mine", {"name": "mine"})), trials={**found.trials, **own})
    assert {label: entry(found, label).rank for label in LABELS} == {"fedavg": 3, "ditto": None, "fedper": 2, "gpfl": 1}
    assert entry(found, "mine").rank is None
    [block, _] = beside.blocks(found)
    assert [one.label for one in block.entries if block.leads(one)] == ["mine"], "the best is in bold all the same"
    assert "| mine | **70.00 ± 0.00** | – | – | – | – |" in paper_tables.markdown(found, ORIGIN)
    assert "Ranks are among methods for which the paper has a number: not mine." in paper_tables.markdown(found, ORIGIN)
    assert "Ranks are among" not in paper_tables.markdown(results(RUN), ORIGIN)
    alone = replace(found, trials=own)
    assert entry(alone, "mine").rank is None, "nor where nothing else was run"
    assert entry(alone, "gpfl").paper_rank == 1
    unprinted = replace(found.experiment, paper={key: number for key, number in PAPER.items() if key[1] != "fedper"})
    assert entry(replace(found, experiment=unprinted), "fedper").rank is None, "the paper has no number of it in this column"
    assert entry(replace(found, experiment=unprinted), "fedavg").rank == 2
    silent = replace(found, experiment=replace(found.experiment, paper={}))
    assert [entry(silent, label).rank for label in ("gpfl", "fedper", "fedavg", "mine")] == [1, 2, 3, None]


def test_order_of_methods_is_compared_pair_by_pair() -> None:
    assert beside.blocks(results(RUN))[0].order == "3 of 3 pairs of methods stand in the paper's order."
    turned = results({**RUN, ("toy/whole", "ditto"): trials("ditto", 30.0)})
    words = "4 of 6 pairs of methods stand in the paper's order; not so here: FedAvg before Ditto, FedPer before Ditto."
    assert beside.blocks(turned)[0].order == words
    level = results({**RUN, ("toy/whole", "ditto"): trials("ditto", 52.0)})
    assert "FedPer level with Ditto" in beside.blocks(level)[0].order
    assert beside.blocks(results(RUN))[1].order == ""


def test_equal_results_share_rank_and_bold_and_stand_in_no_order_however_they_were_added_up() -> None:
    one, other = trials("fedavg", 10.0, 20.0, 30.0), trials("gpfl", 30.0, 20.0, 10.0)
    assert one.mean("best_accuracy") != other.mean("best_accuracy")
    found = results({("toy/whole", "fedavg"): one, ("toy/whole", "gpfl"): other})
    assert [entry(found, label).rank for label in ("fedavg", "gpfl")] == [1.5, 1.5]
    [block, _] = beside.blocks(found)
    assert [one.label for one in block.entries if block.leads(one)] == ["fedavg", "gpfl"]
    assert block.order == "0 of 1 pairs of methods stand in the paper's order; not so here: GPFL level with FedAvg."


def test_fairness_is_deviation_and_coefficient_and_less_is_better() -> None:
    found = results(
        {
            ("toy/whole", "fedavg"): trials("fedavg", 40.0, std=0.08, cov=0.2),
            ("toy/whole", "gpfl"): trials("gpfl", 60.0, 60.0, std=0.09, cov=0.15),
        },
        "fairness",
    )
    fair = {key: PaperValue(8.5, cov=14.0 if key[1] == "gpfl" else 21.0) for key in PAPER}
    found = replace(found, experiment=replace(found.experiment, paper=fair))
    one, other = entry(found, "gpfl"), entry(found, "fedavg")
    assert (one.rank, other.rank) == (1, 2)
    assert wording.ours(one) == "9.00 [15.00]"
    assert wording.difference(one) == "+0.50 [+1.00]"
    assert wording.difference(other) == "−0.50 [−1.00]"
    assert beside.blocks(found)[0].order == "1 of 1 pairs of methods stand in the paper's order."
    text = paper_tables.markdown(found, ORIGIN)
    assert "**9.00 [15.00]** / 8.50 [14.00] (+0.50 [+1.00])" in text
    assert "| 60.00 ± 0.00 | – |" in text, "the accuracy stands beside, and none that validation selected"
    kept = {"validation_best_accuracy": 0.58}
    also = results({("toy/whole", "gpfl"): trials("gpfl", 60.0, std=0.09, cov=0.15, **kept)}, "fairness", validation=0.1)
    assert "| 60.00 | 58.00 |" in paper_tables.markdown(also, ORIGIN)


def test_methods_are_tested_against_gpfl_or_where_it_was_not_run_against_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    few = SimpleNamespace(clients=SimpleNamespace(p=None), seeds=SimpleNamespace(p=0.5))

    def paired(one: Trials, other: Trials, *, spread: bool) -> object:
        asked.append((one.method, other.method))
        assert not spread
        chance, over_seeds = {"fedavg": (0.01, None), "fedper": (0.04, 0.03)}[one.method]
        return SimpleNamespace(clients=SimpleNamespace(p=chance), seeds=SimpleNamespace(p=over_seeds))

    monkeypatch.setattr("gpfl.experiments.statistics.paired", paired)
    found = results(RUN)
    assert entry(found, "fedper").seeds_p == pytest.approx(0.03)
    assert entry(found, "fedavg").p == pytest.approx(0.02)  # Holm: the smallest of two, twice
    assert entry(found, "fedper").p == pytest.approx(0.04)
    assert entry(found, "gpfl").p is None
    assert set(asked) == {("fedavg", "gpfl"), ("fedper", "gpfl")}
    test = "p: paired signed-rank test of the accuracies against GPFL over clients (means over seeds), corrected"
    page, source = paper_tables.markdown(found, ORIGIN), paper_tables.tex(found, ORIGIN)
    assert test in page
    assert "| p | p over seeds |" in page
    assert "| 0.040 | 0.030 |" in page
    assert "p over seeds: the same test of the accuracies of all rows, a pair a seed, against GPFL." in page
    assert test.replace("signed-rank", "signed{-}rank") in source
    assert "over seeds:" not in source, "which has no such column"
    assert r"\quad $p$ & {\footnotesize 0.020} & {\footnotesize --} \\" in source
    monkeypatch.setattr("gpfl.experiments.statistics.paired", lambda one, other, spread: few)
    page, source = paper_tables.markdown(found, ORIGIN), paper_tables.tex(found, ORIGIN)
    assert "no p over clients, as a signed-rank test needs six of them." in page
    assert "p: paired" not in page
    assert "p over seeds: the same test" in page
    assert "toy/whole: no p over clients, as a signed{-}rank test needs six of them." in source
    assert r"\quad $p$" not in source
    rest = results({key: value for key, value in RUN.items() if key[1] != "gpfl"})
    assert beside.blocks(rest)[0].reference == "fedper"


# What is written.


def test_markdown_says_all_that_must_be_known(tmp_path: Path) -> None:
    found = results(
        RUN,
        caveats={"toy/whole": "toy has 5 of the 9 published rows."},
        problems={("toy/10of50", "gpfl"): "the loss of client 3 is nan"},
    )
    text = paper_tables.markdown(found, ORIGIN)
    how = "protocol paper (GPFL's formulas as printed), at most 300 rounds, ended after 100 without a better accuracy"
    assert f"Ours: {how}; seeds 0, 1. The paper:" in text
    assert "No validation rows were kept" in text
    assert "| GPFL | **61.00 ± 0.50** / 60.00 ± 0.50 (+1.00) | failed / – |" in text
    assert "| Ditto | not run / 50.00 ± 0.50 | not run / – |" in text
    assert "Whole, toys (part) | N = 10\\|50, some |" in text
    assert "**Part of the data: toy has 5 of the 9 published rows.**" in text
    assert "| FedPer | 52.00 ± 0.00 | 45.00 | +7.00 | 2 | 2 | 50.00 ± 0.00 | – | 7 | 30 | 2 | – |" in text
    assert "- toy/whole: a note." in text
    assert "- toy/10of50, GPFL failed: the loss of client 3 is nan" in text
    assert "- toy/whole, Ditto: The paper has two numbers." in text
    assert "## toy/10of50" not in text, "nothing of it was run"
    last = "Made by `gpfl reproduce toys --seeds 0,1`; commit abc1234; device a GPU; seeds 0, 1; gpfl 1.0, torch 2.0."
    assert text.splitlines()[-1] == last


def test_settings_by_hand_and_missing_trials_are_named_in_every_form() -> None:
    few = {**RUN, ("toy/whole", "ditto"): trials("ditto", 50.0)}
    found = results(few, settings=('run.precision = "tf32"', "gpfl.lam = 0.5"))
    for text in (paper_tables.markdown(found, ORIGIN), paper_tables.tex(found, ORIGIN).replace("{-}", "-").replace(r"\_", "_")):
        assert 'seeds 0, 1; set by hand: run.precision = "tf32", gpfl.lam = 0.5.' in text
        assert "Trials are 2, but for toy/whole Ditto 1." in text
    assert {record["settings"] for record in paper_tables.records(found)} == {'run.precision = "tf32", gpfl.lam = 0.5'}
    assert "Trials are" not in paper_tables.markdown(results(RUN), ORIGIN)


def test_number_that_the_paper_does_not_print_is_about_and_has_no_rank() -> None:
    about = {place: PaperValue(p.mean, between=(p.mean - 0.3, p.mean + 0.3)) for place, p in PAPER.items()}
    about["toy/whole", "ditto"] = PaperValue(40.5, between=(40.2, 41.0))  # too near FedAvg's 40 to say which is first
    found = results({**RUN, ("toy/whole", "ditto"): trials("ditto", 30.0)})
    found = replace(found, experiment=replace(found.experiment, paper=about))
    one = entry(found, "gpfl")
    assert (wording.theirs(one.paper), wording.difference(one), one.paper_rank) == ("≈ 60.0 (59.7 to 60.3)", "+1.0", None)
    assert beside.blocks(found)[0].order == (
        "5 of 5 pairs of methods stand in the paper's order (of 1 more the paper's numbers do not tell which is ahead)."
    )
    assert "paper's rank" not in paper_tables.markdown(found, ORIGIN), "as it has none"
    [record] = [r for r in paper_tables.records(found) if (r["column"], r["method"]) == ("toy/whole", "gpfl")]
    assert (record["paper"], record["paper_least"], record["paper_most"]) == (60.0, 59.7, 60.3)


def test_pairs_are_compared_where_the_printed_digits_tell_which_is_ahead() -> None:
    one = studies.load_experiments()["feature-shift"]
    [column] = one.columns
    run = {(column.key, row.label): trials(row.label, one.paper[column.key, row.label].mean) for row in one.rows}
    made = TableResults(one, "corrected", 300, 50, (0,), run, columns=one.columns, rows=one.rows)
    assert beside.blocks(made)[0].order == (
        "21 of 21 pairs of methods stand in the paper's order (of 34 more the paper's numbers do not tell which is ahead)."
    )


def test_runs_of_fewer_than_ten_rounds_have_no_mean_of_the_last_ten() -> None:
    found = results({**RUN, ("toy/whole", "gpfl"): trials("gpfl", 60.5, 61.5, rounds=9)})
    assert entry(found, "gpfl").last_ten is None
    text = paper_tables.markdown(found, ORIGIN)
    assert "| GPFL | **61.00 ± 0.50** | 60.00 ± 0.50 | +1.00 | 1 | 1 | – | – | 7 | 9 | 2 | – |" in text
    assert "- Trials of fewer than 10 rounds have no mean of the last ten." in text
    assert "fewer than 10 rounds" not in paper_tables.markdown(results(RUN), ORIGIN)
    ten = results({("toy/whole", "gpfl"): trials("gpfl", 60.5, rounds=10)})
    assert entry(ten, "gpfl").last_ten is not None


def test_table_without_numbers_of_the_papers_speaks_of_none() -> None:
    found = results(RUN)
    silent = replace(found, experiment=replace(found.experiment, paper={}))
    text, source = paper_tables.markdown(silent, ORIGIN), paper_tables.tex(silent, ORIGIN)
    assert "| method | ours, % | rank | last ten rounds, % | selected on validation, % |" in text
    assert "| GPFL | **61.00 ± 0.50** | not run |" in text, "side by side"
    assert "| GPFL | **61.00 ± 0.50** | 1 | 59.00 ± 0.50 |" in text
    assert "in the best round on test rows: mean ± population standard deviation over trials." in text
    assert r"\quad paper" not in source
    assert r"\caption{Accuracy (\%) \& more of $\beta$. In parentheses: ranks.}" in source
    for words in (text, source):
        assert "the paper" not in words.replace("the paper does", "").lower().replace("the paper has two numbers", "")
    [shown] = paper_tables.rich_tables(silent)
    assert [strip.heading for strip in shown.strips] == ["method", "ours", "our\nrank", "trials"]


def test_accuracy_selected_on_validation_stands_beside_the_best_on_test() -> None:
    text = paper_tables.markdown(results(VALIDATED, validation=0.1), ORIGIN)
    assert "10% of each client's training rows were kept for validation" in text
    assert "| GPFL | **61.00 ± 0.00** | 60.00 ± 0.50 | +1.00 | 1 | 1 | 59.00 ± 0.00 | 60.50 ± 0.00 |" in text
    source = paper_tables.tex(results(VALIDATED, validation=0.1), ORIGIN)
    assert r"\quad by validation & 60.50 $\pm$ 0.00 & -- \\" in source
    [shown, *_] = paper_tables.rich_tables(results(VALIDATED, validation=0.1))
    assert shown.strips[2] == Strip("by validation", ["–", "–", "–", "60.50 ± 0.00"], 2)


def test_numbers_of_the_csv_are_those_of_the_table() -> None:
    text = paper_tables.as_csv(paper_tables.records(results(RUN)))
    records = list(csv.DictReader(io.StringIO(text)))
    assert len(records) == 8
    [one] = [r for r in records if (r["column"], r["method"]) == ("toy/whole", "gpfl")]
    assert (float(one["accuracy"]), float(one["paper"]), float(one["difference"])) == pytest.approx((61.0, 60.0, 1.0))
    assert (one["state"], one["trials"], one["seeds"], one["protocol"], one["far"]) == ("run", "2", "0 1", "paper", "False")
    assert (one["most_rounds"], one["patience"], one["commit"], one["device"]) == ("300", "100", "abc1234", "a GPU")
    assert float(one["accuracy_std_over_trials"]) == pytest.approx(0.5)
    [none] = [r for r in records if (r["column"], r["method"]) == ("toy/10of50", "ditto")]
    assert (none["state"], none["accuracy"], none["paper"], none["rank"]) == ("not run", "", "", "")


def test_table_for_the_terminal_has_the_best_in_bold() -> None:
    [shown] = paper_tables.rich_tables(results(RUN))
    assert [row.style for row in shown.table(shown.strips, 80).rows] == [None, None, None, "bold"]
    assert shown.strips[1].cells == ["41.00 ± 1.00", "not run", "52.00 ± 0.00", "61.00 ± 0.50"]


def test_terminal_shows_columns_of_which_something_was_run_or_failed() -> None:
    failed = {("toy/10of50", "gpfl"): "the loss of client 3 is nan"}
    assert len(paper_tables.rich_tables(results(RUN, problems=failed))) == 2
    diverged = {("toy/whole", "gpfl"): "seed 2 diverged in round 3"}
    assert len(paper_tables.rich_tables(results(RUN, problems=diverged))) == 1, "of the other there is nothing to show"


def lines(shown: Screen, width: int) -> list[str]:
    """What a terminal of so many columns shows."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as kept:
        console.print(shown)
    return kept.get().splitlines()


def left_out(said: list[str]) -> list[str]:
    """The columns that the last lines name."""
    words = " ".join(" ".join(said).split()).partition(" columns are too few: ")[2]
    assert not words or words.endswith("; table.md has them.")
    return words.removesuffix("; table.md has them.").split(", ") if words else []


@pytest.mark.parametrize("found", [RUN, VALIDATED], ids=["plain", "validated"])
def test_no_number_is_cut_on_a_narrow_terminal_and_what_is_left_out_is_named(
    found: Mapping[tuple[str, str], Trials],
) -> None:
    [shown] = paper_tables.rich_tables(results(found))
    for width in (*range(24, 100), 160):
        said = lines(shown, width)
        assert max(map(len, said)) <= width
        [head] = [line for line in said if line.startswith("method")]
        [row] = [line for line in said if line.startswith("GPFL")]
        there = [strip for strip in shown.strips if strip.name not in left_out(said)]
        assert row.split() == " ".join(strip.cells[-1] for strip in there).split()
        assert head.split() == [word for strip in there for word in strip.heading.splitlines()[-1].split()]
    assert len(there) == len(shown.strips)


def test_least_important_columns_are_left_out_first() -> None:
    many = results({**VALIDATED, ("toy/whole", "ditto"): trials("ditto", 50.0, 50.0)}, validation=0.1)
    [shown] = paper_tables.rich_tables(many)
    shown = replace(shown, strips=[*shown.strips, Strip("p", ["< 0.001"] * 4, 6)])
    seen: list[str] = []
    for width in range(100, 20, -1):
        seen += [name for name in left_out(lines(shown, width)) if name not in seen]
    assert seen == ["p", "trials", "our rank", "paper's rank", "ours − paper", "by validation", "paper"]
    assert not left_out(lines(shown, 100))


def test_every_table_of_the_terminal_names_protocol_rounds_and_patience() -> None:
    [shown] = paper_tables.rich_tables(results(RUN, settings=("gpfl.mu = 0.1",), validation=0.1))
    rounds = "at most 300 rounds, ended after 100 without a better accuracy"
    said = f"Protocol paper, {rounds}, 10% of training rows for validation; seeds 0, 1; set by hand: gpfl.mu = 0.1."
    assert lines(shown, 200)[:2] == ["toy/whole: Whole, toys", said]


@pytest.mark.parametrize(
    ("patience", "words"),
    [
        (100, "at most 300 rounds, ended after 100 without a better accuracy"),
        (300, "at most 300 rounds, patience 300, which ends none before"),
        (0, "300 rounds without patience"),
    ],
)
def test_patience_is_always_said(patience: int, words: str) -> None:
    assert f"protocol paper (GPFL's formulas as printed), {words}; seeds" in paper_tables.markdown(
        results(RUN, patience=patience), ORIGIN
    )


def test_files_are_written_into_the_folder(tmp_path: Path) -> None:
    paths = paper_tables.save(results(RUN), tmp_path / "toys", ORIGIN)
    assert [path.name for path in paths] == ["table.md", "table.tex", "table.csv"]
    assert all(path.read_text() for path in paths)


# LaTeX.


def test_latex_has_booktabs_bold_best_and_a_line_for_the_paper() -> None:
    text = paper_tables.tex(results(RUN), ORIGIN)
    assert all(word in text for word in (r"\toprule", r"\midrule", r"\bottomrule"))
    assert r"GPFL & \textbf{\boldmath 61.00 $\pm$ 0.50}~{\footnotesize (1)} & not run \\" in text
    assert r"\quad paper & {\footnotesize 60.00 $\pm$ 0.50 (1), $+$1.00} & {\footnotesize --} \\" in text
    assert r" & \multicolumn{1}{c}{toys} & \multicolumn{1}{c}{some} \\" in text
    assert r"Method & Whole & N = 10$|$50 \\" in text
    assert r"Accuracy (\%) \& more of $\beta$." in text
    widths = {line.count("&") - line.count(r"\&") for line in text.splitlines() if line.endswith(r"\\")}
    assert widths == {2}


def test_long_lists_of_a_command_may_be_broken() -> None:
    assert latex.breakable("gpfl --cells a_b,c") == r"gpfl {-}{-}cells a\_b,\allowbreak{}c"
    assert r"seeds 0,\allowbreak{} 1" in paper_tables.tex(results(RUN), ORIGIN)


def test_columns_of_one_group_share_its_heading() -> None:
    text = latex.table("c", "l", ["a", "a", "b"], ["x", "y", "z"], [["r", "1", "2", "3"]], [])
    assert r" & \multicolumn{2}{c}{a} & \multicolumn{1}{c}{b} \\" in text
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}" in text


def test_letters_that_latex_takes_for_something_else_are_written_out() -> None:
    assert latex.text("5_% {x} \\ --a 日") == r"5\_\% \{x\} \textbackslash{} {-}{-}a ?"


COMPILERS = {
    "tectonic": ["tectonic", "table.tex"],
    "pdflatex": ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
}
HERE = next((name for name in COMPILERS if shutil.which(name)), None)


@pytest.mark.skipif(HERE is None, reason="there is no LaTeX compiler here")
def test_latex_compiles(tmp_path: Path) -> None:
    tables = [paper_tables.tex(results(RUN), ORIGIN), paper_tables.tex(results(VALIDATED, validation=0.1), ORIGIN)]
    measured = FeatureMetrics(40, 10, -0.1, 0.2, None, 0.9, 0.1, 0.8)
    measures = {"fedper": [measured] * 2, "gpfl": []}
    tables.append(Measured(COLUMNS[0], measures).tex())
    for one in studies.load_experiments().values():
        nothing = {(column.key, row.label): None for column in one.columns for row in one.rows}
        made = TableResults(one, "corrected", 2000, 100, (0,), nothing, columns=one.columns, rows=one.rows)
        tables.append(paper_tables.tex(made, ORIGIN))
    head = "\\documentclass{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
    (tmp_path / "table.tex").write_text(head + "\n\\clearpage\n".join(tables) + "\\end{document}\n")
    done = subprocess.run(COMPILERS[str(HERE)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("one", studies.load_experiments().values(), ids=studies.load_experiments())
def test_table_of_an_experiment_that_was_not_run_shows_the_papers_numbers(one: Experiment) -> None:
    nothing = {(column.key, row.label): None for column in one.columns for row in one.rows}
    made = TableResults(one, "corrected", 2000, 100, (0,), nothing, columns=one.columns, rows=one.rows)
    text, source = paper_tables.markdown(made, ORIGIN), paper_tables.tex(made, ORIGIN)
    assert text.count("not run") >= len(one.columns) * len(one.rows)
    for numbers in one.paper.values():
        assert f" {numbers.mean:.{1 if numbers.between else 2}f}" in text
        assert f"{numbers.mean:.{1 if numbers.between else 2}f}" in source
    assert source.isascii()
    assert all(studies.display_name(row.label) in text for row in one.rows)
