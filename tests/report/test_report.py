"""Reports: the numbers of tables and the curves of figures, worked out by hand."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

import gpfl
from gpfl.experiments.trials import Trials
from gpfl.report import figures, method_tables, plotting
from gpfl.training.run_dir import LINE_NUMBERS, SUMMARY_NUMBERS, SUMMARY_TEXTS, RunDir


def summary(**numbers: float) -> dict[str, object]:
    """A summary with these numbers, all others 0."""
    return {**dict.fromkeys(SUMMARY_NUMBERS, 0), **dict.fromkeys(SUMMARY_TEXTS, "text"), **numbers}


def two_trials() -> Trials:
    first = summary(
        best_accuracy=0.9,
        last_accuracy=0.8,
        std=0.1,
        cov=0.125,
        bytes_up=1500,
        bytes_down=3_000_000,
        seconds=1.5,
        idle_clients=1,
    )
    second = summary(
        best_accuracy=0.7,
        last_accuracy=0.8,
        std=0.3,
        cov=0.375,
        bytes_up=1700,
        bytes_down=5_000_000,
        seconds=2.5,
        idle_clients=1,
    )
    return Trials("gpfl", [Path("a"), Path("b")], [first, second])


# Tables.


def test_cells_are_means_and_population_deviations_in_percent() -> None:
    assert method_tables.cells(two_trials()) == [
        *("gpfl", "80.00 ± 10.00", "80.00 ± 0.00", "20.00", "0.2500", "1.6 KB", "4.0 MB", "2.0", "2")
    ]


def test_one_trial_has_no_deviation() -> None:
    trials = two_trials()
    alone = Trials("gpfl", trials.folders[:1], trials.summaries[:1])
    assert method_tables.cells(alone) == ["gpfl", "90.00", "80.00", "10.00", "0.1250", "1.5 KB", "3.0 MB", "1.5", "1"]


def test_saved_tables_hold_the_same_numbers(tmp_path: Path) -> None:
    other = Trials("local[b]", [Path("c")], [summary(best_accuracy=0.5)])
    paths = method_tables.save([two_trials(), other], tmp_path, "the title")
    assert [path.name for path in paths] == ["table.md", "table.csv", "table.json"]
    records = json.loads((tmp_path / "table.json").read_text())
    assert [record["method"] for record in records] == ["gpfl", "local[b]"]
    assert records[0]["trials"] == 2
    assert records[0]["best_accuracy"] == pytest.approx(0.8)
    assert records[0]["best_accuracy_std"] == pytest.approx(0.1)
    assert records[0]["idle_clients"] == 1
    assert records[1]["best_accuracy_std"] == 0
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{key: str(value) for key, value in record.items()} for record in records] == rows
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[:2] == ["the title", ""]
    assert lines[4] == "| " + " | ".join(method_tables.cells(two_trials())) + " |"
    assert "1 of 0 clients have fewer than the 0 training rows" in lines[-1]


def test_table_on_a_terminal_shows_names_as_they_are() -> None:
    trials = Trials("a[bold]b", [Path("c")], [summary()])
    screen = io.StringIO()
    Console(width=160, file=screen).print(method_tables.rich_table([trials], "title [/b]"))
    drawn = screen.getvalue()
    assert "a[bold]b" in drawn
    assert "title [/b]" in drawn


@pytest.mark.parametrize(("width", "last"), [(79, False), (104, False), (105, True)])
def test_table_fits_its_terminal_and_always_names_the_methods(width: int, last: bool) -> None:
    screen = io.StringIO()
    trials = Trials("gpfl without cov+gce", two_trials().folders, two_trials().summaries)
    Console(width=width, file=screen).print(method_tables.rich_table([trials], "title", width))
    drawn = screen.getvalue()
    assert "gpfl without cov+gce" in drawn
    assert "80.00 ± 10.00" in drawn
    assert ("last round" in drawn) == last
    assert "…" not in drawn


# Figures.


def finished(folder: Path, accuracies: dict[int, float]) -> Path:
    """A finished run with these accuracies by round."""
    folder.mkdir()
    run = RunDir(folder)
    for number, accuracy in accuracies.items():
        run.append({**dict.fromkeys(LINE_NUMBERS, 0), "round": number, "accuracy": accuracy})
    run.write_summary(summary(rounds=max(accuracies)))
    return folder


def test_curves_are_percentages_over_the_rounds_that_all_trials_have(tmp_path: Path) -> None:
    folders = [
        finished(tmp_path / "a", {0: 0.1, 2: 0.5, 4: 0.75}),
        finished(tmp_path / "b", {0: 0.2, 2: 0.25}),  # it lost patience
    ]
    rounds, accuracies = figures.curves(Trials("gpfl", folders, []))
    assert rounds.tolist() == [0, 2]
    assert np.allclose(accuracies, [[10, 50], [20, 25]])


@pytest.mark.parametrize("lines", [0, 1])
def test_curve_that_does_not_reach_its_last_round_is_refused(tmp_path: Path, lines: int) -> None:
    folder = finished(tmp_path / "a", {0: 0.1, 1: 0.5})
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(
        gpfl.GpflError, match=r"metrics.jsonl is damaged \(it does not reach round 1\): remove summary.json and"
    ):
        figures.curves(Trials("gpfl", [folder], []))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.txt", "the picture 'x.txt' ends in .txt; it must end in .png, .pdf or .svg"),
        ("x", "the picture 'x' has no ending; it must end in .png, .pdf or .svg"),
        (".png", "the picture '.png' has no ending; it must end in .png, .pdf or .svg"),
        ("folder.png", "the picture 'folder.png' is a folder: name a file"),
    ],
)
def test_picture_of_no_known_format_is_refused_before_anything_is_read(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    nowhere = Trials("gpfl", [tmp_path / "nowhere"], [])
    for draw in (
        lambda: figures.draw_curves([nowhere], Path(name), "title"),
        lambda: figures.draw_bubbles(None, Path(name)),  # type: ignore[arg-type]
    ):
        with pytest.raises(gpfl.GpflError) as problem:
            draw()
        assert str(problem.value) == words


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.PNG", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_format_goes_by_the_ending(name: str, start: bytes, tmp_path: Path) -> None:
    figures.draw_curves(
        [Trials("gpfl", [finished(tmp_path / "a", {0: 0.1, 1: 0.9})], [])], tmp_path / name, "all $ in $ all, 北京"
    )
    figures.draw_bubbles(named(["a"], ["b"]), tmp_path / f"bubbles.{name}")
    for path in (tmp_path / name, tmp_path / f"bubbles.{name}"):
        assert path.read_bytes().startswith(start)


def named(clients: Sequence[str], classes: Sequence[str], name: str = "toy") -> gpfl.Federation:
    """A federation whose clients and classes have these names; every client has eight rows of every class."""
    labels = np.tile(np.repeat(np.arange(len(classes)), 8), len(clients))
    groups = np.repeat(np.arange(len(clients)), 8 * len(classes))
    table = gpfl.Table(
        *(np.zeros((len(labels), 1)), labels),
        name=name,
        groups=groups,
        client_names=clients,
        metadata={"classes": list(classes)},
    )
    return gpfl.federate(table, partition="natural")


def drawn(federation: gpfl.Federation, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The picture of a federation, laid out as it is saved."""
    kept: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: kept.append(figure))
    figures.draw_bubbles(federation, Path("a.png"))
    kept[0].draw_without_rendering()
    return kept[0]


LONG = [f"Regional hospital of the district number {k}" for k in range(14)]
CROWDS = {
    "two clients": (["north", "south"], ["good", "bad"], "toy"),
    "one client of one class": (["north"], ["good"], "toy"),
    "long names": (
        LONG,
        ["recovered", "readmitted within thirty days"],
        "a file of a rather long name that somebody chose.csv",
    ),
    "long class names alone": (["a", "b"], LONG[:5], "x" * 40),
    "forty clients": ([f"client {k}" for k in range(40)], ["good", "bad"], "toy"),
    "many clients": ([str(k) for k in range(200)], ["good", "bad"], "toy"),
    "many classes": (["a", "b"], [str(k) for k in range(150)], "toy"),
    "other scripts": (["北京市第一医院", "上海", "الرياض"], ["$x$", "_a^b$", "是"], "医院.csv"),
    "odd letters": (["a\tb", "c\nd", "#0"], ["\\frac{", "{"], "$\\frac{$"),
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_nothing_of_the_picture_is_cut_off(crowd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, classes, name = CROWDS[crowd]
    figure = drawn(named(clients, classes, name), monkeypatch)
    (axes,) = figure.axes
    width, height = figure.canvas.get_width_height(physical=True)
    legend = figure.legends[0].get_window_extent()
    for box in (axes.title.get_window_extent(), axes.xaxis.get_tightbbox(), axes.yaxis.get_tightbbox(), legend):
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= width + 1
        assert box.y1 <= height + 1
    assert not legend.overlaps(axes.title.get_window_extent())
    if len(clients) <= plotting.MOST_TICKS:
        across = [text.get_window_extent() for text in axes.get_xticklabels()]
        assert len(across) == len(clients)
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(across))


@pytest.mark.parametrize("crowd", CROWDS)
def test_discs_lie_within_the_border(crowd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, classes, name = CROWDS[crowd]
    figure = drawn(named(clients, classes, name), monkeypatch)
    (axes,) = figure.axes
    discs = axes.collections[0]
    radius = np.sqrt(discs.get_sizes().max()) / 2 * figure.dpi / 72
    centres = axes.transData.transform(discs.get_offsets())
    inside = axes.get_window_extent()
    assert (centres - radius).min(0)[0] >= inside.x0
    assert (centres - radius).min(0)[1] >= inside.y0
    assert (centres + radius).max(0)[0] <= inside.x1
    assert (centres + radius).max(0)[1] <= inside.y1


def test_clients_and_classes_stand_at_the_axes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = drawn(named(["north", LONG[0]], ["bad", "$good$"]), monkeypatch).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["north", "Regional ho…ict number 0"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["bad", "$good$"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "class")


def test_names_without_a_font_are_told_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "SCRIPTS", ())
    (axes,) = drawn(named(["north", "北京"], ["bad", "good"], "医院"), monkeypatch).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["north", "#1"]
    assert axes.get_xlabel() == "client (#: no font here has its letters)"
    assert axes.get_ylabel() == "class"
    assert axes.get_title().startswith("??: ")


def test_fonts_of_other_scripts_are_taken_where_they_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "SCRIPTS", ("No Such Font", "DejaVu Serif"))
    assert plotting.Letters().fonts == ["DejaVu Sans", "DejaVu Serif"]


@pytest.mark.parametrize(("most", "shown"), [(1, [1]), (9, [5, 1]), (180, [100, 20, 5]), (2000, [2000, 500, 100]), (3, [2])])
def test_key_has_round_numbers_of_rows(most: int, shown: list[int]) -> None:
    assert figures.round_numbers(most) == shown


def test_areas_go_by_rows_and_a_single_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.repeat([0, 1, 2], [40_000, 10_000, 4])
    table = gpfl.Table(np.zeros((len(labels), 1)), labels, client_ids=np.zeros(len(labels)), client_names=["a"])
    figure = drawn(gpfl.federate(table, partition="natural"), monkeypatch)
    large, quarter, tiny = figure.axes[0].collections[0].get_sizes()
    assert large == pytest.approx(4 * quarter)
    assert tiny == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["20,000", "5,000", "1,000"]


def test_curves_are_drawn_as_a_picture_and_equal_curves_as_equal_bytes(tmp_path: Path) -> None:
    rows = [
        Trials("gpfl", [finished(tmp_path / "a", {0: 0.1, 1: 0.9}), finished(tmp_path / "b", {0: 0.2, 1: 0.8})], []),
        Trials("local", [finished(tmp_path / "c", {0: 0.1, 1: 0.3})], []),
    ]
    for name in ("one.png", "two.png"):
        figures.draw_curves(rows, tmp_path / name, "a title")
    with Image.open(tmp_path / "one.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1050, 600))
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
