"""Metrics of reconstructed images with pixels from 0 (black) to 1 (white): PSNR, SSIM, and matching to the ground truth."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_WINDOW, _SIGMA = 11, 1.5
"""Side and standard deviation of SSIM's Gaussian window in pixels; smaller images get a smaller window."""
_SSIM_CONSTANTS = (0.01**2, 0.03**2)


def psnr(true: Tensor, reconstructed: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of images (…, channels, height, width) in dB, peak 1; equal images have 100."""
    return _decibels((true - reconstructed.clamp(0, 1)).square())


def reference_psnr(true: Tensor, reconstructed: Tensor) -> Tensor:
    """Return the PSNR by the formula of the authors' code: on net inputs from -1 to 1, the squared error divided by 3."""
    return _decibels((2 * true - 2 * reconstructed.clamp(0, 1)).square(), 3)


def reference_psnr_of_start(true: Tensor, logits: Tensor) -> Tensor:
    """Return the authors' PSNR of an attack without iterations: their sigmoid (0 to 1) against images from -1 to 1."""
    return _decibels((2 * true - 1 - torch.sigmoid(logits)).square(), 3)


def _decibels(squares: Tensor, divisor: int = 1) -> Tensor:
    return -10 * torch.log10((squares.mean((-3, -2, -1)) / divisor).clamp_min(1e-10))


def ssim(true: Tensor, reconstructed: Tensor) -> Tensor:
    """Return the structural similarity of images (images, channels, height, width); equal images have 1.

    Wang et al. 2004: Gaussian window, population covariance, windows inside the image, mean over positions and channels.
    """
    x, y = true.flatten(0, 1)[:, None].double(), reconstructed.clamp(0, 1).flatten(0, 1)[:, None].double()
    side = min(_WINDOW, *(side - (side + 1) % 2 for side in true.shape[-2:]))
    offsets = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weights = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    window = (weights / weights.sum()).to(x)

    def smooth(values: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(values, window[None, None, None, :]), window[None, None, :, None])

    mx, my = smooth(x), smooth(y)
    vx, vy, covariance = smooth(x * x) - mx * mx, smooth(y * y) - my * my, smooth(x * y) - mx * my
    c1, c2 = _SSIM_CONSTANTS
    index = (2 * mx * my + c1) * (2 * covariance + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return index.mean((-3, -2, -1)).reshape(true.shape[:2]).mean(-1).to(true.dtype)


def match_images(true: Tensor, reconstructed: Tensor, either_sign: bool = False) -> tuple[Tensor, Tensor]:
    """Return the reconstructions of batches (batches, batch, …) in the order with the least squared error, (images, …).

    With `either_sign` each is itself or its negative, whichever is closer. The second result is which are negatives.
    """
    batches = zip(true, reconstructed.clamp(0, 1), strict=True)
    images = torch.cat([guesses[_best_order(batch, guesses, either_sign)] for batch, guesses in batches])
    truth = true.flatten(0, 1)
    error, error_of_negative = ((truth - each).square().mean((-3, -2, -1)) for each in (images, 1 - images))
    inverted = (error_of_negative < error) & either_sign
    return torch.where(inverted[:, None, None, None], 1 - images, images), inverted


def _best_order(true: Tensor, images: Tensor, either_sign: bool) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    candidates = (images, 1 - images) if either_sign else (images,)
    costs = [(true.flatten(1)[:, None] - candidate.flatten(1)[None]).square().mean(-1) for candidate in candidates]
    _, order = linear_sum_assignment(torch.stack(costs).amin(0).cpu().double().numpy())
    return torch.from_numpy(np.asarray(order)).to(images.device)
