"""LaTeX: a table with booktabs, of texts that may hold any letter of ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

LETTERS = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
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
    "–": "--",
    "…": r"\dots{}",
    "-": "{-}",  # two of them are no dash
}
"""How letters are written that LaTeX takes for something else, or does not know."""


def text(words: str) -> str:
    """Gives words as LaTeX shows them; a letter that is neither ASCII nor known becomes ?."""
    return "".join(LETTERS.get(letter, letter if letter.isascii() else "?") for letter in words)


def breakable(words: str) -> str:
    """Gives words as LaTeX shows them, whose lines may end behind any comma, such as in a command with a long list."""
    return text(words).replace(",", r",\allowbreak{}")


def strong(words: str) -> str:
    """Gives LaTeX in bold, formulas too."""
    return rf"\textbf{{\boldmath {words}}}"


def small(words: str) -> str:
    """Gives LaTeX in small letters."""
    return rf"{{\footnotesize {words}}}"


def table(
    caption: str,
    label: str,
    groups: Sequence[str],
    headings: Sequence[str],
    body: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> str:
    """Gives a table; all texts are LaTeX already. Equal groups that stand side by side share a heading."""
    spans, rules, place = [], [], 2
    for name, members in groupby(groups):
        width = len(list(members))
        spans.append(rf"\multicolumn{{{width}}}{{c}}{{{name}}}")
        rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
        place += width
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}[ht]",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{label}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{l{'c' * len(headings)}}}",
        r"\toprule",
        " & ".join(["", *spans]) + r" \\",
        " ".join(rules),
        " & ".join(["Method", *headings]) + r" \\",
        r"\midrule",
        *(" & ".join(cells) + r" \\" for cells in body),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\par\medskip",
        r"\begin{minipage}{\linewidth}\footnotesize",
        *(f"{note}\\par" for note in notes),
        r"\end{minipage}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"
