"""Learned features: those of the models that a run kept, measured on points laid out by hand."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import record_results
from conftest import Command, ToyDataset, toy_federation

import gpfl
from gpfl.experiments import definitions as studies
from gpfl.experiments import features
from gpfl.experiments.features import Features, collect_features, embed_tsne, measure_features
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.experiments.trials import delete_weights

TOYS = """
title = "Features of toys"
caption = "Features of toys by t-SNE."
measure = "features"
rows = ["fedper", "gpfl"]

[[columns]]
key = "toy/four"
heading = "Toys, N = 4"
group = "skew"
weights = true
data = { name = "toy" }
run = { select = "test" }
"""


def laid_out(points: list[tuple[float, float]], label: list[int], client: list[int]) -> Features:
    return Features(np.array(points, dtype=np.float32), np.array(label), np.array(client), method="gpfl")


def squares(middles: dict[tuple[int, int], tuple[float, float]]) -> Features:
    """Four points around a middle for each client and class."""
    around = [(-0.1, 0.0), (0.1, 0.0), (0.0, 0.1), (0.0, -0.1)]
    points = [(x + dx, y + dy) for x, y in middles.values() for dx, dy in around]
    return laid_out(points, [k for _, k in middles for _ in around], [c for c, _ in middles for _ in around])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, gpfl.Federation, gpfl.Result]:
    out, federation = tmp_path_factory.mktemp("runs") / "a", toy_federation()
    return out, federation, gpfl.fit("gpfl", federation, net="mlp", rounds=2, lr=0.1, out=out)


def test_features_are_what_each_clients_kept_model_decides_by(
    finished: tuple[Path, gpfl.Federation, gpfl.Result],
) -> None:
    out, federation, result = finished
    found = collect_features(out, federation=federation)
    assert found.x.dtype == np.float32
    assert found.method == "gpfl"
    assert (found.round, found.selected_by) == (2, "last")
    for place, shard in enumerate(federation.shards):
        own, model = found.client == place, result.clients[place]
        head = {key: value.numpy() for key, value in model.weights["head"].items()}
        logits = found.x[own] @ head["weight"].T + head["bias"]
        x = federation.table.x[np.sort(shard.test)].numpy()
        assert np.allclose(logits, model.logits(x), atol=1e-5)  # the head makes its decision of them, and of f^P alone
        assert found.label[own].tolist() == federation.table.y[np.sort(shard.test)].tolist()


@pytest.mark.parametrize("part", ["train", "test", "all"])
def test_parts_are_as_large_as_the_clients_rows(finished: tuple[Path, gpfl.Federation, gpfl.Result], part: str) -> None:
    out, federation, _ = finished
    rows = [federation.n_samples(name) for name in (("train", "validation", "test") if part == "all" else (part,))]
    assert np.bincount(collect_features(out, part, federation=federation).client).tolist() == np.sum(rows, axis=0).tolist()


def test_rows_are_drawn_by_the_seed_up_to_most_of_each_client_and_class(
    finished: tuple[Path, gpfl.Federation, gpfl.Result],
) -> None:
    out, federation, _ = finished
    one, again, other = (collect_features(out, "all", 3, seed, federation=federation) for seed in (0, 0, 1))
    counts = np.zeros((4, 3), dtype=int)
    np.add.at(counts, (one.client, one.label), 1)
    assert (counts == 3).all()
    assert np.array_equal(one.x, again.x)
    assert not np.array_equal(one.x, other.x)


def test_what_cannot_be_collected_is_refused(finished: tuple[Path, gpfl.Federation, gpfl.Result], tmp_path: Path) -> None:
    out, federation, _ = finished
    for settings, words in (
        ({"split": "rest"}, "split is 'rest'"),
        ({"max_samples": 0}, "max_samples is 0; it must be at least 1"),
    ):
        with pytest.raises(gpfl.GpflError, match=words):
            collect_features(out, **settings, federation=federation)  # type: ignore[arg-type]
    with pytest.raises(gpfl.GpflError, match="holds no run"):
        collect_features(tmp_path)
    model = out / "models" / "client-2.safetensors"
    model.rename(tmp_path / "away")
    try:
        with pytest.raises(gpfl.GpflError, match=r"the model of client 2 is missing .*gpfl resume"):
            collect_features(out, federation=federation)
    finally:
        (tmp_path / "away").rename(model)
    summary = out / "summary.json"
    summary.rename(tmp_path / "away")
    try:
        with pytest.raises(gpfl.GpflError, match="has not finished: gpfl resume"):
            collect_features(out, federation=federation)
    finally:
        (tmp_path / "away").rename(summary)


# Measures.


def test_classes_that_all_clients_share_are_pure_across_clients() -> None:
    shared = squares({(0, 0): (0, 0), (1, 0): (0, 0.01), (0, 1): (9, 0), (1, 1): (9, 0.01)})
    found = measure_features(shared, neighbours=3)
    assert found.silhouette is not None
    assert found.silhouette > 0.95
    assert found.silhouette_islands is not None
    assert found.silhouette_islands < 0.1  # a client's share of a class lies on another's
    assert (found.purity, found.purity_across) == (1.0, 1.0)
    assert found.purity_by_chance == pytest.approx(7 / 15)  # of 15 others, 7 have the class


def test_islands_of_clients_are_pure_among_themselves_alone() -> None:
    apart = squares({(0, 0): (0, 0), (0, 1): (2, 0), (1, 0): (2, 3), (1, 1): (0, 3)})  # the other client's lie crosswise
    found = measure_features(apart, neighbours=3)
    assert found.purity == 1.0
    assert found.purity_across == 0.0
    assert found.silhouette_within is not None
    assert found.silhouette_within > 0.8
    assert found.silhouette_islands is not None
    assert found.silhouette_islands > 0.8
    assert found.silhouette is not None
    assert found.silhouette < 0.2


def test_purity_by_hand() -> None:
    line = laid_out([(0, 0), (1, 0), (2.1, 0), (3.3, 0)], [0, 0, 1, 1], [0, 0, 0, 0])
    # nearest: 1, 0, 1, 2
    assert measure_features(line, neighbours=1).purity == 0.75
    assert measure_features(line, neighbours=99).purity == pytest.approx(1 / 3)


def test_measures_that_say_nothing_are_none() -> None:
    one = laid_out([(0, 0), (1, 0)], [0, 0], [0, 0])
    found = measure_features(one)
    assert (found.silhouette, found.silhouette_within, found.silhouette_islands, found.purity_across) == (None,) * 4
    assert (found.purity, found.purity_by_chance) == (1.0, 1.0)
    assert measure_features(laid_out([(0, 0)], [0], [0])).purity is None


def test_embedding_is_the_same_for_the_same_seed_and_keeps_far_groups_apart() -> None:
    draw = np.random.default_rng(0)
    x = np.concatenate([draw.normal(size=(12, 4)), draw.normal(size=(12, 4)) + 50]).astype(np.float32)
    features = Features(x, np.repeat([0, 1], 12), np.zeros(24, dtype=np.int64))
    one, again = embed_tsne(features, 3), embed_tsne(features, 3)
    assert np.array_equal(one, again)
    middles = one[:12].mean(0), one[12:].mean(0)
    spread = max(
        np.linalg.norm(part - middle, axis=1).max() for part, middle in zip((one[:12], one[12:]), middles, strict=True)
    )
    assert np.linalg.norm(middles[0] - middles[1]) > spread
    with pytest.raises(gpfl.GpflError, match="there are 2 samples of gpfl; t-SNE needs at least 5"):
        embed_tsne(laid_out([(0, 0), (1, 0)], [0, 1], [0, 0]))


# What is kept beside a run.


@pytest.fixture
def run(finished: tuple[Path, gpfl.Federation, gpfl.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run, whose data a reader of its folder finds."""
    out, federation, _ = finished
    real = gpfl.experiments.features.load_run_config
    monkeypatch.setattr(
        gpfl.experiments.features, "load_run_config", lambda folder, given, custom_net: real(folder, federation, custom_net)
    )
    return Path(shutil.copytree(out, tmp_path / "cell-1a2b3c4d" / "seed-0"))


def without_weights(run: Path) -> Path:
    """The run as it is recorded: no weights, and a division without its rows."""
    delete_weights(run)
    (run / "federation.toml").write_text("gone")
    return run


def test_map_is_kept_with_its_run_and_read_back_where_the_weights_are_gone(run: Path) -> None:
    made = features.get_projection(run, "gpfl", points=True)
    kept = json.loads((run / "features.json").read_text())
    assert kept["run"] == "cell-1a2b3c4d/seed-0"
    assert np.sum(kept["rows"]) == 120, "all clients' rows, for the picture of classes"
    again = features.get_projection(without_weights(run), "gpfl", points=True)
    for name in vars(made):
        assert np.array_equal(getattr(made, name), getattr(again, name)), name


def test_map_that_is_kept_is_not_made_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = features.get_projection(run, "gpfl", points=False)
    assert not measured.has_points
    made = features.get_projection(run, "gpfl", points=True)
    assert made.has_points, "points that lack are made of the models"
    assert made.metrics == measured.metrics
    monkeypatch.setattr(features, "collect_features", lambda *given: pytest.fail("it is there"))
    assert features.get_projection(run, "another name", points=True).method == "another name"


@pytest.mark.parametrize(
    "change",
    [
        lambda run: (run / "summary.json").write_text((run / "summary.json").read_text() + " "),
        lambda run: (run / "config.toml").write_text((run / "config.toml").read_text() + "# other"),
        lambda run: (run / "features.json").write_text((run / "features.json").read_text().replace('"most": 500', '"most": 9')),
        lambda run: (run / "features.json").unlink(),
    ],
    ids=["another run", "another config", "made otherwise", "none"],
)
def test_map_that_is_not_of_this_run_is_never_used(run: Path, change: Callable[[Path], object]) -> None:
    features.write_projection(run, features.compute_projection(collect_features(run), points=False))
    assert features.read_projection(run) is not None
    change(run)
    assert features.read_projection(run) is None
    assert features.get_projection(run, "gpfl", points=False).metrics.rows == len(collect_features(run)), (
        "computed again from the models"
    )
    change(run)
    without_weights(run)
    with pytest.raises(gpfl.GpflError, match=r"cell-1a2b3c4d/seed-0 has neither its models nor a valid features.json"):
        features.get_projection(run, "gpfl", points=False)


def test_another_device_is_the_same_run(run: Path) -> None:
    features.get_projection(run, "gpfl", points=False)
    config = (run / "config.toml").read_text()
    assert 'device = "auto"' in config
    (run / "config.toml").write_text(config.replace('device = "auto"', 'device = "cuda"'))
    assert features.read_projection(run) is not None


def test_points_are_those_of_the_first_trial_that_has_them(run: Path) -> None:
    lines: list[str] = []
    other = Path(shutil.copytree(run, run.parent / "seed-1"))
    delete_weights(run)
    trials = Trials("fedper", [StoredRun(run), StoredRun(other)])
    assert not features.is_measured(trials)
    assert features.first_projection(trials) is None
    features.measure_trials(trials, lines.append)
    assert features.is_measured(trials)
    found = features.first_projection(trials)
    assert found is not None
    assert (found.method, found.run) == ("fedper", "cell-1a2b3c4d/seed-1")
    features.measure_trials(Trials("fedper", [StoredRun(run)]), lines.append)
    assert [line.split(": cell-")[0] for line in lines] == [
        "FedPer, seed-0",
        "FedPer, seed-0",
        "FedPer is missing from the figure: no trial has t-SNE points",
    ]


# Recorded results.


def test_recorded_features_are_drawn_and_stand_in_the_table_without_weights_and_data(
    command: Command, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("configs")
    (folder / "features.toml").write_text(TOYS)
    (folder / "attacks").symlink_to(studies.config_dir() / "attacks")
    monkeypatch.setattr(studies, "config_dir", lambda: folder)
    studies.load_experiments.cache_clear()
    try:
        given = ("reproduce", "features", "--rounds", 2, "--seeds", "0,1")
        said = command(*given, "--out", "made")
        assert said.code == 0, said.err
        assert "Measuring features and drawing them by t-SNE" in said.out
        docs = Path("docs/results")
        docs.mkdir(parents=True)
        monkeypatch.setattr(record_results, "RESULTS", docs)
        record_results.record(Path("made"))
        assert not list(docs.rglob("*.safetensors"))
        for name in ("features.png", "features.json", "features-classes.pdf"):
            assert (docs / "features" / name).read_bytes() == Path("made", "features", name).read_bytes()
            (docs / "features" / name).unlink()
        monkeypatch.setattr(ToyDataset, "load", lambda source: pytest.fail("the data are not asked for"))
        said = command(*given, "--only-tables", "--out", docs)
        assert said.code == 0, said.err
        assert "t-SNE" not in said.out
        assert "no figure" not in said.out
        for name in ("features.png", "features.json", "features-classes.pdf", "table.csv"):
            assert (docs / "features" / name).read_bytes() == Path("made", "features", name).read_bytes()
        page = (docs / "features" / "table.md").read_text()
        assert re.search(r"^\| GPFL \|( −?\d\.\d{3} ± \d\.\d{3} \|){5} 2 \|$", page, re.M)
        assert page.endswith("![features](features.png)\n\n![features classes](features-classes.png)\n")
    finally:
        studies.load_experiments.cache_clear()
