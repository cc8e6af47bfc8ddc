"""Tables in every form that they are written in."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from gpfl.report.tables import Bold, MeanStd, ResultColumn, ResultTable, format_bytes, format_csv, format_p_value, render_page

TABLE = ResultTable(
    [
        ResultColumn("method"),
        ResultColumn("N = 10|50", ".2f", group="toys"),
        ResultColumn("our\nrank", "g", group="toys", hide=2),
        ResultColumn("ours −\npaper", "+.1f", group="people", hide=1),
        ResultColumn("empty"),
    ],
    [["gpfl", Bold(MeanStd(61, 0.5, 2)), 1, -3.0, None], ["fed_avg", MeanStd(52, 0, 1), 2.5, 2.0, None]],
    title="Toys",
    caption="In 50 % of toys.",
    notes=["A note."],
)


def lines(table: ResultTable, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_mean_and_population_deviation_are_printed_where_there_are_several_trials() -> None:
    assert f"{MeanStd.from_values([60, 62]):.2f}" == "61.00 ± 1.00"
    assert f"{MeanStd.from_values([60]):.1f}" == "60.0"
    assert MeanStd.from_values([1, 2, 6]).std == pytest.approx(np.std([1, 2, 6]))


def test_markdown_has_caption_table_and_notes() -> None:
    assert TABLE.to_markdown() == (
        "In 50 % of toys.\n\n"
        "| method | N = 10\\|50 | our rank | ours − paper | empty |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| gpfl | **61.00 ± 0.50** | 1 | −3.0 | – |\n"
        "| fed_avg | 52.00 | 2.5 | +2.0 | – |\n"
        "\nA note.\n"
    )


def test_empty_columns_are_dropped() -> None:
    dropped = TABLE.drop_empty()
    assert [column.header for column in dropped.columns] == [column.header for column in TABLE.columns[:-1]]
    assert dropped.cells()[0] == ["gpfl", "61.00 ± 0.50", "1", "−3.0"]


def test_page_has_tables_under_their_titles() -> None:
    page = render_page("A page", [TABLE, TABLE], intro=["First.", "Second."], notes=["one", "two"], origin="Made by us.")
    assert page.startswith("# A page\n\nFirst.\n\nSecond.\n\n## Toys\n\nIn 50 % of toys.\n\n| method |")
    assert page.count("## Toys\n") == 2
    assert page.endswith("\nA note.\n\n- one\n- two\n\nMade by us.\n")
    assert "\n\n\n" not in page


def test_latex_has_booktabs_groups_and_escaped_text() -> None:
    text = TABLE.to_latex("toys")
    assert all(rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    assert r" & \multicolumn{2}{c}{toys} & \multicolumn{1}{c}{people} & \multicolumn{1}{c}{} \\" in text
    assert r"\cmidrule(lr){2-3}\cmidrule(lr){4-4}" in text
    assert r"method & N = 10$|$50 & our rank & ours $-$ paper & empty \\" in text
    assert r"gpfl & \textbf{\boldmath 61.00 $\pm$ 0.50} & 1 & $-$3.0 & -- \\" in text
    assert r"\caption{In 50 \% of toys.}" in text
    assert "\\label{tab:toys}\n" in text
    ungrouped = ResultTable([ResultColumn("a"), ResultColumn("b")], [["--x \\ 日", None]]).to_latex("a")
    assert "multicolumn" not in ungrouped
    assert r"{-}{-}x \textbackslash{} ? & -- \\" in ungrouped


@pytest.mark.parametrize("width", range(30, 100))
def test_no_number_is_cut_on_a_narrow_terminal_and_hidden_columns_are_named(width: int) -> None:
    table = TABLE.drop_empty()
    printed = lines(table, width)
    hidden = " ".join(" ".join(printed[7:]).split()).partition(" characters are too few: ")[2].partition(". A note.")[0]
    shown = [k for k, column in enumerate(table.columns) if column.header.replace("\n", " ") not in hidden.split(", ")]
    assert max(map(len, printed)) <= width
    assert [line.split() for line in printed[5:7]] == [" ".join(row[k] for k in shown).split() for row in table.cells()]
    assert hidden in ("", "our rank", "our rank, ours − paper")
    assert bool(hidden) == (width < 35)


def test_csv_has_all_digits_and_a_line_for_each_record() -> None:
    assert format_csv([{"a": 1 / 3}, {"a": None, "b": "x"}]) == "a,b\n0.3333333333333333,\n,x\n"
    assert format_csv([]) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1549, "1.5 kB"), (2_500_000, "2.5 MB"), (3e9, "3.0 GB")),
        *((4e12, "4.0 TB"), (5e15, "5.0 PB")),
    ],
)
def test_bytes_are_printed_in_the_unit_that_fits(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_small_p_values_are_printed_as_a_bound() -> None:
    assert [format_p_value(p) for p in (None, 0.0004, 0.0416)] == [None, "< 0.001", "0.042"]
