"""Fashion-MNIST."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MAGIC = {3: 0x0803, 1: 0x0801}  # by number of axes
SPLITS = (("train", 60_000), ("t10k", 10_000))
CLASSES = 10
FILES = (
    (
        *("train-images-idx3-ubyte.gz", 26_421_880),
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    (
        *("train-labels-idx1-ubyte.gz", 29_515),
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    (
        *("t10k-images-idx3-ubyte.gz", 4_422_102),
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    (
        *("t10k-labels-idx1-ubyte.gz", 5_148),
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
"""Name, size, SHA-256 and SHA-256 of the content."""


def parse(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test images."""
    images = [_read_idx(paths[f"{split}-images-idx3-ubyte.gz"], (count, 28, 28)) for split, count in SPLITS]
    labels = [_read_idx(paths[f"{split}-labels-idx1-ubyte.gz"], (count,)) for split, count in SPLITS]
    return Table(np.concatenate(images)[:, None], np.concatenate(labels), classes=CLASSES, name="fmnist", kind="pixels")


def _read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return the array of an idx file: a magic number, the axes' lengths and one byte per entry."""
    header = 4 * (1 + len(shape))
    with archive.report_damage(path):
        content = archive.read_gzip(path, header + math.prod(shape))
        magic, *axes = np.frombuffer(content[:header], dtype=">u4").tolist()
        if magic != MAGIC[len(shape)] or tuple(axes) != shape:
            raise ValueError(f"magic number {magic:#x} and shape {tuple(axes)}, not {MAGIC[len(shape)]:#x} and {shape}")
        return np.frombuffer(content[header:], dtype=np.uint8).reshape(shape)


FMNIST = PublishedDataset(
    name="fmnist",
    description="Fashion-MNIST: 70,000 images of clothes, 28×28 grey, 10 classes",
    files=tuple(
        PublishedFile(name, URL + name, size, sha256=sha256, content_sha256=content) for name, size, sha256, content in FILES
    ),
    licence="MIT",
    n_samples=70_000,
    class_names=("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    folder_names=("fashion_mnist", "fashion-mnist", "fashionmnist", "FashionMNIST", "FashionMNIST/raw"),
    system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
    parse=parse,
    partition={"name": "dirichlet", "clients": 20, "beta": 0.1},
    net={"name": "cnn4"},
)
