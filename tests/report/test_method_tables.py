"""Tables of methods, worked out by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_runs import SUMMARY_NUMBERS, SUMMARY_TEXTS, SummaryRun

from gpfl.experiments.stored_runs import Trials
from gpfl.report import method_tables
from gpfl.report.method_tables import method_table


def summary(**numbers: float) -> dict[str, object]:
    return {**dict.fromkeys(SUMMARY_NUMBERS, 0), **dict.fromkeys(SUMMARY_TEXTS, "text"), "metric": "accuracy", **numbers}


def two_trials(method: str = "gpfl") -> Trials:
    numbers = [
        {"selected_accuracy": 0.9, "selected_std": 0.1, "selected_cov": 0.125, "bytes_up": 1500, "bytes_down": 3_000_000},
        {"selected_accuracy": 0.7, "selected_std": 0.3, "selected_cov": 0.375, "bytes_up": 1700, "bytes_down": 5_000_000},
    ]
    return Trials(
        method, [SummaryRun("a", summary(**one, seconds=s, idle_clients=1)) for s, one in zip((1.5, 2.5), numbers, strict=True)]
    )


def printed(trials: Trials, width: int) -> str:
    screen = io.StringIO()
    Console(width=width, file=screen).print(method_table([trials], "title [/b]"))
    return screen.getvalue()


def test_cells_are_means_and_population_deviations_in_percent() -> None:
    trials = two_trials()
    assert method_table([trials]).cells() == [["gpfl", "80.00 ± 10.00", "20.00", "0.2500", "1.6 kB", "4.0 MB", "2.0", "2"]]
    alone = Trials("gpfl", trials.runs[:1])
    assert method_table([alone]).cells() == [["gpfl", "90.00", "10.00", "0.1250", "1.5 kB", "3.0 MB", "1.5", "1"]]


def test_saved_tables_have_the_same_numbers(tmp_path: Path) -> None:
    other = Trials("local[b]", [SummaryRun("c", summary(selected_accuracy=0.5, selected_std=0, selected_cov=0))])
    paths = method_tables.save([two_trials(), other], tmp_path, "the title", ["a note"])
    assert [path.name for path in paths] == ["table.md", "table.csv", "table.json"]
    records = json.loads((tmp_path / "table.json").read_text())
    assert [record["method"] for record in records] == ["gpfl", "local[b]"]
    assert (records[0]["trials"], records[0]["idle_clients"], records[1]["selected_accuracy_std"]) == (2, 1, 0)
    assert (records[0]["selected_accuracy"], records[0]["selected_accuracy_std"]) == pytest.approx((0.8, 0.1))
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{key: str(value) for key, value in record.items()} for record in records] == rows
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# the title\n\n| method | accuracy, % |")
    assert "| gpfl | 80.00 ± 10.00 |" in page
    assert page.endswith("\n\na note\n")
    assert "text: 1 of 0 clients have fewer than the 0 training samples it needs" in page


def test_names_are_printed_as_they_are() -> None:
    text = printed(two_trials("a[bold]b"), 160)
    assert "a[bold]b" in text
    assert "title [/b]" in text


@pytest.mark.parametrize("width", [60, 79, 160])
def test_table_fits_the_terminal_and_always_has_methods_and_accuracies(width: int) -> None:
    text = printed(two_trials("gpfl without cov+gce"), width)
    assert "gpfl without cov+gce" in text
    assert "80.00 ± 10.00" in text
    assert ("CoV" in text.splitlines()[1]) == (width > 60)
    assert "…" not in text


def test_reported_round_and_the_metric_of_the_ranking_are_named() -> None:
    numbers = summary(selected_accuracy=0.5, selected_auroc=0.75) | {"metric": "auroc", "selected_by": "validation"}
    table = method_table([Trials("local", [SummaryRun("a", numbers)])])
    assert [column.header for column in table.columns][:3] == ["method", "AUROC", "accuracy, %"]
    assert table.cells()[0][:5] == ["local", "0.7500", "50.00", "–", "–"]  # earlier versions wrote neither std nor CoV
    assert table.notes == ["Accuracy, std and CoV over clients: round chosen on validation samples."]
