"""Tables of methods side by side."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable

from gpfl import files
from gpfl.study.trials import Trials

HEADINGS = (
    "method",
    "accuracy, best round",
    "accuracy, last round",
    "std over clients",
    "CoV",
    "sent up",
    "sent down",
    "seconds",
)


def cells(trials: Trials) -> list[str]:
    """Gives a method's row: percentages as mean ± std over trials, bytes and seconds of one trial."""

    def percent(key: str) -> str:
        spread = f" ± {100 * trials.std(key):.2f}" if len(trials.summaries) > 1 else ""
        return f"{100 * trials.mean(key):.2f}{spread} %"

    return [
        trials.method,
        percent("best_accuracy"),
        percent("last_accuracy"),
        f"{100 * trials.mean('std'):.2f} %",
        f"{trials.mean('cov'):.4f}",
        size(trials.mean("bytes_up")),
        size(trials.mean("bytes_down")),
        f"{trials.mean('seconds'):.1f}",
    ]


def rich_table(rows: Sequence[Trials], title: str) -> RichTable:
    """Gives the table for a terminal."""
    table = RichTable(title=title, title_justify="left")
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place > 0)
    for trials in rows:
        table.add_row(*cells(trials))
    return table


def markdown(rows: Sequence[Trials]) -> str:
    """Gives the table as Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- |" + " ---: |" * (len(HEADINGS) - 1)]
    lines += ["| " + " | ".join(cells(trials)) + " |" for trials in rows]
    return "\n".join(lines) + "\n"


def records(rows: Sequence[Trials]) -> list[dict[str, object]]:
    """Gives the table as plain numbers, one record a method."""
    keys = (
        "best_accuracy",
        "last_accuracy",
        "last_ten_accuracy",
        "std",
        "cov",
        "seconds",
        "bytes_up",
        "bytes_down",
        "idle_clients",
    )
    return [
        {
            "method": trials.method,
            "trials": len(trials.summaries),
            **{key: trials.mean(key) for key in keys},
            "best_accuracy_std": trials.std("best_accuracy"),
            "last_accuracy_std": trials.std("last_accuracy"),
        }
        for trials in rows
    ]


def save(rows: Sequence[Trials], folder: Path) -> list[Path]:
    """Writes the table as table.md, table.csv and table.json, and gives the files."""
    content = records(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(content[0]))
    writer.writeheader()
    writer.writerows(content)
    files.write_text(folder / "table.md", markdown(rows))
    files.write_text(folder / "table.csv", text.getvalue())
    files.write_text(folder / "table.json", json.dumps(content, indent=2) + "\n")
    return [folder / f"table.{kind}" for kind in ("md", "csv", "json")]


def size(count: float) -> str:
    """Gives a number of bytes in a unit that suits it."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
