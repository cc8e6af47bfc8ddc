"""Grids of reconstructed images, and the figures of the defence study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report.made_studies import STUDY

from gpfl.report import privacy_figures
from gpfl.report.privacy_figures import ImageRow, draw_epsilon, draw_grid, draw_leakage


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that calls a drawing function and returns its figure instead of files."""
    monkeypatch.setattr(privacy_figures, "save_figure", lambda figure, *paths: [figure])
    return lambda draw, *arguments: draw(*arguments, Path("figure"))[0]


def test_images_shown_as_their_negative_are_marked(drawn: Callable[..., Any]) -> None:
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    figure = drawn(draw_grid, images, [ImageRow("fe", images, [20.0, 30.0], [True, False])], "title")
    assert [axes.get_xlabel() for axes in figure.axes[2:]] == ["20.0 neg.", "30.0"]
    assert "negative" in figure.get_supxlabel()


def test_a_long_title_fits_over_few_images(drawn: Callable[..., Any]) -> None:
    figure = drawn(draw_grid, torch.zeros(1, 1, 8, 8), [], "gpfl on digits: images that geiping reconstructs from uploads")
    figure.draw_without_rendering()
    extent = figure._suptitle.get_window_extent()
    assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width


def curves_of(axes: Any) -> dict[str, list[list[float]]]:
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_accuracy_is_drawn_against_epsilon(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(draw_epsilon, STUDY).axes
    curves = curves_of(axes)
    assert curves["GPFL"] == [[300, 50], [10, 40]]
    assert curves["GPFL, Poisson"] == [[100, 50], [pytest.approx(10 / 3), 40]]
    assert curves["FedAvg"] == [[10, 10]]
    markers = [line.get_marker() for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert len(set(markers)) == 2, "methods differ without colour"


def test_psnr_is_drawn_against_accuracy_with_larger_markers_for_stronger_defences(drawn: Callable[..., Any]) -> None:
    gpfl, fedavg = drawn(draw_leakage, STUDY).axes
    curves = curves_of(gpfl)
    assert curves["clip and noise, client level:\n0.1, 1"] == [[50, 20], [40, 12]]
    assert curves["no defence"] == [[60, 30]]
    weak, strong = gpfl.collections[0].get_sizes()
    assert weak < strong
    assert curves_of(fedavg)["few bits:\n4"] == [[30, 25]]
