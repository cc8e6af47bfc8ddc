"""Tables of methods next to each other, as `gpfl compare` writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpfl.core.metrics import METRICS
from gpfl.experiments.stored_runs import Trials
from gpfl.report.tables import Cell, MeanStd, ResultColumn, ResultTable, format_bytes, format_csv, render_page, write_texts

_COLUMNS: Mapping[ResultColumn, Callable[[Trials], Cell]] = {
    ResultColumn("method"): lambda trials: trials.method,
    ResultColumn("accuracy, %", ".2f"): lambda trials: MeanStd.from_trials(trials, "selected_accuracy"),
    ResultColumn("std, %", ".2f", hide=3): lambda trials: _mean(trials, "selected_std", 100),
    ResultColumn("CoV", ".4f", hide=4): lambda trials: _mean(trials, "selected_cov"),
    ResultColumn("up", hide=1): lambda trials: format_bytes(trials.mean("bytes_up")),
    ResultColumn("down", hide=1): lambda trials: format_bytes(trials.mean("bytes_down")),
    ResultColumn("seconds", ".1f", hide=5): lambda trials: trials.mean("seconds"),
    ResultColumn("trials", "d", hide=6): lambda trials: len(trials.summaries),
}


REPORTED_ROUNDS = {
    "last": "last round",
    "validation": "round chosen on validation samples",
    "test": "best round on test samples, as the paper reports",
}
"""Text for the round that is reported, by the setting `run.select`."""


def method_table(methods: Sequence[Trials], title: str = "", notes: Sequence[str] = ()) -> ResultTable:
    """Return the table of methods: mean ± std over trials of the round that is reported, traffic and time of one trial."""
    summaries = [summary for trials in methods for summary in trials.summaries]
    columns = dict(_COLUMNS)
    for name in dict.fromkeys(str(summary.get("metric", "accuracy")) for summary in summaries):
        if name != "accuracy":
            columns = {**dict(list(columns.items())[:1]), **_metric_column(name), **columns}
    rounds = {REPORTED_ROUNDS[str(summary["selected_by"])]: None for summary in summaries if "selected_by" in summary}
    idle = [format_idle_note(trials.summaries[0]) for trials in methods if trials.mean("idle_clients")]
    about = [f"Accuracy, std and CoV over clients: {' or '.join(rounds)}."] if rounds else []
    return ResultTable.from_items(columns, methods, title, notes=[*about, *idle, *notes])


def _metric_column(name: str) -> dict[ResultColumn, Callable[[Trials], Cell]]:
    def cell(trials: Trials) -> Cell:
        values = [summary.get(f"selected_{name}") for summary in trials.summaries]
        numbers = [value for value in values if isinstance(value, (int, float))]
        return MeanStd.from_values(numbers) if len(numbers) == len(values) else None

    return {ResultColumn(METRICS[name].label, ".4f"): cell}


def _mean(trials: Trials, key: str, factor: float = 1.0) -> float | None:
    """Return the mean of a number that summaries of earlier versions lack."""
    return factor * trials.mean(key) if all(key in summary for summary in trials.summaries) else None


def format_idle_note(summary: Mapping[str, object]) -> str:
    """Return the sentence about clients that have too few samples for a method."""
    return (
        f"{summary['method']}: {summary['idle_clients']} of {summary['clients']} clients have fewer than the "
        f"{summary['min_samples']} training samples it needs: they never train and are evaluated with the model that they get."
    )


def to_records(methods: Sequence[Trials]) -> list[dict[str, object]]:
    """Return the table as plain numbers, one record for each method."""
    metrics = {f"selected_{summary.get('metric', 'accuracy')}": None for trials in methods for summary in trials.summaries}
    reported = ("selected_accuracy", *metrics, "selected_std", "selected_cov")  # earlier versions wrote fewer
    always = ("best_accuracy", "last_accuracy", "last_ten_accuracy", "seconds")
    keys = [
        *(key for key in reported if all(key in summary for trials in methods for summary in trials.summaries)),
        *always,
    ]
    return [
        {
            "method": trials.method,
            "trials": len(trials.summaries),
            "seeds": " ".join(str(summary["seed"]) for summary in trials.summaries),
            **{key: trials.mean(key) for key in keys},
            **{f"{key}_std": trials.std(key) for key in keys},
            **{key: round(trials.mean(key)) for key in ("bytes_up", "bytes_down", "idle_clients")},
        }
        for trials in methods
    ]


def save(methods: Sequence[Trials], folder: Path, title: str, notes: Sequence[str] = ()) -> list[Path]:
    """Write the table as table.md, table.csv and table.json and return the paths."""
    records = to_records(methods)
    table = method_table(methods, notes=notes)
    texts = {
        "table.md": render_page(title, [table]),
        "table.csv": format_csv(records),
        "table.json": json.dumps(records, indent=2) + "\n",
    }
    return write_texts(folder, texts)
