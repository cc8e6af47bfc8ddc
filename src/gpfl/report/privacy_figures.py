"""Figures of privacy: grids of reconstructed images, and the trade-offs of defences."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpfl.experiments.defence_study import FAMILIES, DefenceFamily, DefenceStudy
from gpfl.experiments.definitions import display_name
from gpfl.experiments.privacy_table import PrivacyTable
from gpfl.privacy.attack_runner import CaseResult, record_values
from gpfl.report.plotting import (
    annotate,
    figure_style,
    line_style,
    method_styles,
    new_figure,
    png_and_pdf,
    save_figure,
    use_log_scale,
)

_MAX_IMAGES = 10
_IMAGE_SIZE, _LABEL_WIDTH = 0.72, 1.9  # inches


class ImageRow(NamedTuple):
    """A row of images with their PSNRs, and whether each is shown as its negative."""

    label: str
    images: Tensor
    psnrs: Sequence[float] = ()
    inverted: Sequence[bool] = ()

    @classmethod
    def of_case(cls, label: str, result: CaseResult) -> "ImageRow":
        """Return the row of a case."""
        inverted = [bool(record["turned"]) for record in result.records]
        return cls(label, result.reconstructed, list(record_values(result.records, "either_psnr")), inverted)


@figure_style()
def draw_grid(true: Tensor, rows: Sequence[ImageRow], title: str, stem: Path) -> list[Path]:
    """Draw the first images and their reconstructions, a row for each case, and return the files."""
    across = min(_MAX_IMAGES, len(true))
    figure = new_figure(_LABEL_WIDTH + _IMAGE_SIZE * across, 0.7 + (_IMAGE_SIZE + 0.17) * (len(rows) + 1))
    panels = figure.subplots(len(rows) + 1, across, squeeze=False)
    for y, row in enumerate([ImageRow("original", true), *rows]):
        for x in range(across):
            axes = panels[y, x]
            axes.imshow(_to_pixels(row.images[x]), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if row.psnrs:
                axes.set_xlabel(f"{row.psnrs[x]:.1f}{' neg.' if row.inverted[x] else ''}", fontsize=6, labelpad=1.5)
        panels[y, 0].set_ylabel(row.label, rotation=0, ha="right", va="center", fontsize=8)
    inverted = any(any(row.inverted[:across]) for row in rows)
    annotate(figure, title, ["neg.: the negative of the reconstruction, which is closer to the original."] * inverted)
    return save_figure(figure, *png_and_pdf(stem))


def _to_pixels(image: Tensor) -> npt.NDArray[np.float32]:
    """Return an image as (height, width) in grey or (height, width, 3) in colour."""
    pixels: npt.NDArray[np.float32] = image.clamp(0, 1).movedim(0, -1).numpy()
    return pixels[..., 0] if pixels.shape[-1] != 3 else pixels


def draw_table_grids(table: PrivacyTable, folder: Path) -> dict[str, list[Path]]:
    """Draw a grid for each setting of the paper's table and return the files by attack."""
    paths: dict[str, list[Path]] = {attack: [] for attack in table.ceilings}
    for attack in paths:
        for row in table.rows(attack).values():
            case, first = next(iter(row.values()))
            rows = [ImageRow.of_case(column.label, result) for column, (_, result) in row.items()]
            stem = folder / f"grid-{attack}-round-{case.round}-{case.steps}-batch-{case.batch}"
            paths[attack] += draw_grid(first.true, rows, f"{attack}, {case.setting}: PSNR in dB", stem)
    return paths


def draw_study(study: DefenceStudy, folder: Path) -> list[Path]:
    """Draw the figures of a study and return the files; accuracy against ε only if ε is stated."""
    stated = any(point.epsilon is not None for point in study.points)
    return [*(draw_epsilon(study, folder / "epsilon") if stated else []), *draw_leakage(study, folder / "leak")]


@figure_style()
def draw_epsilon(study: DefenceStudy, stem: Path) -> list[Path]:
    """Draw accuracy against ε, a panel for each level: filled markers as run, hollow ones for Poisson sampling."""
    families = [
        family for family in FAMILIES if family.level and any(study.curve(name, family.option) for name in study.methods)
    ]
    figure = new_figure(3.6 * len(families) + 2.2, 3.6)
    panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    for axes, family in zip(panels, families, strict=True):
        for method, style in method_styles(study.methods).items():
            name, points = display_name(method), study.curve(method, family.option)
            hollow = {**style, "linestyle": ":", "linewidth": 1.0, "markerfacecolor": "white"}
            kinds = (("epsilon", name, style), ("epsilon_if_poisson", f"{name}, Poisson", hollow))
            for key, label, line in kinds:
                stated = [(getattr(point, key), 100 * point.accuracy) for point in points if getattr(point, key) is not None]
                if stated:
                    axes.plot(*zip(*stated, strict=True), **line, label=label)
            for point in study.curve(method, ""):
                axes.axhline(100 * point.accuracy, **{**style, "marker": "", "linewidth": 0.8, "alpha": 0.6})
        use_log_scale(axes.xaxis)
        axes.set(xlabel="ε", title=f"{family.level} level")
    panels[0].set_ylabel("accuracy, %")
    annotate(figure, "", [f"Horizontal lines: no defence{_describe_variants(study)}. Left is more private."], panels)
    return save_figure(figure, *png_and_pdf(stem))


@figure_style()
def draw_leakage(study: DefenceStudy, stem: Path) -> list[Path]:
    """Draw PSNR against accuracy, a panel for each method, with a line for each family and larger markers for more of it."""
    figure = new_figure(3.3 * len(study.methods) + 2.8, 3.8)
    panels = figure.subplots(1, len(study.methods), squeeze=False, sharey=True)[0]
    for axes, method in zip(panels, study.methods, strict=True):
        for index, family in enumerate(FAMILIES):
            points = study.curve(method, family.option)
            if family.option in ("top_k", "bits"):  # smaller values are stronger
                points = points[::-1]
            if not points:
                continue
            x, y = [100 * point.accuracy for point in points], [point.psnr for point in points]
            line = line_style(index + 1)
            axes.plot(x, y, **{**line, "markersize": 4}, label=_family_label(study, family))
            axes.scatter(
                x, y, s=[(3 + 2 * k) ** 2 for k in range(len(x))], color=line["color"], marker=line["marker"], zorder=3
            )
        for point in study.curve(method, ""):
            axes.plot([100 * point.accuracy], [point.psnr], "k*", markersize=9, label="no defence")
        floor = float(np.mean([point.floor for point in study.points if point.method == method]))
        axes.axhline(floor, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)), label="floor")
        axes.set(xlabel="accuracy, %", title=display_name(method))
    panels[0].set_ylabel("PSNR of the reconstruction, dB")
    stars = f"Stars: no defence{_describe_variants(study)}."
    footnote = f"Larger markers: stronger defence, in the order of the legend. {stars} Right and down is better."
    annotate(figure, "", [footnote], panels)
    return save_figure(figure, *png_and_pdf(stem))


def _family_label(study: DefenceStudy, family: DefenceFamily) -> str:
    values = sorted({point.value for point in study.points if point.family == family.option})
    if family.option in ("top_k", "bits"):
        values.reverse()
    return f"{family.description}:\n{', '.join(f'{value:g}' for value in values)}"


def _describe_variants(study: DefenceStudy) -> str:
    several = any(point.variant for point in study.points if not point.family)
    return ", also with the method options of defended runs" if several else ""
