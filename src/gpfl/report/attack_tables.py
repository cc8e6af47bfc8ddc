"""Tables of attacks: each case beside its floors and the ceiling, with a verdict that the numbers carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from gpfl.privacy.attack import Case, Kept, Record
from gpfl.report.attack_images import Row

Floats = npt.NDArray[np.float64]

FEWEST, CHANCE = 6, 0.05
"""Images from which a signed-rank test, of one side or of two, can say something, and the chance below which it does."""

PSNRS = ("proper", "reference")
"""Peak 1 in pixels from 0 to 1, or the formula of the authors' code."""


@dataclass(frozen=True)
class Line:
    """A case in numbers: means over images, the verdict by image. All but what is as found is under either sign."""

    case: Case
    images: int
    psnr: float
    std: float
    ssim: float
    start: float
    mean: float
    leaks: bool
    tested: bool  # image by image; few images are judged by their mean
    psnr_as_found: float
    ssim_as_found: float
    turned: int  # images whose negative is nearer

    @property
    def floor(self) -> float:
        """The better of the two guesses without an attack."""
        return max(self.start, self.mean)


def numbers(records: Sequence[Record], key: str) -> Floats:
    """Gives a number of each record."""
    return np.array([cast(float, record[key]) for record in records])


def line_of(case: Case, kept: Kept, psnr: str = "proper") -> Line:
    """Gives the line of a case, by one of PSNRS."""
    records = kept.records
    keys = ("either_psnr", "either_start_psnr", "either_mean_psnr", "either_ssim", "psnr", "ssim", "turned")
    found, start, mean, ssim, as_found, ssim_as_found, turned = (numbers(records, key) for key in keys)
    # The formula's constant: it divides the error by 3, which is four times as large on what nets are given.
    shift = 10 * np.log10(4 / 3) if psnr == "reference" else 0.0
    return Line(
        case,
        len(records),
        psnr=float(found.mean() - shift),
        std=float(found.std()),
        ssim=float(ssim.mean()),
        start=float(start.mean() - shift),
        mean=float(mean.mean() - shift),
        leaks=beats(found, np.maximum(start, mean)),
        tested=len(records) >= FEWEST,
        psnr_as_found=float(as_found.mean() - shift),
        ssim_as_found=float(ssim_as_found.mean()),
        turned=int(turned.sum()),
    )


def row_of(label: str, kept: Kept) -> Row:
    """Gives a case as a row of pictures."""
    turned = [bool(record["turned"]) for record in kept.records]
    return Row(label, kept.found, list(numbers(kept.records, "either_psnr")), turned)


def beats(found: Floats, floor: Floats) -> bool:
    """Tells whether images were rebuilt better than the floor, image by image: by a signed-rank test, of few by the mean."""
    from scipy.stats import wilcoxon

    difference = found - floor
    if len(difference) < FEWEST or not np.any(difference):
        return bool(difference.mean() > 0)
    return bool(wilcoxon(difference, alternative="greater").pvalue < CHANCE)


def verdict(line: Line) -> str:
    """Gives the verdict in words."""
    if not line.tested:
        return f"{'above' if line.leaks else 'at'} the floor (too few images to test)"
    if line.leaks:
        return "leaks"
    return "above the floor, not for certain" if line.psnr > line.floor else "at the floor"


HEADINGS = (
    *("method", "target", "attack", "round", "trained", "verdict"),
    *("batch", "images", "PSNR, dB", "SSIM", "start", "mean image", "turned", "PSNR as found", "SSIM as found"),
)


def cells(line: Line) -> list[str]:
    """Gives the cells of a line."""
    case = line.case
    trained = "one step" if case.steps == "one" else "one epoch"
    return [
        *(case.method, case.target, case.kind, case.round, trained, verdict(line), str(case.batch), str(line.images)),
        *(f"{line.psnr:.2f} ± {line.std:.2f}", f"{line.ssim:.3f}", f"{line.start:.2f}", f"{line.mean:.2f}"),
        *(str(line.turned), f"{line.psnr_as_found:.2f}", f"{line.ssim_as_found:.3f}"),
    ]


def rows_of(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Gives the lines of a Markdown table whose first `words` columns are words."""
    marks = ["---" if place < words else "---:" for place in range(len(headings))]
    return ["| " + " | ".join(row) + " |" for row in (headings, marks, *rows)]


def markdown(done: Mapping[Case, Kept], ceiling: tuple[Case, Kept], psnr: str, title: str) -> str:
    """Gives the table of an attack with its ceiling and what must be known of it."""
    lines = [line_of(case, kept, psnr) for case, kept in done.items()]
    top = line_of(*ceiling, psnr)
    text = [f"{title}\n", *rows_of(HEADINGS, [cells(line) for line in lines], 6), ""]
    text += [f"{note}\n" for note in notes(top, psnr, ceiling[1].records)]
    return "\n".join(text)


EITHER = (
    "PSNR, SSIM, floors and verdicts are under either sign: an image that was rebuilt as its negative shows as much, so each "
    "counts as it is or turned to its negative, whichever is nearer; the start and the mean image too."
)


def notes(top: Line, psnr: str, records: Sequence[Record]) -> list[str]:
    """Gives the sentences under a table: how to read it, its ceiling, and whether it says anything."""
    text = [
        "Lower is more private. The start is a random image that no attack has touched, the mean image is that of all data: "
        "a case leaks where it is nearer to the victims than both, image by image (signed-rank test, p < 0.05).",
        EITHER,
        f"Ceiling (fedavg, untrained net, one step, batch {top.case.batch}, model): {top.psnr:.2f} dB, SSIM {top.ssim:.3f}. In "
        "harder settings (larger batches, whole epochs, later rounds) to be at the floor may be the attack's weakness: a "
        "fedavg that is attacked there too would tell.",
    ]
    if not top.leaks:
        text.append(void(top))
    if psnr == "reference":
        untouched = numbers(records, "reference_start").mean()
        text.append(
            "PSNR by the formula of the authors' code: −10·log10(MSE/3) on what nets are given. In their code an attack that "
            f"was never begun scores {untouched:.2f} dB on these images; the paper's values lie between 6.41 and 7.94."
        )
    return text


def void(top: Line) -> str:
    """Gives the sentence about an attack that fails where nothing is protected, or does not win for certain."""
    if top.psnr > top.floor:
        return (
            f"**This table proves little**: even there the attack is above its floor ({top.floor:.2f} dB) on average but not "
            "image by image. More images, iterations or restarts would tell."
        )
    return (
        f"**This table proves nothing**: the attack does not beat its floor ({top.floor:.2f} dB) even there, so a low value "
        "says that the attack is weak, not that a method is private."
    )
