"""Measures of rebuilt images, of label guesses and of membership inference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpfl
from gpfl.privacy import label_inference as labels
from gpfl.privacy import measures, membership
from gpfl.privacy import victims as victim
from gpfl.privacy.victims import Victim


def pairs(channels: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(side)
    true = torch.rand(4, channels, side, side, generator=draw)
    return true, (
        true + 0.3 * torch.randn(true.shape, generator=draw) * torch.tensor([0.1, 0.5, 1.0, 3.0])[:, None, None, None]
    ).clamp(0, 1)


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 11)])
def test_psnr_and_ssim_are_scikit_images(channels: int, side: int) -> None:
    skimage = pytest.importorskip("skimage.metrics")
    true, found = pairs(channels, side)
    for place in range(len(true)):
        a, b = (images[place].movedim(0, -1).double().numpy() for images in (true, found))
        wanted = skimage.peak_signal_noise_ratio(a, b, data_range=1)
        assert float(measures.psnr(true, found)[place]) == pytest.approx(wanted, abs=1e-4)
        settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1, "channel_axis": -1}
        assert float(measures.ssim(true, found)[place]) == pytest.approx(
            skimage.structural_similarity(a, b, **settings), abs=1e-5
        )


def test_measures_of_known_pairs() -> None:
    true = torch.full((1, 1, 8, 8), 0.5)
    assert float(measures.psnr(true, true + 0.1)) == pytest.approx(20, abs=1e-4)
    assert float(measures.psnr(true, true)) == 100
    assert float(measures.ssim(true, true)) == pytest.approx(1)
    assert float(measures.reference_psnr(true, true + 0.1)) == pytest.approx(20 - 10 * np.log10(4 / 3), abs=1e-4)
    assert float(measures.psnr(true, true + 9)) == pytest.approx(-10 * np.log10(0.25), abs=1e-4)  # clamped to white


def test_rebuilt_images_are_assigned_to_the_true_ones_they_fit() -> None:
    true, found = pairs(1, 8)
    order = torch.tensor([2, 0, 3, 1])
    mixed = found * 0.1 + true * 0.9
    assert torch.equal(measures.assigned(true, mixed[order]), mixed)


# Labels and members.


def run(method: str, **settings: object) -> gpfl.Result:
    federation = gpfl.federate("digits", clients=4, classes_per_client=3, seed=0)
    return gpfl.fit(method, federation, net="mlp", device="cpu", **{"rounds": 1, "lr": 0.05, **settings})


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedrod", "gpfl", "fedproto"])
@pytest.mark.parametrize("which", victim.ROUNDS)
def test_the_label_of_a_batch_of_one_is_exact(method: str, which: str) -> None:
    result = run(method)
    rows = result.federation.shards[1].train[:12]
    victims = [Victim(1, (int(row),)) for row in rows]
    seen = victim.uploads_of(result.engine, victim.state_at(result, which), victims, "one")
    guesses = [labels.guess_labels(one) for one in seen]
    assert [guess.tolist() for guess in guesses if guess is not None] == [[int(result.federation.table.y[row])] for row in rows]


def test_an_upload_tells_more_of_labels_than_no_upload() -> None:
    for method in ("fedavg", "gpfl", "fedproto", "fedrod"):
        result = run(method)
        leaks = labels.label_leaks(result.engine, victim.state_at(result, "0"), range(4))
        assert np.mean([leak.guess for leak in leaks]) < 0.5 * np.mean([min(leak.uniform, leak.overall) for leak in leaks]), (
            method
        )
    result = run("fedper")
    (leak, *_) = leaks = labels.label_leaks(result.engine, victim.state_at(result, "0"), [0])
    assert leak.guess is None
    assert "no head, embeddings or prototypes" in labels.told(leaks, "fedper", len(leaks))


def test_counts_sum_to_the_rows() -> None:
    assert labels.guess_counts(torch.tensor([0.5, 0.3, 0.2, 0.0]), 4).tolist() == [2, 1, 1, 0]
    assert labels.variation(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == 0.5


def test_a_model_that_memorised_is_found_out_and_an_untrained_one_is_not() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(240, 20)).astype(np.float32), draw.integers(4, size=240)  # labels that cannot be learnt, only kept
    federation = gpfl.federate([(x[:120], y[:120]), (x[120:], y[120:])])
    result = gpfl.fit("local", federation, net="mlp", rounds=80, lr=0.3, device="cpu")
    kept = membership.memberships(result.engine, victim.state_at(result, "best"), range(2))
    fresh = membership.memberships(result.engine, victim.state_at(result, "0"), range(2))
    assert np.mean([one.auc for one in kept]) > 0.9
    assert abs(np.mean([one.auc for one in fresh]) - 0.5) < 0.12
    assert "AUC" in membership.told(kept, "local")


def test_the_interval_is_students() -> None:
    mean, half = membership.interval([0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.5)
    assert half == pytest.approx(4.30265 * 0.1 / np.sqrt(3), rel=1e-4)
