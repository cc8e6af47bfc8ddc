"""Tables: all rows of a data set with their labels, and the groups they were collected in."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.core.input_spec import ArrayLike, numeric, store
from gpfl.core.method import Batch
from gpfl.errors import GpflError

Rows: TypeAlias = npt.NDArray[np.int64]
SPLITS = ("train", "validation", "test")
MOST_CLASSES = 100_000
"""More are labels that were not numbered from 0: each class costs a score in every head."""


class Table:
    """Rows x and labels y, and for each row its group (a domain, a subject) and its part, where the publisher tells them.

    A client's rows with one value in `together` are a bundle: all for training, all for validation or all for testing.

    `kind` says what the numbers of x are (see `gpfl.core.input_spec`); without it bytes are pixels and the rest floats.
    """

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        classes: int | None = None,
        name: str = "arrays",
        kind: str | None = None,
        pixel_max: int = 255,
        vocabulary: int = 0,
        groups: ArrayLike | None = None,
        group_names: Sequence[str] = (),
        parts: ArrayLike | None = None,
        together: ArrayLike | None = None,
        origin: Mapping[str, object] | None = None,
    ) -> None:
        """`parts` are places in PARTS; `origin` says where rows came from, and is kept with the manifest of every run."""
        self.name, self.origin = name, dict(origin or {})
        self.source: DataSource | None = None  # what loads this table again
        self.words = ""  # what was found in a person's own files
        self.x, self.form = store(x, kind, pixel_max, vocabulary, name)
        self.y, self.classes = as_labels(y, classes, name)
        if len(self.x) != len(self.y):
            raise GpflError(f"data '{name}' has {len(self.x)} rows and {len(self.y)} labels; there must be as many of both")
        if len(self.x) == 0:
            raise GpflError(f"data '{name}' has no rows")
        self.groups, self.group_names = as_groups(groups, group_names, len(self.y), name)
        self.parts = as_parts(parts, len(self.y), name)
        self.together = as_together(together, len(self.y), name)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.form.shape

    @cached_property
    def digest(self) -> str:
        """The sha256 of the content: form, rows, labels, groups, parts and what stays together."""
        x, y = self.x.cpu().contiguous(), self.y.cpu().contiguous()
        spec = self.form
        # Recorded manifests hold this digest, so the names in the text are those of the first version.
        form = f"Form(shape={spec.shape}, kind={spec.kind!r}, white={spec.pixel_max}, vocabulary={spec.vocabulary})"
        content = hashlib.sha256(f"{tuple(x.shape)} {x.dtype} {self.classes} {form}".encode())
        content.update(x.numpy().data)
        content.update(y.numpy().data)
        if self.groups is not None:
            content.update(np.ascontiguousarray(self.groups).data)
        if self.parts is not None:
            content.update(np.ascontiguousarray(self.parts).data)
        if self.together is not None:
            content.update(b"together")
            content.update(np.ascontiguousarray(self.together).data)
        return content.hexdigest()

    def inputs(self, rows: Tensor) -> Tensor:
        """Gives the inputs of rows (…,) as the net takes them."""
        return self.form.to_net(self.x[rows])

    def batch(self, rows: Tensor) -> Batch:
        """Gives the batch of rows (…, width); a row number of -1 is padding."""
        real = rows.clamp_min(0)
        return Batch(self.inputs(real), self.y[real], (rows >= 0).to(torch.float32))

    def to(self, device: torch.device) -> Table:
        """Gives the same table on `device`."""
        if self.x.device == device:
            return self
        return self.over(self.x.to(device), self.y.to(device))

    def taken(self, rows: Rows) -> Table:
        """Gives a table of these rows alone, with all that is known of each."""
        places = torch.from_numpy(rows)
        table = self.over(self.x[places], self.y[places])
        table.__dict__.pop("digest", None)
        table.groups, table.parts, table.together = (
            None if known is None else known[rows] for known in (self.groups, self.parts, self.together)
        )
        return table

    def over(self, x: Tensor, y: Tensor) -> Table:
        """Gives the same table with its rows and labels in other memory."""
        moved = object.__new__(Table)
        moved.__dict__.update(self.__dict__)
        moved.x, moved.y = x, y
        return moved


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """Data: how to load them, and the settings they are run with unless the user says otherwise.

    Fields declared with `option` are how they are read: keys of the section [data].
    """

    name: str
    doc: str  # one line for `gpfl list`

    @property
    def address(self) -> str:
        """The name that a config calls them by."""
        return self.name

    @property
    @abstractmethod
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Values by section and key of a config."""

    @abstractmethod
    def read(self) -> Table:
        """Gives the table."""

    def load(self) -> Table:
        """Gives the table, which knows where it came from."""
        table = self.read()
        table.source = self
        return table


def as_labels(y: ArrayLike, classes: int | None, name: str) -> tuple[Tensor, int]:
    """Gives labels as int64 and the number of classes; refuses labels outside 0 … classes-1."""
    labels = y.detach().cpu().to(torch.float64).numpy() if isinstance(y, Tensor) else numeric(y, f"data '{name}'")
    if labels.ndim != 1:
        raise GpflError(f"data '{name}' has labels of shape {labels.shape}; give one whole number a row")
    with np.errstate(invalid="ignore"):  # NaN is no whole number, which is said below
        whole = labels.astype(np.int64)
    if not np.array_equal(whole, labels):
        raise GpflError(f"data '{name}' has labels that are not whole numbers, such as {labels[whole != labels][0]}")
    count = classes if classes is not None else int(whole.max(initial=0)) + 1
    if count > MOST_CLASSES:
        raise GpflError(
            f"data '{name}' has label {whole.max()}; labels must be below {MOST_CLASSES:,}: number the classes from 0"
        )
    outside = (whole < 0) | (whole >= count)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise GpflError(f"data '{name}' has label {whole[row]} in row {row}; labels must be 0 to {count - 1}")
    return torch.from_numpy(np.ascontiguousarray(whole)), count


def as_groups(groups: ArrayLike | None, names: Sequence[str], rows: int, name: str) -> tuple[Rows | None, tuple[str, ...]]:
    """Gives the group of each row as a number, and the groups' names."""
    if groups is None:
        return None, ()
    numbers = np.asarray(groups).astype(np.int64)
    if numbers.shape != (rows,):
        raise GpflError(f"data '{name}' has {rows} rows and groups of shape {numbers.shape}; give one group a row")
    named = tuple(names) or tuple(str(number) for number in range(int(numbers.max()) + 1))
    if numbers.min() < 0 or numbers.max() >= len(named):
        raise GpflError(f"data '{name}' has group {numbers.max()}; there are names for groups 0 to {len(named) - 1}")
    return numbers, named


def as_parts(parts: ArrayLike | None, rows: int, name: str) -> Rows | None:
    """Gives the part of each row as its place in PARTS."""
    if parts is None:
        return None
    places = np.asarray(parts).astype(np.int64)
    if places.shape != (rows,) or (rows and (places.min() < 0 or places.max() >= len(SPLITS))):
        raise GpflError(f"data '{name}' must say 0 (train), 1 (validation) or 2 (test) for each of its {rows} rows")
    return places


def as_together(together: ArrayLike | None, rows: int, name: str) -> Rows | None:
    """Gives each row's bundle as a number, of values of any kind."""
    if together is None:
        return None
    values = np.asarray(together)
    if values.shape != (rows,):
        raise GpflError(f"data '{name}' has {rows} rows and 'together' of shape {values.shape}; give one value a row")
    return np.unique(values.astype(str) if values.dtype == object else values, return_inverse=True)[1].astype(np.int64)
