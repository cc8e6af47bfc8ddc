"""Update the tables in docs/results/README.md from the table.csv beside them: python scripts/results_page.py."""

from __future__ import annotations

import csv
import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE = RESULTS / "README.md"
BLOCK = re.compile(r"<!-- table: (\S+) (\S+) -->\n.*?<!-- end -->", re.S)
NAMES = {
    "gpfl": "**GPFL**",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedrod": "FedRoD",
    "fedphp": "FedPHP",
    "fedproto": "FedProto",
    "local": "Local",
    "fedavg-ft": "FedAvg+FT",
}


def main() -> None:
    """Rewrite the page in place."""
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def update(page: str) -> str:
    """Return the page with every table between its markers rendered again."""
    return BLOCK.sub(lambda match: f"<!-- table: {match[1]} {match[2]} -->\n{table(match[1], match[2])}\n<!-- end -->", page)


def table(experiment: str, column: str) -> str:
    """Return one column of an experiment as a Markdown table: ours, the paper's, the difference and the number of trials."""
    with (RESULTS / experiment / "table.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["column"] == column and int(row["trials"])]
    rows.sort(key=lambda row: -float(row["accuracy"]))
    lines = ["| method | ours, % | paper, % | difference | trials |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        ours = spread(row["accuracy"], row["accuracy_std_over_trials"] if int(row["trials"]) > 1 else "")
        difference = f"{float(row['difference']):+.2f}".replace("-", "−") if row["difference"] else "–"
        paper = ("≈ " if row["paper_least"] else "") + spread(row["paper"], row["paper_std_over_trials"])
        lines.append(f"| {NAMES[row['method']]} | {ours} | {paper} | {difference} | {row['trials']} |")
    return "\n".join([*lines, ""])


def spread(mean: str, std: str) -> str:
    """Return a mean with its standard deviation, as far as they are known."""
    if not mean:
        return "–"
    return f"{float(mean):.2f}" + (f" ± {float(std):.2f}" if std else "")


if __name__ == "__main__":
    main()
