"""Read images as pixels, as in training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps


def read(paths: Sequence[str]) -> Sequence[str]:
    """Return the paths of images."""
    return paths


def encode(paths: Sequence[str], spec: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Return images as pixels (images, channels, height, width). Raise if one has another size."""
    size, mode = (spec["width"], spec["height"]), "L" if spec["channels"] == 1 else "RGB"
    images = []
    for path in paths:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert(mode)
        if image.size != size and not spec["resize"]:
            raise ValueError(f"{path} is {image.size[0]}×{image.size[1]}; the model takes {size[0]}×{size[1]}")
        resized = image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)
        images.append(np.asarray(resized).reshape(*size[::-1], -1).transpose(2, 0, 1))
    return np.stack(images)


def graph_inputs(paths: Sequence[str], spec: Mapping[str, Any], _: Sequence[Any]) -> dict[str, npt.NDArray[np.uint8]]:
    """Return the input of the ONNX model."""
    return {"pixels": encode(paths, spec)}
