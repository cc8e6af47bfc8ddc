"""Tables: all rows of a data set with their labels, as the publisher stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.errors import GpflError
from gpfl.method import Batch

ArrayLike: TypeAlias = npt.ArrayLike | Tensor
Rows: TypeAlias = npt.NDArray[np.int64]


class Table:
    """Rows x and labels y. Pixels stay whole numbers from 0 to `white` and become floats in [-1, 1] when a batch is made.

    `white` is 0 where rows are floats, which are taken as they are.
    """

    def __init__(
        self, x: ArrayLike, y: ArrayLike, *, classes: int | None = None, name: str = "arrays", white: int = 255
    ) -> None:
        self.name = name
        self.x = as_inputs(x, name)
        self.white = 0 if self.x.is_floating_point() else white
        self.y, self.classes = as_labels(y, classes, name)
        if len(self.x) != len(self.y):
            raise GpflError(f"data '{name}' has {len(self.x)} rows and {len(self.y)} labels; there must be as many of both")
        if len(self.x) == 0:
            raise GpflError(f"data '{name}' has no rows")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.x.shape[1:])

    @cached_property
    def digest(self) -> str:
        """The sha256 of the content: shape, type, rows and labels."""
        x, y = self.x.cpu().contiguous(), self.y.cpu().contiguous()
        content = hashlib.sha256(f"{tuple(x.shape)} {x.dtype} {self.classes} {self.white}".encode())
        content.update(x.numpy().data)
        content.update(y.numpy().data)
        return content.hexdigest()

    def inputs(self, rows: Tensor) -> Tensor:
        """Gives the inputs of rows (…,) as the net takes them."""
        return scale(self.x[rows], self.white)

    def batch(self, rows: Tensor) -> Batch:
        """Gives the batch of rows (…, width); a row number of -1 is padding."""
        real = rows.clamp_min(0)
        return Batch(self.inputs(real), self.y[real], (rows >= 0).to(torch.float32))

    def to(self, device: torch.device) -> Table:
        """Gives the same table on `device`."""
        if self.x.device == device:
            return self
        moved = object.__new__(Table)
        moved.__dict__.update(self.__dict__)
        moved.x, moved.y = self.x.to(device), self.y.to(device)
        return moved


class Source(Protocol):
    """A named data set: how to load it, and the settings it is run with unless the user says otherwise."""

    @property
    def doc(self) -> str:
        """One line for `gpfl list`."""

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Values by section and key of a config."""

    def load(self) -> Table:
        """Gives the table."""


def scale(x: Tensor, white: int) -> Tensor:
    """Gives whole-numbered pixels as floats in [-1, 1]; floats stay as they are."""
    return x if x.is_floating_point() else x.to(torch.float32) / (white / 2) - 1


def as_inputs(x: ArrayLike, name: str) -> Tensor:
    """Gives rows as a float32 tensor, or uint8 where they are bytes; refuses NaN and infinity."""
    rows = x.detach() if isinstance(x, Tensor) else torch.from_numpy(plain(numeric(x, name)))
    if rows.dim() < 2:
        raise GpflError(f"data '{name}' has rows of no dimension (shape {tuple(rows.shape)}); give one vector or image a row")
    if rows.dtype == torch.uint8:
        return rows
    rows = rows.to(torch.float32)
    bad = ~torch.isfinite(rows.flatten(1)).all(1)
    if bad.any():
        raise GpflError(
            f"data '{name}' has NaN or infinity in {int(bad.sum())} of {len(rows)} rows, first in row {int(bad.nonzero()[0])}: "
            "remove or fill them"
        )
    return rows


def inputs_like(x: ArrayLike, shape: tuple[int, ...], white: int, name: str) -> Tensor:
    """Gives rows in the form of a table's: the same shape, and pixels where it has pixels."""
    rows = as_inputs(x, name)
    if tuple(rows.shape[1:]) != shape:
        raise GpflError(f"{name} has rows of shape {tuple(rows.shape[1:])}; they must be of shape {shape}")
    if rows.is_floating_point() == (not white):
        return rows
    if not white:
        raise GpflError(f"{name} holds bytes; the model was trained on floats: give them scaled as its data were")
    if not ((rows == rows.round()).all() and rows.min() >= 0 and rows.max() <= white):
        raise GpflError(f"{name} holds other numbers than the whole ones from 0 to {white} that the model was trained on")
    return rows.to(torch.uint8)


def as_labels(y: ArrayLike, classes: int | None, name: str) -> tuple[Tensor, int]:
    """Gives labels as int64 and the number of classes; refuses labels outside 0 … classes-1."""
    labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else numeric(y, name)
    if labels.ndim != 1:
        raise GpflError(f"data '{name}' has labels of shape {labels.shape}; give one whole number a row")
    with np.errstate(invalid="ignore"):  # NaN is no whole number, which is said below
        whole = labels.astype(np.int64)
    if not np.array_equal(whole, labels):
        raise GpflError(f"data '{name}' has labels that are not whole numbers, such as {labels[whole != labels][0]}")
    count = classes if classes is not None else int(whole.max(initial=0)) + 1
    outside = (whole < 0) | (whole >= count)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise GpflError(f"data '{name}' has label {whole[row]} in row {row}; labels must be 0 to {count - 1}")
    return torch.from_numpy(np.ascontiguousarray(whole)), count


def plain(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Gives an array that torch can share: bytes or float32, in this machine's byte order, contiguous and writable."""
    kind = np.uint8 if array.dtype == np.uint8 else np.float32
    with np.errstate(over="ignore"):  # infinity is refused by name later
        return np.require(array.astype(kind, copy=False), requirements=("C", "W"))


def numeric(values: ArrayLike, name: str) -> npt.NDArray[np.generic]:
    """Gives an array of numbers."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise GpflError(f"data '{name}' has rows of unequal shape; give every row the same shape") from None
    if array.dtype.kind not in "biuf":
        raise GpflError(f"data '{name}' holds {array.dtype}, not numbers: encode text and categories as numbers first")
    return array
