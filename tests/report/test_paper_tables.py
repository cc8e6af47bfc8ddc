"""Tables next to the paper's, in all their forms."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from toy_results import COLUMNS, PAPER, RUN, VALIDATED, toy_plan, toy_results, toy_trials

from gpfl.experiments import definitions
from gpfl.experiments.definitions import Experiment, PaperValue, display_name
from gpfl.experiments.features import FeatureMetrics
from gpfl.experiments.grid import TableResults
from gpfl.report import feature_tables, paper_tables
from gpfl.report.paper_tables import (
    Origin,
    describe_rounds,
    describe_setting,
    terminal_tables,
    to_latex,
    to_markdown,
    to_records,
)
from gpfl.report.tables import ResultTable

ORIGIN = Origin("gpfl reproduce toys --seeds 0,1", "abc1234")


def printed(table: ResultTable, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


# Markdown.


def test_page_has_setting_table_and_notes() -> None:
    text = to_markdown(
        toy_results(
            {**RUN, ("toy/whole", "ditto"): toy_trials("ditto", 50.0)},
            caveats={"toy/whole": "toy has 5 of the 9 published samples."},
            problems={("toy/10of50", "gpfl"): "the loss of client 3 is nan", ("toy/whole", "gpfl"): "seed 2 diverged"},
        ),
        ORIGIN,
    )
    assert text.startswith(
        "# Toys\n\nAccuracy (%) & more of β.\n\nProtocol paper (GPFL's formulas as printed), at most 300 rounds"
    )
    assert (
        "\n## toy/whole: Whole, toys\n\nPart of the data: toy has 5 of the 9 published samples.\n\n| method | ours, % |" in text
    )
    assert "| GPFL | **61.00 ± 0.50** | 60.00 ± 0.50 | +1.00 | 1 | 1 | 59.00 ± 0.50 | 7 | 30 | 2 |" in text
    assert "| Ditto | 50.00 | 50.00 ± 0.50 | +0.00 | 3 | 2 | 48.00 | 7 | 30 | 1 |" in text
    assert "| FedPer | 52.00 ± 0.00 | 45.00 | +7.00 | 2 | 3 |" in text
    assert "5 of 6 pairs of methods are in the paper's order." in text
    assert "- Trials: 2, except toy/whole Ditto 1." in text
    assert "- toy/whole: a note." in text
    assert "- toy/whole GPFL: seed 2 diverged" in text
    assert "- toy/10of50 GPFL failed: the loss of client 3 is nan" in text
    assert "- toy/whole, Ditto: The paper has two numbers." in text
    assert "## toy/10of50" not in text, "nothing of it was run"
    last = "Made by `gpfl reproduce toys --seeds 0,1`; commit abc1234; device a GPU; seeds 0, 1; gpfl 1.0, torch 2.0."
    assert text.splitlines()[-1] == last


def test_far_difference_is_marked() -> None:
    text = to_markdown(toy_results({("toy/whole", "gpfl"): toy_trials("gpfl", 58.0)}), ORIGIN)
    assert "| GPFL | **58.00** | 60.00 ± 0.50 | −2.00† | 1 | 1 |" in text
    assert "- † more than 2 of the paper's standard deviations from its mean." in text
    assert "†" not in to_markdown(toy_results(RUN), ORIGIN)


def test_setting_names_protocol_rounds_patience_seeds_and_values_set_by_hand() -> None:
    plan = toy_plan(run={"precision": "tf32"}, overrides={"gpfl": {"mu": 0.1}}, validation=0.1, protocol="paper")
    results = toy_results(RUN, plan=plan, tuned="tuned by gpfl tune")
    assert describe_setting(results) == (
        "Protocol paper (GPFL's formulas as printed), at most 2,000 rounds, patience 100; 10% of each client's training "
        'samples for validation; seeds 0, 1, 2; tuned by gpfl tune; set by hand: run.precision = "tf32", gpfl.mu = 0.1.'
    )
    assert describe_setting(results) in to_markdown(results, ORIGIN)
    assert describe_rounds(300, 0) == "300 rounds without patience"
    assert {record["settings"] for record in to_records(results)} == {'run.precision = "tf32", gpfl.mu = 0.1'}


def test_ranks_are_said_to_be_among_the_papers_methods() -> None:
    few = {cell: number for cell, number in PAPER.items() if cell[1] != "fedper"}
    results = toy_results(RUN)
    text = to_markdown(replace(results, experiment=replace(results.experiment, paper=few)), ORIGIN)
    assert "- Ranks are among methods for which the paper has a number: not FedPer." in text
    assert "Ranks are among" not in to_markdown(results, ORIGIN)


def test_number_that_the_paper_does_not_print_is_approximate() -> None:
    results = toy_results(RUN)
    about = {cell: PaperValue(p.mean, interval=(p.mean - 0.3, p.mean + 0.3)) for cell, p in PAPER.items()}
    results = replace(results, experiment=replace(results.experiment, paper=about))
    text = to_markdown(results, ORIGIN)
    assert "| GPFL | **61.00 ± 0.50** | ≈ 60.0 (59.7 to 60.3) | +1.0 | 1 |" in text
    assert "paper's rank" not in text
    [record] = [r for r in to_records(results) if (r["column"], r["method"]) == ("toy/whole", "gpfl")]
    assert (record["paper"], record["paper_least"], record["paper_most"]) == (60.0, 59.7, 60.3)


def test_trials_of_fewer_than_ten_rounds_have_no_mean_of_the_last_ten() -> None:
    text = to_markdown(toy_results({**RUN, ("toy/whole", "gpfl"): toy_trials("gpfl", 60.5, 61.5, rounds=9)}), ORIGIN)
    assert "| GPFL | **61.00 ± 0.50** | 60.00 ± 0.50 | +1.00 | 1 | 1 | – | 7 | 9 | 2 |" in text


def test_table_without_numbers_of_the_papers_does_not_mention_the_paper() -> None:
    results = toy_results(RUN)
    results = replace(results, experiment=replace(results.experiment, paper={}, remarks={}))
    text, latex = to_markdown(results, ORIGIN), to_latex(results, ORIGIN)
    assert "| method | ours, % | rank | last ten rounds, % | best round | rounds | trials |" in text
    assert "the paper" not in (text + latex).lower()
    assert r"\caption{Accuracy (\%) \& more of $\beta$. First rows: ours. In parentheses: ranks.}" in latex


def test_accuracy_selected_on_validation_is_next_to_the_best_on_test() -> None:
    results = toy_results(VALIDATED, plan=toy_plan(validation=0.1))
    assert "| 59.00 ± 0.00 | 60.50 ± 0.00 | 7 | 30 | 2 |" in to_markdown(results, ORIGIN)
    assert "\\quad by validation & 60.50 $\\pm$ 0.00 & -- \\\\" in to_latex(results, ORIGIN)


def test_fairness_is_deviation_and_coefficient() -> None:
    run = {
        ("toy/whole", "fedavg"): toy_trials("fedavg", 40.0, std=0.08, cov=0.2),
        ("toy/whole", "gpfl"): toy_trials("gpfl", 60.0, 60.0, std=0.09, cov=0.15),
    }
    results = toy_results(run, "fairness")
    fair = {key: PaperValue(8.5, cov=14.0 if key[1] == "gpfl" else 21.0) for key in PAPER}
    text = to_markdown(replace(results, experiment=replace(results.experiment, paper=fair)), ORIGIN)
    assert "| method | std, % [CoV] | paper | difference | rank | paper's rank | accuracy, % |" in text
    assert "| GPFL | **9.00 [15.00]** | 8.50 [14.00] | +0.50 [+1.00] | 1 | 1 | 60.00 ± 0.00 |" in text
    assert "| FedAvg | 8.00 [20.00] | 8.50 [21.00] | −0.50 [−1.00] | 2 | 2 | 40.00 |" in text
    assert "Less is better; ranks go by the coefficient." in text


def test_p_values_come_with_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    class Test:
        def __init__(self, p: float | None) -> None:
            self.p = p

    class Comparison:
        def __init__(self, clients: float | None, seeds: float | None) -> None:
            self.clients, self.seeds = Test(clients), Test(seeds)

    monkeypatch.setattr("gpfl.experiments.statistics.compare_paired", lambda one, other, spread: Comparison(0.0001, 0.5))
    text, latex = to_markdown(toy_results(RUN), ORIGIN), to_latex(toy_results(RUN), ORIGIN)
    assert "| trials | p | p over seeds |" in text
    assert "| 2 | < 0.001 | 1.000 |" in text
    assert "p: signed-rank test of clients' accuracies (means over seeds) against GPFL, with Holm's correction." in text
    assert "p over seeds: the same test of the accuracies of all samples" in text
    assert "\\quad p & $<$ 0.001 & -- \\\\" in latex
    assert "signed{-}rank test of clients' accuracies" in latex
    monkeypatch.setattr("gpfl.experiments.statistics.compare_paired", lambda one, other, spread: Comparison(None, None))
    assert "No p over clients: a signed-rank test needs six of them." in to_markdown(toy_results(RUN), ORIGIN)


# LaTeX and CSV.


def test_latex_has_rows_of_ours_and_the_papers_with_the_best_in_bold() -> None:
    text = to_latex(toy_results(RUN, caveats={"toy/10of50": "toy has 5 of the 9 published samples."}), ORIGIN)
    assert r"GPFL & \textbf{\boldmath 61.00 $\pm$ 0.50 (1)} & not run \\" in text
    assert "\\quad paper & 60.00 $\\pm$ 0.50 (1) $+$1.00 & -- \\\\" in text
    assert r" & \multicolumn{1}{c}{toys} & \multicolumn{1}{c}{some} \\" in text
    assert r"Method & Whole & N = 10$|$50 (part) \\" in text
    assert r"toy/10of50: toy has 5 of the 9 published samples.\par" in text
    assert r"Made by gpfl reproduce toys {-}{-}seeds 0,\allowbreak{}1; commit abc1234" in text


def test_numbers_of_the_csv_are_those_of_the_table(tmp_path: Path) -> None:
    paths = paper_tables.save(toy_results(RUN), tmp_path / "toys", ORIGIN)
    assert [path.name for path in paths] == ["table.md", "table.tex", "table.csv"]
    with paths[2].open(newline="") as file:
        records = list(csv.DictReader(file))
    assert len(records) == 8
    [one] = [r for r in records if (r["column"], r["method"]) == ("toy/whole", "gpfl")]
    assert (float(one["accuracy"]), float(one["paper"]), float(one["difference"])) == pytest.approx((61.0, 60.0, 1.0))
    assert (one["state"], one["trials"], one["seeds"], one["protocol"], one["far"]) == ("run", "2", "0 1", "paper", "False")
    assert (one["most_rounds"], one["patience"], one["commit"], one["device"]) == ("300", "100", "abc1234", "a GPU")
    assert float(one["accuracy_std_over_trials"]) == pytest.approx(0.5)
    [none] = [r for r in records if (r["column"], r["method"]) == ("toy/10of50", "ditto")]
    assert (none["state"], none["accuracy"], none["paper"], none["rank"]) == ("not run", "", "", "")


# The terminal.


def test_terminal_has_columns_of_which_something_was_run_or_failed() -> None:
    failed = {("toy/10of50", "gpfl"): "the loss of client 3 is nan"}
    assert len(terminal_tables(toy_results(RUN, problems=failed))) == 2
    diverged = {("toy/whole", "gpfl"): "seed 2 diverged in round 3"}
    assert len(terminal_tables(toy_results(RUN, problems=diverged))) == 1


def test_least_important_columns_are_hidden_first() -> None:
    [table] = terminal_tables(toy_results(VALIDATED, plan=toy_plan(validation=0.1)))
    seen: list[str] = []
    for width in range(120, 20, -1):
        hidden = " ".join(printed(table, width).split()).partition(" characters are too few: ")[2].partition(". ")[0]
        seen += [name for name in hidden.split(", ") if name and name not in seen]
    last = ["last ten rounds", "%", "best round", "rounds"]
    assert seen[: len(last)] == last
    assert seen[len(last) :] == ["trials", "rank", "paper's rank", "difference", "selected on validation", "paper"]


def test_problems_are_grouped_by_their_text() -> None:
    problems = {("a", "gpfl"): "x", ("a", "fedavg"): "x", ("b", "gpfl"): "y", ("b", "local"): "x"}
    assert paper_tables.group_problems(problems) == ["a gpfl, fedavg; b local: x", "b gpfl: y"]
    assert paper_tables.group_problems({("a", "gpfl"): "x", ("b", "gpfl"): "x"}) == ["a, b gpfl: x"]


# All experiments.

COMPILERS = {
    "tectonic": ["tectonic", "table.tex"],
    "pdflatex": ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
}
COMPILER = next((name for name in COMPILERS if shutil.which(name)), None)


def not_run(experiment: Experiment) -> TableResults:
    nothing = {(column.key, row.label): None for column in experiment.columns for row in experiment.rows}
    return TableResults(experiment, toy_plan(seeds=(0,)), nothing, columns=experiment.columns, rows=experiment.rows)


@pytest.mark.skipif(COMPILER is None, reason="there is no LaTeX compiler here")
def test_latex_compiles(tmp_path: Path) -> None:
    tables = [to_latex(toy_results(RUN), ORIGIN), to_latex(toy_results(VALIDATED, plan=toy_plan(validation=0.1)), ORIGIN)]
    measures = {"fedper": [FeatureMetrics(40, 10, -0.1, 0.2, None, 0.9, 0.1, 0.8)] * 2, "gpfl": []}
    tables.append(feature_tables.metrics_table(COLUMNS[0], measures).to_latex("features"))
    tables += [to_latex(not_run(experiment), ORIGIN) for experiment in definitions.load_experiments().values()]
    head = "\\documentclass{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
    (tmp_path / "table.tex").write_text(head + "\n\\clearpage\n".join(tables) + "\\end{document}\n")
    done = subprocess.run(COMPILERS[str(COMPILER)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("experiment", definitions.load_experiments().values(), ids=definitions.load_experiments())
def test_table_of_an_experiment_that_was_not_run_has_the_papers_numbers(experiment: Experiment) -> None:
    results = not_run(experiment)
    latex = to_latex(results, ORIGIN)
    records = {(record["column"], record["method"]): record["paper"] for record in to_records(results)}
    for cell, numbers in experiment.paper.items():
        assert f"{numbers.mean:.{1 if numbers.interval else 2}f}" in latex
        assert records[cell] == numbers.mean
    assert latex.isascii()
    assert all(display_name(row.label).replace("-", "{-}").replace("&", r"\&") in latex for row in experiment.rows)
