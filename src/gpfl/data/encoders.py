"""Encoders of samples: image files as pixels, texts as tokens."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpfl.errors import GpflError

if TYPE_CHECKING:
    from PIL import Image  # imported in functions: runs without image files start 0.1 s sooner

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")
CAMERA_FORMATS = ("JPEG", "TIFF", "WEBP")  # formats with an orientation; a PNG would have to be decoded to know
ORIENTATION = 0x0112  # EXIF tag of the orientation of the camera
SIDEWAYS = (5, 6, 7, 8)
GREY = ("1", "L")
COLOUR = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr", "RGBX")
PUNCTUATION = re.compile(r"(['.,()!?])")
SEPARATORS = re.compile(r"<br />|[;:]")
RULE = "basic_english"  # how `tokenize` splits texts, saved with every tokenizer so that models of a later rule are recognised


# Images.


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
    def from_dict(cls, content: Mapping[str, object]) -> "ImageFormat":
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
def _open(file: Path, failure: str) -> Iterator["Image.Image"]:
    from PIL import Image

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


def _orientation(image: "Image.Image") -> int:
    orientation = image.getexif().get(ORIENTATION, 1) if image.format in CAMERA_FORMATS else 1
    return orientation if isinstance(orientation, int) else 1


def decode(file: Path, grey: bool, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image, upright and in the given size (width, height)."""
    from PIL import Image, ImageOps

    with _open(file, "is damaged") as image:
        upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        converted = upright.convert("L" if grey else "RGB")
        return np.asarray(converted if converted.size == size else converted.resize(size, Image.Resampling.BILINEAR))


# Texts.


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, without quotes."""
    spaced = PUNCTUATION.sub(r" \1 ", text.lower().replace('"', ""))
    return SEPARATORS.sub(" ", spaced).split()


def build_vocabulary(texts: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the index of each word, from 1, ordered by frequency and then alphabet; 0 is padding."""
    counts = Counter(word for words in texts for word in words)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(order, start=1)}


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into tokens as in training. Words that are not in the vocabulary become 0, which is also the padding."""

    words: tuple[str, ...]  # the vocabulary; the first word is token 1
    length: int  # number of tokens of a text, which is cut or padded
    columns: tuple[str, ...] = ("text",)  # columns of a table that make up a text, joined by a space

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Token of each word."""
        return {word: number for number, word in enumerate(self.words, start=1)}

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return the tokens of texts, (texts, length)."""
        return self.encode_words([tokenize(text) for text in texts])

    def encode_words(self, texts: Sequence[Sequence[str]]) -> npt.NDArray[np.int32]:
        """Return the tokens of texts that are split into words already."""
        x = np.zeros((len(texts), self.length), dtype=np.int32)
        for row, words in enumerate(texts):
            tokens = [self.vocabulary.get(word, 0) for word in words[: self.length]]
            x[row, : len(tokens)] = tokens
        return x

    def count_unknown(self, texts: Sequence[str]) -> tuple[int, int]:
        """Return how many words of texts are not in the vocabulary, and how many there are."""
        words = [word for text in texts for word in tokenize(text)[: self.length]]
        return sum(word not in self.vocabulary for word in words), len(words)

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON holds it."""
        return {"rule": RULE, "words": list(self.words), "length": self.length, "columns": list(self.columns)}

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> "Tokenizer":
        """Return the tokenizer that `to_dict` wrote. Raise GpflError if it is invalid."""
        words, length, columns = (content.get(key) for key in ("words", "length", "columns"))
        lists = all(isinstance(each, list) and all(isinstance(entry, str) for entry in each) for each in (words, columns))
        if content.get("rule") != RULE or not lists or not isinstance(length, int) or length < 1:
            raise GpflError(f"this is not a tokenizer of gpfl with the rule {RULE}")
        return cls(tuple(words), length, tuple(columns))  # type: ignore[arg-type]
