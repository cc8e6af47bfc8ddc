"""Folders of images with one sub-folder per class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from gpfl.data.files.layout import InputFile, class_folders, image_files
from gpfl.data.files.roles import check_divided, check_splits
from gpfl.data.files.samples import FileSamples
from gpfl.errors import GpflError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")
CAMERA_FORMATS = ("JPEG", "TIFF", "WEBP")  # formats with an orientation; a PNG would have to be decoded to know
ORIENTATION = 0x0112  # EXIF tag of the orientation of the camera
SIDEWAYS = (5, 6, 7, 8)
GREY = ("1", "L")
COLOUR = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr", "RGBX")


def load_images(inputs: Sequence[InputFile], side: int) -> FileSamples:
    """Return all images as bytes (samples, channels, height, width), resized to `side` pixels unless it is 0."""
    found = [(entry, folder.name, file) for entry in inputs for folder in class_folders(entry) for file in image_files(folder)]
    headers = [_read_header(file) for _, _, file in found]
    grey = all(mode in GREY for mode, _ in headers)
    width, height = (side, side) if side else _common_size([size for _, size in headers], [file for _, _, file in found])
    x = np.empty((len(found), 1 if grey else 3, height, width), dtype=np.uint8)
    for row, (_, _, file) in enumerate(found):
        x[row] = _decode(file, grey, (width, height)).reshape(height, width, -1).transpose(2, 0, 1)
    splits = check_splits(np.array([entry.split for entry, _, _ in found])) if check_divided(inputs) else None
    description = f"{'grey' if grey else 'colour'} images of {width}×{height}" + (", resized" if side else "")
    clients = np.array([entry.client for entry, _, _ in found]) if all(entry.client for entry in inputs) else None
    labels = np.array([label for _, label, _ in found])
    return FileSamples(
        x=x,
        input_description=description,
        labels=labels,
        clients=clients,
        client_hint="" if clients is not None else "put the class folders of each client into a folder of its own",
        splits=splits,
        metadata={"image_size": side},
    )


def _read_header(file: Path) -> tuple[str, tuple[int, int]]:
    """Return an image's mode and upright size without decoding it."""
    try:
        with _quiet(), Image.open(file, formats=FORMATS) as image:
            mode, size = image.mode, image.size[::-1] if _orientation(image) in SIDEWAYS else image.size
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise GpflError(
            f"{file} has over {Image.MAX_IMAGE_PIXELS or 0:,} pixels, more than is safe to decode: shrink it"
        ) from None
    except Exception as problem:  # damaged bytes may raise anything
        raise GpflError(f"{file} is not an image ({problem}): remove or replace it") from None
    if mode not in GREY + COLOUR:
        raise GpflError(f"{file} has pixels of mode {mode}, deeper than 8 bits: save it with 8 bits per channel")
    return mode, size


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _orientation(image: Image.Image) -> int:
    orientation = image.getexif().get(ORIENTATION, 1) if image.format in CAMERA_FORMATS else 1
    return orientation if isinstance(orientation, int) else 1


def _common_size(sizes: Sequence[tuple[int, int]], files: Sequence[Path]) -> tuple[int, int]:
    for size, file in zip(sizes, files, strict=True):
        if size != sizes[0]:
            raise GpflError(
                f"{file} is {size[0]}×{size[1]}, {files[0].name} is {sizes[0][0]}×{sizes[0][1]}: "
                "give all images the same size, or resize them with --image-size 64"
            )
    return sizes[0]


def _decode(file: Path, grey: bool, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    try:
        with _quiet(), Image.open(file, formats=FORMATS) as image:
            upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
            converted = upright.convert("L" if grey else "RGB")
            return np.asarray(converted if converted.size == size else converted.resize(size, Image.Resampling.BILINEAR))
    except Exception as problem:  # damaged bytes may raise anything
        raise GpflError(f"{file} is damaged ({problem}): remove or replace it") from None
