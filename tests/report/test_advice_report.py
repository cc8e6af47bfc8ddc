"""The report of `gpfl advise`: one sentence for every kind of advice, tables, figure, page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpfl.experiments.advice import Scores, give_advice
from gpfl.experiments.advise import AdviceResult, MethodCost
from gpfl.experiments.learning_curve import SampleEstimate
from gpfl.report.advice_report import AdviceReport
from gpfl.training import config as configs

REPEATS = 20


def report_of(
    means: Mapping[str, list[float]],
    *,
    metric: str = "accuracy",
    std: float = 0.02,
    constant: float = 0.5,
    selected: float = 9,
    alone_bytes: float = 0,
) -> AdviceReport:
    """Return the report on scores with these means for each client."""
    clients = len(means["local"])
    rng = np.random.default_rng(0)
    by_method = {}
    for name, values in means.items():
        noise = rng.normal(size=(REPEATS, clients))
        by_method[name] = np.array(values) + std * (noise - noise.mean(0)) / noise.std(0, ddof=1)
    scores = Scores(
        clients=[f"c{k}" for k in range(clients)],
        metric=metric,
        validation=by_method,
        test=by_method,
        constant=np.full((REPEATS, clients), constant),
        n_samples=np.full(clients, 400),
        n_train=np.full(clients, 240.0),
        n_test=np.full(clients, 100.0),
    )
    config = configs.resolve_config({"data": {"name": "digits"}, "method": {"name": "local"}, "run": {"metric": metric}})
    costs = {name: MethodCost(30, selected, 1000, 2000, 1.5) for name in means}
    costs["local"] = MethodCost(30, selected, alone_bytes, alone_bytes, 1.5)
    return AdviceReport(AdviceResult(config, give_advice(scores, 0.01), scores, None, "not measured", costs, 0.01, {}))


ALONE = {"local": [0.9, 0.9], "fedavg": [0.6, 0.6], "fedper": [0.8, 0.8]}
GLOBAL = {"local": [0.7, 0.7], "fedavg": [0.8, 0.8], "fedper": [0.7, 0.7]}
PERSONALISED = {"local": [0.7, 0.7], "fedavg": [0.75, 0.75], "fedper": [0.9, 0.9]}
EXCEPTION = {"local": [0.7, 0.7, 0.7, 0.9], "fedavg": [0.85, 0.85, 0.85, 0.75]}


@pytest.mark.parametrize(
    ("means", "sentence"),
    [
        (ALONE, "Recommendation: stay alone, since joining changes accuracy by −10.0 points on average"),
        (GLOBAL, "Recommendation: train one global model (fedavg), since joining changes accuracy by +10.0 points on average"),
        (PERSONALISED, "Recommendation: federate with fedper, which gives every client a model of its own, since joining"),
        (EXCEPTION, "; but joining is clearly not better for c3."),
    ],
)
def test_recommendation_is_one_sentence(means: dict[str, list[float]], sentence: str) -> None:
    text = report_of(means).sentence
    assert sentence in text
    assert text.endswith(".")
    assert ". " not in text


def test_staying_alone_is_not_argued_for_with_personalised_models() -> None:
    assert "personalised" not in report_of(ALONE).sentence


def test_samples_for_a_clear_answer_are_a_number_of_samples_more() -> None:
    report = report_of({"local": [0.8, 0.8], "fedavg": [0.82, 0.82]}, std=0.08)
    verdict = replace(report.advice.average, more_samples=SampleEstimate(2.5, 1.2, 4.0))
    assert verdict.n_samples == 800
    assert report.describe_more(verdict) == (
        "about 1,200 more samples, 2.5 times as many at every client, are expected to make it clear "
        "(160 to 2,400 more in the middle half of resamples)"
    )


def test_noise_and_missing_signal_are_told_apart() -> None:
    noise = report_of({"local": [0.8, 0.8], "fedavg": [0.82, 0.82]}, std=0.08).sentence
    assert noise.startswith("These data are inconclusive: joining changes accuracy by +2.0 points on average")
    assert "how many more samples would make it clear cannot be estimated" in noise
    nothing = report_of({"local": [0.4, 0.4], "fedavg": [0.5, 0.5]}).sentence
    assert "no model is clearly better than always predicting the class frequencies" in nothing


def test_tables_have_a_row_for_each_client_and_method() -> None:
    report = report_of(EXCEPTION)
    clients = report.client_table().cells()
    assert [row[0] for row in clients] == ["c0", "c1", "c2", "c3", "average"]
    assert [row[8] for row in clients] == ["yes", "yes", "yes", "no", "yes"]
    assert clients[3][2:5] == ["90.0", "75.0", "−15.0"]
    assert [row[0] for row in report.cost_table().cells()] == ["local", "fedavg"]
    assert report.cost_table().cells()[0][5:7] == ["nothing", "nothing"]
    assert len(report.cost_table().notes) == 1


def test_statistics_of_columns_that_staying_alone_sends_are_not_hidden() -> None:
    table = report_of(EXCEPTION, alone_bytes=300).cost_table()
    assert table.cells()[0][5:7] == ["300 bytes", "300 bytes"]
    assert "Staying alone sends statistics of columns only" in table.notes[1]


def test_losses_are_shown_as_losses_and_their_fall_as_a_gain() -> None:
    report = report_of({"local": [-0.7], "fedavg": [-0.5]}, metric="log_loss", constant=-0.9)
    assert report.client_table().cells()[0][2:5] == ["0.700", "0.500", "+0.200"]
    assert "a lower log loss is a gain" in report.client_table().notes[0]


def test_many_clients_are_cut_to_those_with_extreme_gains() -> None:
    gains = np.linspace(-0.1, 0.1, 50)
    report = report_of({"local": [0.7] * 50, "fedavg": (0.7 + gains).tolist()})
    names = [row[0] for row in report.client_table(4).cells()]
    assert names == ["c0", "c1", "c48", "c49", "average"]
    assert len(report.client_table().rows) == 51
    assert report.figure().startswith("<svg")


def test_training_that_ends_too_early_is_a_note() -> None:
    report = report_of(GLOBAL, selected=29)
    longer = f"longer training may change the answer (--rounds {2 * report.result.config.train.rounds})"
    assert any(longer in note for note in report.notes)
    assert report_of(GLOBAL).notes == []


def test_json_has_the_sentence_and_all_numbers(tmp_path: Path) -> None:
    report = report_of(PERSONALISED)
    report.save(tmp_path, "gpfl advise")
    content = json.loads((tmp_path / "advice.json").read_text())
    assert (content["recommendation"], content["method"], content["sentence"]) == ("personalised", "fedper", report.sentence)
    assert content["clients"]["c0"]["gain"]["better"] > 0.95
    assert "<strong>average</strong>" in (tmp_path / "advice.html").read_text()
