"""Tables of methods next to each other, as `gpfl compare` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpfl.experiments.stored_runs import Trials
from gpfl.io import files
from gpfl.report.tables import MeanStd, ResultColumn, ResultTable, Value, format_bytes, format_csv, render_page

_COLUMNS = (
    ResultColumn("method"),
    ResultColumn("accuracy, %", ".2f"),
    ResultColumn("last round, %", ".2f", hide=2),
    ResultColumn("std, %", ".2f", hide=3),
    ResultColumn("CoV", ".4f", hide=4),
    ResultColumn("up", hide=1),
    ResultColumn("down", hide=1),
    ResultColumn("seconds", ".1f", hide=5),
    ResultColumn("trials", "d", hide=6),
)


def method_table(methods: Sequence[Trials], title: str = "", notes: Sequence[str] = ()) -> ResultTable:
    """Return the table of methods: mean ± std over trials, traffic and time of one trial."""
    rows: list[list[Value]] = [
        [
            trials.method,
            MeanStd.from_trials(trials, "best_accuracy"),
            MeanStd.from_trials(trials, "last_accuracy"),
            100 * trials.mean("std"),
            trials.mean("cov"),
            format_bytes(trials.mean("bytes_up")),
            format_bytes(trials.mean("bytes_down")),
            trials.mean("seconds"),
            len(trials.summaries),
        ]
        for trials in methods
    ]
    idle = [format_idle_note(trials.summaries[0]) for trials in methods if trials.mean("idle_clients")]
    return ResultTable(_COLUMNS, rows, title=title, notes=[*idle, *notes])


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
    for name, content in texts.items():
        files.write_text(folder / name, content)
    return [folder / name for name in texts]
