"""Runs on columns: the exchange of statistics is recorded, and a run resumes and loads with the same encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from user_files import lines, message_of, write

import gpfl
from gpfl.data.columns import RawColumns
from gpfl.data.preprocessing import Preprocessor
from gpfl.io import toml

OPTIONS = {"client": "site", "label": "kind", "missing": "mean", "missing_indicator": True}


def make_file(path: Path, rows: int = 60) -> Path:
    rng = np.random.default_rng(1)
    a, b = rng.normal(5, 2, rows).round(3), rng.normal(size=rows).round(3)
    ages = ["" if k % 7 == 0 else a[k] + 10 * (k % 3) for k in range(rows)]
    sexes = ["fmx"[k % 2 if k % 20 else 2] for k in range(rows)]
    cells = [(ages[k], b[k], sexes[k], f"s{k % 3}", "high" if b[k] > 0 else "low") for k in range(rows)]
    return write(path, lines(("a", "b", "sex", "site", "kind"), *cells))


def fit(folder: Path, scale: str, **settings: Any) -> gpfl.Result:
    federation = gpfl.federate(make_file(folder / "a.csv"), scale=scale, **OPTIONS)
    return gpfl.fit("ditto", federation, rounds=3, checkpoint_every=1, out=folder / "run", **settings)


def raw_of(result: gpfl.Result) -> RawColumns:
    raw = result.federation.table.raw
    assert raw is not None
    return raw


@pytest.mark.parametrize("scale", ["federated", "local"])
def test_a_run_resumes_and_loads_with_the_same_encoding_to_the_bit(scale: str, tmp_path: Path) -> None:
    whole = fit(tmp_path, scale)
    run = tmp_path / "run"
    (run / "summary.json").unlink()
    (run / "checkpoint.safetensors").unlink()
    resumed, loaded = gpfl.resume(run), gpfl.load(run)
    for result in (resumed, loaded):
        assert result.federation.preprocessing == whole.federation.preprocessing
        assert np.array_equal(result.federation.table.x, whole.federation.table.x)
        assert [{**record, "seconds": 0} for record in result.history] == [{**record, "seconds": 0} for record in whole.history]
        for client, expected in zip(result.clients, whole.clients, strict=True):
            assert np.array_equal(client.logits(raw_of(whole)), expected.logits(raw_of(whole)))


def test_the_exchange_is_counted_and_saved(tmp_path: Path) -> None:
    result = fit(tmp_path, "local")
    preprocessing = result.federation.preprocessing
    assert preprocessing is not None
    up, down = sum(preprocessing.bytes_up.values()), sum(preprocessing.bytes_down.values())
    assert up > 0
    assert (result.summary["preprocessing_bytes_up"], result.summary["preprocessing_bytes_down"]) == (up, down)
    first, second, third = ((record["bytes_up"], record["bytes_down"]) for record in result.history[:3])
    assert first == (up, down)
    assert (second[0] - up, second[1] - down) == (third[0] - second[0], third[1] - second[1]), "then as much in every round"
    saved = json.loads((tmp_path / "run" / "preprocessing.json").read_text())
    assert {name: Preprocessor.from_dict(content) for name, content in saved["clients"].items()} == preprocessing.clients
    assert Preprocessor.from_dict(saved["preprocessor"]) == preprocessing.federated
    assert (sum(saved["bytes_up"].values()), sum(saved["bytes_down"].values())) == (up, down)


def test_runs_on_other_data_exchange_nothing(tmp_path: Path) -> None:
    federation = gpfl.federate([(np.eye(4), [0, 1, 0, 1])] * 2)
    result = gpfl.fit("fedavg", federation, rounds=1, out=tmp_path / "run")
    assert result.history[0]["bytes_up"] == 0
    assert not any(key.startswith("preprocessing") for key in result.summary)
    assert not (tmp_path / "run" / "preprocessing.json").exists()


@pytest.mark.parametrize("scale", ["federated", "local"])
def test_a_saved_model_predicts_raw_rows(scale: str, tmp_path: Path) -> None:
    result = fit(tmp_path, scale)
    raw = raw_of(result)
    for client, shard in zip(result.clients, result.federation.shards, strict=True):
        model = gpfl.load_model(tmp_path / "run" / "models" / f"client-{shard.name}.safetensors")
        assert model.preprocessor == client.preprocessor
        encoded = result.federation.table.x[shard.test]
        assert np.array_equal(model.logits(raw.select(shard.test)), client.logits(encoded))
        y = model.classes_[result.federation.table.y[shard.test]]
        assert model.score(raw.select(shard.test), y) == client.score(encoded, y)
    plain = gpfl.fit("fedavg", gpfl.federate([(np.eye(4), [0, 1, 0, 1])] * 2), rounds=1)
    assert message_of(lambda: plain.clients[0].predict(raw)) == (
        "the model of client '0' was not trained on columns: give inputs as an array"
    )
    assert message_of(lambda: plain.personalize(raw, np.zeros(len(raw)))) == (
        "this run was not trained on columns: give inputs as an array"
    )


def test_a_new_client_is_encoded_like_the_others(tmp_path: Path) -> None:
    local = fit(tmp_path / "local", "local")
    raw, y = raw_of(local).select(np.arange(20)), local.federation.table.y[:20]
    own = local.personalize(raw, y, rounds=1).preprocessor
    assert own is not None
    values = raw.values[:, 0]
    assert own.scaling["a"] == pytest.approx((np.nanmean(values), np.nanstd(values)), rel=1e-12)
    federated = fit(tmp_path / "federated", "federated")
    assert federated.federation.preprocessing is not None
    assert federated.personalize(raw, y, rounds=1).preprocessor == federated.federation.preprocessing.federated


def test_a_run_of_an_earlier_version_says_why_it_cannot_be_resumed(tmp_path: Path) -> None:
    fit(tmp_path, "federated")
    manifest = tmp_path / "run" / "federation.toml"
    content = toml.read(manifest)
    table, source = content["table"], content["source"]
    assert isinstance(table, dict)
    assert isinstance(source, dict)
    columns = [{"name": "a", "mean": 0.0, "std": 1.0}]
    old = {**content, "table": {**table, "sha256": "0" * 64}, "source": {**source, "columns": columns}}
    manifest.write_text(toml.dump(old))
    assert "was written by an earlier gpfl, which scaled columns by pooled rows" in (
        message_of(lambda: gpfl.Federation.load(manifest, gpfl.federate(tmp_path / "a.csv", **OPTIONS).table))
    )
