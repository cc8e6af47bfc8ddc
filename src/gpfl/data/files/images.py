"""Folders of images with one sub-folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpfl.data.files.layout import InputFile, class_folders, image_files
from gpfl.data.files.roles import check_divided, check_splits
from gpfl.data.files.samples import FileSamples
from gpfl.data.images import GREY, ImageFormat, read_header
from gpfl.errors import GpflError


def load_images(inputs: Sequence[InputFile], side: int) -> FileSamples:
    """Return all images as bytes (samples, channels, height, width), resized to `side` pixels unless it is 0."""
    found = [(entry, folder.name, file) for entry in inputs for folder in class_folders(entry) for file in image_files(folder)]
    headers = [read_header(file) for _, _, file in found]
    channels = 1 if all(mode in GREY for mode, _ in headers) else 3
    paths = [file for _, _, file in found]
    width, height = (side, side) if side else _common_size([size for _, size in headers], paths)
    images = ImageFormat(channels, height, width, resize=bool(side))
    splits = check_splits(np.array([entry.split for entry, _, _ in found])) if check_divided(inputs) else None
    description = str(images) + (", resized" if side else "")
    clients = np.array([entry.client for entry, _, _ in found]) if all(entry.client for entry in inputs) else None
    labels = np.array([label for _, label, _ in found])
    return FileSamples(
        x=images.read(paths),
        encoder=images,
        input_description=description,
        labels=labels,
        clients=clients,
        client_hint="" if clients is not None else "put the class folders of each client into a folder of its own",
        splits=splits,
        metadata={"image_size": side},
    )


def _common_size(sizes: Sequence[tuple[int, int]], files: Sequence[Path]) -> tuple[int, int]:
    for size, file in zip(sizes, files, strict=True):
        if size != sizes[0]:
            raise GpflError(
                f"{file} is {size[0]}×{size[1]}, {files[0].name} is {sizes[0][0]}×{sizes[0][1]}: "
                "give all images the same size, or resize them with --image-size 64"
            )
    return sizes[0]
