"""The defence study: its runs, the noise for an ε, and its results as JSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import ToyDataset
from privacy.blob_runs import blob_images
from report.made_studies import STUDY

import gpfl
from gpfl.data import DATASETS
from gpfl.defences.accounting import gaussian_epsilon
from gpfl.experiments.defence_study import (
    FAMILIES,
    DefenceFamily,
    DefenceStudy,
    find_noises,
)
from gpfl.experiments.grid import GridPlan

pytest.importorskip("dp_accounting")


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add blobs to the datasets."""
    monkeypatch.setitem(DATASETS, "blobs", ToyDataset(make=lambda: gpfl.Table(*blob_images(), name="blobs"), name="blobs"))


def find_noise(method: str, family: DefenceFamily, delta: float) -> float:
    """Return the noise of a method for ε = 4."""
    settings = {"data": {"name": "blobs"}, "partition": {"clients": 2}, "net": {"name": "mlp"}}
    plan = GridPlan(out=Path("out"), seeds=(0,), rounds=1, patience=0, common=settings)
    bounds = {"clip": 0.2, "example_clip": 1.0, "delta": delta}
    (noise,) = find_noises(family, [4.0], method, bounds, {}, plan)
    return noise


@pytest.mark.usefixtures("blobs")
def test_the_noise_for_an_epsilon_depends_on_delta_and_on_the_gradients_per_step() -> None:
    client, example = FAMILIES[:2]
    for delta in (1e-5, 1e-7):
        assert 3.95 < gaussian_epsilon(find_noise("fedavg", client, delta) / 2, 1, delta) <= 4
    noise = find_noise("pfedme", example, 1e-5)
    assert 3.95 < gaussian_epsilon(noise / 2, 5, 1e-5) <= 4, "pFedMe takes five steps on each batch"


def test_a_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "points.json").write_text(STUDY.to_json())
    assert DefenceStudy.read(tmp_path / "points.json") == STUDY


def test_curves_are_sorted_by_value() -> None:
    assert [point.value for point in STUDY.curve("gpfl", "noise")] == [0.1, 1]
    assert STUDY.methods == ["gpfl", "fedavg"]
    assert np.isclose(STUDY.curve("fedavg", "")[0].accuracy, 0.3)
