"""The paper's figures: what is drawn, worked out by hand, and that all of it is on the page."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import toy_federation
from made import trials_of
from matplotlib.figure import Figure
from matplotlib.text import Annotation

import gpfl
from gpfl.experiments import definitions as experiments
from gpfl.experiments.definitions import PaperValue
from gpfl.experiments.results import TableResults
from gpfl.experiments.trials import Trials, delete_weights
from gpfl.methods import METHODS
from gpfl.report import curves, experiment_figures, fairness, figures, lines, paper_tables, plotting
from gpfl.training.run_dir import RunDir

NAN = float("nan")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were written, laid out as they are saved."""
    kept: list[Figure] = []

    def write(figure: Figure, stem: Path) -> list[Path]:
        figure.draw_without_rendering()
        kept.append(figure)
        return [stem.with_name(stem.name + ending) for ending in plotting.BOTH]

    monkeypatch.setattr(plotting, "save_png_and_pdf", write)
    return kept


def whole(figure: Figure) -> bool:
    """Tells whether every axes with its labels, and every title and note, is on the page."""
    width, height = figure.canvas.get_width_height(physical=True)
    boxes = [axes.get_tightbbox() for axes in figure.axes if axes.get_visible()]
    boxes += [text.get_window_extent() for text in (figure._suptitle, figure._supxlabel) if text is not None]
    return all(b.x0 >= -1 and b.y0 >= -1 and b.x1 <= width + 1 and b.y1 <= height + 1 for b in boxes if b is not None)


# What pictures share.


def test_both_forms_are_written_and_equal_figures_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        figure = plotting.new_figure(2, 2)
        figure.add_subplot().plot([0, 1])
        assert plotting.save_png_and_pdf(figure, tmp_path / "new" / f"{name}.v1") == [
            tmp_path / "new" / f"{name}.v1{ending}" for ending in (".png", ".pdf")
        ]
    for ending, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        one, two = ((tmp_path / "new" / f"{name}.v1{ending}").read_bytes() for name in ("one", "two"))
        assert one.startswith(start)
        assert one == two


def test_no_form_is_written_where_one_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").mkdir()
    with pytest.raises(gpfl.GpflError, match="is a folder: name a file"):
        plotting.save_png_and_pdf(plotting.new_figure(1, 1), tmp_path / "a")
    assert not (tmp_path / "a.png").exists()


def test_every_method_has_a_mark_of_its_own_and_the_same_in_all_pictures() -> None:
    everyone = plotting.method_styles(list(METHODS))
    assert len({look.marker for look in everyone.values()}) == len(METHODS)
    assert len({look.colour for look in everyone.values()}) == len(METHODS)
    assert plotting.method_styles(["local", "gpfl"])["gpfl"] == everyone["gpfl"]
    assert plotting.method_styles(["Per-FedAvg"])["Per-FedAvg"] == everyone["perfedavg"]
    variants = plotting.method_styles(["gpfl", "gpfl without cov", "gpfl without gce"])
    assert len({look.marker for look in variants.values()}) == 3
    assert len(plotting.method_styles([f"method {k}" for k in range(40)])) == 40


@pytest.mark.parametrize(
    ("wanted", "gap", "found"),
    [
        ([0.2, 0.8], 0.1, [0.2, 0.8]),
        ([0.5, 0.5, 0.5], 0.1, [0.4, 0.5, 0.6]),
        ([0.9, 0.2, 0.9], 0.2, [0.8, 0.2, 1.0]),
        ([0.0, 0.0], 0.5, [0.0, 0.5]),
        ([0.3, 0.3, 0.3], 9.0, [0.0, 0.5, 1.0]),
        ([0.7], 0.1, [0.7]),
        ([1.2], 0.1, [1.0]),
    ],
)
def test_labels_stay_near_their_curves_and_clear_of_each_other(
    wanted: Sequence[float], gap: float, found: Sequence[float]
) -> None:
    assert plotting.apart(wanted, gap).tolist() == pytest.approx(found)


def test_only_lines_from_curves_that_end_early_to_their_labels_are_dotted() -> None:
    axes = plotting.new_figure(4, 3).subplots()
    axes.set(xlim=(0, 10), ylim=(0, 1))
    ends = [plotting.End("FedAvg", 2, 0.2), plotting.End("FedPer", 9.8, 0.5), plotting.End("GPFL", 10, 0.9)]
    plotting.label_ends(axes, ends, plotting.method_styles([end.label for end in ends]), 3)
    dashes = [text.arrow_patch.get_linestyle() for text in axes.texts if isinstance(text, Annotation) and text.arrow_patch]
    assert dashes == [(0, (1, 3)), "-", "-"]


# Curves.


@pytest.mark.parametrize(
    ("values", "window", "means"),
    [
        ([1, 2, 6, 3], 1, [1, 2, 6, 3]),
        ([1, 2, 6, 3], 3, [1.5, 3, 11 / 3, 4.5]),
        ([1, 2, 6, 3], 2, [1.5, 4, 4.5, 3]),
        ([1, NAN, 6], 3, [1, 3.5, 6]),
        ([2, 4], 99, [3, 3]),
    ],
)
def test_running_means_are_of_the_values_that_there_are(values: Sequence[float], window: int, means: Sequence[float]) -> None:
    assert curves.running_mean(np.array(values, dtype=float), window).tolist() == pytest.approx(means)


@pytest.mark.parametrize(
    ("terms", "ce", "objective"),
    [
        ({"ce": 0.5}, 0.5, 0.5),
        ({"ce": 0.5, "angle": 2.0, "magnitude": 0.25}, 0.5, 2.75),  # GPFL
        ({"ce": 0.5, "head_ce": 9.0}, 0.5, 0.5),  # FedRep trains its head before
        ({"ce": 0.5, "proximal": 0.1, "global_ce": 9.0}, 0.5, 0.6),  # Ditto's global model is not the client's own
        ({"ce": 9.0, "adapted_ce": 0.3}, 0.3, 0.3),  # Per-FedAvg
    ],
)
def test_losses_are_of_the_clients_own_model(terms: dict[str, float], ce: float, objective: float) -> None:
    assert curves.cross_entropy({"train": terms}) == pytest.approx(ce)
    assert curves.objective({"train": terms}) == pytest.approx(objective)


def test_curves_begin_with_the_first_round_that_has_a_value(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [
        trials_of(
            *(tmp_path, "gpfl", {0: [[0.1], [0.2], [0.4]], 1: [[0.1], [0.4], [0.8], [0.9]]}),
            terms=[{"ce": 2.0}, {"ce": 1.0}, {"ce": 0.5}],
        ),
        trials_of(tmp_path, "fedavg", {0: [[0.1], [0.2], [0.3]]}, terms=[{"ce": 2.0}, {"ce": 1.5}]),
    ]
    paths, found = curves.draw(rows, tmp_path / "curves", "a $ title", window=3)
    assert [path.name for path in paths] == ["curves.png", "curves.pdf"]
    assert list(found) == ["accuracy", "objective", "ce"]
    assert found["accuracy"][0].rounds.tolist() == [0, 1, 2]
    assert np.allclose(found["accuracy"][0].values, [[10, 20, 40], [10, 40, 80]])
    assert found["ce"][0].rounds.tolist() == [1, 2]
    (figure,) = drawn
    top = figure.axes[0]
    assert top.lines[0].get_ydata() == pytest.approx([10, 30, 60])  # faint, as measured: the mean over seeds
    assert top.lines[1].get_ydata() == pytest.approx([20, 100 / 3, 45])  # strong, smoothed
    assert top.lines[0].get_alpha() < 1
    assert {text.get_text() for text in top.texts} >= {"GPFL 45.0", "FedAvg 25.0"}
    note = figure._supxlabel.get_text()
    assert "running mean over 3 evaluated rounds" in note
    assert "mean of 1 or 2 seeds" in note, "of the one method, and of the other"
    assert "does not compare between methods" in note
    assert whole(figure)


def test_an_axis_shows_where_curves_differ_and_says_that_it_cuts_their_rise(tmp_path: Path, drawn: list[Figure]) -> None:
    rise = [[0.5], [0.6], [0.7], [0.88], [0.88], [0.88], [0.88]]
    rows = [trials_of(tmp_path, name, {0: [*rise, [last]]}) for name, last in (("gpfl", 0.9), ("fedavg", 0.88))]
    curves.draw(rows, tmp_path / "near", "title", panels=["accuracy"])
    rows[1] = trials_of(tmp_path / "other", "fedavg", {0: [[0.5]] * 8})
    curves.draw(rows, tmp_path / "far", "title", panels=["accuracy"])
    near, far = drawn
    assert near.axes[0].get_ylim()[0] == pytest.approx(82 - 0.4)
    assert far.axes[0].get_ylim()[0] == pytest.approx(50 - 2)
    assert ["below the axis" in figure._supxlabel.get_text() for figure in drawn] == [True, False]


def test_twelve_curves_that_end_together_have_labels_clear_of_each_other(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [trials_of(tmp_path, name, {0: [[0.1], [0.9]]}, terms=[{"ce": 1.0}]) for name in METHODS]
    curves.draw(rows, tmp_path / "curves", "title")
    for axes in drawn[0].axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        assert len(boxes) == 12
        boxes.sort(key=lambda box: box.y0)
        assert all(above.y0 >= below.y1 - 3 for below, above in itertools.pairwise(boxes))
    assert whole(drawn[0])


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    nothing = lines.series_of("gpfl", [None], [None])
    for draw in (
        lambda: curves.draw([], tmp_path / "a", ""),
        lambda: curves.draw([Trials("gpfl", [], [])], tmp_path / "a", ""),
        lambda: fairness.draw([fairness.Setting("a", [])], tmp_path / "a", ""),
        lambda: lines.draw([nothing], [lines.Stop("a", 0)], tmp_path / "a", "", what="", axis=""),
    ):
        with pytest.raises(gpfl.GpflError, match="run some first"):
            draw()


# Fairness.


def test_fairness_is_the_papers_at_the_best_round_and_the_fairest_is_uppermost(tmp_path: Path, drawn: list[Figure]) -> None:
    unfair = trials_of(tmp_path, "gpfl", {0: [[0.5, 0.5], [0.6, 1.0]], 1: [[0.8, 0.8], [0.0, 0.0]]})
    fair = trials_of(tmp_path, "fedavg", {0: [[0.5, 0.6]]})
    one = fairness.spread(unfair, PaperValue(3.21, cov=7.2))
    assert np.allclose(one.clients, [[60, 100], [80, 80]])
    assert one.std.tolist() == pytest.approx([20, 0])
    assert one.cov.tolist() == pytest.approx([25, 0])
    assert one.words == "10.00 [12.50]"
    _, shown = fairness.draw([fairness.Setting("a $ b", [one, fairness.spread(fair)])], tmp_path / "fair", "Fairness")
    assert [spread.method for spread in shown[0].spreads] == ["fedavg", "gpfl"]
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["GPFL", "FedAvg"]  # from below
    assert {"10.00 [12.50]", "3.21 [7.20]", "5.00 [9.09]", "–"} <= {text.get_text() for text in axes.texts}
    assert whole(drawn[0])


def test_accuracy_of_zero_has_no_variation() -> None:
    assert fairness.Spread("gpfl", np.zeros((1, 3)), np.zeros(1)).cov.tolist() == [0]


# Lines.


def test_series_hold_means_and_deviations_and_gaps() -> None:
    one = lines.series_of("perfedavg", [[40.0, 42.0], None], [(41.5, 0.2), None])
    assert one.label == "Per-FedAvg"
    assert np.array_equal([one.mean, one.std], [[41, NAN], [1, NAN]], equal_nan=True)
    assert np.array_equal([one.paper, one.paper_std], [[41.5, NAN], [0.2, NAN]], equal_nan=True)
    assert one.last == 0


def test_paper_stands_in_the_panel_of_a_few_methods_and_in_panels_of_their_own_of_many(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    stops = [lines.Stop("ρ = 1", 0), lines.Stop("ρ ∈ [0.5, 1]", 1), lines.Stop("ρ ∈ [0.1, 1]", 2)]
    names = list(METHODS)[:7]
    series = [lines.series_of(name, [[50.0 + k], [49.0], None], [(51.0, 0.1)] * 3) for k, name in enumerate(names)]
    lines.draw(series[:2], stops, tmp_path / "few", "title", what="accuracy, %", axis="ρ")
    lines.draw(series, stops, tmp_path / "many", "title", what="accuracy, %", axis="ρ")
    few, many = drawn
    assert len(few.axes) == 1
    assert sum(line.get_markerfacecolor() == "white" for line in few.axes[0].lines) == 2
    shown = [axes for axes in many.axes if axes.get_visible()]
    assert len(shown) == 8
    titles = [axes.get_title() for axes in shown]
    assert {experiments.display_name(name) for name in names} <= set(titles)
    own = shown[titles.index("GPFL")]
    assert [line.get_ydata().tolist() for line in own.lines if line.get_markerfacecolor() == "white"] == [[51.0] * 3]
    labels = {text.get_text() for text in few.axes[0].texts}
    assert "GPFL 49.0 (ρ ∈ [0.5, 1])" in labels  # its last number is not at the end of the axis
    assert whole(few)
    assert whole(many)


# The hook of the command.


def results_of(name: str, trials: dict[tuple[str, str], Trials | None], columns: Sequence[str] = ()) -> TableResults:
    """Results of a real experiment with these trials."""
    experiment = experiments.load_experiments()[name]
    kept = tuple(column for column in experiment.columns if not columns or column.key in columns)
    return TableResults(
        *(experiment, "corrected", 2, 0, (0,), trials),
        columns=kept,
        rows=experiment.rows,
        caveats={column.key: "toy has 5 of the 9 published rows." for column in kept},
    )


def test_data_that_nobody_checked_are_not_called_a_part() -> None:
    results = results_of("fairness", {})
    assert experiment_figures.heading(results) == "Fairness (corrected protocol, part of the data)"
    unchecked = {column.key: "har comes from files whose checksum is not the published one." for column in results.columns}
    assert experiment_figures.heading(replace(results, caveats=unchecked)) == "Fairness (corrected protocol)"
    one = results.columns[0]
    mixed = replace(results, caveats={**unchecked, one.key: results.caveats[one.key]})
    assert experiment_figures.heading(mixed) == "Fairness (corrected protocol)", "the panel says it"
    assert experiment_figures.heading(mixed, one).endswith(", TINY, N = 20 (corrected protocol, part of the data)")


def test_longer_curves_are_smoothed_no_less() -> None:
    windows = [curves.fitting_window(rounds) for rounds in range(1, 2001)]
    assert windows == sorted(windows)
    assert (windows[5], windows[59], windows[-1]) == (1, 3, 41)
    assert all(window % 2 for window in windows)


def test_scalability_is_drawn_by_the_number_of_clients_and_ends_with_all_fifty(tmp_path: Path, drawn: list[Figure]) -> None:
    keys = [column.key for column in experiments.load_experiments()["scalability"].columns]
    trials = {(key, "gpfl"): trials_of(tmp_path / str(k), "gpfl", {0: [[k / 10]]}) for k, key in enumerate(keys)}
    results = results_of("scalability", {**trials, ("cifar100/50", "fedavg"): None})
    stops, columns = experiment_figures.stops_of(results.experiment.name, results.columns)
    assert [stop.heading for stop in stops] == ["20", "30", "50", "100", "500", "10|50", "30|50", "50"]
    assert columns[2] == columns[-1]
    assert stops[0].x == pytest.approx(np.log10(20))
    assert [stop.x for stop in stops] == sorted(stop.x for stop in stops)
    one = experiment_figures.line_of(results, "gpfl", columns)
    assert one.mean.tolist() == pytest.approx([0, 10, 20, 30, 40, 50, 60, 20])
    assert one.paper.tolist() == pytest.approx([61.86, 60.96, 60.98, 57.11, 37.28, 53.26, 59.18, 60.98])
    assert [path.name for path in experiment_figures.draw(results, tmp_path)] == ["scalability.png", "scalability.pdf"]
    assert drawn[0].axes[0].get_title(loc="left") == "Scalability (corrected protocol, part of the data)"
    assert whole(drawn[0])


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("stability", ["stability.png", "stability.pdf"]),
        ("fairness", ["fairness.png", "fairness.pdf"]),
        ("feature-shift", ["feature-shift.png", "feature-shift.pdf"]),
        ("effectiveness", []),
        ("ablation", []),
    ],
)
def test_measure_chooses_the_picture(name: str, files: list[str], tmp_path: Path, drawn: list[Figure]) -> None:
    experiment = experiments.load_experiments()[name]
    made = trials_of(tmp_path / "runs", "gpfl", {0: [[0.5, 0.25], [0.75, 0.5]]}, terms=[{"ce": 1.0}])
    results = results_of(name, {(column.key, "gpfl"): made for column in experiment.columns})
    assert [path.name for path in experiment_figures.draw(results, tmp_path)] == files
    assert all(whole(figure) for figure in drawn)


def test_experiment_of_which_nothing_was_run_has_no_picture(tmp_path: Path) -> None:
    assert experiment_figures.draw(results_of("stability", {("cifar100/join-1", "gpfl"): None}), tmp_path) == []


def test_every_experiment_that_has_a_line_has_an_axis() -> None:
    assert set(experiment_figures.AXES) <= set(experiments.load_experiments())
    assert set(experiments.MEASURES) == {"accuracy", "fairness", "curves", "features"}


def keys_of(name: str) -> list[str]:
    return [column.key for column in experiments.load_experiments()[name].columns]


def test_one_column_is_no_line_and_that_is_said(tmp_path: Path) -> None:
    for name, key in (("scalability", "cifar100/500"), ("stability", "cifar100/join-1")):
        made = {(key, "gpfl"): trials_of(tmp_path / name, "gpfl", {0: [[0.5]]})}
        with pytest.raises(gpfl.GpflError, match=f"{key} is the only column that was run, and a line needs two"):
            experiment_figures.draw(results_of(name, dict(made), [key]), tmp_path)
        with pytest.raises(gpfl.GpflError, match="is the only column that was run"):
            experiment_figures.draw(results_of(name, dict(made), keys_of(name)), tmp_path)


def test_columns_that_were_not_run_have_no_place_on_the_axis(tmp_path: Path, drawn: list[Figure]) -> None:
    keys = keys_of("scalability")
    made = {(key, "gpfl"): trials_of(tmp_path / str(k), "gpfl", {0: [[0.5]]}) for k, key in enumerate(keys[:2])}
    experiment_figures.draw(results_of("scalability", dict(made), keys), tmp_path)
    assert [tick.get_text() for tick in drawn[0].axes[0].get_xticklabels()] == ["20", "30"]


def test_title_says_where_values_are_not_the_usual_ones() -> None:
    results = replace(results_of("fairness", {}), caveats={}, settings=("train.batch_size = 1000",), tuned="by a search")
    assert experiment_figures.heading(results) == "Fairness (corrected protocol, values set by hand, tuned values)"


# Features.


@pytest.fixture
def featured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TableResults:
    """Results on features, of one trial of FedPer and two of GPFL."""
    federation = toy_federation()
    seeds = {"gpfl": (0, 1), "fedper": (0,)}
    for name in seeds:
        for seed in seeds[name]:
            gpfl.fit(name, federation, net="mlp", rounds=1, lr=0.1, seed=seed, out=tmp_path / name / f"seed-{seed}")
    real = gpfl.training.api.load_run_config
    monkeypatch.setattr(
        gpfl.training.api, "load_run_config", lambda folder, given, custom_net: real(folder, federation, custom_net)
    )
    key = experiments.load_experiments()["features"].columns[0].key
    folders = {name: [tmp_path / name / f"seed-{seed}" for seed in seeds[name]] for name in seeds}
    trials = {(key, name): Trials(name, runs, [RunDir(run).summary() for run in runs]) for name, runs in folders.items()}
    return results_of("features", dict(trials))


def test_features_are_drawn_with_the_classes_of_clients(
    featured: TableResults, tmp_path: Path, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[figures.Holding, Path]] = []
    monkeypatch.setattr(figures, "draw_bubbles", lambda of, path: shown.append((of, path)))
    paths = experiment_figures.draw(featured, tmp_path / "out")
    names = [f"features{ending}" for ending in (".png", ".pdf", ".json", "-classes.png", "-classes.pdf")]
    assert [path.name for path in paths] == names
    assert [path for _, path in shown] == paths[3:]
    assert {held.data for held, _ in shown} == {"FMNIST, N = 10 (part of the data)"}
    assert (shown[0][0].rows == figures.Holding.of(toy_federation()).rows).all()
    assert [axes.get_title().split(",")[0] for axes in drawn[0].axes] == ["FedPer", "GPFL"]
    assert (tmp_path / "out" / "features.json").is_file()
    assert whole(drawn[0])


def test_features_are_drawn_again_and_stand_in_the_table_where_weights_are_gone(featured: TableResults, tmp_path: Path) -> None:
    """And nothing but the folders of runs is needed."""
    said: list[str] = []
    assert "Not measured" in str(experiment_figures.added(featured).lines)
    before = {path.name: path.read_bytes() for path in experiment_figures.draw(featured, tmp_path / "out", said.append)}
    table = experiment_figures.added(featured)
    key = featured.columns[0].key
    assert [table.numbers[key, row.label]["measured_trials"] for row in featured.rows] == [1, 0, 2]
    assert said[0] == "Measuring features and drawing them by t-SNE, which takes minutes."
    assert [words.split(": silhouette by class ")[0] for words in said[1:]] == [f"{key} FedPer", f"{key} GPFL"]
    assert said[2].endswith(" (2 trials)")
    for trials in featured.trials.values():
        for run in trials.folders if trials else ():
            delete_weights(run)
            (run / "federation.toml").unlink()
    assert {
        path.name: path.read_bytes() for path in experiment_figures.draw(featured, tmp_path / "again", said.append)
    } == before
    assert experiment_figures.added(featured) == table
    assert said[3:] == said[1:3], "and t-SNE is not waited for"
    origin = paper_tables.Origin("gpfl reproduce features", "abc1234")
    page, _, plain = paper_tables.save(featured, tmp_path / "out", origin, table)
    section = page.read_text().split("## Features of fmnist/10-clients\n")[1]
    assert section.index("| GPFL | ") < section.index("Silhouettes (−1 to 1)") < section.index("Made by")
    with plain.open(newline="") as file:
        found = {record["method"]: record for record in csv.DictReader(file)}
    assert float(found["gpfl"]["silhouette"]) == table.numbers[key, "gpfl"]["silhouette"]
    assert found["fedproto"]["silhouette"] == ""


def test_features_that_cannot_be_had_are_named_and_the_others_drawn(
    featured: TableResults, tmp_path: Path, drawn: list[Figure]
) -> None:
    said: list[str] = []
    delete_weights(tmp_path / "fedper" / "seed-0")
    experiment_figures.draw(featured, tmp_path / "out", said.append)
    assert [axes.get_title().split(",")[0] for axes in drawn[0].axes] == ["GPFL"]
    assert said[1].startswith(
        "FedPer, seed-0: the models of fedper/seed-0 are gone, and no whole features.json of them was kept"
    )
    assert said[2] == "FedPer is left out of the picture: no points of these trials were kept"
    (tmp_path / "gpfl" / "seed-0" / "features.json").unlink()
    delete_weights(tmp_path / "gpfl" / "seed-0")
    experiment_figures.draw(featured, tmp_path / "out", said.append)
    assert drawn[1].axes[0].get_title().startswith("GPFL, round 1"), "of the other seed"
    for path in tmp_path.glob("*/seed-*/features.json"):
        path.unlink()
    delete_weights(tmp_path / "gpfl" / "seed-1")
    with pytest.raises(gpfl.GpflError, match="fmnist/10-clients has no features to draw"):
        experiment_figures.draw(featured, tmp_path / "out", said.append)
