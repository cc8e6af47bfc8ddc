"""Figures of runs and experiments: what is drawn, worked out by hand, with which names, and that nothing is cut off."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import toy_federation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from synthetic_runs import trials_of
from toy_results import toy_plan

import gpfl
from gpfl.experiments import definitions as experiments
from gpfl.experiments import features
from gpfl.experiments.definitions import PaperValue
from gpfl.experiments.features import FeatureMetrics, FeatureProjection
from gpfl.experiments.grid import TableResults
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.experiments.trials import delete_weights
from gpfl.methods import METHODS
from gpfl.report import feature_tables, figures, paper_tables, plotting
from gpfl.report.figures import METRICS, ClassCounts, figure_title, learning_curve

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


# Figures of experiments.


def results_of(name: str, trials: dict[tuple[str, str], Trials | None], columns: Sequence[str] = ()) -> TableResults:
    """Results of a real experiment with these trials."""
    experiment = experiments.load_experiments()[name]
    kept = tuple(column for column in experiment.columns if not columns or column.key in columns)
    return TableResults(
        *(experiment, toy_plan(rounds=2, patience=0, seeds=(0,)), trials),
        columns=kept,
        rows=experiment.rows,
        caveats={column.key: "toy has 5 of the 9 published samples." for column in kept},
    )


def column_keys(name: str) -> list[str]:
    return [column.key for column in experiments.load_experiments()[name].columns]


# Titles.


def test_unverified_data_are_not_called_a_part() -> None:
    results = results_of("fairness", {})
    assert figure_title(results) == "Fairness (corrected protocol, part of the data)"
    unverified = {column.key: "har comes from files whose checksum is not the published one." for column in results.columns}
    assert figure_title(replace(results, caveats=unverified)) == "Fairness (corrected protocol)"
    one = results.columns[0]
    mixed = replace(results, caveats={**unverified, one.key: results.caveats[one.key]})
    assert figure_title(mixed) == "Fairness (corrected protocol)", "the panel says it"
    assert figure_title(mixed, one).endswith(", TINY, N = 20 (corrected protocol, part of the data)")


def test_title_says_where_values_are_not_the_usual_ones() -> None:
    results = replace(results_of("fairness", {}), caveats={}, plan=toy_plan(common={"train": {"batch_size": 1000}}), tuned="x")
    assert figure_title(results) == "Fairness (corrected protocol, values set by hand, tuned values)"


# Which figures are drawn, of what.


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("stability", ["stability.png", "stability.pdf"]),
        ("scalability", ["scalability.png", "scalability.pdf"]),
        ("fairness", ["fairness.png", "fairness.pdf"]),
        ("feature-shift", ["feature-shift.png", "feature-shift.pdf"]),
        ("effectiveness", []),
        ("ablation", []),
    ],
)
def test_measure_chooses_the_figure(name: str, files: list[str], tmp_path: Path) -> None:
    made = trials_of(tmp_path / "runs", "gpfl", {0: [[0.5, 0.25], [0.75, 0.5]]}, terms=[{"ce": 1.0}])
    results = results_of(name, {(key, "gpfl"): made for key in column_keys(name)})
    paths = figures.draw(results, tmp_path)
    assert [path.name for path in paths] == files
    assert all(path.is_file() for path in paths)


def test_experiment_of_which_nothing_was_run_has_no_figure(tmp_path: Path) -> None:
    assert figures.draw(results_of("stability", {("cifar100/fraction-1", "gpfl"): None}), tmp_path) == []


def test_axes_and_measures_are_those_of_experiments() -> None:
    assert set(figures.AXES) <= set(experiments.load_experiments())
    measures = {one.measure for one in experiments.load_experiments().values()}
    assert measures == {"accuracy", "fairness", "curves", "features"}


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, laid out as in their files."""
    saved: list[Figure] = []

    def save(figure: Figure, *paths: Path) -> list[Path]:
        figure.draw_without_rendering()
        saved.append(figure)
        return []

    monkeypatch.setattr(plotting, "save_figure", save)
    return saved


def lines_of(axes: Axes) -> dict[str, list[list[float]]]:
    """The heights of each line with error bars, by its label."""
    found: dict[str, list[list[float]]] = {}
    for container in axes.containers:
        found.setdefault(container.get_label(), []).append(container[0].get_ydata().tolist())
    return found


def test_columns_that_were_run_are_settings_next_to_the_papers(tmp_path: Path, saved_figures: list[Figure]) -> None:
    keys = [key for key in column_keys("scalability") if key != "cifar100/500"]
    trials = {(key, "gpfl"): trials_of(tmp_path / str(k), "gpfl", {0: [[k / 10]]}) for k, key in enumerate(keys)}
    figures.draw(results_of("scalability", dict(trials)), tmp_path)
    ours, paper = saved_figures[0].axes
    assert [axes.get_title() for axes in (ours, paper)] == ["ours", "the paper"]
    assert [tick.get_text() for tick in ours.get_xticklabels()] == ["20", "30", "50", "100", "10|50", "30|50"]
    assert lines_of(ours) == {"GPFL": [pytest.approx([0, 10, 20, 30]), pytest.approx([40, 50])]}, "a line for each group"
    assert lines_of(paper) == {"GPFL": [[61.86, 60.96, 60.98, 57.11], [53.26, 59.18]]}, "of methods that were run"


def test_best_method_is_first_in_the_legend_of_settings(tmp_path: Path, saved_figures: list[Figure]) -> None:
    keys = column_keys("stability")
    trials = {
        (key, name): trials_of(tmp_path / str(k), name, {0: [[accuracy]], 1: [[accuracy]]})
        for k, key in enumerate(keys)
        for name, accuracy in (("ditto", 0.5), ("gpfl", 0.75 - k / 4))
    }
    figures.draw(results_of("stability", {**trials, (keys[0], "ditto"): None}), tmp_path)
    [legend] = saved_figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["GPFL", "Ditto"]
    assert lines_of(saved_figures[0].axes[0])["Ditto"] == [[50, 50], [50, 50, 50]], (
        "a line for each group, without the first column"
    )


def test_one_column_is_no_line_and_that_is_said(tmp_path: Path) -> None:
    for name, key in (("scalability", "cifar100/500"), ("stability", "cifar100/fraction-1")):
        made = {(key, "gpfl"): trials_of(tmp_path / name, "gpfl", {0: [[0.5]]})}
        for keys in ([key], column_keys(name)):
            with pytest.raises(gpfl.GpflError, match=f"{key} is the only column that was run, and a line needs two"):
                figures.draw(results_of(name, dict(made), keys), tmp_path)


def test_fairness_is_that_of_the_best_round(tmp_path: Path, saved_figures: list[Figure]) -> None:
    made = trials_of(tmp_path, "gpfl", {0: [[0.5, 0.5], [0.6, 1.0]], 1: [[0.8, 0.8], [0.0, 0.0]]})
    figures.draw(results_of("fairness", {("har/real-world", "gpfl"): made}, ["har/real-world"]), tmp_path)
    [axes] = saved_figures[0].axes
    assert axes.get_title(loc="left") == "HAR, N = 30, real world (part of the data)"
    assert axes.collections[0].get_offsets()[:, 0].tolist() == pytest.approx([60, 100, 80, 80])
    assert axes.lines[1].get_xdata() == pytest.approx([80]), "all samples"


def test_fairness_has_the_fairest_method_at_the_top_next_to_the_papers_numbers(
    tmp_path: Path, saved_figures: list[Figure]
) -> None:
    unfair = trials_of(tmp_path, "gpfl", {0: [[0.6, 1.0]], 1: [[0.8, 0.8]]})
    fair = trials_of(tmp_path, "fedavg", {0: [[0.5, 0.6]]})
    results = results_of("fairness", {("har/real-world", "gpfl"): unfair, ("har/real-world", "fedavg"): fair})
    papers = {("har/real-world", "gpfl"): PaperValue(3.21, cov=7.2)}
    figures.draw(replace(results, experiment=replace(results.experiment, paper=papers)), tmp_path)
    [axes] = saved_figures[0].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["GPFL", "FedAvg"]  # from below
    [numbers] = axes.child_axes
    assert [text.get_text() for text in numbers.get_yticklabels()] == [
        "10.00 [12.50]   paper 3.21 [7.20]",
        "5.00 [9.09]   paper –",
    ]


# Features.


@pytest.fixture
def featured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableResults:
    """Results on features, measured of one trial of FedPer and two of GPFL."""
    federation = toy_federation()
    seeds = {"gpfl": (0, 1), "fedper": (0,)}
    for name in seeds:
        for seed in seeds[name]:
            gpfl.fit(name, federation, net="mlp", rounds=1, lr=0.1, seed=seed, out=tmp_path / name / f"seed-{seed}")
    load = gpfl.experiments.features.load_run_config
    monkeypatch.setattr(
        gpfl.experiments.features, "load_run_config", lambda folder, _, custom_net: load(folder, federation, custom_net)
    )
    key = column_keys("features")[0]
    folders = {name: [tmp_path / name / f"seed-{seed}" for seed in seeds[name]] for name in seeds}
    trials = {(key, name): Trials(name, [StoredRun(run) for run in runs]) for name, runs in folders.items()}
    for one in trials.values():
        features.measure_trials(one, pytest.fail)
    return results_of("features", dict(trials))


def test_features_are_drawn_with_the_classes_of_clients(
    featured: TableResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[ClassCounts] = []
    monkeypatch.setattr(figures, "draw_class_counts", lambda data, *paths: counts.append(data) or list(paths))
    paths = figures.draw(featured, tmp_path / "out")
    names = [f"features{ending}" for ending in (".png", ".pdf", ".json", "-classes.png", "-classes.pdf")]
    assert [path.name for path in paths] == names
    assert all(path.is_file() for path in paths[:3])
    assert counts[0].data == "FMNIST, N = 10 (part of the data)"
    assert (counts[0].counts == ClassCounts.from_federation(toy_federation()).counts).all()


def test_features_are_drawn_again_and_are_in_the_table_after_weights_are_gone(featured: TableResults, tmp_path: Path) -> None:
    """And nothing but the folders of runs is needed."""
    records = feature_tables.to_records(featured)
    before = {path.name: path.read_bytes() for path in figures.draw(featured, tmp_path / "out")}
    key = featured.columns[0].key
    assert [records[key, row.label]["measured_trials"] for row in featured.rows] == [1, 0, 2]
    for trials in featured.trials.values():
        for run in trials.runs if trials else ():
            delete_weights(run.path)
            (run.path / "federation.toml").unlink()
    assert {path.name: path.read_bytes() for path in figures.draw(featured, tmp_path / "again")} == before
    assert feature_tables.to_records(featured) == records
    origin = paper_tables.Origin("gpfl reproduce features", "abc1234")
    page, latex, table = paper_tables.save(featured, tmp_path / "out", origin)
    section = page.read_text().split("## Features of fmnist/10-clients\n")[1]
    assert section.index("| GPFL | ") < section.index("Silhouettes (−1 to 1)") < section.index("Made by")
    assert latex.read_text().count(r"\begin{table}") == 2
    with table.open(newline="") as file:
        found = {record["method"]: record for record in csv.DictReader(file)}
    assert float(found["gpfl"]["silhouette"]) == records[key, "gpfl"]["silhouette"]
    assert found["fedproto"]["silhouette"] == ""


def test_methods_without_features_are_left_out(featured: TableResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[FeatureProjection]] = []
    monkeypatch.setattr(figures, "draw_features", lambda projections, *more: drawn.append(projections) or [])
    delete_weights(tmp_path / "fedper" / "seed-0")
    (tmp_path / "fedper" / "seed-0" / "features.json").unlink()
    figures.draw(featured, tmp_path / "out")
    assert [(one.method, one.run) for one in drawn[0]] == [("gpfl", "gpfl/seed-0")]
    for path in tmp_path.glob("gpfl/seed-*/features.json"):
        path.unlink()
    assert "Not measured" in feature_tables.tables(featured)[0].notes[0]
    with pytest.raises(gpfl.GpflError, match="fmnist/10-clients has no features to draw"):
        figures.draw(featured, tmp_path / "out")
