"""Forms: in what kind of number a table holds its rows, and how a net gets them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.errors import GpflError

ArrayLike: TypeAlias = npt.ArrayLike | Tensor

KINDS = {
    "floats": "floats, taken as they are",
    "pixels": "whole numbers from 0 to pixel_max, scaled to [-1, 1]",
    "counts": "whole numbers, taken as they are",
    "tokens": "numbers of words, from 0 to the size of the vocabulary",
}


@dataclass(frozen=True)
class InputSpec:
    """The form of a table's rows: one row's shape, the kind of number, and what belongs to the kind.

    Rows stay in the smallest type that holds them until a batch is made of them.
    """

    shape: tuple[int, ...]
    kind: str = "floats"
    pixel_max: int = 0  # pixels: the largest value
    vocabulary: int = 0  # tokens: how many there are

    def to_net(self, stored: Tensor) -> Tensor:
        """Gives stored rows as a net takes them."""
        if self.kind == "pixels":
            return stored.to(torch.float32) / (self.pixel_max / 2) - 1
        return stored.to(torch.int64 if self.kind == "tokens" else torch.float32)

    def example(self) -> Tensor:
        """Gives two rows of zeros as a net takes them."""
        return self.to_net(torch.zeros(2, *self.shape))

    def probe(self) -> Tensor:
        """Gives two rows of many values as a net takes them, everywhere the same: a model is known by its scores of them."""
        numbers = torch.arange(2 * math.prod(self.shape)).reshape(2, *self.shape)
        if self.kind == "floats":
            return torch.sin(numbers + 1.0)
        values = {"pixels": self.pixel_max + 1, "tokens": max(1, self.vocabulary)}.get(self.kind, 10)
        return self.to_net(numbers % values)

    def read(self, x: ArrayLike, name: str) -> Tensor:
        """Gives rows that a user gave in this form, as a table would store them; other forms are refused."""
        rows = as_tensor(x, name)
        if tuple(rows.shape[1:]) != self.shape:
            raise GpflError(f"{name} has rows of shape {tuple(rows.shape[1:])}; they must be of shape {self.shape}")
        if self.kind == "floats":
            if rows.dtype == torch.uint8:
                raise GpflError(f"{name} holds bytes; the model was trained on floats: give them scaled as its data were")
            return finite(rows.to(torch.float32), name)
        self.check(rows, name)
        return rows.to(torch.uint8 if self.kind == "pixels" else torch.int32)

    def check(self, rows: Tensor, name: str) -> None:
        """Refuses numbers that pixels, counts or tokens of this form cannot be."""
        most = {"pixels": self.pixel_max, "tokens": self.vocabulary - 1}.get(self.kind)
        if rows.dtype == torch.uint8 and (most is None or most >= 255):
            return  # no byte is outside, so none is read
        outside = rows.numel() > 0 and (rows.min() < 0 or (most is not None and rows.max() > most))
        if outside or (rows.is_floating_point() and not bool((rows == rows.floor()).all())):
            limit = f"from 0 to {most}" if most is not None else "from 0 on"
            raise GpflError(f"{name} holds other numbers than the whole ones {limit} that its {self.kind} may be")


def store(x: ArrayLike, kind: str | None, pixel_max: int, vocabulary: int, name: str) -> tuple[Tensor, InputSpec]:
    """Gives rows in the type a table keeps them in, and their form. Without a kind, bytes are pixels and the rest floats."""
    rows = as_tensor(x, name)
    if kind is not None and kind not in KINDS:
        raise GpflError(f"data '{name}' is said to be of kind '{kind}'; kinds are {', '.join(KINDS)}")
    kind = kind or ("pixels" if rows.dtype == torch.uint8 else "floats")
    shape = tuple(rows.shape[1:])
    if kind == "floats":
        return finite(rows.to(torch.float32), f"data '{name}'"), InputSpec(shape)
    if kind == "tokens" and not vocabulary:
        vocabulary = int(rows.max()) + 1 if rows.numel() else 0
    form = InputSpec(shape, kind, pixel_max if kind == "pixels" else 0, vocabulary if kind == "tokens" else 0)
    if rows.dtype in (torch.uint8, torch.int16, torch.int32):  # small enough: shared with whoever holds it
        form.check(rows, f"data '{name}'")
        return rows, form
    return form.read(rows, f"data '{name}'"), form


def as_tensor(x: ArrayLike, name: str) -> Tensor:
    """Gives rows as a tensor, bytes and small whole numbers in their own type, other numbers as float32."""
    if isinstance(x, Tensor):
        rows = x.detach().cpu()
        if rows.is_complex():
            raise GpflError(f"{name} holds complex numbers: give real ones")
    else:
        array = numeric(x, name)
        kept = array.dtype.newbyteorder("=") in (np.uint8, np.int16, np.int32, np.int64)
        with np.errstate(over="ignore"):  # infinity is refused by name later
            native = array.astype(array.dtype.newbyteorder("=") if kept else np.float32, copy=False)
        rows = torch.from_numpy(np.require(native, requirements=("C", "W")))
    if rows.dim() < 2:
        raise GpflError(f"{name} has rows of no dimension (shape {tuple(rows.shape)}); give one vector or image a row")
    return rows


def finite(rows: Tensor, name: str) -> Tensor:
    """Gives the rows, having refused NaN and infinity."""
    bad = ~torch.isfinite(rows.flatten(1)).all(1)
    if bad.any():
        raise GpflError(
            f"{name} has NaN or infinity in {int(bad.sum())} of {len(rows)} rows, first in row {int(bad.nonzero()[0])}: "
            "remove or fill them"
        )
    return rows


def numeric(values: ArrayLike, name: str) -> npt.NDArray[np.generic]:
    """Gives an array of numbers."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise GpflError(f"{name} has rows of unequal shape; give every row the same shape") from None
    if array.dtype.kind not in "biuf":
        raise GpflError(f"{name} holds {array.dtype}, not numbers: encode text and categories as numbers first")
    return array
