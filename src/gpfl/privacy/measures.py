"""Measures of rebuilt images, in pixels from 0 (black) to 1 (white): PSNR, SSIM, and which rebuilt image is which."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW, SPREAD = 11, 1.5
"""Side and standard deviation of SSIM's Gaussian window, in pixels; a smaller image has a smaller one."""
STEADY = (0.01**2, 0.03**2)


def psnr(true: Tensor, found: Tensor) -> Tensor:
    """Gives the peak signal-to-noise ratio of images (…, channels, height, width) in dB, peak 1; equal images have 100."""
    error = (true - found.clamp(0, 1)).square().mean((-3, -2, -1))
    return -10 * torch.log10(error.clamp_min(1e-10))


def reference_psnr(true: Tensor, found: Tensor) -> Tensor:
    """Gives the ratio by the formula of the authors' code: on what nets are given (-1 to 1), the error divided by 3."""
    error = (2 * true - 2 * found.clamp(0, 1)).square().mean((-3, -2, -1)) / 3
    return -10 * torch.log10(error.clamp_min(1e-10))


def untouched_reference(true: Tensor, logits: Tensor) -> Tensor:
    """Gives the authors' PSNR of an attack that was never begun: their sigmoid (0 to 1) against images from -1 to 1."""
    error = (2 * true - 1 - torch.sigmoid(logits)).square().mean((-3, -2, -1)) / 3
    return -10 * torch.log10(error)


def ssim(true: Tensor, found: Tensor) -> Tensor:
    """Gives the structural similarity of images (images, channels, height, width): 1 for equal ones.

    Wang et al. 2004: Gaussian window, population covariance, windows inside the image, mean over places and channels.
    """
    x, y = true.flatten(0, 1)[:, None].double(), found.clamp(0, 1).flatten(0, 1)[:, None].double()
    window = gaussian(min(WINDOW, *(side - (side + 1) % 2 for side in true.shape[-2:]))).to(x)

    def smooth(values: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(values, window[None, None, None, :]), window[None, None, :, None])

    mx, my = smooth(x), smooth(y)
    vx, vy, both = smooth(x * x) - mx * mx, smooth(y * y) - my * my, smooth(x * y) - mx * my
    small, large = STEADY
    index = (2 * mx * my + small) * (2 * both + large) / ((mx * mx + my * my + small) * (vx + vy + large))
    return index.mean((-3, -2, -1)).reshape(true.shape[:2]).mean(-1).to(true.dtype)


def gaussian(side: int) -> Tensor:
    """Gives the weights of a window (side,) that sum to one."""
    places = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    weights = torch.exp(-places.square() / (2 * SPREAD**2))
    return weights / weights.sum()


def assigned(true: Tensor, found: Tensor, either: bool = False) -> Tensor:
    """Gives the found images of a batch (rows, …) in the order of the true ones that makes the squared error least.

    With `either` an image counts as itself or its negative, whichever is nearer; images come as they were found.
    """
    from scipy.optimize import linear_sum_assignment

    shown = found.clamp(0, 1)
    candidates = (shown, 1 - shown) if either else (shown,)
    costs = [(true.flatten(1)[:, None] - images.flatten(1)[None]).square().mean(-1) for images in candidates]
    _, order = linear_sum_assignment(torch.stack(costs).amin(0).cpu().double().numpy())
    return found[torch.from_numpy(np.asarray(order)).to(found.device)]


class Matched(NamedTuple):
    """Found images beside the true ones they belong to, (images, channels, height, width), and which were turned."""

    images: Tensor
    turned: Tensor


def matched(true: Tensor, found: Tensor, either: bool = False) -> Matched:
    """Gives the found images of batches (batches, rows, …) in the order of the true ones.

    With `either` each is itself or its negative, whichever is nearer.
    """
    truth = true.flatten(0, 1)
    shown = torch.cat([assigned(t, f, either) for t, f in zip(true, found, strict=True)]).clamp(0, 1)
    as_found, negative = ((truth - images).square().mean((-3, -2, -1)) for images in (shown, 1 - shown))
    turned = (negative < as_found) & either
    return Matched(torch.where(turned[:, None, None, None], 1 - shown, shown), turned)
