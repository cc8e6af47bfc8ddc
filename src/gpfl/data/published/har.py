"""UCI HAR: human activity recognition with smartphones."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gpfl.core.local_round import Indices
from gpfl.core.options import option
from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table
from gpfl.errors import GpflError

NAME = "human+activity+recognition+using+smartphones.zip"
INNER = "UCI HAR Dataset.zip"
ROOT = "UCI HAR Dataset"
CHANNELS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
RAW_CHANNELS = [index for index, channel in enumerate(CHANNELS) if channel.startswith("total")]
"""Channels that the publisher did not filter."""
STEPS = 128
ACTIVITIES = 6
MAX_VALUE = 1e9
MAX_BYTES = 1 << 28  # of one text file, several times the largest


def parse(paths: Mapping[str, Path]) -> Table:
    """Return all windows (9 channels, 1, 128 steps), training before test, with the subject as client."""
    path = paths[NAME]
    with archive.open_zip(path, str(path)) as outer:
        inner = io.BytesIO(archive.read_zip_member(outer, INNER, MAX_BYTES, str(path)))
    label = f"{INNER} in {path}"
    with archive.open_zip(inner, label) as members:
        splits = [_read_split(members, split, label) for split in ("train", "test")]
    x, y, subjects = (np.concatenate(arrays) for arrays in zip(*splits, strict=True))
    numbers, client_ids = np.unique(subjects, return_inverse=True)
    names = [f"subject {number}" for number in numbers]
    return Table(x[:, :, None], y - 1, classes=ACTIVITIES, name="har", client_ids=client_ids, client_names=names)


def _read_split(members: zipfile.ZipFile, split: str, label: str) -> tuple[npt.NDArray[Any], ...]:
    """Return signals (windows, channels, steps), activities and subjects."""
    y, subjects = (_read_integers(members, f"{ROOT}/{split}/{kind}_{split}.txt", label) for kind in ("y", "subject"))
    signals = []
    for channel in CHANNELS:
        name = f"{ROOT}/{split}/Inertial Signals/{channel}_{split}.txt"
        values = _read_numbers(members, name, label)
        if len(values) != len(y) * STEPS or len(subjects) != len(y):
            raise GpflError(f"{name} of {label} has {len(values):,} numbers for {len(y):,} windows of {STEPS} steps")
        signals.append(values.reshape(len(y), STEPS).astype(np.float32))
    if not len(y) or y.min() < 1 or y.max() > ACTIVITIES:
        raise GpflError(f"{label} has activities outside 1 to {ACTIVITIES} in its {split} split")
    return np.stack(signals, axis=1), y, subjects


def _read_numbers(members: zipfile.ZipFile, name: str, label: str) -> npt.NDArray[np.float64]:
    content = archive.read_zip_member(members, name, MAX_BYTES, label)
    try:
        values = np.array(content.split(), dtype=np.float64)
    except ValueError as error:
        raise GpflError(f"{name} of {label} holds something other than numbers ({error})") from None
    if not (np.abs(values) < MAX_VALUE).all():
        raise GpflError(f"{name} of {label} holds NaN or a number beyond {MAX_VALUE:g}")
    return values


def _read_integers(members: zipfile.ZipFile, name: str, label: str) -> npt.NDArray[np.int64]:
    values = _read_numbers(members, name, label)
    if not np.array_equal(values, np.rint(values)):
        raise GpflError(f"{name} of {label} holds numbers that are not whole")
    return values.astype(np.int64)


def find_recordings(x: npt.NDArray[np.float32], subjects: Indices) -> Indices:
    """Return the index of each window's recording: consecutive windows of a recording overlap by half."""
    signals = np.ascontiguousarray(x[:, RAW_CHANNELS].transpose(0, 2, 1))  # (windows, steps, channels)
    known: dict[tuple[int, bytes], int] = {}
    halves = [
        [known.setdefault((subject, half.tobytes()), len(known)) for half in np.split(window, 2)]
        for subject, window in zip(subjects.tolist(), signals, strict=True)
    ]
    first, second = np.array(halves).T
    overlaps = coo_array((np.ones(len(x)), (first, second)), shape=(len(known), len(known)))
    _, recording = connected_components(overlaps, directed=False)
    return np.asarray(recording[first], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Har(PublishedDataset):
    """UCI HAR in one of two layouts, split by windows or by recordings."""

    layout: str = option(
        "channels",
        "'channels' = 9 channels of 128 steps, 'interleaved' = a window (128, 9) reshaped to (9, 128) (authors' code)",
        choices=("channels", "interleaved"),
    )
    group: str = option(
        "windows",
        "what is kept in one split: single windows (authors' code), or recordings of many overlapping windows",
        choices=("windows", "recordings"),
        omit_default=True,
    )

    def read(self) -> Table:
        """Return the table in the chosen layout, grouped by recordings if chosen."""
        table = super().read()
        if self.group == "recordings":
            assert table.client_ids is not None
            table.group_ids = find_recordings(table.x.squeeze(2).numpy(), table.client_ids)
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
    n_samples=10_299,
    folder_names=("uci_har", "uci-har", "UCI_HAR", "HAR"),
    parse=parse,
    partition={"name": "natural"},
    net={"name": "harcnn"},
)
