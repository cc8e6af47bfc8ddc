"""Figures of experiments: what is drawn, and with which names."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from gpfl.experiments.features import FeatureProjection
from gpfl.experiments.grid import TableResults
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.experiments.trials import delete_weights
from gpfl.report import feature_tables, figures, paper_tables, plotting
from gpfl.report.figures import ClassCounts, figure_title


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
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, laid out as in their files."""
    saved: list[Figure] = []

    def save(figure: Figure, stem: Path) -> list[Path]:
        figure.draw_without_rendering()
        saved.append(figure)
        return []

    monkeypatch.setattr(plotting, "save_png_and_pdf", save)
    return saved


def lines_of(axes: Axes) -> dict[str, list[list[float]]]:
    """The heights of each line with error bars, by its label."""
    found: dict[str, list[list[float]]] = {}
    for container in axes.containers:
        found.setdefault(container.get_label(), []).append(container[0].get_ydata().tolist())
    return found


def test_columns_that_were_run_are_settings_next_to_the_papers(tmp_path: Path, drawn: list[Figure]) -> None:
    keys = [key for key in column_keys("scalability") if key != "cifar100/500"]
    trials = {(key, "gpfl"): trials_of(tmp_path / str(k), "gpfl", {0: [[k / 10]]}) for k, key in enumerate(keys)}
    figures.draw(results_of("scalability", dict(trials)), tmp_path)
    ours, paper = drawn[0].axes
    assert [axes.get_title() for axes in (ours, paper)] == ["ours", "the paper"]
    assert [tick.get_text() for tick in ours.get_xticklabels()] == ["20", "30", "50", "100", "10|50", "30|50"]
    assert lines_of(ours) == {"GPFL": [pytest.approx([0, 10, 20, 30]), pytest.approx([40, 50])]}, "a line for each group"
    assert lines_of(paper) == {"GPFL": [[61.86, 60.96, 60.98, 57.11], [53.26, 59.18]]}, "of methods that were run"


def test_best_method_is_first_in_the_legend_of_settings(tmp_path: Path, drawn: list[Figure]) -> None:
    keys = column_keys("stability")
    trials = {
        (key, name): trials_of(tmp_path / str(k), name, {0: [[accuracy]], 1: [[accuracy]]})
        for k, key in enumerate(keys)
        for name, accuracy in (("ditto", 0.5), ("gpfl", 0.75 - k / 4))
    }
    figures.draw(results_of("stability", {**trials, (keys[0], "ditto"): None}), tmp_path)
    [legend] = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["GPFL", "Ditto"]
    assert lines_of(drawn[0].axes[0])["Ditto"] == [[50, 50], [50, 50, 50]], "a line for each group, without the first column"


def test_one_column_is_no_line_and_that_is_said(tmp_path: Path) -> None:
    for name, key in (("scalability", "cifar100/500"), ("stability", "cifar100/fraction-1")):
        made = {(key, "gpfl"): trials_of(tmp_path / name, "gpfl", {0: [[0.5]]})}
        for keys in ([key], column_keys(name)):
            with pytest.raises(gpfl.GpflError, match=f"{key} is the only column that was run, and a line needs two"):
                figures.draw(results_of(name, dict(made), keys), tmp_path)


def test_fairness_is_that_of_the_best_round(tmp_path: Path, drawn: list[Figure]) -> None:
    made = trials_of(tmp_path, "gpfl", {0: [[0.5, 0.5], [0.6, 1.0]], 1: [[0.8, 0.8], [0.0, 0.0]]})
    figures.draw(results_of("fairness", {("har/real-world", "gpfl"): made}, ["har/real-world"]), tmp_path)
    [axes] = drawn[0].axes
    assert axes.get_title(loc="left") == "HAR, N = 30, real world (part of the data)"
    assert axes.collections[0].get_offsets()[:, 0].tolist() == pytest.approx([60, 100, 80, 80])
    assert axes.lines[1].get_xdata() == pytest.approx([80]), "all samples"


def test_fairness_has_the_fairest_method_at_the_top_next_to_the_papers_numbers(tmp_path: Path, drawn: list[Figure]) -> None:
    unfair = trials_of(tmp_path, "gpfl", {0: [[0.6, 1.0]], 1: [[0.8, 0.8]]})
    fair = trials_of(tmp_path, "fedavg", {0: [[0.5, 0.6]]})
    results = results_of("fairness", {("har/real-world", "gpfl"): unfair, ("har/real-world", "fedavg"): fair})
    papers = {("har/real-world", "gpfl"): PaperValue(3.21, cov=7.2)}
    figures.draw(replace(results, experiment=replace(results.experiment, paper=papers)), tmp_path)
    [axes] = drawn[0].axes
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
    monkeypatch.setattr(figures, "draw_class_counts", lambda data, *paths: counts.append(data))
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
