"""The published files themselves, where a machine has them (GPFL_DATA names a folder with one sub-folder a data set): their
content, and two rounds of training on each.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command

from gpfl.data import PUBLISHED, Table, find_dataset
from gpfl.data.published import cache
from gpfl.data.published.dataset import provenance_warning
from gpfl.training.run_dir import RunDir

pytestmark = pytest.mark.realdata

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(scope="session")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for all tests of this call, in whatever process they run: each data set is parsed once."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "published"


@pytest.fixture(autouse=True)
def _cache(parsed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(parsed))


def get(name: str) -> Table:
    """Parses the files of a data set; from then on it must open from the cache at once, memory-mapped and the same."""
    if PUBLISHED[name].find_files() is None:
        pytest.skip(f"GPFL_DATA names no folder with the files of {name}")
    table = PUBLISHED[name].prepare(unverified=True)
    start = time.perf_counter()
    opened = cache.load(name)
    assert time.perf_counter() - start < 0.5
    assert opened is not None
    assert opened.digest == table.digest
    return table


def class_counts(table: Table) -> list[int]:
    return np.bincount(table.y.numpy(), minlength=table.classes).tolist()


def test_har_has_the_published_windows_activities_and_subjects() -> None:
    table = get("har")
    assert (len(table), table.shape, table.input_spec.kind) == (10_299, (9, 1, 128), "floats")
    assert class_counts(table) == [1722, 1544, 1406, 1777, 1906, 1944]
    assert table.client_ids is not None
    sizes = np.bincount(table.client_ids)
    assert (len(sizes), sizes.min(), sizes.max()) == (30, 281, 409)
    assert table.client_names == tuple(f"subject {person}" for person in range(1, 31))
    body, total = table.x[:, 0], table.x[:, 6]
    assert body.mean().abs() < 0.05, "without gravity"
    assert 0.5 < total.mean() < 1.1, "with gravity, in g"


def test_amazon_has_the_published_reviews_of_each_domain_and_the_published_checksums() -> None:
    table = get("amazon")
    assert (len(table), table.shape, table.input_spec.kind, table.x.dtype) == (27_677, (5000,), "counts", torch.uint8)
    assert table.client_names == ("books", "dvd", "electronics", "kitchen")
    assert table.client_ids is not None
    assert np.bincount(table.client_ids).tolist() == [6465, 5586, 7681, 7945]
    assert table.metadata["verified"] is True
    assert abs(table.y.double().mean() - 0.5) < 0.02


def test_heart_has_the_published_patients_of_each_hospital_and_the_published_checksums() -> None:
    table = get("heart")
    assert table.client_names == ("cleveland", "hungary", "switzerland", "long-beach")
    assert table.client_ids is not None
    assert np.bincount(table.client_ids).tolist() == [303, 294, 123, 200]
    assert np.bincount(table.client_ids[table.y.numpy() == 1]).tolist() == [139, 106, 115, 149]
    assert table.metadata["verified"] is True
    assert table.raw is not None
    missing = dict(zip([c.name for c in table.raw.schema.columns], np.isnan(table.raw.values).sum(0).tolist(), strict=True))
    assert (missing["age"], missing["chol"], missing["ca"], missing["thal"]) == (0, 30, 611, 486)


def test_the_complete_cases_of_heart_are_the_740_of_flamby() -> None:
    get("heart")
    table = find_dataset("heart", {"cases": "complete"}).load()
    assert table.client_ids is not None
    assert np.bincount(table.client_ids).tolist() == [303, 261, 46, 130]
    assert provenance_warning(table) == ""


def test_cifar100_has_600_images_a_class_and_the_published_channel_means() -> None:
    table = get("cifar100")
    assert (table.shape, table.x.dtype, class_counts(table)) == ((3, 32, 32), torch.uint8, [600] * 100)
    means = table.x.numpy().mean(axis=(0, 2, 3), dtype=np.float64) / 255
    assert means == pytest.approx([0.5074, 0.4867, 0.4411], abs=5e-4)


def test_tiny_imagenet_has_equally_many_images_of_200_classes() -> None:
    table = get("tiny")
    assert (table.shape, table.x.dtype, table.classes) == ((3, 64, 64), torch.uint8, 200)
    counts = class_counts(table)
    assert min(counts) == max(counts) > 0
    grey = (table.x[:, 0] == table.x[:, 1]).flatten(1).all(1)
    assert 0 < grey.sum() < len(table) / 10


def test_ag_news_has_four_classes_and_the_published_test_rows() -> None:
    table = get("agnews")
    assert (table.shape, table.classes, table.input_spec.kind) == ((200,), 4, "tokens")
    assert torch.bincount(table.y[-7600:]).tolist() == [1900] * 4
    assert 1 < int(table.x.max()) < table.input_spec.vocabulary <= 98_635
    if len(table) == 127_600:
        assert table.input_spec.vocabulary == 98_635
    assert (table.x[:, 0] > 0).all()
    assert ((table.x[:, :-1] > 0) | (table.x[:, 1:] == 0)).all(), "padding stands at the end only"


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_of_the_system_package_is_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path))
    assert PUBLISHED["fmnist"].prepare().metadata["verified"] is True


def test_fashion_mnist_has_7000_images_a_class() -> None:
    table = get("fmnist")
    assert (table.shape, table.x.dtype, class_counts(table)) == ((1, 28, 28), torch.uint8, [7000] * 10)
    assert table.y[:5].tolist() == [9, 0, 0, 3, 0]


TASKS = {
    "fmnist": ("fmnist", "--clients", 2, "--total-clients", 200, "--beta", 1),
    "cifar100": ("cifar100", "--clients", 2, "--total-clients", 200),
    "tiny": ("tiny", "--clients", 2, "--total-clients", 200),
    "tiny with resnet18": ("tiny", "--net", "resnet18", "--clients", 2, "--total-clients", 200),
    "agnews": ("agnews", "--clients", 2, "--total-clients", 200),
    "amazon": ("amazon", "--clients", 2, "--batch-size", 250, "--lr", 0.1),
    "har": ("har", "--clients", 2, "--batch-size", 20),
    "heart": ("heart", "--clients", 2),
}
"""The tasks with their own nets, on few clients: two of two hundred, two domains, two people, two hospitals."""


@pytest.mark.parametrize("method", ["gpfl", "fedavg"])
@pytest.mark.parametrize("task", TASKS)
def test_two_rounds_of_a_task_of_the_paper(task: str, method: str, command: Command) -> None:
    name, *flags = TASKS[task]
    get(str(name))
    result = command("run", "--data", name, *flags, "--method", method, "--rounds", 2, "--device", "cpu", "--out", "run")
    assert result.code == 0, result.err
    losses = [float(str(line["loss"])) for line in RunDir(Path("run")).read_metrics()]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    if task != "tiny with resnet18":  # its BatchNorm statistics need more than a dozen steps
        assert losses[2] < losses[0]
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["method"], summary["rounds"], summary["clients"]) == (method, 2, 2)
    assert len(list(Path("run/models").iterdir())) == 2
