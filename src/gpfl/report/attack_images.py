"""Pictures of attacks: originals, and below them what was rebuilt in each case."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpfl.report import plotting

MOST = 10
"""Images across."""
INCH, MARGIN = 0.72, 1.9
"""Inches of one image, and of the words at its left."""
LETTERS = 11
"""Letters of a title in an inch."""


class Row(NamedTuple):
    """A row of pictures: images, and of each its PSNR and whether it is shown as its negative."""

    label: str
    images: Tensor
    psnrs: Sequence[float] = ()
    turned: Sequence[bool] = ()


def draw_grid(true: Tensor, rows: Sequence[Row], title: str, stem: Path) -> list[Path]:
    """Writes the first images and what was rebuilt of them, a row a case with its PSNR, as PNG and PDF; gives the files."""
    across = min(MOST, len(true))
    wide = MARGIN + INCH * across
    lines = textwrap.wrap(title, int(LETTERS * wide))
    figure = plotting.new_figure(wide, 0.3 + 0.2 * len(lines) + (INCH + 0.17) * (len(rows) + 1))
    figure.suptitle("\n".join(lines), fontsize=plotting.MIDDLE)
    places = figure.subplots(len(rows) + 1, across, squeeze=False)
    for down, row in enumerate([Row("original", true), *rows]):
        for right in range(across):
            axes = places[down, right]
            axes.imshow(pixels(row.images[right]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set_visible(False)
            if row.psnrs:
                mark = " neg." if row.turned[right] else ""
                axes.set_xlabel(f"{row.psnrs[right]:.1f}{mark}", fontsize=6, labelpad=1.5)
        places[down, 0].set_ylabel(row.label, rotation=0, ha="right", va="center", fontsize=plotting.SMALL)
    if any(any(row.turned[:across]) for row in rows):
        plotting.add_footnote(figure, ["neg.: the negative of what was found, which is nearer to the original."])
    return plotting.save_png_and_pdf(figure, stem)


def pixels(image: Tensor) -> npt.NDArray[np.float32]:
    """Gives an image as it is drawn: (height, width) in grey, (height, width, 3) in colour."""
    shown: npt.NDArray[np.float32] = image.clamp(0, 1).movedim(0, -1).numpy()
    return shown[..., 0] if shown.shape[-1] != 3 else shown
