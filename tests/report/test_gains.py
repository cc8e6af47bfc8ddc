"""The sentence on gains over a reference, for constructed scores, and its figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_repeats import repeated_results

from gpfl.experiments.repeats import RepeatedResults
from gpfl.report.repeat_tables import RepeatReport, describe_gains, draw_gains

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


def test_lower_is_better_for_losses() -> None:
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
