"""A deployment computes what the loop engine computes, to the bit: the parts of coordinator and sites called directly."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import toy_federation
from direct_sites import Sections, assert_equal, direct, make_sites, roster_of, simulate
from patients import LABEL, make_rows, write_rows

import gpfl
from gpfl.deploy.coordinator import coordinate
from gpfl.deploy.roster import Roster
from gpfl.methods import METHODS


def check_equal(federation: gpfl.Federation, sections: Sections, folder: Path) -> None:
    result = simulate(federation, sections)
    roster = Roster.from_json(roster_of(federation, sections).to_json())
    sites = make_sites(roster, federation, folder)
    statistics = federation.preprocessing.statistics if federation.preprocessing else None
    outcome = coordinate(roster, direct(sites), folder / "run", statistics=statistics)
    assert_equal(outcome.last.shared, result.outcome.last.shared)
    assert_equal(outcome.selected.shared, result.outcome.selected.shared)
    keys = ("round", "accuracy", "loss", "client_accuracies", "train", "bytes_up", "bytes_down")
    assert [{k: r.get(k) for k in keys} for r in outcome.history] == [{k: r.get(k) for k in keys} for r in result.history]
    for site, expected in zip(sites, result.clients, strict=True):
        model = gpfl.load_model(site.folder / "model.safetensors")
        assert_equal(model.weights, expected.weights)
        assert (model.class_names, model.threshold) == (expected.class_names, expected.threshold)


@pytest.mark.parametrize("method", METHODS)
def test_deployed_equals_simulated(method: str, tmp_path: Path) -> None:
    check_equal(toy_federation(), {"method": {"name": method}, "train": {"rounds": 2, "lr": 0.05}}, tmp_path)


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"name": "gpfl", "cond_source": "stale_local"}},
        {"method": {"name": "gpfl", "valve_upload": "low_rank"}},
        {"train": {"client_fraction": 0.5, "rounds": 3}},
        {"defence": {"clip": 1.0, "noise": 0.5}},
        {"defence": {"clip": 1.0, "bits": 8}},
        {"train": {"aggregation": "median"}},
        {"train": {"aggregation": "trimmed_mean", "trim_fraction": 0.1}, "method": {"name": "fedrod"}},
        {"train": {"aggregation": "krum", "krum_byzantine": 0}},
        {"defence": {"example_clip": 1.0, "example_noise": 0.5}, "method": {"name": "fedavg"}},
    ],
    ids=["stale", "low rank", "sampled", "noise", "bits", "median", "trimmed", "krum", "examples"],
)
def test_deployed_equals_simulated_with_options(sections: Sections, tmp_path: Path) -> None:
    train = {"rounds": 2, "lr": 0.05, **sections.get("train", {})}
    check_equal(toy_federation(), {**sections, "train": train}, tmp_path)


@pytest.mark.parametrize("scale", ["federated", "local"])
def test_columns_are_encoded_at_the_sites_as_in_simulation(scale: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "visits.csv", make_rows())
    reading = {"client": "hospital", "label": LABEL, "ignore": ("patient",), "missing": "mean", "missing_indicator": True}
    federation = gpfl.federate(path, scale=scale, validation_fraction=0.5, **reading)
    check_equal(federation, {"method": {"name": "gpfl"}, "train": {"rounds": 3, "lr": 0.1}, "net": {"name": "mlp"}}, tmp_path)
    models = [gpfl.load_model(tmp_path / f"site-{shard.name}" / "model.safetensors") for shard in federation.shards]
    assert all(model.preprocessor is not None for model in models)
    assert any(model.threshold is not None for model in models)  # chosen on the site's validation samples
