"""PSNR, SSIM and the matching of reconstructed images to the true ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpfl.privacy import image_metrics


def noisy_images(channels: int, side: int) -> tuple[Tensor, Tensor]:
    """Return images, and the same with increasing noise."""
    rng = torch.Generator().manual_seed(side)
    true = torch.rand(4, channels, side, side, generator=rng)
    noise = torch.randn(true.shape, generator=rng) * torch.tensor([0.1, 0.5, 1.0, 3.0])[:, None, None, None]
    return true, (true + 0.3 * noise).clamp(0, 1)


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 11)])
def test_psnr_and_ssim_are_those_of_scikit_image(channels: int, side: int) -> None:
    skimage = pytest.importorskip("skimage.metrics")
    true, found = noisy_images(channels, side)
    for index in range(len(true)):
        a, b = (images[index].movedim(0, -1).double().numpy() for images in (true, found))
        psnr = skimage.peak_signal_noise_ratio(a, b, data_range=1)
        assert float(image_metrics.psnr(true, found)[index]) == pytest.approx(psnr, abs=1e-4)
        settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1, "channel_axis": -1}
        ssim = skimage.structural_similarity(a, b, **settings)
        assert float(image_metrics.ssim(true, found)[index]) == pytest.approx(ssim, abs=1e-5)


def test_metrics_of_known_images() -> None:
    true = torch.full((1, 1, 8, 8), 0.5)
    assert float(image_metrics.psnr(true, true + 0.1)) == pytest.approx(20, abs=1e-4)
    assert float(image_metrics.psnr(true, true)) == 100
    assert float(image_metrics.ssim(true, true)) == pytest.approx(1)
    assert float(image_metrics.reference_psnr(true, true + 0.1)) == pytest.approx(20 - 10 * np.log10(4 / 3), abs=1e-4)
    assert float(image_metrics.psnr(true, true + 9)) == pytest.approx(-10 * np.log10(0.25), abs=1e-4)  # clamped to 1


def test_reconstructions_are_reordered_to_fit_the_true_images() -> None:
    true, found = noisy_images(1, 8)
    close = found * 0.1 + true * 0.9
    found = close[torch.tensor([2, 0, 3, 1])]
    assert torch.equal(image_metrics.match_images(true[None], found[None])[0], close.clamp(0, 1))
