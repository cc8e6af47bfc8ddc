"""Summary of an attack case: means over images, and the verdict whether the upload leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from gpfl.privacy.attack_cases import AttackCase
from gpfl.privacy.attack_runner import CaseResult, Record

Floats = npt.NDArray[np.float64]

MIN_IMAGES = 6  # images from which a signed-rank test can be significant
_SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class CaseSummary:
    """Means over the images of a case. Each counts as itself or its negative, whichever is closer, except `…_as_found`."""

    case: AttackCase
    images: int
    psnr: float
    std: float
    ssim: float
    start_psnr: float  # of the images that the attack starts from
    mean_psnr: float  # of the dataset's mean image
    leaks: bool
    tested: bool  # by a signed-rank test; with few images only the means are compared
    psnr_as_found: float
    ssim_as_found: float
    inverted: int  # images whose negative is closer

    @property
    def floor(self) -> float:
        """PSNR of the better of the two guesses that need no upload."""
        return max(self.start_psnr, self.mean_psnr)

    @property
    def verdict(self) -> str:
        """Whether the upload leaks, as text."""
        if not self.tested:
            return f"{'above' if self.leaks else 'at'} the floor (too few images to test)"
        if self.leaks:
            return "leaks"
        return "above the floor, not significantly" if self.psnr > self.floor else "at the floor"


def summarize_case(case: AttackCase, result: CaseResult, formula: str = "proper") -> CaseSummary:
    """Return the summary of a case with PSNRs by one of `attack_cases.PSNR_FORMULAS`."""
    keys = ("either_psnr", "either_start_psnr", "either_mean_psnr", "either_ssim", "psnr", "ssim", "turned")
    psnr, start, mean, ssim, as_found, ssim_as_found, inverted = (record_values(result.records, key) for key in keys)
    # Net inputs have four times the squared error of pixels; the formula divides it by 3.
    shift = 10 * np.log10(4 / 3) if formula == "reference" else 0.0
    return CaseSummary(
        case,
        len(result.records),
        psnr=float(psnr.mean() - shift),
        std=float(psnr.std()),
        ssim=float(ssim.mean()),
        start_psnr=float(start.mean() - shift),
        mean_psnr=float(mean.mean() - shift),
        leaks=_exceeds(psnr, np.maximum(start, mean)),
        tested=len(result.records) >= MIN_IMAGES,
        psnr_as_found=float(as_found.mean() - shift),
        ssim_as_found=float(ssim_as_found.mean()),
        inverted=int(inverted.sum()),
    )


def record_values(records: Sequence[Record], key: str) -> Floats:
    """Return the values of a key of all records."""
    return np.array([cast(float, record[key]) for record in records])


def signed_rank_p_value(differences: Floats, alternative: str = "two-sided") -> float | None:
    """Return the p-value of a signed-rank test, or None if there are too few images to test."""
    from scipy.stats import wilcoxon

    if len(differences) < MIN_IMAGES or not np.any(differences):
        return None
    return float(wilcoxon(differences, alternative=alternative).pvalue)


def _exceeds(psnr: Floats, floor: Floats) -> bool:
    """Return whether images are closer to the truth than the floor: by a signed-rank test, for few images by the mean."""
    p_value = signed_rank_p_value(psnr - floor, "greater")
    return bool((psnr - floor).mean() > 0) if p_value is None else p_value < _SIGNIFICANCE
