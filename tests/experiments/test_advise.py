"""Advice on constructed federations where the truth is known: what is trained, measured and recommended end to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from patients import LABEL, make_rows, write_rows

import gpfl
from gpfl.data.table import DataSource
from gpfl.experiments import advise
from gpfl.experiments.advice import Verdict
from gpfl.experiments.repeats import SplitDrawer
from gpfl.report.advice_report import AdviceReport
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback

N_CLASSES = 4
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Constructed(DataSource):
    """Clients whose relation is known."""

    make: Callable[[], gpfl.Table]
    name: str = "constructed"
    description: str = "constructed"

    @property
    def defaults(self) -> dict[str, dict[str, object]]:
        return {
            "partition": {"name": "natural"},
            "net": {"name": "mlp", "hidden": [16]},
            "train": {"lr": 0.1},
            "run": {"engine": "vmap"},
        }

    def read(self) -> gpfl.Table:
        return self.make()


def blobs(
    n_clients: int,
    n_samples: int,
    width: int,
    distance: float,
    relabel: Callable[[Labels, Labels], Labels] = lambda y, clients: y,
) -> gpfl.Table:
    """Return clients with the same inputs, a Gaussian blob for each class; `relabel` makes labels from blobs and clients."""
    rng = np.random.default_rng(0)
    centres = distance * np.linalg.qr(rng.normal(size=(width, N_CLASSES)))[0].T
    clients = np.arange(n_clients * n_samples) % n_clients
    y = rng.integers(0, N_CLASSES, len(clients))
    x = centres[y] + rng.normal(size=(len(y), width))
    return gpfl.Table(x.astype(np.float32), relabel(y, clients), classes=N_CLASSES, name="constructed", client_ids=clients)


def identical() -> gpfl.Table:
    """Return clients whose few samples have the same distribution."""
    return blobs(8, 40, width=20, distance=2.0)


def unrelated() -> gpfl.Table:
    """Return clients whose labels depend on their inputs in ways that have nothing in common."""
    rng = np.random.default_rng(0)
    clients = np.repeat(np.arange(6), 150)
    x = rng.normal(size=(len(clients), 6))
    weights = rng.normal(size=(6, 6, 2))  # (clients, features, classes)
    y = np.einsum("nf,nfc->nc", x, weights[clients]).argmax(1)
    return gpfl.Table(x.astype(np.float32), y, classes=2, name="constructed", client_ids=clients)


def clustered() -> gpfl.Table:
    """Return two groups of clients that give the same inputs other labels."""
    return blobs(12, 60, width=120, distance=4.0, relabel=lambda y, clients: (y + 2 * (clients % 2)) % N_CLASSES)


def permuted() -> gpfl.Table:
    """Return clients of which each names the same classes in an order of its own."""
    orders = np.array([np.random.default_rng(seed).permutation(N_CLASSES) for seed in range(12)])
    return blobs(12, 60, width=120, distance=4.0, relabel=lambda y, clients: orders[clients, y])


def noise() -> gpfl.Table:
    """Return clients whose labels do not depend on their inputs."""
    return blobs(6, 60, width=6, distance=0.0)


def advise_on(make: Callable[[], gpfl.Table], folder: Path, monkeypatch: pytest.MonkeyPatch) -> advise.AdviceResult:
    """Return the advice on a federation after 10 repeats, each of up to 30 rounds."""
    monkeypatch.setitem(configs.DATASETS, "constructed", Constructed(make=make))
    monkeypatch.setattr(advise, "FRACTIONS", (0.5,))
    settings = advise.resolve_settings({"data": {"name": "constructed"}})
    return advise.advise(settings, advise.parse_variants("fedper,gpfl"), 10, folder, lambda label: Callback())


def clients_with(result: advise.AdviceResult, answer: str) -> list[Verdict]:
    return [client for client in result.advice.clients if client.answer == answer]


@pytest.mark.slow
def test_one_global_model_wins_among_identical_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = advise_on(identical, tmp_path, monkeypatch)
    assert (result.advice.choice, result.advice.method) == ("global", "fedavg")
    assert "fedavg" in result.advice.average.methods
    assert clients_with(result, "yes")
    assert not clients_with(result, "no")
    assert "train one global model (fedavg)" in AdviceReport(result).sentence


@pytest.mark.slow
def test_staying_alone_wins_among_unrelated_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = advise_on(unrelated, tmp_path, monkeypatch)
    assert (result.advice.choice, result.advice.method) == ("alone", "local")
    assert clients_with(result, "no")
    assert not clients_with(result, "yes")
    assert "Recommendation: stay alone" in AdviceReport(result).sentence


@pytest.mark.slow
@pytest.mark.parametrize("make", [clustered, permuted])
def test_personalised_models_win_among_clients_that_share_features_only(
    make: Callable[[], gpfl.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = advise_on(make, tmp_path, monkeypatch)
    assert result.advice.choice == "personalised"
    assert result.advice.method in ("fedper", "gpfl")
    assert result.mean_score("fedavg") < result.mean_score("local") < result.mean_score(result.advice.method)
    assert clients_with(result, "yes")
    assert not clients_with(result, "no")
    assert f"federate with {result.advice.method}" in AdviceReport(result).sentence


@pytest.mark.slow
def test_nothing_can_be_told_from_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = advise_on(noise, tmp_path, monkeypatch)
    assert (result.advice.choice, result.advice.method, result.advice.average.reason) == ("unclear", "", "no signal")
    assert {client.answer for client in result.advice.clients} == {"unclear"}
    assert AdviceReport(result).sentence.startswith("These data are inconclusive: no model is clearly better")


def test_staying_alone_uses_the_clients_own_statistics(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "visits.csv", make_rows())
    data = {"name": str(path), "client": "hospital", "label": LABEL, "ignore": ["patient"], "missing": "mean"}
    config = configs.resolve_config({"method": {"name": "local"}, "data": data, "partition": {"name": "natural"}})
    splits = SplitDrawer(config, same_clients=True)
    together, alone = splits(3), advise.with_own_statistics(splits)(3)
    assert together.preprocessing is not None
    age = together.preprocessing.federated.input_names.index("age")
    for shard, same in zip(together.shards, alone.shards, strict=True):
        assert [*shard.train] == [*same.train]
        assert abs(float(alone.table.x[shard.train, age].mean())) < 1e-5
        assert abs(float(together.table.x[shard.train, age].mean())) > 1e-3
