"""Pages and sentences from the jinja2 templates in `templates`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpfl.io import files

if TYPE_CHECKING:
    from jinja2 import Environment

    from gpfl.report.tables import ResultTable

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
def _environment() -> Environment:
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
