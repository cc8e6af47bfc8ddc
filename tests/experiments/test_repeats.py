"""Repeated splits: paired seeds, whole groups, statistics of training samples, and files that resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gpfl
from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.table import DataSource
from gpfl.experiments.compare import parse_methods
from gpfl.experiments.repeats import RepeatedResults, run_repeats
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback


class Hospitals(DataSource):
    """Patients of three hospitals, two visits each, with numbers that need scaling."""

    @property
    def defaults(self) -> dict[str, dict[str, object]]:
        return {"partition": {"name": "natural"}, "net": {"name": "mlp", "hidden": [4]}, "train": {"rounds": 2, "lr": 0.1}}

    def read(self) -> gpfl.Table:
        rng = np.random.default_rng(0)
        sizes = (40, 60, 30)
        hospital = np.repeat(np.arange(3), sizes)
        values = rng.normal(10.0, 5.0, (sum(sizes), 3))
        labels = (values[:, 0] + rng.normal(0, 5, len(values)) > 10).astype(int)
        schema = Schema(tuple(ColumnSchema(name) for name in ("age", "weight", "dose")))
        groups = np.arange(len(values)) // 2
        return gpfl.Table(
            RawColumns(schema, values),
            labels,
            name="hospitals",
            client_ids=hospital,
            client_names=list("abc"),
            group_ids=groups,
        )


@pytest.fixture
def hospitals(monkeypatch: pytest.MonkeyPatch) -> configs.ConfigDict:
    source = Hospitals(name="hospitals", description="made")
    monkeypatch.setitem(configs.DATASETS, "hospitals", source)
    return {"data": {"name": "hospitals"}, "run": {"engine": "vmap"}}


def run(settings: configs.ConfigDict, methods: str, repeats: int, out: Path | None = None) -> RepeatedResults:
    return run_repeats(settings, parse_methods(methods), repeats, out, lambda label: Callback())


def test_all_methods_see_the_same_splits_and_every_repeat_another(hospitals: configs.ConfigDict) -> None:
    results = run(hospitals, "local,fedavg", 3)
    local, fedavg = results.records["local"], results.records["fedavg"]
    assert [local[k].split for k in range(3)] == [fedavg[k].split for k in range(3)]
    assert len({local[k].split for k in range(3)}) == 3
    assert [(local[k].seed, local[k].partition_seed) for k in range(3)] == [(0, 1), (1, 2), (2, 3)]
