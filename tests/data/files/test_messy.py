"""Files as they come from spreadsheets and databases: bad cells, missing values, ids, dates, delimiters."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from user_files import (
    close,
    column_names,
    error_of,
    file_metadata,
    inputs,
    lines,
    load,
    make_csv,
    message_of,
    missing,
    missing_role,
    scaled,
    write,
)

from gpfl.cli.options import parse_options

HEAD = ("age", "client", "label")


def people(ages: Sequence[object], mark: str = ",") -> str:
    """Return a CSV with one person per row, two clients and two classes."""
    return lines(HEAD, *((age, "ns"[k % 2], "ab"[k // 2 % 2]) for k, age in enumerate(ages)), mark=mark)


def notes(path: Path, **settings: object) -> list[str]:
    """Return the description without its first two lines."""
    return load(path, **settings).description.split("\n")[2:]


def raw(path: Path, **settings: object) -> list[list[float]]:
    """Return the values of the columns before they are encoded."""
    table = load(path, **settings)
    assert table.raw is not None
    return table.raw.values.tolist()  # type: ignore[no-any-return]


# Nearly numbers.


FIX = "correct the file, read such cells as missing values with --unreadable missing, or leave the column out with --ignore age"


@pytest.mark.parametrize("cell", [">90", "12 kg", "12.5 %", "n.d.", "2023-01-10"])
def test_cells_that_are_not_numbers_are_reported_with_their_share(cell: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", people([30 + k % 9 for k in range(19)] + [cell, "", cell]))
    assert error_of(path, missing="drop") == (
        f"column 'age' has cells that are not numbers in 2 of 22 rows (9.1 %), first '{cell}' in a.csv, line 21: {FIX}"
    )


def test_unreadable_cells_may_be_missing_values(tmp_path: Path) -> None:
    ages = [30 + k % 9 for k in range(19)] + [">90", "", "<5"]
    path = write(tmp_path / "a.csv", people(ages))
    assert error_of(path, unreadable="missing") == missing("age", 3, "a.csv, line 21")
    note = "Unreadable cells read as missing values: age in 2 of 22 rows (9.1 %), such as '>90'."
    assert notes(path, unreadable="missing", missing="mean")[0] == note
    table = load(path, unreadable="missing", missing="drop")
    assert len(table) == 19
    assert notes(path, unreadable="missing", missing="drop")[1] == note
    assert table.metadata["unreadable"] == "missing"
    dates = [f"2023-01-{k + 10}" for k in range(12)]
    path = write(tmp_path / "b.csv", people([*dates, "soon"]))
    assert error_of(path) == (
        f"column 'age' has cells that are not dates in 1 of 13 rows (7.7 %), first 'soon' in b.csv, line 14: {FIX}"
    )


@pytest.mark.parametrize(
    ("cells", "values", "note"),
    [
        (["12%", "3.5 %", "-4%"], [0.12, 0.035, -0.04], "Read as fractions: age (12% is 0.12)."),
        (
            ['"1,234.5"', "950", '"-12,345,678"'],
            [1234.5, 950, -12345678],
            "Read with thousands marks: age (1,234.5 is 1234.5).",
        ),
        (['"1,234"', "950", "7"], [1234, 950, 7], "Read with thousands marks: age (1,234 is 1234)."),
        (["1 234", "950", "7"], [1234, 950, 7], "Read with thousands marks: age (1 234 is 1234)."),
        (["1'000.5", "950", "7"], [1000.5, 950, 7], "Read with thousands marks: age (1'000.5 is 1000.5)."),
        (['"61,4"', "950", "7"], [61.4, 950, 7], "Read with decimal commas: age (61,4 is 61.4)."),
        (['"1.234,5"', "950", "2.500"], [1234.5, 950, 2500], "Read with decimal commas: age (1.234,5 is 1234.5)."),
    ],
)
def test_percentages_thousands_marks_and_decimal_commas_are_numbers(
    cells: Sequence[str], values: Sequence[float], note: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", people(cells))
    assert raw(path) == [[value] for value in values]
    assert notes(path) == [note]


def test_a_comma_before_three_digits_is_a_decimal_comma_where_commas_do_not_separate_cells(tmp_path: Path) -> None:
    assert raw(write(tmp_path / "a.csv", people(["1,234", "950", "7"], ";"))) == [[1.234], [950], [7]]
    assert raw(write(tmp_path / "b.csv", people(["1,234", "9.5", "7"], ";"))) == [[1234], [9.5], [7]], "a decimal point"
    assert raw(write(tmp_path / "c.csv", people(["1.234,5", "2.500", "7"], ";"))) == [[1234.5], [2500], [7]]


def test_numbers_among_texts_and_in_short_files_are_categories(tmp_path: Path) -> None:
    table = load(write(tmp_path / "a.csv", people([*range(10), "x", "y"])))
    assert inputs(table).shape == (12, 12), "10 of 12 are numbers"
    assert inputs(load(write(tmp_path / "b.csv", people([*range(9), "x"])))).shape == (10, 10), "10 rows tell nothing"


@pytest.mark.parametrize("word", ["", "-", "--", ".", "#N/A", "unknown", "Missing", "?", "none", "NaN", " na "])
def test_texts_of_missing_values_are_known(word: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", people([30, word, 40, 50]))
    assert error_of(path) == missing("age", 1, "a.csv, line 3")


@pytest.mark.parametrize("word", ["unknown", "none", "-", "missing"])
def test_a_class_or_client_may_have_such_a_name(word: str, tmp_path: Path) -> None:
    rows = [(k, word if k % 2 else "n", word if k % 3 else "b") for k in range(8)]
    table = load(write(tmp_path / "a.csv", lines(HEAD, *rows)))
    assert word in table.client_names
    assert word in table.metadata["classes"]  # type: ignore[operator]


@pytest.mark.parametrize("word", ["", "NA", "n/a", "nan", "null"])
@pytest.mark.parametrize("name", ["client", "label"])
def test_missing_labels_and_clients_are_errors_with_their_line(name: str, word: str, tmp_path: Path) -> None:
    rows = [[k, "ns"[k % 2], "ab"[k % 2]] for k in range(6)]
    rows[4][HEAD.index(name)] = word
    assert error_of(write(tmp_path / "a.csv", lines(HEAD, *rows))) == missing_role(name, 1, "a.csv, line 6")


def test_line_numbers_count_blank_lines_and_line_breaks_in_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b,label\n1,"two\nlines",x\n\n2,q,y\n,q,x\n')
    assert error_of(path) == missing("a", 1, "a.csv, line 6")


def test_errors_name_the_folder_if_files_have_the_same_name(tmp_path: Path) -> None:
    for client, age in (("n", "1"), ("s", "")):
        for part in ("train", "test"):
            write(tmp_path / "d" / client / f"{part}.csv", lines(("age", "label"), (age, "x"), (2, "y")))
    assert "2 missing values, first in s/test.csv, line 2" in error_of(tmp_path / "d")


# Decimal commas.


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_decimal_commas_are_read_if_commas_do_not_separate_cells(mark: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", people(["61,5", "-48", "70,25", "5.5"], mark))
    assert close(inputs(load(path)), [[v] for v in scaled([61.5, -48, 70.25, 5.5])])
    assert notes(path) == ["Read with decimal commas: age (61,5 is 61.5)."]


def test_labels_with_decimal_commas_are_fractions(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", lines(("a", "label"), (1, "36,6"), (2, "37"), mark=";"))
    assert error_of(path).startswith("'label' holds 36.6; labels are whole numbers or names of classes")


# Ids, constants, dates.


def test_possible_ids_and_constant_columns_are_reported_with_the_flag(tmp_path: Path) -> None:
    rows = [(k, 100 + k, 7, k / 3, k % 4, "ns"[k % 2], "ab"[k % 3 > 0]) for k in range(24)]
    path = write(tmp_path / "a.csv", lines(("x y", "case", "site", "v", "w", "client", "label"), *rows))
    assert notes(path) == [
        "A different whole number in every row, as in an id: x y, case; leave out with --ignore 'x y,case'.",
        "The same value in every row: site; leave out with --ignore site.",
    ]
    assert notes(path, ignore=["x y"]) == [
        "A different whole number in every row, as in an id: case; leave out with --ignore 'x y,case'.",
        "The same value in every row: site; leave out with --ignore 'x y,site'.",
    ]
    rows = [(f"p{max(k, 1)}", k, "ab"[k % 2]) for k in range(40)]
    path = write(tmp_path / "b.csv", lines(("who", "n", "label"), *((who, n % 3, kind) for who, n, kind in rows)))
    assert notes(path) == ["A different text in nearly every row, as in an id: who; leave out with --ignore who."]


@pytest.mark.parametrize(
    ("cells", "days", "order"),
    [
        (["2023-01-10", "1969-12-31"], [19367, -1], "year first"),
        (["2023-01-10 12:00", "2023-01-10 06:00:00"], [19367.5, 19367.25], "year first"),
        (["2023-01-10T12:00:00Z", "2023-01-10T12:00:00+06:00"], [19367.5, 19367.25], "year first"),
        (["2023/1/10", "2023/01/11"], [19367, 19368], "year first"),
        (["10.1.2023", "31.01.2023"], [19367, 19388], "day first"),
        (["10/1/2023", "31/01/2023"], [19367, 19388], "day first"),
        (["1/10/23", "01/31/23 6:00 PM"], [19367, 19388.75], "month first"),
        (["1/10/2023", "2/3/2023"], [19367, 19391], "month first, although the day may come first"),
        (["10.1.2023", "3.2.2023"], [19367, 19391], "day first, although the month may come first"),
    ],
)
def test_dates_are_read_as_days_with_one_order_for_a_column(
    cells: Sequence[str], days: Sequence[float], order: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", people([*cells, *cells]))
    assert raw(path) == [[day] for day in (*days, *days)]
    assert notes(path) == [f"Read as days since 1970-01-01 ({order}): age ({cells[0]} is {days[0]:.10g})."]


def test_columns_of_dates_may_be_left_out_or_be_errors(tmp_path: Path) -> None:
    rows = [(f"2023-01-{k + 10}", k % 3, "ns"[k % 2], "ab"[k % 2]) for k in range(12)]
    path = write(tmp_path / "a.csv", lines(("day", *HEAD), *rows))
    assert raw(path, dates="ignore") == [[k % 3] for k in range(12)]
    assert notes(path, dates="ignore") == ["Columns of dates left out: day."]
    assert load(path, dates="ignore").metadata["dates"] == "ignore"
    assert error_of(path, dates="error") == (
        "column 'day' holds dates: read dates as days with --dates days, leave columns of dates out with --dates ignore, "
        "or leave the column out with --ignore day"
    )
    alone = write(tmp_path / "b.csv", people(["2023-01-10", "2023-01-11"]))
    assert error_of(alone, dates="ignore") == f"{alone} has no column of inputs besides dates, which --dates ignore leaves out"


def test_dates_of_parquet_are_read_as_days(tmp_path: Path) -> None:
    days = [datetime.date(2023, 1, 10), None, datetime.date(1970, 1, 2)]
    times = [datetime.datetime(2023, 1, 10, 18), None, datetime.datetime(1970, 1, 2)]
    pl.DataFrame({"day": days, "time": times, "label": ["x", "y", "y"]}).write_parquet(tmp_path / "a.parquet")
    assert raw(tmp_path / "a.parquet", missing="drop") == [[19367, 19367.75], [1, 1]]


# Missing values.


GAPS = "age,sex,client,label\n30,f,n,a\n,m,s,b\n50,,n,b\n70,f,s,a\n10,?,n,b\n"


def test_missing_numbers_are_filled_with_the_mean_and_texts_with_the_most_frequent(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", GAPS)
    table = load(path, missing="mean")
    mean, std = 40.0, float(np.std([30, 50, 70, 10]))
    sexes = [(1, 0), (0, 1), (1, 0), (1, 0), (1, 0)]
    assert close(inputs(table), [[(age - mean) / std, *sex] for age, sex in zip([30, 40, 50, 70, 10], sexes, strict=True)])
    assert table.metadata == {
        "classes": ["a", "b"],
        **file_metadata("label", client="client", missing="mean", scale="federated"),
    }
    assert "sex (f, m)" in table.description
    assert notes(path, missing="mean") == [
        "Missing values filled with the mean value of training samples: age 1.",
        "Missing values filled with the most frequent category of training samples: sex 2.",
    ]
    plain = load(path, missing="mean", scale="none")
    assert inputs(plain)[:, 0].tolist() == [30, 40, 50, 70, 10]


def test_the_mean_is_over_training_rows(tmp_path: Path) -> None:
    text = lines(("a", "part", "label"), (1, "train", 0), (3, "train", 1), ("", "test", 0), (100, "test", 1))
    table = load(write(tmp_path / "a.csv", text), missing="mean", scale="none")
    assert inputs(table)[:, 0].tolist() == [1, 3, 2, 100]
    text = lines(("a", "b", "part", "label"), ("", 1, "train", 0), ("", 2, "train", 1), (5, 3, "test", 0))
    table = load(write(tmp_path / "a.csv", text), missing="mean")
    assert message_of(lambda: inputs(table)) == (
        "column 'a' has no value in any training sample, so there is nothing to fill in: leave it out with --ignore a"
    )


def test_drop_leaves_out_rows_with_any_missing_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", GAPS + "20,m,,a\n90,f,s,\n60,m,s,b\n")
    table = load(path, missing="drop", missing_labels="drop", scale="none")
    assert inputs(table).tolist() == [[30, 1, 0], [70, 1, 0], [60, 0, 1]]
    assert table.y.tolist() == [0, 0, 1]
    assert (table.metadata["missing"], table.metadata["missing_labels"]) == ("drop", "drop")
    assert notes(path, missing="drop", missing_labels="drop")[0] == (
        "Left out 5 of 8 rows with missing values: label 1, client 1, age 1, sex 2."
    )


def test_missing_inputs_and_missing_labels_are_dropped_separately(tmp_path: Path) -> None:
    labels = write(tmp_path / "a.csv", "a,b,label\n1,1,x\n2,2,\n3,3,y\n4,4,y\n")
    assert error_of(labels, missing="drop") == missing_role("label", 1, "a.csv, line 3")
    assert len(load(labels, missing_labels="drop")) == 3
    columns = write(tmp_path / "b.csv", "a,b,label\n1,1,x\n2,,x\n3,3,y\n4,4,y\n")
    assert error_of(columns, missing_labels="drop") == missing("b", 1, "b.csv, line 3")
    assert len(load(columns, missing="drop")) == 3


def test_dropping_all_rows_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b,label\n1,,x\n2,,y\n")
    assert error_of(path, missing="drop") == "column 'b' is empty in every row: leave the column out with --ignore b"
    assert error_of(write(tmp_path / "b.csv", "a,b,label\n1,,x\n,2,y\n,3,x\n"), missing="drop") == (
        "each of 3 rows has a missing value, most of them in column 'a': leave it out with --ignore a"
    )
    assert error_of(path, missing="mean") == "column 'b' is empty in every row: leave the column out with --ignore b"


def test_drop_reports_files_of_which_nothing_is_left(tmp_path: Path) -> None:
    for client, age in (("n", 1), ("s", "")):
        write(tmp_path / "d" / f"{client}.csv", lines(("age", "label"), (age, "x"), (age, "y")))
    message = "Left out 2 of 4 rows with missing values: age 2. Nothing is left of s.csv."
    assert message in notes(tmp_path / "d", missing="drop")
    assert load(tmp_path / "d", missing="drop").client_names == ("n",)


def test_drop_leaves_out_rows_of_arrays(tmp_path: Path) -> None:
    x = np.arange(12.0).reshape(6, 2)
    x[1, 0], x[4, 1] = np.nan, np.inf
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 0, 1, 0, 1]), more=np.zeros(9))
    table = load(tmp_path / "a.npz", missing="drop")
    assert np.array_equal(table.x.numpy(), x[[0, 2, 3, 5]])
    assert table.y.tolist() == [0, 0, 1, 1]
    assert notes(tmp_path / "a.npz", missing="drop") == ["Left out 2 of 6 rows with missing values: x 2."]


# Several problems at once.


def test_one_error_names_all_bad_columns_with_flags_that_work(tmp_path: Path) -> None:
    rows = [
        (k, f"p{k}", "" if k == 3 else k % 5, f"2023-01-{k % 28 + 1:02}", k % 7 if k else ">6", "ab"[k % 2]) for k in range(60)
    ]
    path = write(tmp_path / "a.csv", lines(("row", '"who, what"', "age", "day", "it's", "label"), *rows))
    message = error_of(path, ignore=["row"], dates="error")
    lasting = "--ignore 'row,\"who, what\",day,it'\"'\"'s'"
    every = "--ignore 'row,\"who, what\",age,day,it'\"'\"'s'"
    assert message == (
        "column 'who, what' holds 60 different texts, such as 'p0' (at most 50 can be categories); "
        "column 'age' has 1 missing value, in a.csv, line 5; column 'day' holds dates; "
        "column 'it's' has cells that are not numbers in 1 of 60 rows (1.7 %), first '>6' in a.csv, line 2: "
        "read dates as days with --dates days, leave columns of dates out with --dates ignore, "
        "correct the file, read such cells as missing values with --unreadable missing, "
        f"fill missing values with --missing mean {lasting}, leave such rows out with --missing drop {lasting}, "
        f"or leave all these columns out with {every}"
    )
    text = shlex.split(lasting)[1]
    ignored = parse_options({"data__ignore": (text,)})["data"]["ignore"]
    assert ignored == ["row", "who, what", "day", "it's"]
    assert load(path, ignore=ignored, missing="mean").shape == (1,)


def test_many_bad_columns_are_counted_and_the_flag_ignores_them_all(tmp_path: Path) -> None:
    names = [f"c{k}" for k in range(9)]
    path = write(tmp_path / "a.csv", lines((*names, "v", "label"), *(("",) * 9 + (k, k % 2) for k in range(4))))
    message = error_of(path)
    assert message.count("is empty in every row") == 5
    assert "; 4 more columns cannot be inputs either: " in message
    assert message.endswith(f"--ignore {','.join(names)}")


# Unnamed columns and delimiters.


def test_unnamed_row_numbers_and_empty_columns_are_left_out(tmp_path: Path) -> None:
    expected = load(write(tmp_path / "a.csv", make_csv()), client="site", label="kind")
    rows = make_csv().splitlines()
    for start in ("", "Unnamed: 0"):
        text = "\n".join([f"{start},{rows[0]},", *(f"{7 * k},{row}," for k, row in enumerate(rows[1:]))])
        path = write(tmp_path / "b.csv", text)
        table = load(path, client="site", label="kind")
        assert table.digest == expected.digest
        assert table.description.split("\n")[2:] == [
            "Left out of b.csv: the first column, which has no name and numbers the rows.",
            "Left out of b.csv: an empty column without a name.",
        ]
    path = write(tmp_path / "c.csv", ",a,label\n1,1,x\n1,2,y\n")
    assert error_of(path).startswith(f"{path}: column 1 of 3 has no name: name it")


def test_delimiters_are_counted_outside_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", '"name, first, last";label\n1;x\n2;y\n')
    assert column_names(load(path)) == ["name, first, last"]


def test_a_line_of_excel_names_the_delimiter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "sep=;\r\na;label\r\n1,5;x\r\n;y\r\n")
    assert error_of(path) == missing("a", 1, "a.csv, line 4")


def test_a_file_with_one_column_is_an_error_that_names_the_delimiter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "# exported\na,label\n1,x\n")
    assert error_of(path) == (
        f"{path} has one column, '# exported', when split at commas; its first line must name the columns, "
        "separated by commas, semicolons, tabs, bars"
    )
    path = write(tmp_path / "b.csv", "a;label\n1;x;3\n")
    assert error_of(path) == f"{path}, line 2, has 3 cells when split at semicolons; the first line has 2"


# Notes in the description.


def test_names_that_differ_in_case_and_a_single_client_are_reported(tmp_path: Path) -> None:
    rows = [(k % 5, ["North", "north"][k % 2], ["Yes", "yes", "no"][k % 3]) for k in range(12)]
    alone = "differ only in case: are they the same?"
    path = write(tmp_path / "a.csv", lines(HEAD, *rows))
    assert notes(path) == [f"The classes 'Yes' and 'yes' {alone}", f"The clients 'North' and 'north' {alone}"]
    path = write(tmp_path / "b.csv", lines(HEAD, (1, "n", 0), (2, "n", 1)))
    assert notes(path) == ["There is only one client, so nothing is exchanged."]


def test_names_with_commas_are_quoted_in_the_description(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'doctor,label\n"Müller, Anna","ja, sehr"\nLee,nein\n')
    assert "2 classes of 'label': 'ja, sehr', nein." in load(path).description
    assert "doctor (Lee, 'Müller, Anna')" in load(path).description
