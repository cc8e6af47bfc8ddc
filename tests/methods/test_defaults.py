"""Defaults of every method, presets, and values that disable a method."""

from __future__ import annotations

import re

import pytest
from conftest import toy_federation

import gpfl
from gpfl.core import options
from gpfl.methods import METHODS
from gpfl.training import config as configs

DEFAULTS: dict[str, dict[str, object]] = {
    "gpfl": {"p_scale": "sum", "cond_source": "global", "mlg_norm": "batch", "reg": "wd", "without": (), "valve": "auto"}
    | {"valve_gradient": "both", "valve_upload": "full", "guidance": "features"}
    | {"share_valve": True, "alpha_levels": 0, "alpha_noise": 0.0},
    "fedavg": {},
    "fedprox": {"mu": 0.001},
    "perfedavg": {"passes": 2},
    "pfedme": {"steps": 5, "lam": 15.0, "p_lr": 0.01, "beta": 1.0, "theta_decay": 0.001, "eval_model": "theta"},
    "ditto": {"lam": 0.1, "personal_epochs": 1},
    "fedper": {},
    "fedrep": {"head_epochs": 1},
    "fedrod": {},
    "fedphp": {"mu": 0.9, "lam": 0.01, "variant": "mix"},
    "fedproto": {"lam": 1.0, "prototypes": "running"},
    "local": {},
    "fedavg-ft": {"ft_epochs": 5, "ft_parts": "all"},
}
"""The defaults of the specification, without those that depend on the net or the learning rate."""

DISABLING = [
    ("fedprox", "mu", 0.0, "is FedAvg"),
    ("ditto", "lam", 0.0, "trained alone"),
    ("pfedme", "beta", 0.0, "keep its first model"),
    ("pfedme", "lam", 0.0, "never move"),
    ("fedphp", "lam", 1.0, "weight 0"),
    ("fedproto", "lam", 0.0, "trained alone"),
    ("fedavg-ft", "ft_epochs", 0, "would be FedAvg"),
]


def test_defaults_are_those_of_the_specification() -> None:
    assert DEFAULTS.keys() == METHODS.keys()
    for name, expected in DEFAULTS.items():
        values = options.option_values(METHODS[name]())
        fixed = {key: value for key, value in values.items() if value == value}  # NaN depends on the net
        assert fixed == expected, name


def test_gpfl_has_options_of_the_data_under_the_corrected_protocol_alone() -> None:
    def resolve(data: str, protocol: str = "corrected", **values: object) -> dict[str, object]:
        sections: configs.ConfigDict = {
            "data": {"name": data},
            "run": {"protocol": protocol},
            "method": {"name": "gpfl", **values},
        }
        return configs.resolve_config(sections).sections()["method"]

    assert (resolve("har")["guidance"], resolve("har")["mu"]) == ("embeddings", 0.1)
    assert resolve("fmnist")["guidance"] == "embeddings"
    assert "guidance" not in resolve("cifar100")
    for protocol in ("paper", "reference"):
        values = resolve("har", protocol)
        assert "guidance" not in values
        assert values["mu"] != values["mu"]  # NaN: by net
    assert resolve("har", mu=0.5)["mu"] == 0.5
    assert "guidance" not in resolve("fmnist", guidance="features")


def test_rates_of_perfedavg_default_to_the_learning_rate() -> None:
    method = gpfl.fit("perfedavg", toy_federation(), rounds=1, lr=0.03).engine.method
    assert (method.alpha, method.beta) == (0.03, 0.03)  # type: ignore[attr-defined]


def test_rate_of_fine_tuning_defaults_to_the_learning_rate() -> None:
    method = gpfl.fit("fedavg-ft", toy_federation(), rounds=1, lr=0.03).engine.method
    assert method.ft_lr == 0.03  # type: ignore[attr-defined]


def test_reference_protocol_evaluates_the_same_model_as_the_authors_code() -> None:
    config = configs.resolve_config({"method": {"name": "pfedme"}, "run": {"protocol": "reference"}})
    assert config.method.eval_model == "local_w"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "key", "value", "reason"), DISABLING)
def test_value_that_disables_a_method_raises_unless_allowed(name: str, key: str, value: float, reason: str) -> None:
    config: configs.ConfigDict = {"method": {"name": name, key: value}}
    with pytest.raises(gpfl.GpflError, match=re.escape(reason)):
        configs.resolve_config(config)
    with pytest.raises(gpfl.GpflError, match="--allow-noop"):
        gpfl.fit(METHODS[name](**{key: value}), toy_federation(), rounds=1)
    allowed = configs.resolve_config({**config, "run": {"allow_noop": True}})
    assert getattr(allowed.method, key) == value
    gpfl.fit(name, toy_federation(), rounds=1, allow_noop=True, **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"lr": 0.15}, {"p_lr": 0.2}])
def test_pull_that_would_diverge_raises(settings: dict[str, float]) -> None:
    with pytest.raises(gpfl.GpflError, match="must stay below 2"):
        gpfl.fit("pfedme", toy_federation(), rounds=1, **settings)  # type: ignore[arg-type]


def test_constant_contexts_are_equal_in_all_runs_and_differ_from_each_other() -> None:
    constants = []
    for seed in (0, 1):
        result = gpfl.fit("gpfl", toy_federation(), net="mlp", rounds=1, seed=seed, without=["pci"])
        constants.append(result.engine.method.init(seed)[1]["constants"])
    for name in ("g", "p"):
        assert constants[0][name].equal(constants[1][name])
    assert not constants[0]["g"].equal(constants[0]["p"])
