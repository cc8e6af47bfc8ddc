"""Tables of results, for Markdown, LaTeX and the terminal, and pages from the jinja2 templates in `templates`."""

import csv
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gpfl.core.metrics import METRICS
from gpfl.experiments.stored_runs import Trials
from gpfl.io import files

if TYPE_CHECKING:
    from jinja2 import Environment


MISSING = "–"  # text of a cell without a value


@dataclass(frozen=True)
class MeanStd:
    """A mean and population standard deviation over `n` trials; it prints as `61.00 ± 0.50`, or `61.00` for one trial."""

    mean: float
    std: float
    n: int = 1

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "MeanStd":
        """Return the mean and the population standard deviation of values."""
        array = np.array(list(values), dtype=np.float64)
        return cls(float(array.mean()), float(array.std()), len(array))

    @classmethod
    def from_trials(cls, trials: Trials, key: str) -> "MeanStd | None":
        """Return a number of the trials' summaries in percent, or None if one lacks it."""
        if not all(key in summary for summary in trials.summaries):
            return None
        return cls(100 * trials.mean(key), 100 * trials.std(key), len(trials.summaries))

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}}" + (f" ± {self.std:{spec}}" if self.n > 1 else "")


Value = str | float | MeanStd | None


@dataclass(frozen=True)
class Bold:
    """A cell in bold."""

    value: Value


Cell = Value | Bold
Item = TypeVar("Item")


@dataclass(frozen=True)
class ResultColumn:
    """Header and format of a column.

    `format` is the format of its numbers, such as ".2f". Columns next to each other with the same `group` share that header in
    LaTeX. A terminal that is too narrow hides the columns with the highest `hide` first; columns with 0 always stay.
    """

    header: str
    format: str = ""
    align: Literal["left", "right"] = "right"
    group: str = ""
    hide: int = 0


@dataclass(frozen=True)
class ResultTable:
    """A table whose first column names the rows.

    A cell is a text, a number, a `MeanStd` or None (no value), or one of these in `Bold`. Print it with rich, or write it with
    `to_markdown`, `to_latex`, `to_html` and `render_page`; `format_csv` writes records of plain numbers.
    """

    columns: Sequence[ResultColumn]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    caption: str = ""
    notes: Sequence[str] = ()

    @classmethod
    def from_items(
        cls,
        columns: Mapping[ResultColumn, Callable[[Item], Cell]],
        items: Iterable[Item],
        title: str = "",
        caption: str = "",
        notes: Sequence[str] = (),
    ) -> "ResultTable":
        """Return a table with a row for each item; every column has the function that returns an item's cell."""
        rows = [[cell_of(item) for cell_of in columns.values()] for item in items]
        return cls(list(columns), rows, title, caption, notes)

    def drop_empty(self) -> "ResultTable":
        """Return the table without columns in which no row has a value."""
        used = [k for k in range(len(self.columns)) if k == 0 or any(_value(row[k]) is not None for row in self.rows)]
        return replace(self, columns=[self.columns[k] for k in used], rows=[[row[k] for k in used] for row in self.rows])

    def cells(self) -> list[list[str]]:
        """Return the rows as text."""
        return [
            [format_value(_value(cell), column.format) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def to_markdown(self) -> str:
        """Return caption, table and notes as Markdown."""
        return render("table.md", table=self, rows=self._marked("**{}**", escape_markdown))

    def to_latex(self, label: str) -> str:
        """Return a LaTeX table; it needs the packages booktabs and graphicx."""
        spans, first = [], 2
        for group, members in groupby(column.group for column in self.columns[1:]):
            width = len(list(members))
            spans.append((group, width, first, first + width - 1))
            first += width
        rows = self._marked(r"\textbf{{\boldmath {}}}", escape_latex)
        return render("table.tex", table=self, label=label, rows=rows, spans=spans)

    def to_html(self) -> str:
        """Return the table without title, caption and notes as HTML."""
        return render("table.html", table=self, rows=self._marked("<strong>{}</strong>", html.escape))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield title, caption, table and notes for a terminal, without columns for which it is too narrow."""
        shown, hidden = list(range(len(self.columns))), [column.hide for column in self.columns]
        while not (fits := self._width(shown, console) <= options.max_width) and (most := max(hidden[k] for k in shown)):
            shown = [k for k in shown if hidden[k] != most]
        if self.title:
            yield Text(self.title, style="table.title")
        if self.caption:
            yield Text(self.caption)
        yield self._to_rich(shown, no_wrap=fits)
        if missing := [column.header.replace("\n", " ") for k, column in enumerate(self.columns) if k not in shown]:
            yield Text(f"Hidden, as {options.max_width} characters are too few: {', '.join(missing)}.")
        for note in self.notes:
            yield Text(note)

    def _width(self, shown: Sequence[int], console: Console) -> int:
        unlimited = console.options.update_width(10_000)
        return Measurement.get(console, unlimited, self._to_rich(shown, no_wrap=True)).maximum

    def _to_rich(self, shown: Sequence[int], *, no_wrap: bool) -> Table:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for k in shown:
            column = self.columns[k]
            align = column.align if k else "left"
            table.add_column(Text(column.header), justify=align, vertical="bottom", no_wrap=no_wrap, overflow="fold")
        for row, texts in zip(self.rows, self.cells(), strict=True):
            table.add_row(*(Text(texts[k], style="bold" if isinstance(row[k], Bold) else "") for k in shown))
        return table

    def _marked(self, bold: str, escape: Callable[[str], str]) -> list[list[str]]:
        pairs = [zip(row, texts, strict=True) for row, texts in zip(self.rows, self.cells(), strict=True)]
        return [[bold.format(escape(text)) if isinstance(cell, Bold) else escape(text) for cell, text in row] for row in pairs]


def format_csv(records: Sequence[Mapping[str, object]]) -> str:
    """Return records as CSV with a header line; a record may lack keys of others."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for record in records for key in record)), lineterminator="\n")
    if records:
        writer.writeheader()
        writer.writerows(records)
    return text.getvalue()


def format_value(value: Value, spec: str = "") -> str:
    """Return the text of a value: strings as they are, numbers by the format spec, `MISSING` for None."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    text = format(value, spec)
    return f"−{text[1:]}" if text.startswith("-") else text


class MetricUnit:
    """The unit of a metric in texts: percent and points, or the metric itself with two more digits."""

    def __init__(self, metric: str, digits: int = 1) -> None:
        percentage = METRICS[metric].is_percentage
        self.scale = 100 if percentage else 1
        self.suffix, self.points = (", %", ", points") if percentage else ("", "")  # after the metric, after a difference of it
        self.spec = f".{digits if percentage else digits + 2}f"

    def difference(self, value: float) -> str:
        """Return a difference with its sign."""
        return format_value(self.scale * value, f"+z{self.spec}")

    def interval(self, low: float | None, high: float | None) -> str:
        """Return an interval of differences."""
        return MISSING if low is None or high is None else f"{self.difference(low)} to {self.difference(high)}"


def enumerate_names(names: Sequence[str], limit: int = 6) -> str:
    """Return names as "a, b and c"; of more than `limit`, the others are counted."""
    shown = list(names[:limit]) + ([f"{len(names) - limit} others"] if len(names) > limit else [])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def shorten(text: str, width: int) -> str:
    """Return a name without its middle if it is too long: names of clients often differ at the end."""
    tail = width // 2
    return text if len(text) <= width else f"{text[: width - tail - 1]}…{text[-tail:]}"


def format_share(share: float) -> str:
    """Return a share or a probability in percent; one that is not 0 or 1 is not rounded to it."""
    return "< 1 %" if 0 < share < 0.005 else "> 99 %" if 0.995 < share < 1 else f"{100 * share:.0f} %"


def format_p_value(p: float | None) -> str | None:
    """Return a p-value with three digits."""
    return None if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def format_bytes(count: float) -> str:
    """Return a number of bytes in the unit that fits, such as 1.5 kB."""
    return decimal(round(count))


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def _value(cell: Cell) -> Value:
    return cell.value if isinstance(cell, Bold) else cell


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"$|$",
    "<": r"$<$",
    ">": r"$>$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "−": r"$-$",
    "+": r"$+$",
    "†": r"$^\dagger$",
    "∈": r"$\in$",
    "ρ": r"$\rho$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "η": r"$\eta$",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "–": "--",
    "…": r"\dots{}",
    "\u2003": r"\quad ",
    "-": "{-}",  # keeps "--" of flags from becoming a dash
    ",": r",\allowbreak{}",  # long lists in commands may wrap
}


def render(template: str, **values: object) -> str:
    """Return the text of a template with these values."""
    return _environment().get_template(template).render(**values)


def render_lines(template: str, **values: object) -> list[str]:
    """Return the lines of a template that are not empty, such as one sentence or note each."""
    return [line for line in map(str.strip, render(template, **values).splitlines()) if line]


def render_page(
    title: str, tables: Sequence[ResultTable], *, intro: Sequence[str] = (), notes: Sequence[str] = (), origin: str = ""
) -> str:
    """Return a Markdown page: title, paragraphs, tables under their titles, a list of notes and where the numbers come from."""
    page = render("page.md", title=title, tables=tables, intro=intro, notes=notes, origin=origin)
    return page.rstrip("\n") + "\n"


def markdown_images(paths: Sequence[Path]) -> str:
    """Return Markdown that shows the PNG files among the paths, for a page next to them."""
    return "".join(f"\n![{path.stem.replace('-', ' ')}]({path.name})\n" for path in paths if path.suffix == ".png")


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files by name into a folder and return their paths."""
    for name, text in texts.items():
        files.write_text(folder / name, text)
    return [folder / name for name in texts]


def escape_latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped and others as commands; unknown non-ASCII characters become ?."""
    return "".join(_LATEX.get(character, character if character.isascii() else "?") for character in text)


def escape_markdown(text: str) -> str:
    """Return text that stays within a cell of a Markdown table."""
    return text.replace("|", "\\|")


@cache
def _environment() -> "Environment":
    import jinja2  # not needed to train

    environment = jinja2.Environment(  # delimiters that LaTeX does not use
        loader=jinja2.PackageLoader("gpfl.report"),
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(latex=escape_latex, markdown=escape_markdown)
    environment.filters["fixed"] = lambda value, digits: f"{value:.{digits}f}"
    return environment
