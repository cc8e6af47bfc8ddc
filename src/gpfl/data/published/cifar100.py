"""CIFAR-100."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

NAME = "cifar-100-binary.tar.gz"
RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, pixels
MEMBERS = (("cifar-100-binary/train.bin", 50_000), ("cifar-100-binary/test.bin", 10_000))


def parse(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test images with their fine labels."""
    with archive.report_damage(paths[NAME]):
        total = sum(count for _, count in MEMBERS) * RECORD
        members = archive.read_tar_gz(paths[NAME], tuple(name for name, _ in MEMBERS), total)
        records = [np.frombuffer(members[name], dtype=np.uint8).reshape(count, RECORD) for name, count in MEMBERS]
        images = np.concatenate(records)
        if images[:, 1].max() > 99:
            raise ValueError(f"label {images[:, 1].max()} is not 0 to 99")
    return Table(images[:, 2:].reshape(-1, 3, 32, 32), images[:, 1], classes=100, name="cifar100", kind="pixels")


CIFAR100 = PublishedDataset(
    name="cifar100",
    description="CIFAR-100: 60,000 photographs, 32×32 colour, 100 classes",
    files=(
        PublishedFile(
            NAME,
            f"https://www.cs.toronto.edu/~kriz/{NAME}",
            168_513_733,
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    ),
    licence="none stated; cite Krizhevsky 2009",
    n_samples=60_000,
    folder_names=("cifar-100", "cifar_100", "CIFAR100", "Cifar100"),
    parse=parse,
    wrong_files={"cifar-100-python.tar.gz": f"holds pickles, which gpfl does not read: get the binary version, {NAME}"},
    partition={"name": "dirichlet", "clients": 20, "beta": 0.1},
    net={"name": "cnn4"},
)
