"""What defences promise: ε against published values, what is counted, and what is said where nobody can say."""

from __future__ import annotations

import dataclasses
import math

import pytest
from conftest import Command, toy_federation

import gpfl
from gpfl.core.local_round import Schedule
from gpfl.core.method import Phase
from gpfl.defences import DefenceConfig
from gpfl.defences import accounting as statement
from gpfl.defences.accounting import (
    AccountingInputs,
    client_level,
    client_words,
    example_level,
    gaussian,
    noise_for,
    poisson,
    without_replacement,
)
from gpfl.defences.coupling import Tried

pytest.importorskip("dp_accounting")


# Published values.


@pytest.mark.parametrize(
    ("rows", "batch", "noise", "epochs", "delta", "epsilon"),
    [
        # tensorflow_privacy/privacy/analysis/compute_dp_sgd_privacy_test.py, "Test0" and "Test1": MNIST's size, and 100,000.
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ],
)
def test_epsilon_of_dp_sgd_is_that_of_tensorflow_privacy(
    rows: int, batch: int, noise: float, epochs: int, delta: float, epsilon: float
) -> None:
    assert poisson(noise, batch / rows, math.ceil(epochs * rows / batch), delta) == pytest.approx(epsilon, rel=1e-6)


def test_epsilon_of_one_gaussian_release_is_that_of_the_accountants_own_tests() -> None:
    # dp_accounting/rdp/rdp_privacy_accountant_test.py, test_compute_epsilon_delta_gaussian: exactly (1, 1e-6).
    assert gaussian(4.530877117, 1, 1e-6) == pytest.approx(1, abs=1e-4)


def test_epsilon_is_within_that_of_the_first_moments_accountant() -> None:
    # Abadi et al. 2016, section 3.2: q = 0.01, σ = 4, δ = 1e-5, 10,000 steps give ε ≈ 1.26; conversions have become tighter.
    assert 0.9 < poisson(4.0, 0.01, 10_000, 1e-5) < 1.26


def test_many_releases_are_as_one_with_less_noise() -> None:
    assert gaussian(8.0, 16, 1e-5) == pytest.approx(gaussian(2.0, 1, 1e-5), rel=1e-9)


# What is counted.


def crowd(
    rounds: int = 10, join: float | tuple[float, float] = 1.0, rows: tuple[int, ...] = (100,) * 10, **facts: object
) -> AccountingInputs:
    return AccountingInputs(Schedule(seed=0, rounds=rounds, client_fraction=join), (Phase(step=None, epochs=1),), rows, **facts)  # type: ignore[arg-type]


def test_clients_are_promised_what_gaussian_releases_of_all_rounds_give() -> None:
    facts = client_level(DefenceConfig(clip=1.0, noise=4.0), crowd())
    assert facts["epsilon"] == gaussian(2.0, 10, 1e-5), "one client exchanged moves the sum by twice the bound"
    assert facts["epsilon_if_poisson"] == pytest.approx(gaussian(4.0, 10, 1e-5)), "one more or less moves it by the bound"
    assert facts["epsilon_of_one_upload"] == gaussian(2.0 / math.sqrt(10), 1, 1e-5)
    assert facts["epsilon_of_all_uploads"] == gaussian(2.0 / math.sqrt(10), 10, 1e-5)


def test_clients_that_are_drawn_are_promised_more() -> None:
    some, all_ = (client_level(DefenceConfig(clip=1.0, noise=4.0), crowd(client_fraction=join)) for join in (0.2, 1.0))
    assert some["epsilon"] == without_replacement(2.0, 2, 10, 10, 1e-5)
    assert some["epsilon_if_poisson"] == poisson(4.0, 0.2, 10, 1e-5)
    assert some["epsilon"] < all_["epsilon"]
    assert some["epsilon"] < some["epsilon_if_cohorts_are_known"] == gaussian(2.0, some["most_rounds"], 1e-5)
    assert "to who knows the cohorts" in client_words(some)
    assert "to who knows the cohorts" not in client_words(all_)
    assert some["most_rounds"] < all_["most_rounds"] == 10
    assert some["joining"] == [2, 2]


def test_a_range_of_joining_clients_is_counted_as_if_all_joined() -> None:
    facts = client_level(DefenceConfig(clip=1.0, noise=4.0), crowd(client_fraction=(0.5, 1.0)))
    assert facts["epsilon"] == gaussian(2.0, 10, 1e-5)
    assert "epsilon_if_poisson" not in facts


def test_rows_are_promised_what_one_noisy_gradient_a_pass_gives() -> None:
    facts = example_level(DefenceConfig(example_clip=1.0, example_noise=4.0), crowd(rows=(200, 100, 55)))
    assert facts["epsilon"] == gaussian(2.0, 10, 1e-5)
    assert facts["epsilon_if_poisson"] == poisson(4.0, 10 / 55, 50, 1e-5)
    assert facts["worst_rows"] == 55


@pytest.mark.parametrize(("noise", "worst"), [(4.0, 101), (0.1, 130)])
def test_the_worst_of_many_clients_is_found_at_either_end(noise: float, worst: int) -> None:
    """Much noise: who is drawn most often; little: who takes the most steps."""
    facts = example_level(DefenceConfig(example_clip=1.0, example_noise=noise), crowd(rows=tuple(range(101, 131))))
    assert facts["worst_rows"] == worst


def test_passes_and_steps_inside_a_step_count() -> None:
    phases = (Phase(step=None, epochs=2), Phase(step=None, epochs=1))  # type: ignore[arg-type]
    one = dataclasses.replace(crowd(), phases=phases, tried=Tried((1, 5), uses_counts=False))
    facts = example_level(DefenceConfig(example_clip=1.0, example_noise=4.0), one)
    assert facts["gradients_a_round"] == 7
    assert facts["epsilon"] == gaussian(2.0, 70, 1e-5)


@pytest.mark.parametrize(
    ("method", "gradients", "counts"),
    [
        *(("fedavg", 1, False), ("fedrep", 2, False), ("pfedme", 5, False)),
        *(("perfedavg", 4, False), ("fedrod", 1, True), ("gpfl", 1, True)),
    ],
)
def test_a_method_is_asked_how_often_rows_enter_and_whether_label_counts_do(method: str, gradients: int, counts: bool) -> None:
    more = {"mlg_norm": "sample_mean"} if method == "gpfl" else {}
    settings = {"example_clip": 1.0, "example_noise": 4.0, "rounds": 1, "lr": 0.1, "device": "cpu", "engine": "loop"}
    facts = gpfl.fit(method, toy_federation(), net="mlp", **settings, **more).summary["privacy"]["example"]
    assert (facts["gradients_a_round"], facts["label_counts_known"]) == (gradients, counts)


def test_noise_is_found_for_an_epsilon() -> None:
    noise = noise_for(8.0, lambda noise: gaussian(noise, 100, 1e-5))
    assert 7.95 < gaussian(noise, 100, 1e-5) <= 8.0
    assert float(f"{noise:.3g}") == noise


# Words.


def test_without_the_accountant_a_run_says_that_nothing_is_stated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement, "accountant", lambda: "")
    said = command("run", "--data", "toy", "--method", "fedavg", "--clip", "1", "--noise", "1", "--out", "run")
    assert said.code == 0
    assert "ε is not stated: pip install 'gpfl[privacy]'" in said.out
    facts = gpfl.training.run_dir.read_json(gpfl.training.run_dir.Path("run/summary.json"), "")["privacy"]
    assert facts["accountant"] == "not installed"
    assert not any(key.startswith("epsilon") for key in facts["client"])
    with pytest.raises(gpfl.GpflError, match="ε needs the package dp-accounting"):
        statement.library()


def test_the_words_name_assumptions_and_numbers() -> None:
    (text,) = statement.words({"client": client_level(DefenceConfig(clip=1.0, noise=4.0), crowd())})
    assert "one client exchanged" in text
    assert "if cohorts were Poisson samples" in text
    assert "To the server, which sees single uploads" in text
    (text,) = statement.words({"example": example_level(DefenceConfig(example_clip=1.0, example_noise=4.0), crowd())})
    assert "for the worst client (100 rows) if batches were Poisson samples" in text
    assert statement.number(None) == "endless"
    assert statement.number(123456.0) == "1.2e+05"
    assert statement.statement(DefenceConfig(clip=1.0), crowd()) == {}, "without noise nothing is promised"
