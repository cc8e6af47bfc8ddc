"""Tables of methods side by side."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as RichTable

from gpfl.experiments.trials import Trials
from gpfl.io import files
from gpfl.report.tables import format_bytes

HEADINGS = ("method", "accuracy, %", "last round, %", "std, %", "CoV", "up", "down", "seconds")
WIDE = 105
"""Columns of a terminal from which all of the table fits; below, the last round is left out."""


def headings(rows: Sequence[Trials]) -> list[str]:
    """Gives the headings of methods' rows; the number of trials stands last, where it is not the same for all."""
    return [*HEADINGS, *(["trials"] * (len({len(trials.summaries) for trials in rows}) > 1))]


def cells(trials: Trials) -> list[str]:
    """Gives a method's row: mean ± std over trials where there are several, bytes of one trial, the number of trials."""

    def spread(key: str, factor: float, digits: int) -> str:
        tail = f" ± {factor * trials.std(key):.{digits}f}" if len(trials.summaries) > 1 else ""
        return f"{factor * trials.mean(key):.{digits}f}{tail}"

    return [
        trials.method,
        spread("best_accuracy", 100, 2),
        spread("last_accuracy", 100, 2),
        f"{100 * trials.mean('std'):.2f}",
        f"{trials.mean('cov'):.4f}",
        format_bytes(trials.mean("bytes_up")),
        format_bytes(trials.mean("bytes_down")),
        f"{trials.mean('seconds'):.1f}",
        str(len(trials.summaries)),
    ]


def rich_table(rows: Sequence[Trials], title: str, width: int = WIDE) -> RichTable:
    """Gives the table for a terminal of so many columns."""
    names = headings(rows)
    shown = [place for place, heading in enumerate(names) if width >= WIDE or not heading.startswith("last")]
    table = RichTable(title=escape(title), title_justify="left", box=HEAVY_HEAD)
    if width < WIDE:
        table.box, table.show_edge, table.pad_edge, table.padding = SIMPLE_HEAD, False, False, (0, 0)
    for place in shown:
        table.add_column(names[place], justify="left" if place == 0 else "right", no_wrap=True)
    for trials in rows:
        row = cells(trials)
        table.add_row(*(escape(row[place]) for place in shown))
    return table


def markdown(rows: Sequence[Trials], title: str = "", notes: Sequence[str] = ()) -> str:
    """Gives the table as Markdown, with its title before it and what must be known of it after it."""
    names = headings(rows)
    lines = [f"{title}\n"] if title else []
    lines += ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    lines += ["| " + " | ".join(cells(trials)[: len(names)]) + " |" for trials in rows]
    lines += [f"\n{note}" for note in (*format_idle_notes(rows), *notes)]
    return "\n".join(lines) + "\n"


def format_idle_notes(rows: Sequence[Trials]) -> list[str]:
    """Gives a sentence for each method in which some clients could never take part."""
    return [format_idle_note(trials.summaries[0]) for trials in rows if trials.mean("idle_clients")]


def format_idle_note(summary: Mapping[str, object]) -> str:
    """Gives the sentence about clients that have too few rows for a method."""
    return (
        f"{summary['method']}: {summary['idle_clients']} of {summary['clients']} clients have fewer than the "
        f"{summary['rows_needed']} training rows it needs; they never trained, and count with the model the method gives them."
    )


def records(rows: Sequence[Trials]) -> list[dict[str, object]]:
    """Gives the table as plain numbers, one record a method: means over trials, and their standard deviations."""
    spread = ("best_accuracy", "last_accuracy", "last_ten_accuracy", "std", "cov", "seconds")
    counted = ("bytes_up", "bytes_down", "idle_clients")
    return [
        {
            "method": trials.method,
            "trials": len(trials.summaries),
            "seeds": " ".join(str(summary["seed"]) for summary in trials.summaries),
            **{key: trials.mean(key) for key in spread},
            **{f"{key}_std": trials.std(key) for key in spread},
            **{key: round(trials.mean(key)) for key in counted},
        }
        for trials in rows
    ]


def save(rows: Sequence[Trials], folder: Path, title: str = "", notes: Sequence[str] = ()) -> list[Path]:
    """Writes the table as table.md, table.csv and table.json, and gives the files."""
    content = records(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(content[0]))
    writer.writeheader()
    writer.writerows(content)
    files.write_text(folder / "table.md", markdown(rows, title, notes))
    files.write_text(folder / "table.csv", text.getvalue())
    files.write_text(folder / "table.json", json.dumps(content, indent=2) + "\n")
    return [folder / f"table.{kind}" for kind in ("md", "csv", "json")]
