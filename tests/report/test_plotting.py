"""What figures share: files, styles and text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gpfl
from gpfl.methods import METHODS
from gpfl.report import plotting
from gpfl.report.plotting import figure_style, method_styles, new_figure, png_and_pdf, save_figure


def test_equal_figures_are_written_as_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with figure_style():
            figure = new_figure(2, 2)
            figure.add_subplot().plot([0, 1])
            assert save_figure(figure, *png_and_pdf(tmp_path / "new" / f"{name}.v1")) == [
                tmp_path / "new" / f"{name}.v1{ending}" for ending in (".png", ".pdf")
            ]
            save_figure(figure, tmp_path / "new" / f"{name}.v1.SVG")
    for ending, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")):
        one, two = ((tmp_path / "new" / f"{name}.v1{ending}").read_bytes() for name in ("one", "two"))
        assert one.startswith(start)
        assert one == two


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.txt", "the figure 'x.txt' ends in .txt; it must end in .png, .pdf or .svg"),
        ("x", "the figure 'x' has no ending; it must end in .png, .pdf or .svg"),
        (".png", "the figure '.png' has no ending; it must end in .png, .pdf or .svg"),
        ("folder.png", "the figure 'folder.png' is a folder: name a file"),
    ],
)
def test_path_that_no_figure_can_be_written_to_is_rejected(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    with pytest.raises(gpfl.GpflError) as error:
        plotting.check_image_path(Path(name))
    assert str(error.value) == message


def test_every_method_has_its_own_marker_and_colour_in_all_figures() -> None:
    styles = method_styles(list(METHODS))
    assert len({style["marker"] for style in styles.values()}) == len(METHODS)
    assert len({style["color"] for style in styles.values()}) == len(METHODS)
    assert method_styles(["local", "gpfl"])["gpfl"] == styles["gpfl"]
    assert method_styles(["Per-FedAvg"])["Per-FedAvg"] == styles["perfedavg"]
    assert method_styles(["FedAvg+FT"])["FedAvg+FT"] == styles["fedavg-ft"]
    variants = method_styles(["gpfl", "gpfl without cov", "gpfl without gce"])
    assert len({style["marker"] for style in variants.values()}) == 3
    assert len(method_styles([f"method {k}" for k in range(40)])) == 40


def test_long_text_loses_its_middle_and_characters_without_a_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "_characters", lambda: frozenset("abcdefgh …"))
    assert plotting.printable("a  b\nc", 9) == "a b c"
    assert plotting.printable("abcdefgh", 5) == "ab…gh"
    assert plotting.printable("a北b", 9) == "ab"


def test_names_are_ticks_and_those_without_a_font_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "_characters", lambda: frozenset("north"))
    axes = new_figure(4, 3).add_subplot()
    plotting.use_name_ticks(axes.xaxis, ["north", "北京"])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["north", "#1"]


def test_installed_fonts_of_other_scripts_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "FALLBACK_FONTS", ("No Such Font", "DejaVu Serif"))
    assert plotting._fonts() == ["DejaVu Sans", "DejaVu Serif"]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.9), (0.001, 5)])
def test_logarithmic_axes_have_plain_numbers(low: float, high: float) -> None:
    with figure_style():
        figure = new_figure(4, 3)
        axes = figure.add_subplot()
        axes.plot([0, 1], [low, high])
        plotting.use_log_scale(axes.yaxis)
        figure.draw_without_rendering()
    ticks = [text.get_text() for text in axes.get_yticklabels()]
    assert axes.get_yscale() == "log"
    assert len(ticks) >= 3
    assert all(np.isfinite(float(tick)) for tick in ticks), "no formulas such as 10⁻¹"
