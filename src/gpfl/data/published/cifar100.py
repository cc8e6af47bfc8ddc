"""CIFAR-100."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gpfl.data.published import archive
from gpfl.data.published.cache import Parsed
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.errors import GpflError

RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, pixels
PARTS = (("cifar-100-binary/train.bin", 50_000), ("cifar-100-binary/test.bin", 10_000))
NAME = "cifar-100-binary.tar.gz"


def parse(paths: Mapping[str, Path]) -> Parsed:
    """Gives training and test images, in this order, with their fine labels."""
    members = archive.tar_members(paths[NAME], tuple(name for name, _ in PARTS), PARTS[0][1] * RECORD)
    records = []
    for name, rows in PARTS:
        if len(members[name]) != rows * RECORD:
            raise GpflError(f"{name} in {paths[NAME]} has {len(members[name]):,} bytes; it should have {rows * RECORD:,}")
        records.append(np.frombuffer(members[name], dtype=np.uint8).reshape(rows, RECORD))
    table = np.concatenate(records)
    if table[:, 1].max() > 99:
        raise GpflError(f"{paths[NAME]} has a label {table[:, 1].max()}; labels are 0 to 99")
    return Parsed(table[:, 2:].reshape(-1, 3, 32, 32), table[:, 1], 100, kind="pixels")


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
    rows=60_000,
    folders=("cifar-100", "cifar_100", "CIFAR100", "Cifar100"),
    parse=parse,
    mistaken={"cifar-100-python.tar.gz": f"holds pickles, which are not read: the binary version is wanted, {NAME}"},
    settings={
        "partition": {"name": "dirichlet", "clients": 20, "beta": 0.1},
        "net": {"name": "cnn4"},
        "train": {"rounds": 2000, "patience": 100},
    },
)
