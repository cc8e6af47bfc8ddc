"""Tiny-ImageNet."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

NAME = "tiny-imagenet-200.zip"
ROOT = "tiny-imagenet-200"
SIDE = 64
CLASSES = 200
MAX_BYTES = 1 << 20  # of one image or list
TRAINING_IMAGE = re.compile(rf"{ROOT}/train/(n\d{{8}})/images/\1_(\d+)\.JPEG")


def parse(paths: Mapping[str, Path]) -> Table:
    """Return the training images in the order of class and number; the test images have no published labels."""
    path = paths[NAME]
    with archive.open_zip(path, str(path)) as members:
        wnids = archive.read_zip_member(members, f"{ROOT}/wnids.txt", MAX_BYTES).decode("ascii").split()
        label_of = {wnid: label for label, wnid in enumerate(sorted(set(wnids)))}
        found = [match for match in map(TRAINING_IMAGE.fullmatch, members.namelist()) if match and match[1] in label_of]
        found.sort(key=lambda match: (label_of[match[1]], int(match[2])))
        if len({match[1] for match in found}) != CLASSES:
            raise ValueError(f"it does not hold training images of {CLASSES} classes")
        x = np.empty((len(found), 3, SIDE, SIDE), dtype=np.uint8)
        for row, match in enumerate(found):
            x[row] = _read_image(members, match[0])
    labels = np.array([label_of[match[1]] for match in found])
    return Table(x, labels, classes=CLASSES, name="tiny", kind="pixels")


def _read_image(members: zipfile.ZipFile, name: str) -> npt.NDArray[np.uint8]:
    content = archive.read_zip_member(members, name, MAX_BYTES)
    with archive.report_damage(f"{name} in {members.filename}"), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
        if image.size != (SIDE, SIDE):
            raise ValueError(f"{image.size[0]}×{image.size[1]} pixels instead of {SIDE}×{SIDE}")
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


TINY = PublishedDataset(
    name="tiny",
    description="Tiny-ImageNet: 100,000 photographs, 64×64 colour, 200 classes",
    files=(PublishedFile(NAME, f"http://cs231n.stanford.edu/{NAME}", 248_100_043, md5="90528d7ca1a48142e341f4ef8d21d0de"),),
    licence="non-commercial (ImageNet terms)",
    n_samples=100_000,
    folder_names=("tiny_imagenet", "tiny-imagenet", "tiny-imagenet-200", "TinyImagenet"),
    parse=parse,
    partition={"name": "dirichlet", "clients": 20, "beta": 0.1},
    net={"name": "cnn4"},
)
