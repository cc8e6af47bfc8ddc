"""Datasets of images: Fashion-MNIST, CIFAR-100, Tiny-ImageNet, and scikit-learn's handwritten digits."""

import io
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import DataSource, Table

FMNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FMNIST_SPLITS = (("train", 60_000), ("t10k", 10_000))
FMNIST_FILES = (
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


def parse_fmnist(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test images."""
    images = [_read_idx(paths[f"{split}-images-idx3-ubyte.gz"], (count, 28, 28)) for split, count in FMNIST_SPLITS]
    labels = [_read_idx(paths[f"{split}-labels-idx1-ubyte.gz"], (count,)) for split, count in FMNIST_SPLITS]
    return Table(np.concatenate(images)[:, None], np.concatenate(labels), classes=10, name="fmnist", kind="pixels")


def _read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return the array of an idx file: a magic number, the axes' lengths and one byte per entry."""
    header, expected = 4 * (1 + len(shape)), 0x0800 + len(shape)
    with archive.report_damage(path):
        content = archive.read_gzip(path, header + math.prod(shape))
        magic, *axes = np.frombuffer(content[:header], dtype=">u4").tolist()
        if magic != expected or tuple(axes) != shape:
            raise ValueError(f"magic number {magic:#x} and shape {tuple(axes)}, not {expected:#x} and {shape}")
        return np.frombuffer(content[header:], dtype=np.uint8).reshape(shape)


FMNIST = PublishedDataset(
    name="fmnist",
    description="Fashion-MNIST: 70,000 images of clothes, 28×28 grey, 10 classes",
    files=tuple(
        PublishedFile(name, FMNIST_URL + name, size, sha256=sha256, content_sha256=content)
        for name, size, sha256, content in FMNIST_FILES
    ),
    licence="MIT",
    n_samples=70_000,
    class_names=("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    folder_names=("fashion_mnist", "fashion-mnist", "fashionmnist", "FashionMNIST", "FashionMNIST/raw"),
    system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
    parse=parse_fmnist,
    partition={"name": "dirichlet", "clients": 20, "beta": 0.1},
    net={"name": "cnn4"},
    methods={"gpfl": {"guidance": "embeddings"}},
)

CIFAR100_FILE = "cifar-100-binary.tar.gz"
CIFAR100_MEMBERS = {"cifar-100-binary/train.bin": 50_000, "cifar-100-binary/test.bin": 10_000}


def parse_cifar100(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test images with their fine labels."""
    width = 2 + 3 * 32 * 32  # coarse label, fine label, pixels
    with archive.report_damage(paths[CIFAR100_FILE]):
        total = sum(CIFAR100_MEMBERS.values()) * width
        members = archive.read_tar_gz(paths[CIFAR100_FILE], tuple(CIFAR100_MEMBERS), total)
        records = [np.frombuffer(members[name], np.uint8).reshape(count, width) for name, count in CIFAR100_MEMBERS.items()]
        images = np.concatenate(records)
        if images[:, 1].max() > 99:
            raise ValueError(f"label {images[:, 1].max()} is not 0 to 99")
    return Table(images[:, 2:].reshape(-1, 3, 32, 32), images[:, 1], classes=100, name="cifar100", kind="pixels")


CIFAR100 = PublishedDataset(
    name="cifar100",
    description="CIFAR-100: 60,000 photographs, 32×32 colour, 100 classes",
    files=(
        PublishedFile(
            CIFAR100_FILE,
            f"https://www.cs.toronto.edu/~kriz/{CIFAR100_FILE}",
            168_513_733,
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    ),
    licence="none stated; cite Krizhevsky 2009",
    n_samples=60_000,
    folder_names=("cifar-100", "cifar_100", "CIFAR100", "Cifar100"),
    parse=parse_cifar100,
    wrong_files={
        "cifar-100-python.tar.gz": f"holds pickles, which gpfl does not read: get the binary version, {CIFAR100_FILE}"
    },
    partition={"name": "dirichlet", "clients": 20, "beta": 0.1},
    net={"name": "cnn4"},
)

TINY_FILE = "tiny-imagenet-200.zip"
TINY_CLASSES = 200
TINY_MAX_BYTES = 1 << 20  # of one image or list
TINY_IMAGE = re.compile(r"tiny-imagenet-200/train/(n\d{8})/images/\1_(\d+)\.JPEG")


def parse_tiny(paths: Mapping[str, Path]) -> Table:
    """Return the training images in the order of class and number; the test images have no published labels."""
    path = paths[TINY_FILE]
    with archive.open_zip(path, str(path)) as members:
        wnids = archive.read_zip_member(members, "tiny-imagenet-200/wnids.txt", TINY_MAX_BYTES).decode("ascii").split()
        label_of = {wnid: label for label, wnid in enumerate(sorted(set(wnids)))}
        found = [match for match in map(TINY_IMAGE.fullmatch, members.namelist()) if match and match[1] in label_of]
        found.sort(key=lambda match: (label_of[match[1]], int(match[2])))
        if len({match[1] for match in found}) != TINY_CLASSES:
            raise ValueError(f"it does not hold training images of {TINY_CLASSES} classes")
        x = np.empty((len(found), 3, 64, 64), dtype=np.uint8)
        for row, match in enumerate(found):
            x[row] = _read_image(members, match[0])
    labels = np.array([label_of[match[1]] for match in found])
    return Table(x, labels, classes=TINY_CLASSES, name="tiny", kind="pixels")


def _read_image(members: zipfile.ZipFile, name: str) -> npt.NDArray[np.uint8]:
    from PIL import Image  # takes 0.1 s, which runs on other data need not wait

    content = archive.read_zip_member(members, name, TINY_MAX_BYTES)
    with archive.report_damage(f"{name} in {members.filename}"), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
        if image.size != (64, 64):
            raise ValueError(f"{image.size[0]}×{image.size[1]} pixels instead of 64×64")
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


TINY = PublishedDataset(
    name="tiny",
    description="Tiny-ImageNet: 100,000 photographs, 64×64 colour, 200 classes",
    files=(
        PublishedFile(
            TINY_FILE, f"http://cs231n.stanford.edu/{TINY_FILE}", 248_100_043, md5="90528d7ca1a48142e341f4ef8d21d0de"
        ),
    ),
    licence="non-commercial (ImageNet terms)",
    n_samples=100_000,
    folder_names=("tiny_imagenet", "tiny-imagenet", "tiny-imagenet-200", "TinyImagenet"),
    parse=parse_tiny,
    partition={"name": "dirichlet", "clients": 20, "beta": 0.1},
    net={"name": "cnn4"},
)


@dataclass(frozen=True, kw_only=True)
class Digits(DataSource):
    """1,797 images of 8×8 pixels with values 0 to 16, about 180 per class (UCI optical recognition of handwritten digits)."""

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Twenty clients with four classes each and a small net."""
        return {
            "partition": {"name": "pathological", "clients": 20, "classes_per_client": 4},
            "net": {"name": "mlp"},
            "train": {"rounds": 40, "lr": 0.05},
        }

    def read(self) -> Table:
        """Return the table."""
        # scikit-learn's own reader imports scipy.stats, which takes a quarter of the time until training starts.
        package = Path(find_spec("sklearn").origin).parent  # type: ignore[union-attr,arg-type]
        values = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")  # 64 pixels and the label
        images = values[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
        return Table(images, values[:, -1].astype(np.int64), classes=10, name="digits", pixel_max=16)


DIGITS = Digits(name="digits", description="1,797 handwritten digits, 8×8 (part of scikit-learn, no download)")
