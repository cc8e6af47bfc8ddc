"""Tables of methods next to each other, as `gpfl compare` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpfl.experiments.stored_runs import Trials
from gpfl.report.tables import Cell, MeanStd, ResultColumn, ResultTable, format_bytes, format_csv, render_page, write_texts

_COLUMNS: Mapping[ResultColumn, Callable[[Trials], Cell]] = {
    ResultColumn("method"): lambda trials: trials.method,
    ResultColumn("accuracy, %", ".2f"): lambda trials: MeanStd.from_trials(trials, "best_accuracy"),
    ResultColumn("last round, %", ".2f", hide=2): lambda trials: MeanStd.from_trials(trials, "last_accuracy"),
    ResultColumn("std, %", ".2f", hide=3): lambda trials: 100 * trials.mean("std"),
    ResultColumn("CoV", ".4f", hide=4): lambda trials: trials.mean("cov"),
    ResultColumn("up", hide=1): lambda trials: format_bytes(trials.mean("bytes_up")),
    ResultColumn("down", hide=1): lambda trials: format_bytes(trials.mean("bytes_down")),
    ResultColumn("seconds", ".1f", hide=5): lambda trials: trials.mean("seconds"),
    ResultColumn("trials", "d", hide=6): lambda trials: len(trials.summaries),
}


def method_table(methods: Sequence[Trials], title: str = "", notes: Sequence[str] = ()) -> ResultTable:
    """Return the table of methods: mean ± std over trials, traffic and time of one trial."""
    idle = [format_idle_note(trials.summaries[0]) for trials in methods if trials.mean("idle_clients")]
    return ResultTable.from_items(_COLUMNS, methods, title, notes=[*idle, *notes])


def format_idle_note(summary: Mapping[str, object]) -> str:
    """Return the sentence about clients that have too few samples for a method."""
    return (
        f"{summary['method']}: {summary['idle_clients']} of {summary['clients']} clients have fewer than the "
        f"{summary['min_samples']} training samples it needs: they never train and are evaluated with the model that they get."
    )


def to_records(methods: Sequence[Trials]) -> list[dict[str, object]]:
    """Return the table as plain numbers, one record for each method."""
    spread = ("best_accuracy", "last_accuracy", "last_ten_accuracy", "std", "cov", "seconds")
    return [
        {
            "method": trials.method,
            "trials": len(trials.summaries),
            "seeds": " ".join(str(summary["seed"]) for summary in trials.summaries),
            **{key: trials.mean(key) for key in spread},
            **{f"{key}_std": trials.std(key) for key in spread},
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
