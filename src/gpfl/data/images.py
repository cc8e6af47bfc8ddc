"""Decode image files, and describe the images that a model takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from gpfl.errors import GpflError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")
CAMERA_FORMATS = ("JPEG", "TIFF", "WEBP")  # formats with an orientation; a PNG would have to be decoded to know
ORIENTATION = 0x0112  # EXIF tag of the orientation of the camera
SIDEWAYS = (5, 6, 7, 8)
GREY = ("1", "L")
COLOUR = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr", "RGBX")


@dataclass(frozen=True)
class ImageFormat:
    """The images that a model takes."""

    channels: int  # 1 for grey, 3 for colour images. Others are converted
    height: int  # height in pixels
    width: int  # width in pixels
    resize: bool = False  # whether images of another size are resized; otherwise they are an error

    @property
    def is_grey(self) -> bool:
        """Whether the model takes grey images."""
        return self.channels == 1

    def __str__(self) -> str:
        return f"{'grey' if self.is_grey else 'colour'} images of {self.width}×{self.height}"

    def read(self, files: Sequence[Path]) -> npt.NDArray[np.uint8]:
        """Return images as bytes (images, channels, height, width)."""
        x = np.empty((len(files), self.channels, self.height, self.width), dtype=np.uint8)
        for row, file in enumerate(files):
            pixels = decode(file, self.is_grey, (self.width, self.height))
            x[row] = pixels.reshape(self.height, self.width, -1).transpose(2, 0, 1)
        return x

    def check(self, files: Sequence[Path]) -> int:
        """Return how many colour images are read as grey. Raise if one cannot be read, or has another size."""
        colour = 0
        for file in files:
            mode, size = read_header(file)
            colour += self.is_grey and mode not in GREY
            if size != (self.width, self.height) and not self.resize:
                raise GpflError(
                    f"{file} is {size[0]}×{size[1]}; the model takes {self}: resize the image, or train with --image-size, "
                    "which resizes images"
                )
        return colour

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> ImageFormat:
        """Return the format that `to_dict` wrote."""
        return cls(**content)  # type: ignore[arg-type]


def read_header(file: Path) -> tuple[str, tuple[int, int]]:
    """Return an image's mode and upright size without decoding it."""
    with _open(file, "is not an image") as image:
        mode, size = image.mode, image.size[::-1] if _orientation(image) in SIDEWAYS else image.size
    if mode not in GREY + COLOUR:
        raise GpflError(f"{file} has pixels of mode {mode}, deeper than 8 bits: save it with 8 bits per channel")
    return mode, size


@contextmanager
def _open(file: Path, failure: str) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings(action="ignore"):
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise GpflError(
            f"{file} has over {Image.MAX_IMAGE_PIXELS or 0:,} pixels, more than is safe to decode: shrink it"
        ) from None
    except Exception as problem:  # damaged bytes may raise anything
        raise GpflError(f"{file} {failure} ({problem}): remove or replace it") from None


def _orientation(image: Image.Image) -> int:
    orientation = image.getexif().get(ORIENTATION, 1) if image.format in CAMERA_FORMATS else 1
    return orientation if isinstance(orientation, int) else 1


def decode(file: Path, grey: bool, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image, upright and in the given size (width, height)."""
    with _open(file, "is damaged") as image:
        upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        converted = upright.convert("L" if grey else "RGB")
        return np.asarray(converted if converted.size == size else converted.resize(size, Image.Resampling.BILINEAR))
