"""Attack cases: which are reused, how reconstructions are measured, and the verdict."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from privacy.blob_runs import make_runner, train_on_blobs
from torch import Tensor

import gpfl
from gpfl.io.tensors import read_tensors, write_tensors
from gpfl.privacy import reconstruction
from gpfl.privacy.attack_runner import AttackCase, CaseResult, case_path, record_values, summarize_case
from gpfl.privacy.image_metrics import psnr
from gpfl.privacy.reconstruction import AttackConfig, Reconstruction
from gpfl.privacy.uploads import STEPS, choose_batches, load_images, mean_image, observe_uploads, state_at

CASE = AttackCase("fedavg", "fe", "geiping", "0", "one", 1)
QUICK = AttackConfig(iterations=2, restarts=1)


@pytest.fixture(scope="module")
def fedavg() -> gpfl.Result:
    return train_on_blobs("fedavg")


# Saved cases.


def test_finished_cases_are_not_attacked_again(fedavg: gpfl.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(fedavg, config=QUICK)
    cases = [dataclasses.replace(CASE, steps=steps) for steps in STEPS]
    first = runner.run(cases, tmp_path)
    monkeypatch.setattr(reconstruction, "reconstruct", lambda *given: pytest.fail("attacked again"))
    again = runner.run(cases, tmp_path)
    assert [result.records for result in again.values()] == [result.records for result in first.values()]
    harder = make_runner(fedavg, config=dataclasses.replace(QUICK, iterations=6))
    assert harder.load(CASE, tmp_path) is None


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"batch_size": 5}])
def test_another_local_training_is_attacked_again(fedavg: gpfl.Result, tmp_path: Path, settings: dict[str, int]) -> None:
    cases = [dataclasses.replace(CASE, steps=steps) for steps in STEPS]
    make_runner(fedavg, config=QUICK).run(cases, tmp_path)
    other = make_runner(train_on_blobs("fedavg", **settings), config=QUICK)
    assert [other.load(case, tmp_path) is not None for case in cases] == [True, False], "one step is the same in both"


def test_another_defence_is_attacked_again(tmp_path: Path) -> None:
    saved = []
    for settings in ({}, {"clip": 0.1}, {"clip": 0.1}):
        runner = make_runner(train_on_blobs("fedavg", **settings), config=QUICK)
        saved.append(runner.load(CASE, tmp_path) is not None)
        runner.run([CASE], tmp_path)
    assert saved == [False, False, True]


def test_cases_of_an_older_version_are_attacked_again(fedavg: gpfl.Result, tmp_path: Path) -> None:
    runner, path = make_runner(fedavg), case_path(tmp_path, CASE)
    runner.run([CASE], tmp_path)
    images, metadata = read_tensors(path)
    settings = {name: value for name, value in metadata["settings"].items() if name != "version"}
    records = [{name: value for name, value in record.items() if "either" not in name} for record in metadata["records"]]
    write_tensors(path, images, {"settings": settings, "records": records})
    assert runner.load(CASE, tmp_path) is None
    results = runner.run([CASE], tmp_path)
    assert summarize_case(CASE, results[CASE]).images == 2
    assert runner.load(CASE, tmp_path) is not None


# Metrics.


def measure(result: gpfl.Result, found: Tensor, batch: int = 1) -> CaseResult:
    """Return the result of a case whose attack found these images."""
    runner = make_runner(result, found.shape[0] * batch, batch)
    true = load_images(result.federation, runner.batches[batch])
    logits = torch.randn(true.shape, generator=torch.Generator().manual_seed(0))
    return runner.measure(
        dataclasses.replace(CASE, batch=batch), Reconstruction(found, torch.zeros(len(true)), logits), true, 0
    )


def true_images(result: gpfl.Result, images: int, batch: int = 1) -> Tensor:
    return load_images(result.federation, make_runner(result, images, batch).batches[batch])


def test_a_negative_counts_as_reconstructed(fedavg: gpfl.Result) -> None:
    true = true_images(fedavg, 8)
    result = measure(fedavg, torch.cat([1 - true[:3], true[3:]]))
    assert [record["turned"] for record in result.records] == [True] * 3 + [False] * 5
    assert all(record["either_psnr"] == 100 for record in result.records)
    assert result.records[0]["psnr"] < 10
    assert result.records[0]["ssim"] < result.records[0]["either_ssim"] == pytest.approx(1)
    torch.testing.assert_close(result.reconstructed, true.flatten(0, 1))
    summary = summarize_case(CASE, result)
    assert (summary.psnr, summary.inverted, summary.verdict) == (100, 3, "leaks")
    assert summary.psnr_as_found < 70


def test_each_image_of_a_batch_has_its_own_sign_and_its_best_position(fedavg: gpfl.Result) -> None:
    found = true_images(fedavg, 4, 4)[:, [2, 0, 3, 1]].clone()
    found[:, 1] = 1 - found[:, 1]  # the first true image
    result = measure(fedavg, found, 4)
    assert [record["turned"] for record in result.records] == [True, False, False, False]
    assert all(record["either_psnr"] == 100 for record in result.records)


def test_floors_are_measured_like_reconstructions(fedavg: gpfl.Result) -> None:
    true = true_images(fedavg, 8)
    start = torch.sigmoid(torch.randn(true.shape, generator=torch.Generator().manual_seed(0)))
    mean = mean_image(fedavg.federation).expand_as(true)
    for guess, floor in ((start, "either_start_psnr"), (1 - start, "either_start_psnr"), (mean, "either_mean_psnr")):
        for record in measure(fedavg, guess).records:
            assert record["either_psnr"] == pytest.approx(record[floor], abs=1e-5)
    summary = summarize_case(CASE, measure(fedavg, 1 - start))
    assert summary.start_psnr > float(psnr(true, start).mean()), "the start may count as its negative too"
    assert summary.verdict == "at the floor"


def test_the_reference_formula_is_a_constant_away(fedavg: gpfl.Result) -> None:
    result = measure(fedavg, torch.full((8, 1, 1, 8, 8), 0.3))
    summary = summarize_case(CASE, result, "reference")
    assert summary.psnr_as_found == pytest.approx(record_values(result.records, "reference_psnr").mean(), abs=1e-5)
    assert summary.leaks == summarize_case(CASE, result).leaks


def test_the_verdict_follows_from_the_images() -> None:
    def verdict(*psnrs: float) -> str:
        same = {"psnr": 0.0, "ssim": 0.5, "either_ssim": 0.5, "turned": False}
        floors = {"either_start_psnr": 8.0, "either_mean_psnr": 10.0}
        records = [{**same, **floors, "either_psnr": psnr} for psnr in psnrs]
        return summarize_case(CASE, CaseResult(records, torch.zeros(0), torch.zeros(0))).verdict

    assert verdict(*range(20, 28)) == "leaks"
    assert verdict(*range(1, 9)) == "at the floor"
    assert verdict(30, 30.5, 31, 31.5, 5, 4, 3, 2) == "above the floor, not significantly"
    assert verdict(20, 21) == "above the floor (too few images to test)"
    assert verdict(5, 6) == "at the floor (too few images to test)"


# Defended uploads.


def attack_defended(**defence: float) -> tuple[float, float]:
    """Return the mean PSNR of reconstructions from defended uploads, and the floor."""
    runner = make_runner(train_on_blobs("fedavg", **defence), 6, config=AttackConfig(iterations=80, restarts=1))
    case = dataclasses.replace(CASE, target="model")
    records = runner.run([case])[case].records
    floor = [max(record["start_psnr"], record["mean_psnr"]) for record in records]
    return float(record_values(records, "psnr").mean()), float(np.mean(floor))


@pytest.fixture(scope="module")
def undefended() -> tuple[float, float]:
    return attack_defended()


@pytest.mark.parametrize(
    "defence", [{"clip": 0.1, "noise": 10.0}, {"example_clip": 0.1, "example_noise": 10.0}], ids=["client", "example"]
)
def test_noise_puts_the_attack_at_the_floor(undefended: tuple[float, float], defence: dict[str, float]) -> None:
    found, floor = undefended
    assert found > floor + 5
    assert attack_defended(**defence)[0] < floor


def test_clipping_alone_hides_nothing(undefended: tuple[float, float]) -> None:
    assert attack_defended(clip=0.01)[0] == pytest.approx(undefended[0], abs=3)


def test_the_server_does_not_know_the_salt_of_the_noise() -> None:
    result = train_on_blobs("fedavg", clip=0.1, noise=1.0)
    batches = choose_batches(result.federation, [0], 1, [1], 0)[1]
    for steps in STEPS:
        (view,) = observe_uploads(result.engine, state_at(result, "0"), batches, steps)
        assert (result.engine.method.salt > 0, view.method.salt) == (True, 0)
