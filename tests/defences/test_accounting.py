"""Privacy accounting: ε against published values, what is counted, and how guarantees are described."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from conftest import Command, toy_federation

import gpfl
from gpfl.core.local_round import Schedule
from gpfl.core.method import Phase
from gpfl.defences import DefenceConfig, accounting
from gpfl.defences.accounting import (
    AccountingInputs,
    client_guarantee,
    example_guarantee,
    find_noise,
    fixed_size_epsilon,
    gaussian_epsilon,
    poisson_epsilon,
)
from gpfl.defences.coupling import CouplingCheck

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
    assert poisson_epsilon(noise, batch / rows, math.ceil(epochs * rows / batch), delta) == pytest.approx(epsilon, rel=1e-6)


def test_epsilon_of_one_gaussian_release_is_that_of_the_accountants_own_tests() -> None:
    # dp_accounting/rdp/rdp_privacy_accountant_test.py, test_compute_epsilon_delta_gaussian: exactly (1, 1e-6).
    assert gaussian_epsilon(4.530877117, 1, 1e-6) == pytest.approx(1, abs=1e-4)


def test_epsilon_is_within_that_of_the_first_moments_accountant() -> None:
    # Abadi et al. 2016, section 3.2: q = 0.01, σ = 4, δ = 1e-5, 10,000 steps give ε ≈ 1.26; conversions have become tighter.
    assert 0.9 < poisson_epsilon(4.0, 0.01, 10_000, 1e-5) < 1.26


def test_many_releases_are_as_one_with_less_noise() -> None:
    assert gaussian_epsilon(8.0, 16, 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1, 1e-5), rel=1e-9)


# What is counted.


def inputs(client_fraction: float | tuple[float, float] = 1.0, n_samples: tuple[int, ...] = (100,) * 10) -> AccountingInputs:
    schedule = Schedule(seed=0, rounds=10, client_fraction=client_fraction)
    return AccountingInputs(schedule, (Phase(step=None, epochs=1),), n_samples)  # type: ignore[arg-type]


def test_client_guarantee_is_that_of_gaussian_releases_in_all_rounds() -> None:
    guarantee = client_guarantee(DefenceConfig(clip=1.0, noise=4.0), inputs())
    assert guarantee["epsilon"] == gaussian_epsilon(2.0, 10, 1e-5), "one client exchanged moves the sum by twice the bound"
    assert guarantee["epsilon_if_poisson"] == pytest.approx(gaussian_epsilon(4.0, 10, 1e-5)), (
        "one more or less moves it by the bound"
    )
    assert guarantee["epsilon_of_one_upload"] == gaussian_epsilon(2.0 / math.sqrt(10), 1, 1e-5)
    assert guarantee["epsilon_of_all_uploads"] == gaussian_epsilon(2.0 / math.sqrt(10), 10, 1e-5)


def test_client_sampling_improves_the_guarantee() -> None:
    some, all_ = (
        client_guarantee(DefenceConfig(clip=1.0, noise=4.0), inputs(client_fraction)) for client_fraction in (0.2, 1.0)
    )
    assert some["epsilon"] == fixed_size_epsilon(2.0, 2, 10, 10, 1e-5)
    assert some["epsilon_if_poisson"] == poisson_epsilon(4.0, 0.2, 10, 1e-5)
    assert some["epsilon"] < all_["epsilon"]
    assert some["epsilon"] < some["epsilon_if_cohorts_are_known"] == gaussian_epsilon(2.0, some["most_rounds"], 1e-5)
    assert "who knows which clients were sampled" in accounting.describe_guarantee({"client": some})[0]
    assert "who knows which clients were sampled" not in accounting.describe_guarantee({"client": all_})[0]
    assert some["most_rounds"] < all_["most_rounds"] == 10
    assert some["joining"] == [2, 2]


def test_a_range_of_client_fractions_counts_as_full_participation() -> None:
    guarantee = client_guarantee(DefenceConfig(clip=1.0, noise=4.0), inputs(client_fraction=(0.5, 1.0)))
    assert guarantee["epsilon"] == gaussian_epsilon(2.0, 10, 1e-5)
    assert "epsilon_if_poisson" not in guarantee


def test_example_guarantee_is_that_of_one_noisy_gradient_per_epoch() -> None:
    guarantee = example_guarantee(DefenceConfig(example_clip=1.0, example_noise=4.0), inputs(n_samples=(200, 100, 55)))
    assert guarantee["epsilon"] == gaussian_epsilon(2.0, 10, 1e-5)
    assert guarantee["epsilon_if_poisson"] == poisson_epsilon(4.0, 10 / 55, 50, 1e-5)
    assert guarantee["worst_rows"] == 55


@pytest.mark.parametrize(("noise", "worst"), [(4.0, 101), (0.1, 130)])
def test_the_worst_client_is_found_among_the_smallest_and_the_largest(noise: float, worst: int) -> None:
    """With much noise the client with the highest sampling rate is worst, with little the one with the most steps."""
    guarantee = example_guarantee(
        DefenceConfig(example_clip=1.0, example_noise=noise), inputs(n_samples=tuple(range(101, 131)))
    )
    assert guarantee["worst_rows"] == worst


def test_epochs_and_inner_steps_count() -> None:
    phases = (Phase(step=None, epochs=2), Phase(step=None, epochs=1))  # type: ignore[arg-type]
    two_phases = dataclasses.replace(inputs(), phases=phases, coupling=CouplingCheck((1, 5), uses_label_counts=False))
    guarantee = example_guarantee(DefenceConfig(example_clip=1.0, example_noise=4.0), two_phases)
    assert guarantee["gradients_a_round"] == 7
    assert guarantee["epsilon"] == gaussian_epsilon(2.0, 70, 1e-5)


@pytest.mark.parametrize(
    ("method", "gradients", "counts"),
    [
        *(("fedavg", 1, False), ("fedrep", 2, False), ("pfedme", 5, False)),
        *(("perfedavg", 4, False), ("fedrod", 1, True), ("gpfl", 1, True)),
    ],
)
def test_gradients_per_round_and_use_of_label_counts_follow_from_the_method(method: str, gradients: int, counts: bool) -> None:
    more = {"mlg_norm": "sample_mean"} if method == "gpfl" else {}
    settings = {"example_clip": 1.0, "example_noise": 4.0, "rounds": 1, "lr": 0.1, "device": "cpu", "engine": "loop"}
    guarantee = gpfl.fit(method, toy_federation(), net="mlp", **settings, **more).summary["privacy"]["example"]
    assert (guarantee["gradients_a_round"], guarantee["label_counts_known"]) == (gradients, counts)


def test_find_noise_inverts_epsilon() -> None:
    noise = find_noise(8.0, lambda noise: gaussian_epsilon(noise, 100, 1e-5))
    assert 7.95 < gaussian_epsilon(noise, 100, 1e-5) <= 8.0
    assert float(f"{noise:.3g}") == noise


# Descriptions.


def test_without_the_accountant_no_epsilon_is_stated(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "accountant_version", lambda: "")
    result = command("run", "--data", "toy", "--method", "fedavg", "--clip", "1", "--noise", "1", "--out", "run")
    assert result.code == 0
    assert "ε is not computed: pip install 'gpfl[privacy]'" in result.out
    guarantee = json.loads(Path("run/summary.json").read_text())["privacy"]
    assert guarantee["accountant"] == "not installed"
    assert not any(key.startswith("epsilon") for key in guarantee["client"])
    with pytest.raises(gpfl.GpflError, match="ε needs the package dp-accounting"):
        accounting.load_accountant()


def test_descriptions_name_assumptions_and_numbers() -> None:
    (text,) = accounting.describe_guarantee({"client": client_guarantee(DefenceConfig(clip=1.0, noise=4.0), inputs())})
    assert "(replace one client)" in text
    assert "under Poisson sampling (add or remove one client)" in text
    assert "Against a server that sees individual uploads" in text
    (text,) = accounting.describe_guarantee(
        {"example": example_guarantee(DefenceConfig(example_clip=1.0, example_noise=4.0), inputs())}
    )
    assert "for the worst client, which has 100 samples" in text
    assert accounting.format_epsilon(None) == "∞"
    assert accounting.format_epsilon(123456.0) == "1.2e+05"
    assert accounting.privacy_guarantee(DefenceConfig(clip=1.0), inputs()) == {}, "no guarantee without noise"
