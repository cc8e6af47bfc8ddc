"""Results of an experiment on toys, with summaries made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from synthetic_runs import SummaryRun

from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Experiment, PaperValue, TableColumn
from gpfl.experiments.grid import GridPlan, TableResults
from gpfl.experiments.stored_runs import Trials

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
METADATA = {"device": "a GPU", "gpfl": "1.0", "torch": "2.0", "best_round": 7, "rounds": 30, "seconds": 2.0}


def toy_trials(label: str, *accuracies: float, **more: float) -> Trials:
    """Trials with these accuracies in percent; the standard deviation over clients is a tenth of them."""
    summaries: list[dict[str, object]] = [
        {
            **METADATA,
            "seed": seed,
            "best_accuracy": value / 100,
            "last_ten_accuracy": value / 100 - 0.02,
            "std": value / 1000,
            "cov": 0.1,
            **more,
        }
        for seed, value in enumerate(accuracies)
    ]
    return Trials(label, [SummaryRun(f"nowhere/{summary['seed']}", summary) for summary in summaries])


def toy_plan(**options: object) -> GridPlan:
    return GridPlan(out=Path(), **options)  # type: ignore[arg-type]


def toy_results(trials: Mapping[tuple[str, str], Trials], measure: str = "accuracy", **more: object) -> TableResults:
    rows = tuple(MethodVariant(label, {"name": label}) for label in LABELS)
    remarks = {("toy/whole", "ditto"): "The paper has two numbers."}
    experiment = Experiment("toys", "Toys", "Accuracy (%) & more of β.", measure, rows, COLUMNS, PAPER, remarks)
    cells = {(column.key, row.label): trials.get((column.key, row.label)) for column in COLUMNS for row in rows}
    commits = {("toy/whole", "gpfl"): ("abc1234",)}
    plan = toy_plan(protocol="paper", rounds=300, patience=100, seeds=(0, 1))
    results = TableResults(experiment, plan, cells, columns=COLUMNS, rows=rows, commits=commits)
    return replace(results, **more)  # type: ignore[arg-type]


RUN = {
    ("toy/whole", "fedavg"): toy_trials("fedavg", 40.0, 42.0),
    ("toy/whole", "fedper"): toy_trials("fedper", 52.0, 52.0),
    ("toy/whole", "gpfl"): toy_trials("gpfl", 60.5, 61.5),
}
VALIDATED = {**RUN, ("toy/whole", "gpfl"): toy_trials("gpfl", 61.0, 61.0, validation_best_accuracy=0.605)}
