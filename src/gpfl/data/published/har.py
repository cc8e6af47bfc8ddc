"""UCI HAR: human activity recognition with smartphones."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.core.local_round import Indices
from gpfl.core.options import option
from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

NAME = "human+activity+recognition+using+smartphones.zip"
INNER = "UCI HAR Dataset.zip"
ROOT = "UCI HAR Dataset"
CHANNELS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
RAW_CHANNELS = [index for index, channel in enumerate(CHANNELS) if channel.startswith("total")]
"""Channels that the publisher did not filter."""
STEPS = 128
ACTIVITIES = 6
MAX_BYTES = 1 << 28  # of one text file, several times the largest


def parse(paths: Mapping[str, Path]) -> Table:
    """Return all windows (9 channels, 1, 128 steps), training before test, with the subject as client."""
    path = paths[NAME]
    with archive.open_zip(path, str(path)) as outer:
        inner = io.BytesIO(archive.read_zip_member(outer, INNER, MAX_BYTES))
    with archive.open_zip(inner, f"{INNER} in {path}") as members:
        splits = [_read_split(members, split) for split in ("train", "test")]
    x, y, subjects = (np.concatenate(arrays) for arrays in zip(*splits, strict=True))
    numbers, client_ids = np.unique(subjects, return_inverse=True)
    names = [f"subject {number}" for number in numbers]
    return Table(x[:, :, None], y - 1, classes=ACTIVITIES, name="har", client_ids=client_ids, client_names=names)


def _read_split(members: zipfile.ZipFile, split: str) -> tuple[npt.NDArray[Any], ...]:
    """Return signals (windows, channels, steps), activities and subjects."""

    def read(name: str, dtype: type) -> npt.NDArray[Any]:
        return np.array(archive.read_zip_member(members, f"{ROOT}/{split}/{name}_{split}.txt", MAX_BYTES).split(), dtype=dtype)

    y, subjects = read("y", np.int64), read("subject", np.int64)
    signals = [read(f"Inertial Signals/{channel}", np.float64).reshape(len(y), STEPS) for channel in CHANNELS]
    if not 0 < len(y) == len(subjects) or not ((y >= 1) & (y <= ACTIVITIES)).all():
        raise ValueError(f"{len(y)} activities for {len(subjects)} subjects, or an activity outside 1 to {ACTIVITIES}")
    x = np.stack(signals, axis=1).astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError("a signal is NaN or infinite")
    return x, y, subjects


def find_recordings(x: npt.NDArray[np.float32], subjects: Indices) -> Indices:
    """Return the index of each window's recording: consecutive windows of a recording overlap by half."""
    from scipy.sparse import coo_array  # takes 0.1 s, which runs on other data need not wait
    from scipy.sparse.csgraph import connected_components

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
    class_names=("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying"),
    folder_names=("uci_har", "uci-har", "UCI_HAR", "HAR"),
    parse=parse,
    partition={"name": "natural"},
    net={"name": "harcnn"},
    methods={"gpfl": {"guidance": "embeddings", "mu": 0.1}},
)
