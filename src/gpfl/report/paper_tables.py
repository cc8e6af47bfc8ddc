"""Tables beside the paper's: Markdown, LaTeX and CSV, and for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from gpfl.experiments.definitions import display_name
from gpfl.experiments.results import TableResults
from gpfl.experiments.trials import Trials
from gpfl.io import files
from gpfl.report import latex
from gpfl.report.comparison import Block, Entry, MeanStd, blocks
from gpfl.report.screen import Screen, Strip
from gpfl.report.wording import (
    NONE,
    brief,
    chance,
    difference,
    format_mean_std,
    notes,
    ours,
    place,
    protocol,
    tested,
    theirs,
    untested,
)


@dataclass(frozen=True)
class Origin:
    """Where a table comes from: its last line."""

    command: str
    commit: str

    def words(self, results: TableResults) -> str:
        """Gives the line of results."""
        commits = {one for made in results.commits.values() for one in made}
        return self.line([trials for trials in results.trials.values() if trials], commits, results.seeds)

    def line(self, runs: Sequence[Trials], made_at: AbstractSet[str], seeds: Iterable[int]) -> str:
        """Gives the line: the command, the commits of the runs, the devices and the seeds."""
        summaries = [summary for trials in runs for summary in trials.summaries]
        commits = ", ".join(sorted(made_at)) or self.commit
        devices = ", ".join(sorted({str(summary["device"]) for summary in summaries})) or "none"
        made = sorted({f"gpfl {s.get('gpfl', '?')}, torch {s.get('torch', '?')}" for s in summaries})
        numbers = ", ".join(map(str, seeds))
        return f"`{self.command}`; commit {commits}; device {devices}; seeds {numbers}" + "".join(f"; {m}" for m in made) + "."


@dataclass(frozen=True)
class Added:
    """What a table has besides accuracies: lines of its page, numbers by column and row, and LaTeX."""

    lines: Sequence[str] = ()
    numbers: Mapping[tuple[str, str], Mapping[str, object]] = field(default_factory=dict)
    tex: str = ""


# Markdown.


def markdown(results: TableResults, origin: Origin, more: Sequence[str] = ()) -> str:
    """Gives the table as Markdown: all columns side by side, then each column with all that is known of it."""
    made = blocks(results)
    name = f" ({results.table})" if results.table else ""
    lines = [f"# {results.experiment.title}{name}", "", results.experiment.caption, ""]
    lines += [" ".join(protocol(results)), ""]
    if len(made) > 1:
        lines += [*overview(made), ""]
    for block in made:
        if block.run or len(made) == 1:
            lines += [*details(block), ""]
    lines += more
    said = notes(results, made)
    lines += [f"- {words}" for words in said] + [""] * bool(said)
    lines.append(f"Made by {origin.words(results)}")
    return "\n".join(lines) + "\n"


def overview(made: Sequence[Block]) -> list[str]:
    """Gives the lines of the table of all columns: ours, and where it has any the paper's and the difference."""
    headings = [f"{block.column.heading}, {block.column.group}{' (part)' if block.is_partial else ''}" for block in made]
    printed = any(block.printed for block in made)
    what = "Ours / the paper's (ours minus the paper's):" if printed else "Ours:"
    lines = [what, "", row(["method", *headings]), rule(len(made))]
    for number, entry in enumerate(made[0].entries):
        lines.append(row([display_name(entry.label), *(beside(block, block.entries[number], printed) for block in made)]))
    return lines


def beside(block: Block, entry: Entry, printed: bool) -> str:
    """Gives ours, the best in bold, and the paper's number if the paper prints any."""
    if not printed:
        return bold(ours(entry), block, entry)
    tail = f" ({difference(entry)})" if entry.difference is not None else ""
    return f"{bold(ours(entry), block, entry)} / {theirs(entry.paper)}{tail}"


def bold(text: str, block: Block, entry: Entry) -> str:
    """Gives the text in bold where the entry is the best."""
    return f"**{text}**" if block.leads(entry) else text


def details(block: Block) -> list[str]:
    """Gives the lines of one column, a row a method."""
    title = f"## {block.column.key}: {block.column.heading}, {block.column.group}"
    lines = [title, ""]
    if block.caveat:
        lines += [f"**{'Part of the data' if block.is_partial else 'Unverified data'}: {block.caveat}**", ""]
    columns = detail_columns(block)
    lines += [row(columns), rule(len(columns) - 1)]
    lines += [row(cells) for cells in zip(*columns.values(), strict=True)]
    said = [*([block.order] if block.order else []), *tested([block], over_seeds=True)]
    return [*lines, "", " ".join(said)] if said else lines


def detail_columns(block: Block) -> dict[str, list[str]]:
    """Gives one column's table by heading, a cell a method; without ranks and paper's numbers where there are none."""
    entries, fair = block.entries, block.fairness
    found = {
        "method": [display_name(e.label) for e in entries],
        "std, % [CoV]" if fair else "ours, %": [bold(ours(e), block, e) for e in entries],
    }
    compared = {
        "paper" if fair else "paper, %": [theirs(e.paper) for e in entries],
        "difference": [difference(e) for e in entries],
        "rank": [place(e.rank) for e in entries],
        "paper's rank": [place(e.paper_rank) for e in entries],
    }
    found |= {heading: cells for heading, cells in compared.items() if any(cell != NONE for cell in cells)}
    means = {
        "accuracy, %" if fair else "last ten rounds, %": [e.accuracy if fair else e.last_ten for e in entries],
        "selected on validation, %": [e.validated for e in entries],
    }
    found |= {
        heading: [format_mean_std(one, e.count) for one, e in zip(numbers, entries, strict=True)]
        for heading, numbers in means.items()
    }
    for heading, key in (("best round", "best_round"), ("rounds", "rounds")):
        found[heading] = [f"{e.trials.mean(key):.0f}" if e.trials else NONE for e in entries]
    found |= {"trials": [str(e.count) for e in entries], "p": [chance(e.p) for e in entries]}
    seeds = [chance(e.seeds_p) for e in entries]
    return {**found, "p over seeds": seeds} if any(cell != NONE for cell in seeds) else found


def row(cells: Iterable[str]) -> str:
    """Gives a line of a Markdown table; N = 10|50 has a bar of its own."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rule(columns: int) -> str:
    """Gives the line below the headings."""
    return "| --- |" + " ---: |" * columns


# LaTeX.


def tex(results: TableResults, origin: Origin) -> str:
    """Gives the table for LaTeX with booktabs: for each method lines of ours, ours by validation and the paper's, if any."""
    made = blocks(results)
    body = []
    validated = any(entry.validated for block in made for entry in block.entries)
    printed = any(block.printed for block in made)
    for number, entry in enumerate(made[0].entries if made else ()):
        entries = [block.entries[number] for block in made]
        best = [bold("x", block, one) != "x" for block, one in zip(made, entries, strict=True)]
        mine = [
            (latex.strong(latex.text(ours(one))) if top else latex.text(ours(one))) + in_order(one.rank)
            for one, top in zip(entries, best, strict=True)
        ]
        papers = [
            theirs(one.paper)
            + (f" ({place(one.paper_rank)})" if one.paper_rank is not None else "")
            + (f", {difference(one)}" if one.difference is not None else "")
            for one in entries
        ]
        body.append([latex.text(display_name(entry.label)), *mine])
        if validated:
            body.append([r"\quad by validation", *(latex.text(format_mean_std(one.validated, one.count)) for one in entries)])
        if any(one.p is not None for one in entries):
            body.append([r"\quad $p$", *(latex.small(latex.text(chance(one.p))) for one in entries)])
        if printed:
            body.append([r"\quad paper", *(latex.small(latex.text(words)) for words in papers)])
    headings = [latex.text(block.column.heading) + (r" (part)" if block.is_partial else "") for block in made]
    groups = [latex.text(block.column.group) for block in made]
    more = ["ours in the round that is best on validation rows"] * validated
    more += ["p"] * any(entry.p is not None for block in made for entry in block.entries)
    more += ["the paper's, and ours minus the paper's"] * printed
    then = f" First lines: ours; then {'; '.join(more)}." if more else ""
    caption = (
        f"{results.experiment.caption}{then} In parentheses: "
        f"ranks{', both among the methods that were run and for which the paper has a number' * printed}."
    )
    caveats = [f"Data of {block.column.key}: {block.caveat}" for block in made if block.caveat]
    words = [*protocol(results), *tested(made, over_seeds=False), *caveats, *notes(results, made)]
    last = latex.breakable(f"Made by {origin.words(results).replace('`', '')}")
    foot = [*map(latex.text, words), last]
    return latex.table(latex.text(caption), f"gpfl-{results.name}", groups, headings, body, foot)


def in_order(rank: float | None) -> str:
    """Gives a rank as LaTeX puts it behind a number."""
    return "~" + latex.small(latex.text(f"({place(rank)})")) if rank is not None else ""


# CSV.


def records(results: TableResults) -> list[dict[str, object]]:
    """Gives the table as plain numbers in percent, one record a method and column; None where there is no number."""
    found = []
    for block in blocks(results):
        for entry in block.entries:
            found.append(
                {
                    "experiment": results.experiment.name,
                    "column": block.column.key,
                    "method": entry.label,
                    "state": entry.state,
                    "trials": entry.count,
                    "seeds": " ".join(str(summary["seed"]) for summary in entry.trials.summaries) if entry.trials else "",
                    "protocol": results.protocol,
                    "most_rounds": results.rounds,
                    "patience": results.patience,
                    "validation": results.validation,
                    "settings": ", ".join(results.settings),
                    "tuned": results.tuned,
                    **numbers(entry),
                    "data": block.caveat,
                    "problem": entry.problem,
                    "commit": ", ".join(results.commits.get((block.column.key, entry.label), ())),
                }
            )
    return found


def numbers(entry: Entry) -> dict[str, object]:
    """Gives the numbers of an entry by name."""
    kinds: Mapping[str, MeanStd | None] = {
        "accuracy": entry.accuracy,
        "last_ten": entry.last_ten,
        "validation_selected": entry.validated,
        "client_std": entry.client_std,
        "client_cov": entry.client_cov,
    }
    means = {key: entry.trials.mean(key) if entry.trials else None for key in ("best_round", "rounds", "seconds")}
    paper = entry.paper
    return {
        **{name: number.mean if number else None for name, number in kinds.items()},
        **{f"{name}_std_over_trials": number.std if number else None for name, number in kinds.items()},
        "paper": paper.mean if paper else None,
        "paper_least": paper.between[0] if paper and paper.between else None,
        "paper_most": paper.between[1] if paper and paper.between else None,
        "paper_std_over_trials": paper.std if paper else None,
        "paper_cov": paper.cov if paper else None,
        "difference": entry.difference,
        "difference_cov": entry.cov_difference,
        "far": entry.far,
        "rank": entry.rank,
        "paper_rank": entry.paper_rank,
        "p": entry.p,
        "p_over_seeds": entry.seeds_p,
        **means,
        "device": ", ".join(sorted({str(summary["device"]) for summary in entry.trials.summaries})) if entry.trials else None,
    }


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Gives records as CSV."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def save(results: TableResults, folder: Path, origin: Origin, added: Added | None = None) -> list[Path]:
    """Writes the table as table.md, table.tex and table.csv, and gives the files."""
    more = added or Added()
    plain = [{**one, **more.numbers.get((str(one["column"]), str(one["method"])), {})} for one in records(results)]
    texts = {
        "table.md": markdown(results, origin, more.lines),
        "table.tex": tex(results, origin) + more.tex,
        "table.csv": as_csv(plain),
    }
    for name, content in texts.items():
        files.write_text(folder / name, content)
    return [folder / name for name in texts]


def experiment_in(folder: Path) -> str:
    """Gives the name of the experiment whose table a folder holds; "" where there is none."""
    try:
        with (folder / "table.csv").open(encoding="utf-8", newline="") as file:
            return next(csv.DictReader(file), {}).get("experiment") or ""
    except (OSError, UnicodeDecodeError, csv.Error):
        return ""


# The terminal.


def untested_words(results: TableResults) -> list[str]:
    """Gives sentences about rows that could not be tested, by column."""
    return [f"{block.column.key}: {words}" for block in blocks(results) for words in untested(block)]


def rich_tables(results: TableResults) -> list[Screen]:
    """Gives a table for each column of which something was run, or failed."""
    return [screen(results, block) for block in blocks(results) if any(e.trials or e.problem for e in block.entries)]


def screen(results: TableResults, block: Block) -> Screen:
    """Gives the table of a column for the terminal, without what is empty."""
    entries = block.entries
    note = " (part of the data)" if block.is_partial else ""
    strips = [
        Strip("method", [display_name(e.label) for e in entries]),
        Strip("ours", [ours(e) for e in entries]),
        Strip("by validation", [format_mean_std(e.validated, e.count) for e in entries], 2),
        Strip("paper", [theirs(e.paper) for e in entries], 1),
        Strip("ours −\npaper", [difference(e) for e in entries], 3),
        Strip("our\nrank", [place(e.rank) for e in entries], 4),
        Strip("paper's\nrank", [place(e.paper_rank) for e in entries], 4),
        Strip("trials", [str(e.count) for e in entries], 5),
        Strip("p", [chance(e.p) for e in entries], 6),
    ]
    return Screen(
        f"{block.column.key}: {block.column.heading}, {block.column.group}{note}",
        brief(results),
        [strip for strip in strips if any(cell != NONE for cell in strip.cells)],
        [block.leads(e) for e in entries],
        "table.md has them",
    )
