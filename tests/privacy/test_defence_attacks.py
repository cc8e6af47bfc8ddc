"""Attacks on defended uploads: noise puts them at the floor, clipping alone does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Command
from privacy.test_attack import trained

import gpfl
from gpfl.privacy import attack
from gpfl.privacy.attack import AttackConfig, AttackRunner, Case
from gpfl.privacy.victims import choose_victims, state_at, uploads_of


def psnrs(result: gpfl.Result, effort: AttackConfig) -> tuple[float, float]:
    victims = choose_victims(result.federation, [0, 1], 6, [1], 0)
    bench = AttackRunner(result.engine, {"0": state_at(result, "0")}, victims, effort)
    case = Case("fedavg", "model", "geiping", "0", "one", 1)
    records = bench.attack([case], None, lambda case, kept: None)[case].records
    found = np.array([[record["psnr"], max(record["start_psnr"], record["mean_psnr"])] for record in records])
    return float(found[:, 0].mean()), float(found[:, 1].mean())


EFFORT = AttackConfig(iterations=80, restarts=1)


@pytest.fixture(scope="module")
def undefended() -> tuple[float, float]:
    return psnrs(trained("fedavg"), EFFORT)


@pytest.mark.parametrize(
    "settings",
    [{"clip": 0.1, "noise": 10.0}, {"example_clip": 0.1, "example_noise": 10.0}],
    ids=["client", "example"],
)
def test_a_noisy_upload_puts_the_attack_at_the_floor(undefended: tuple[float, float], settings: dict[str, float]) -> None:
    found, floor = undefended
    assert found > floor + 5
    assert psnrs(trained("fedavg", **settings), EFFORT)[0] < floor


def test_clipping_alone_hides_nothing(undefended: tuple[float, float]) -> None:
    assert psnrs(trained("fedavg", clip=0.01), EFFORT)[0] == pytest.approx(undefended[0], abs=3)


def test_cases_of_another_defence_are_attacked_anew(tmp_path: Path) -> None:
    effort, case = AttackConfig(iterations=2, restarts=1), Case("fedavg", "model", "geiping", "0", "one", 1)
    told = []
    for settings in ({}, {"clip": 0.1}, {"clip": 0.1}):
        result = trained("fedavg", **settings)
        victims = choose_victims(result.federation, [0], 1, [1], 0)
        bench = AttackRunner(result.engine, {"0": state_at(result, "0")}, victims, effort)
        told.append(bench.held(case, tmp_path) is not None)
        bench.attack([case], tmp_path, lambda case, kept: None)
    assert told == [False, False, True]


def test_the_server_is_not_given_what_noise_is_drawn_from() -> None:
    result = trained("fedavg", clip=0.1, noise=1.0)
    victims = choose_victims(result.federation, [0], 1, [1], 0)[1]
    for steps in ("one", "epoch"):
        (seen,) = uploads_of(result.engine, state_at(result, "0"), victims, steps)
        assert (result.engine.method.salt > 0, seen.method.salt) == (True, 0)


def test_a_defended_fedavg_and_its_ceiling_are_both_kept(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("run", "--data", "digits", "--net", "mlp", "--hidden", 8, "--rounds", 1, "--device", "cpu", "--clip", 0.1)
    assert command(*run, "--method", "fedavg", "--out", "r").code == 0
    call = ("attack", "r", "--target", "model", "--images", 1, "--iterations", 2, "--restarts", 1)
    first = command(*call)
    monkeypatch.setattr(attack, "rebuild", lambda *given: pytest.fail("attacked again"))
    again = command(*call)
    assert again.code == 0, again.err
    assert again.out == first.out
