"""Figures: what is drawn, worked out by hand, and that nothing is cut off."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from synthetic_runs import trials_of

import gpfl
from gpfl.experiments.features import FeatureMetrics, FeatureProjection
from gpfl.experiments.stored_runs import Trials
from gpfl.methods import METHODS
from gpfl.report import figures, plotting
from gpfl.report.figures import METRICS, ClassCounts, learning_curve

NAN = float("nan")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, laid out as in their files."""
    saved: list[Figure] = []

    def save(figure: Figure, *paths: Path) -> None:
        figure.draw_without_rendering()
        saved.append(figure)

    monkeypatch.setattr(plotting, "save_figure", save)
    return saved


def is_complete(figure: Figure) -> bool:
    """Whether all axes with their labels, titles, legends and notes lie within the figure, and no legend on the axes."""
    width, height = figure.canvas.get_width_height(physical=True)
    axes = [axes.get_tightbbox() for axes in figure.axes if axes.get_visible()]
    legends = [legend.get_window_extent() for legend in figure.legends]
    texts = [text.get_window_extent() for text in (figure._suptitle, figure._supxlabel) if text is not None]
    inside = all(b.x0 >= -1 and b.y0 >= -1 and b.x1 <= width + 1 and b.y1 <= height + 1 for b in [*axes, *legends, *texts])
    return inside and not any(legend.overlaps(box) for legend in legends for box in [*axes, *texts])


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


# Learning curves.


@pytest.mark.parametrize(
    ("values", "window", "means"),
    [
        ([1, 2, 6, 3], 1, [1, 2, 6, 3]),
        ([1, 2, 6, 3], 3, [1.5, 3, 11 / 3, 4.5]),
        ([2, 4], 99, [3, 3]),
    ],
)
def test_running_means_at_the_ends_are_of_fewer_values(values: Sequence[float], window: int, means: Sequence[float]) -> None:
    assert figures.running_mean(np.array(values, dtype=float), window).tolist() == pytest.approx(means)


def test_longer_curves_are_smoothed_no_less() -> None:
    windows = [figures.smoothing_window(rounds) for rounds in range(1, 2001)]
    assert windows == sorted(windows)
    assert (windows[5], windows[59], windows[-1]) == (1, 3, 41)
    assert all(window % 2 for window in windows)


@pytest.mark.parametrize(
    ("terms", "ce", "objective"),
    [
        ({"ce": 0.5}, 0.5, 0.5),
        ({"ce": 0.5, "angle": 2.0, "magnitude": 0.25}, 0.5, 2.75),  # GPFL
        ({"ce": 0.5, "head_ce": 9.0}, 0.5, 0.5),  # FedRep trains its head before
        ({"ce": 0.5, "proximal": 0.1, "global_ce": 9.0}, 0.5, 0.6),  # Ditto's global model is not the personal one
        ({"ce": 9.0, "adapted_ce": 0.3}, 0.3, 0.3),  # Per-FedAvg
        ({}, NAN, NAN),
    ],
)
def test_losses_are_those_of_the_personal_model(terms: dict[str, float], ce: float, objective: float) -> None:
    assert figures.cross_entropy({"train": terms}) == pytest.approx(ce, nan_ok=True)
    assert figures.objective({"train": terms}) == pytest.approx(objective, nan_ok=True)


def test_curves_are_of_the_rounds_that_all_trials_have_from_the_first_with_a_value(tmp_path: Path) -> None:
    seeds = {0: [[0.1], [0.2], [0.4]], 1: [[0.1], [0.4], [0.8], [0.9]]}
    trials = trials_of(tmp_path, "gpfl", seeds, terms=[{"ce": 2.0}, {"ce": 1.0}, {"ce": 0.5}])
    (rounds, accuracies), _, (loss_rounds, losses) = (learning_curve(trials, metric) for metric in METRICS.values())
    assert rounds.tolist() == [0, 1, 2]
    assert np.allclose(accuracies, [[10, 20, 40], [10, 40, 80]])
    assert np.allclose(figures.running_mean(accuracies, 3).mean(0), [20, 100 / 3, 45])
    assert loss_rounds.tolist() == [1, 2]
    assert losses.tolist() == [[2, 1], [2, 1]]


def test_best_method_is_first_in_the_legend_with_its_last_accuracy(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [
        trials_of(tmp_path, "fedavg", {0: [[0.1], [0.2], [0.3]]}, terms=[{"ce": 2.0}, {"ce": 1.5}]),
        trials_of(tmp_path, "gpfl", {0: [[0.1], [0.4], [0.8]], 1: [[0.1], [0.3], [0.6]]}, terms=[{"ce": 2.0}, {"ce": 0.5}]),
    ]
    figures.draw_learning_curves(rows, [tmp_path / "curves.png"], "a $ title", losses=True)
    (figure,) = drawn
    assert legend_labels(figure) == ["GPFL (70.0 %)", "FedAvg (30.0 %)"]
    assert [axes.get_ylabel() for axes in figure.axes] == list(METRICS)
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([10, 35, 70])
    note = figure._supxlabel.get_text()
    assert "Mean over 1 or 2 seeds" in note
    assert "does not compare between methods" in note.replace("\n", " ")
    assert is_complete(figure)


def test_long_curves_are_smoothed_and_their_rounds_faint(tmp_path: Path, drawn: list[Figure]) -> None:
    rounds = [[0.1], *[[0.5], [0.7]] * 10]
    figures.draw_learning_curves([trials_of(tmp_path, "gpfl", {0: rounds})], [tmp_path / "curves.png"], "title")
    faint, strong = drawn[0].axes[0].lines
    assert faint.get_alpha() < 1
    assert faint.get_ydata()[:3] == pytest.approx([10, 50, 70])
    assert strong.get_ydata()[:3] == pytest.approx([30, 130 / 3, 170 / 3])


def test_axis_begins_where_long_curves_differ(tmp_path: Path, drawn: list[Figure]) -> None:
    rise = [[0.1 + 0.2 * k] for k in range(4)]
    rows = [trials_of(tmp_path, name, {0: [*rise, *[[last]] * 20]}) for name, last in (("gpfl", 0.9), ("fedavg", 0.88))]
    figures.draw_learning_curves(rows, [tmp_path / "curves.png"], "title")
    bottom, top = drawn[0].axes[0].get_ylim()
    assert 70 < bottom < 88
    assert 90 < top < 92
    assert "may lie below the axis" in drawn[0]._supxlabel.get_text().replace("\n", " ")


def test_all_methods_fit(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [trials_of(tmp_path, name, {0: [[0.1], [0.9]]}, terms=[{"ce": 1.0}]) for name in METHODS]
    figures.draw_learning_curves(rows, [tmp_path / "curves.png"], "title", losses=True)
    figures.draw_learning_curves(rows, [tmp_path / "curves.png"], "title")
    assert all(len(legend_labels(figure)) == len(METHODS) and is_complete(figure) for figure in drawn)


@pytest.mark.parametrize("n_lines", [0, 1])
def test_curve_that_does_not_reach_its_last_round_is_an_error(tmp_path: Path, n_lines: int) -> None:
    trials = trials_of(tmp_path, "gpfl", {0: [[0.1], [0.5]]})
    path = trials.runs[0].path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:n_lines]))
    with pytest.raises(gpfl.GpflError, match=r"metrics.jsonl is damaged \(it does not reach round 1\)"):
        figures.draw_learning_curves([trials], [tmp_path / "curves.png"], "title")


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    for draw in (
        lambda: figures.draw_learning_curves([], [tmp_path / "a.png"], ""),
        lambda: figures.draw_learning_curves([Trials("gpfl", [])], [tmp_path / "a.png"], ""),
        lambda: figures.draw_features([], tmp_path / "a", ""),
    ):
        with pytest.raises(gpfl.GpflError, match=r"run some .*first"):
            draw()


# Features.


def projection(n_classes: int, n_clients: int, **more: object) -> FeatureProjection:
    label, client = (ids.ravel() for ids in np.meshgrid(np.arange(n_classes), np.arange(n_clients)))
    points = np.random.default_rng(0).normal(size=(len(label), 2)).astype(np.float32)
    return FeatureProjection(FeatureMetrics(40, 10, -0.1, 0.2, None, 0.9, 0.1, 0.8), 512, label, client, points, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("classes", "clients", "entries"), [(2, 2, 4), (10, 12, 22), (24, 12, 36), (100, 50, 0)])
def test_features_have_legends_while_classes_and_clients_are_few(
    classes: int, clients: int, entries: int, tmp_path: Path, drawn: list[Figure]
) -> None:
    projections = [projection(classes, clients, method=name, round=7) for name in ("fedper", "gpfl")]
    figures.draw_features(projections[:1], tmp_path / "one", "all $ in $ all")
    figures.draw_features(projections * 2, tmp_path / "four", "title")
    for figure in drawn:
        assert len(legend_labels(figure)) == entries
        assert is_complete(figure)
    one, two, *_ = drawn[1].axes
    assert one.get_title().startswith("FedPer, round 7\nsilhouette −0.10, with client –\npurity 0.90, in other clients 0.80")
    assert two.get_title().startswith("GPFL")


def test_legends_have_the_names_of_classes_and_clients(tmp_path: Path, drawn: list[Figure]) -> None:
    named = projection(2, 2, clients=("north", "$x$"), classes=("a", "1"))
    figures.draw_features([named], tmp_path / "a", "title")
    assert legend_labels(drawn[0]) == ["a", "1", "north", "$x$"]


def test_many_classes_have_as_many_colours() -> None:
    assert len(set(figures.class_colors(10))) == 10
    assert len(set(figures.class_colors(100))) > 90


# Classes of clients.

LONG = [f"Regional hospital of the district number {k}" for k in range(14)]
CASES = {
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
    "odd characters": (["a\tb", "c\nd", "#0"], ["\\frac{", "{"], "$\\frac{$"),
}


def class_counts(clients: Sequence[str], classes: Sequence[str], name: str = "toy") -> ClassCounts:
    return ClassCounts(name, clients, classes, np.full((len(clients), len(classes)), 8))


@pytest.mark.parametrize("case", CASES)
def test_classes_of_clients_fit_and_discs_lie_within_the_axes(case: str, drawn: list[Figure]) -> None:
    figures.draw_class_counts(class_counts(*CASES[case]), Path("a.png"))
    (figure,) = drawn
    (axes,) = figure.axes
    assert is_complete(figure)
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [text.get_window_extent() for text in ticks]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
    discs = axes.collections[0]
    radius = np.sqrt(discs.get_sizes().max()) / 2 * figure.dpi / 72
    centres, inside = axes.transData.transform(discs.get_offsets()), axes.get_window_extent()
    assert (centres - radius >= inside.p0).all()
    assert (centres + radius <= inside.p1).all()


def test_clients_and_classes_are_named_on_the_axes(drawn: list[Figure]) -> None:
    figures.draw_class_counts(class_counts(["north", LONG[0]], ["bad", "$good$"]), Path("a.png"))
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["north", "Regional ho…ict number 0"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["bad", "$good$"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "class")


def test_areas_are_proportional_to_samples_and_one_sample_is_visible(drawn: list[Figure]) -> None:
    figures.draw_class_counts(ClassCounts("toy", ["a"], list("012"), np.array([[40_000, 10_000, 4]])), Path("a.png"))
    large, quarter, tiny = drawn[0].axes[0].collections[0].get_sizes()
    assert large == pytest.approx(4 * quarter)
    assert tiny == 1
    assert set(legend_labels(drawn[0])) <= {"10,000", "20,000", "30,000", "40,000"}
    assert len(legend_labels(drawn[0])) > 1
