"""UCI HAR: human activity recognition with smartphones."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gpfl.core.local_round import Indices
from gpfl.core.options import option
from gpfl.data.published import archive
from gpfl.data.published.cache import Array, Parsed
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table
from gpfl.errors import GpflError

NAME = "human+activity+recognition+using+smartphones.zip"
INNER = "UCI HAR Dataset.zip"
ROOT = "UCI HAR Dataset"
CHANNELS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
STEPS = 128
ACTIVITIES = 6
LARGEST = 1e9
TOTAL = [place for place, channel in enumerate(CHANNELS) if channel.startswith("total")]
"""The channels that are as the phone read them."""
MOST = 1 << 28  # bytes of one text file, several times the largest


def parse(paths: Mapping[str, Path]) -> Parsed:
    """Gives all windows (9 channels, 1, 128 steps), training before test, with the person who wore the phone as group."""
    path = paths[NAME]
    with archive.open_zip(path, str(path)) as outer:
        inner = io.BytesIO(archive.zip_member(outer, INNER, MOST, str(path)))
    label = f"{INNER} in {path}"
    with archive.open_zip(inner, label) as members:
        parts = [read_part(members, part, label) for part in ("train", "test")]
    x, y, subject = (np.concatenate([part[k] for part in parts]) for k in range(3))
    people, client_ids = np.unique(subject, return_inverse=True)
    return Parsed(
        x[:, :, None], y - 1, ACTIVITIES, client_ids=client_ids, client_names=[f"subject {person}" for person in people]
    )


def read_part(members: zipfile.ZipFile, part: str, label: str) -> tuple[Array, Array, Array]:
    """Gives signals (windows, channels, steps), activities and subjects of the training or test part."""
    y, subject = (read_whole(members, f"{ROOT}/{part}/{kind}_{part}.txt", label) for kind in ("y", "subject"))
    signals = []
    for channel in CHANNELS:
        name = f"{ROOT}/{part}/Inertial Signals/{channel}_{part}.txt"
        values = read_numbers(members, name, label)
        if len(values) != len(y) * STEPS or len(subject) != len(y):
            raise GpflError(f"{name} of {label} has {len(values):,} numbers for {len(y):,} windows of {STEPS} steps")
        signals.append(values.reshape(len(y), STEPS).astype(np.float32))
    if not len(y) or y.min() < 1 or y.max() > ACTIVITIES:
        raise GpflError(f"{label} has other activities than 1 to {ACTIVITIES} in its {part} part")
    return np.stack(signals, axis=1), y, subject


def read_numbers(members: zipfile.ZipFile, name: str, label: str) -> npt.NDArray[np.float64]:
    """Gives the numbers of a text file, with white space between."""
    content = archive.zip_member(members, name, MOST, label)
    try:
        values = np.array(content.split(), dtype=np.float64)
    except ValueError as problem:
        raise GpflError(f"{name} of {label} holds something else than numbers ({problem})") from None
    if not (np.abs(values) < LARGEST).all():
        raise GpflError(f"{name} of {label} holds NaN or a number beyond {LARGEST:g}")
    return values


def read_whole(members: zipfile.ZipFile, name: str, label: str) -> npt.NDArray[np.int64]:
    """Gives the whole numbers of a text file."""
    values = read_numbers(members, name, label)
    if not np.array_equal(values, np.rint(values)):
        raise GpflError(f"{name} of {label} holds other numbers than whole ones")
    return values.astype(np.int64)


def recordings(x: npt.NDArray[np.float32], people: Indices) -> Indices:
    """Gives the number of each window's recording: a window begins with the second half of the one before it."""
    signals = np.ascontiguousarray(x[:, TOTAL].transpose(0, 2, 1))  # the steps of a half lie side by side
    known: dict[tuple[int, bytes], int] = {}
    halves = [
        [known.setdefault((person, half.tobytes()), len(known)) for half in np.split(window, 2)]
        for person, window in zip(people.tolist(), signals, strict=True)
    ]
    begin, end = np.array(halves).T
    joined = coo_array((np.ones(len(x)), (begin, end)), shape=(len(known), len(known)))
    _, recording = connected_components(joined, directed=False)
    return np.asarray(recording[begin], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Har(PublishedDataset):
    """UCI HAR, in one of two layouts, divided by windows or by whole recordings."""

    layout: str = option(
        "channels",
        "9 channels of 128 steps, or interleaved as in the authors' code: 128 steps of 9 values in a row, cut into 9 lines",
        choices=("channels", "interleaved"),
    )
    group: str = option(
        "windows",
        "what is all for training, validation or testing: windows, one by one as in the authors' code, or whole recordings",
        choices=("windows", "recordings"),
        omit_default=True,
    )

    def read(self) -> Table:
        """Gives the table in the layout that was asked for, with recordings that stay together if so."""
        table = super().read()
        if self.group == "recordings":
            assert table.client_ids is not None
            table.group_ids = recordings(table.x.squeeze(2).numpy(), table.client_ids)
        if self.layout == "interleaved":
            table.x = table.x.squeeze(2).transpose(1, 2).reshape(table.x.shape)
        return table


HAR = Har(
    name="har",
    description="UCI HAR: 10,299 windows of phone sensors, 9×128, 6 activities, 30 people",
    files=(
        PublishedFile(
            NAME,
            f"https://archive.ics.uci.edu/static/public/240/{NAME}",
            61_000_000,
            sha256="c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031",
        ),
    ),
    licence="CC BY 4.0",
    rows=10_299,
    folders=("uci_har", "uci-har", "UCI_HAR", "HAR"),
    parse=parse,
    settings={"partition": {"name": "natural"}, "net": {"name": "harcnn"}, "train": {"rounds": 2000, "patience": 100}},
)
