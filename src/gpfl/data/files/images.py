"""Folders of images: one sub-folder for each class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from gpfl.data.files.gathered import Gathered
from gpfl.data.files.labels import checked_parts
from gpfl.data.files.layout import Piece, class_folders, image_files
from gpfl.errors import GpflError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")
TURNED = ("JPEG", "TIFF", "WEBP")
"""Formats that cameras write; a PNG would have to be decoded to be asked."""
ORIENTATION = 0x0112
"""The tag that says how a camera was held."""
SIDEWAYS = (5, 6, 7, 8)
GREY = ("1", "L")
COLOUR = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr", "RGBX")


def gather_images(pieces: Sequence[Piece], side: int) -> Gathered:
    """Gives all images (channels, height, width) as bytes; `side` is the one they are made square to, 0 leaves them alone."""
    found = [(piece, folder.name, file) for piece in pieces for folder in class_folders(piece) for file in image_files(folder)]
    facts = [look(file) for _, _, file in found]
    grey = all(mode in GREY for mode, _ in facts)
    width, height = (side, side) if side else one_size([size for _, size in facts], [file for _, _, file in found])
    x = np.empty((len(found), 1 if grey else 3, height, width), dtype=np.uint8)
    for row, (_, _, file) in enumerate(found):
        x[row] = decode(file, grey, (width, height)).reshape(height, width, -1).transpose(2, 0, 1)
    told = all(piece.client for piece in pieces)
    parted = {bool(piece.part) for piece in pieces}
    if len(parted) > 1:
        odd = next(piece for piece in pieces if not piece.part)
        raise GpflError(f"{odd.path} is not divided into train and test, but others are: divide all clients or none")
    parts = checked_parts(np.array([piece.part for piece, _, _ in found])) if parted == {True} else None
    words = f"{'grey' if grey else 'colour'} images of {width}×{height}" + (", resized" if side else "")
    clients = np.array([piece.client for piece, _, _ in found]) if told else None
    labels = np.array([label for _, label, _ in found])
    return Gathered(x, labels, clients, parts, None, words, recipe={"image_size": side})


def look(file: Path) -> tuple[str, tuple[int, int]]:
    """Gives an image's mode and size, as it is to be looked at, without decoding it."""
    try:
        with quiet(), Image.open(file, formats=FORMATS) as image:
            mode, size = image.mode, image.size[::-1] if orientation(image) in SIDEWAYS else image.size
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise GpflError(
            f"{file} has over {Image.MAX_IMAGE_PIXELS or 0:,} pixels, more than is safe to decode: shrink it"
        ) from None
    except Exception as problem:  # damaged bytes may raise anything
        raise GpflError(f"{file} is not an image ({problem}): remove or replace it") from None
    if mode not in GREY + COLOUR:
        raise GpflError(f"{file} has pixels of mode {mode}, deeper than 8 bits: save it with 8 bits a channel")
    return mode, size


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Pillow's warnings from the terminal; the one about images too large to decode becomes an error."""
    with warnings.catch_warnings(action="ignore"):
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def orientation(image: Image.Image) -> int:
    """Gives how a camera was held, from 1, upright, to 8."""
    held = image.getexif().get(ORIENTATION, 1) if image.format in TURNED else 1
    return held if isinstance(held, int) else 1


def one_size(sizes: Sequence[tuple[int, int]], files: Sequence[Path]) -> tuple[int, int]:
    """Gives the one size that all images have."""
    for size, file in zip(sizes, files, strict=True):
        if size != sizes[0]:
            raise GpflError(
                f"{file} is {size[0]}×{size[1]}, {files[0].name} is {sizes[0][0]}×{sizes[0][1]}: "
                "give all images one size, or say --image-size 64 to resize them"
            )
    return sizes[0]


def decode(file: Path, grey: bool, size: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Gives the bytes of an image in the wanted size."""
    try:
        with quiet(), Image.open(file, formats=FORMATS) as image:
            upright = ImageOps.exif_transpose(image) if orientation(image) > 1 else image
            plain = upright.convert("L" if grey else "RGB")
            return np.asarray(plain if plain.size == size else plain.resize(size, Image.Resampling.BILINEAR))
    except Exception as problem:  # damaged bytes may raise anything
        raise GpflError(f"{file} is damaged ({problem}): remove or replace it") from None
