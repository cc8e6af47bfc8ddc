"""Tables over repeated splits and the sentence on gains: what they say, and that the saved files have the same numbers."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_repeats import repeated_results

from gpfl.experiments.repeats import RepeatedResults
from gpfl.experiments.statistics import corrected_t_test
from gpfl.report.repeat_tables import RepeatReport, describe_gains, draw_gains

SCORES = {
    "local": {"a": [0.7, 0.8, 0.9], "b": [0.5, 0.6, 0.7]},  # 0.6, 0.7, 0.8
    "gpfl": {"a": [0.7, 0.9, 0.7], "b": [0.7, 0.7, 0.7]},  # 0.7, 0.8, 0.7
    "fedavg": {"a": [0.1, 0.2, 0.1], "b": [0.1, 0.2, 0.1]},
}


def test_methods_are_shown_in_percent_with_ranks_the_worst_client_and_costs() -> None:
    report = RepeatReport(repeated_results(SCORES))
    assert report.title == "heart, 2 clients (natural), 100 rounds, 3 repeats"
    assert report.method_table().cells() == [
        ["gpfl", "73.33 ± 4.71", "1.33", "2", "70.00", "1.5 kB", "3.0 kB", "2.0"],
        ["local", "70.00 ± 8.16", "1.67", "1", "60.00", "1.5 kB", "3.0 kB", "2.0"],
        ["fedavg", "13.33 ± 4.71", "3.00", "0", "13.33", "1.5 kB", "3.0 kB", "2.0"],
    ]


def test_differences_from_the_best_have_the_interval_of_the_named_test() -> None:
    table = RepeatReport(repeated_results(SCORES)).difference_table()
    test = corrected_t_test([-0.1, -0.1, 0.1], 1 / 3)
    assert test.low is not None
    assert test.high is not None
    local = table.cells()[0]
    assert local[:2] == ["local", "−3.33"]
    assert local[2] == f"−{-100 * test.low:.2f} to +{100 * test.high:.2f}"
    assert local[4:] == ["1 – 2", "0.3 – 1.0"]
    assert "corrected resampled t-test" in table.notes[0]
    assert "(1/3 + 0.33) times" in table.notes[0]


def test_pairs_are_row_minus_column_and_marked_where_significant() -> None:
    cells = RepeatReport(repeated_results(SCORES)).pair_table().cells()
    assert cells[0] == ["gpfl", "–", "+3.33 ", "+60.00*"]
    assert cells[2] == ["fedavg", "−60.00*", "−56.67 ", "–"]


def test_clients_show_means_and_wins_and_only_where_all_repeats_have_the_same() -> None:
    report = RepeatReport(repeated_results(SCORES))
    assert report.client_table().cells()[0] == ["a", "76.7 (2)", "80.0 (2)", "13.3 (0)"]
    assert len(report.tables) == 4
    assert len(RepeatReport(repeated_results(SCORES, partition="dirichlet")).tables) == 3


def test_undefined_metrics_of_a_client_are_dashes() -> None:
    test = {name: {"a": [0.5, 0.6], "b": [None, None]} for name in ("local", "gpfl")}
    report = RepeatReport(repeated_results(test, "auroc"))
    assert report.client_table().cells()[1] == ["b", "–", "–"]
    assert report.to_dict()["clients"]["b"]["local"] == {"mean": None, "best_in": 0}  # type: ignore[index]


def test_lower_is_better_for_losses() -> None:
    report = RepeatReport(repeated_results(SCORES, "log_loss"))
    table = report.method_table()
    assert [row[0] for row in table.cells()] == ["fedavg", "local", "gpfl"]
    assert table.cells()[1][4] == "0.8000"  # the worst client


def test_saved_files_have_the_same_numbers(tmp_path: Path) -> None:
    report = RepeatReport(repeated_results(SCORES))
    paths = report.save(tmp_path, ["a note"])
    assert [path.name for path in paths] == ["table.md", "table.csv", "table.json"]
    content = json.loads((tmp_path / "table.json").read_text())
    assert (content["metric"], content["repeats"], content["test_train_ratio"]) == ("accuracy", 3, pytest.approx(1 / 3))
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["gpfl", "local", "fedavg"]
    assert float(rows[1]["difference_from_best"]) == content["methods"][1]["difference_from_best"] == pytest.approx(-1 / 30)
    pair = content["pairs"][0]
    assert (pair["one"], pair["other"], pair["wins"]) == ("gpfl", "local", 2)
    assert float(rows[1]["difference_low"]) == -pair["high"]
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# heart, 2 clients (natural), 100 rounds, 3 repeats\n\n| method | accuracy, % |")
    assert "## Paired differences from gpfl" in page
    assert page.endswith("- a note\n")


@pytest.mark.parametrize("width", [80, 120])
def test_tables_of_six_methods_fit_a_terminal(width: int) -> None:
    names = ("local", "fedavg", "fedavg-ft", "fedper", "ditto", "gpfl")
    scores = {name: {"long-beach": [0.70 + k / 100, 0.72, 0.73], "b": [0.6, 0.7, 0.7]} for k, name in enumerate(names)}
    screen = io.StringIO()
    for table in RepeatReport(repeated_results(scores)).tables:
        Console(width=width, file=screen).print(table)
    assert max(map(len, screen.getvalue().splitlines())) <= width
    assert "±" in screen.getvalue()
    assert screen.getvalue().count("fedavg-ft") >= 4


# The sentence on gains over a reference, for constructed scores, and its figure.

ALONE = [0.70, 0.72, 0.71, 0.69, 0.73, 0.70]


def results(metric: str = "accuracy", **shifts: list[float]) -> RepeatedResults:
    """Return results of training alone and of methods that differ from it by these values in the repeats."""
    scores = {"local": {"a": ALONE}}
    scores |= {name.replace("_", "-"): {"a": [a + d for a, d in zip(ALONE, own, strict=True)]} for name, own in shifts.items()}
    return repeated_results(scores, metric)


def sentence(given: RepeatedResults) -> str:
    report = RepeatReport(given)
    return describe_gains(report.differences_from("local"), report.metric, "training alone")


NOISE = [0.02, -0.02, 0.01, -0.01, 0.03, -0.03]
GAIN = [0.050, 0.052, 0.048, 0.051, 0.049, 0.050]
LARGER = [0.100, 0.102, 0.098, 0.101, 0.099, 0.100]


def test_better_worse_and_unclear_methods_are_told_apart() -> None:
    text = sentence(results(fedavg_ft=LARGER, ditto=GAIN, fedavg=[-d for d in GAIN], gpfl=NOISE))
    assert text == (
        "On these data fedavg-ft is better than training alone by 10.0 points of accuracy (95 % interval 9.7 to 10.3) and "
        "ditto by 5.0 (4.7 to 5.3); fedavg is worse than training alone by 5.0 points of accuracy (95 % interval 4.7 to 5.3); "
        "there is no clear difference from training alone for gpfl (+0.0, 95 % interval −4.3 to +4.3)."
    )


def test_noise_is_no_difference_whatever_its_mean() -> None:
    text = sentence(results(fedavg=NOISE, gpfl=[d + 0.01 for d in NOISE]))
    assert text.startswith(
        "On these data there is no clear difference from training alone for gpfl (+1.0, 95 % interval −3.3 to "
    )
    assert "better" not in text
    assert "worse" not in text


def test_equal_scores_are_no_difference() -> None:
    text = sentence(results(fedavg=[0.0] * 6))
    assert text == (
        "On these data there is no clear difference from training alone for fedavg (+0.0, 95 % interval +0.0 to +0.0)."
    )


def test_all_methods_worse_is_said_the_worst_first() -> None:
    text = sentence(results(fedavg=[-d for d in LARGER], gpfl=[-d for d in GAIN]))
    assert text.startswith("On these data fedavg is worse than training alone by 10.0 points of accuracy (95 % interval 9.7 to")
    assert text.endswith("and gpfl by 5.0 (4.7 to 5.3).")


def test_gains_in_losses_are_reductions() -> None:
    assert sentence(results("log_loss", gpfl=GAIN)).startswith(
        "On these data gpfl is worse than training alone by 0.050 in log loss"
    )
    assert sentence(results("log_loss", gpfl=[-d for d in GAIN])).startswith("On these data gpfl is better than training alone")


def test_p_values_are_corrected_for_the_pairs_with_the_reference_alone() -> None:
    slight = [0.01, 0.03, 0.005, 0.02, 0.03, 0.012]
    alone = RepeatReport(results(gpfl=slight)).differences_from("local")
    among = RepeatReport(results(gpfl=slight, fedavg=NOISE, ditto=NOISE)).differences_from("local")
    [p] = [pair.test.p for pair in alone]
    assert p is not None
    assert alone[0].corrected_p == pytest.approx(p)
    assert [pair.corrected_p for pair in among if pair.other == "gpfl"] == [pytest.approx(3 * p)]


def test_figure_has_a_row_for_each_method(tmp_path: Path) -> None:
    given = results(fedavg_ft=LARGER, gpfl=NOISE)
    pairs = RepeatReport(given).differences_from("local")
    draw_gains(given, pairs, tmp_path / "gains.png", "made", "points")
    draw_gains(given, pairs, tmp_path / "again.svg", "made", "points")
    assert (tmp_path / "gains.png").stat().st_size > 5000
    text = (tmp_path / "again.svg").read_text()
    assert "fedavg-ft" in text
