"""The table of a dataset in memory, the checks of the arrays in it, and the interface of everything that can load one."""

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.core.local_round import Indices, Samples
from gpfl.core.net import INPUT_KINDS, InputSpec
from gpfl.data.columns import RawColumns
from gpfl.data.encoders import ImageFormat, Tokenizer
from gpfl.data.preprocessing import PreprocessingOptions
from gpfl.errors import GpflError

ArrayLike: TypeAlias = npt.ArrayLike | Tensor

SPLITS = ("train", "validation", "test")
MAX_CLASSES = 100_000  # a larger label is an id or a measurement rather than a class


class Table(Samples):
    """Samples with their labels and, where known, the client, the split and the group of each sample.

    Raw columns stay as they are in `raw`, and `x` holds their values, until a federation encodes them: their scaling and
    categories come from the training samples, which are known when the samples are divided.

    Args:
        x: Samples along the first axis, or raw columns.
        y: Class of each sample, from 0.
        classes: Number of classes; by default the largest label plus one.
        name: Name of the dataset in messages and manifests.
        kind: What the numbers of `x` are (see `gpfl.core.net.INPUT_KINDS`); by default bytes are pixels, others floats.
        pixel_max: Largest value of a pixel.
        vocabulary: Number of tokens; by default the largest token plus one.
        input_spec: What the numbers of `x` are, in place of `kind`, `pixel_max` and `vocabulary`.
        client_ids: Index of each sample's client (a domain, a subject) in `client_names`.
        client_names: Names of the clients; by default their indices.
        splits: Index of each sample's split in `SPLITS`.
        group_ids: Samples of one client with the same value are never divided between splits.
        metadata: Where the samples come from; saved in the manifest of every run.
        preprocessing: How raw columns are encoded.

    """

    def __init__(
        self,
        x: ArrayLike | RawColumns,
        y: ArrayLike,
        *,
        classes: int | None = None,
        name: str = "arrays",
        kind: str | None = None,
        pixel_max: int = 255,
        vocabulary: int = 0,
        input_spec: InputSpec | None = None,
        client_ids: ArrayLike | None = None,
        client_names: Sequence[str] = (),
        splits: ArrayLike | None = None,
        group_ids: ArrayLike | None = None,
        metadata: Mapping[str, object] | None = None,
        preprocessing: PreprocessingOptions | None = None,
    ) -> None:
        self.name, self.metadata = name, dict(metadata or {})
        self.raw = x if isinstance(x, RawColumns) else None
        self.preprocessing = preprocessing or PreprocessingOptions()
        self.source: DataSource | None = None  # loads this table again
        self.encoder: ImageFormat | Tokenizer | None = None  # makes samples of images or texts; saved with models
        self.description = ""  # what was found in the user's files
        self.client_hint = ""  # how to name the clients if the user's files do not
        if input_spec is not None:
            kind, pixel_max, vocabulary = input_spec.kind, input_spec.pixel_max, input_spec.vocabulary
        if isinstance(x, RawColumns):
            samples, input_spec = torch.from_numpy(x.values), InputSpec((len(x.schema),))
        else:
            samples, input_spec = _store_samples(x, kind, pixel_max, vocabulary, name)
        labels, self.classes = _check_labels(y, classes, name)
        super().__init__(samples, labels, input_spec)
        if len(self.x) != len(self.y):
            raise GpflError(f"data '{name}' has {len(self.x)} rows and {len(self.y)} labels; give one label per row")
        if len(self.x) == 0:
            raise GpflError(f"data '{name}' has no rows")
        self.client_ids, self.splits = self._check_ids("client_ids", client_ids), self._check_ids("splits", splits)
        self.client_names: tuple[str, ...] = ()
        if self.client_ids is not None:
            largest = int(self.client_ids.max())
            self.client_names = tuple(client_names) or tuple(str(index) for index in range(largest + 1))
            if self.client_ids.min() < 0 or largest >= len(self.client_names):
                last = len(self.client_names) - 1
                raise GpflError(f"data '{name}' has client {largest}; there are names for clients 0 to {last}")
        if self.splits is not None and (self.splits.min() < 0 or self.splits.max() >= len(SPLITS)):
            low, high = self.splits.min(), self.splits.max()
            raise GpflError(f"data '{name}' has splits {low} to {high}; they are 0 train, 1 validation, 2 test")
        self.group_ids = self._check_ids("group_ids", group_ids)

    def __len__(self) -> int:
        return len(self.y)

    def _check_ids(self, what: str, ids: ArrayLike | None) -> Indices | None:
        """Return ids as whole numbers, groups numbered from 0."""
        if ids is None:
            return None
        array = np.asarray(ids)
        if array.shape != (len(self),):
            raise GpflError(
                f"data '{self.name}' has {len(self)} rows and {what} of shape {array.shape}; give one value per row"
            )
        if what == "group_ids":
            array = np.unique(array.astype(str) if array.dtype == object else array, return_inverse=True)[1]
        return array.astype(np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.input_spec.shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, () if the data have none."""
        names = self.metadata.get("classes")
        return tuple(map(str, names)) if isinstance(names, list) else self.source.class_names if self.source else ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the samples and everything known of each; of raw columns as they were before they were encoded."""
        y, raw = self.y.cpu().contiguous().numpy(), self.raw
        if raw is None:
            x, spec = self.x.cpu().contiguous().numpy(), self.input_spec
            # Manifests record this digest, so the words in it keep the names of the first release.
            form = f"Form(shape={spec.shape}, kind={spec.kind!r}, white={spec.pixel_max}, vocabulary={spec.vocabulary})"
            header, names = f"{tuple(x.shape)} {self.x.dtype} {self.classes} {form}", ("", "", "together")
        else:
            x = np.where(np.isnan(raw.values), np.nan, raw.values)  # one bit pattern for all missing values
            header = json.dumps([raw.schema.to_dict(), self.classes], sort_keys=True)
            names = ("clients", "splits", "groups")
        content = hashlib.sha256(header.encode())
        content.update(x.data)
        content.update(y.data)
        for name, ids in zip(names, (self.client_ids, self.splits, self.group_ids), strict=True):
            if ids is not None:
                content.update(name.encode())
                content.update(np.ascontiguousarray(ids).data)
        return content.hexdigest()

    def encode(self, x: npt.NDArray[np.float32]) -> "Table":
        """Return the same table with its raw columns encoded as `x`."""
        table = self.with_tensors(torch.from_numpy(x).to(self.y.device), self.y)
        table.input_spec = InputSpec((x.shape[1],))
        return table

    def to(self, device: torch.device) -> "Table":
        """Return the same table on `device`."""
        if self.x.device == device:
            return self
        return self.with_tensors(self.x.to(device), self.y.to(device))

    def select(self, indices: Indices) -> "Table":
        """Return a table of the samples at `indices`."""
        chosen = torch.from_numpy(indices)
        table = self.with_tensors(self.x[chosen], self.y[chosen])
        table.__dict__.pop("digest", None)
        for name in ("client_ids", "splits", "group_ids"):
            ids = getattr(self, name)
            setattr(table, name, None if ids is None else ids[indices])
        table.raw = None if self.raw is None else self.raw.select(indices)
        return table

    def concatenate(self, others: Sequence["Table"]) -> "Table":
        """Return a table of the encoded samples of this one and others of the same kind, without what is known of each."""
        tables = (self, *others)
        table = self.with_tensors(torch.cat([each.x for each in tables]), torch.cat([each.y for each in tables]))
        table.__dict__.pop("digest", None)
        table.raw = table.client_ids = table.splits = table.group_ids = None
        return table

    def with_tensors(self, x: Tensor, y: Tensor) -> "Table":
        """Return the same table with its samples and labels in other memory."""
        table = copy.copy(self)
        table.x, table.y = x, y
        return table


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """A dataset that can be loaded, and the default config of runs on it.

    Fields declared with `option` are keys of the config section [data].
    """

    name: str
    description: str  # one line for `gpfl data list`
    class_names: tuple[str, ...] = ()  # names of the classes, () if the table has them or there are none

    @property
    def config_name(self) -> str:
        """Value of `data.name` in a config."""
        return self.name

    @property
    @abstractmethod
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Config values by section and key that apply unless the user sets them."""

    @abstractmethod
    def read(self) -> Table:
        """Return the table."""

    def load(self) -> Table:
        """Return the table with its `source` set."""
        table = self.read()
        table.source = self
        return table


# Users' arrays: types, shapes and values.


def _store_samples(x: ArrayLike, kind: str | None, pixel_max: int, vocabulary: int, name: str) -> tuple[Tensor, InputSpec]:
    """Return samples in the type a table stores them in, and their spec. By default bytes are pixels, others floats."""
    samples = _as_tensor(x, name)
    if kind is not None and kind not in INPUT_KINDS:
        raise GpflError(f"data '{name}' has kind '{kind}'; kinds are {', '.join(INPUT_KINDS)}")
    kind = kind or ("pixels" if samples.dtype == torch.uint8 else "floats")
    shape = tuple(samples.shape[1:])
    if kind == "floats":
        return _check_finite(samples.to(torch.float32), f"data '{name}'"), InputSpec(shape)
    if kind == "tokens" and not vocabulary:
        vocabulary = int(samples.max()) + 1 if samples.numel() else 0
    spec = InputSpec(shape, kind, pixel_max if kind == "pixels" else 0, vocabulary if kind == "tokens" else 0)
    if samples.dtype in (torch.uint8, torch.int16, torch.int32):  # small enough: shares the caller's memory
        _check_values(samples, spec, f"data '{name}'")
        return samples, spec
    return read_samples(samples, spec, f"data '{name}'"), spec


def read_samples(x: ArrayLike, spec: InputSpec, name: str) -> Tensor:
    """Return samples of a known spec in the type a table stores them in; raise if they are of another shape or kind."""
    samples = _as_tensor(x, name)
    if tuple(samples.shape[1:]) != spec.shape:
        raise GpflError(f"{name} has rows of shape {tuple(samples.shape[1:])}; they must be of shape {spec.shape}")
    if spec.kind == "floats":
        if samples.dtype == torch.uint8:
            raise GpflError(f"{name} holds bytes; the model was trained on floats: scale them as its training data were")
        return _check_finite(samples.to(torch.float32), name)
    _check_values(samples, spec, name)
    return samples.to(torch.uint8 if spec.kind == "pixels" else torch.int32)


def _numeric_array(values: ArrayLike, name: str) -> npt.NDArray[np.generic]:
    """Return an array of numbers; raise if the values are anything else."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise GpflError(f"{name} has rows of unequal shape; give every row the same shape") from None
    if array.dtype.kind not in "biuf":
        raise GpflError(f"{name} holds {array.dtype}, not numbers: encode text and categories as numbers first")
    return array


def _as_tensor(x: ArrayLike, name: str) -> Tensor:
    # Bytes and small integers keep their type, all else becomes float32.
    if isinstance(x, Tensor):
        samples = x.detach().cpu()
        if samples.is_complex():
            raise GpflError(f"{name} holds complex numbers: give real ones")
    else:
        array = _numeric_array(x, name)
        keeps_type = array.dtype.newbyteorder("=") in (np.uint8, np.int16, np.int32, np.int64)
        with np.errstate(over="ignore"):  # _check_finite reports infinity
            native = array.astype(array.dtype.newbyteorder("=") if keeps_type else np.float32, copy=False)
        samples = torch.from_numpy(np.require(native, requirements=("C", "W")))
    if samples.dim() < 2:
        raise GpflError(f"{name} has rows without dimensions (shape {tuple(samples.shape)}); give one vector or image per row")
    return samples


def _check_finite(samples: Tensor, name: str) -> Tensor:
    bad = ~torch.isfinite(samples.flatten(1)).all(1)
    if bad.any():
        raise GpflError(
            f"{name} has NaN or infinity in {int(bad.sum())} of {len(samples)} rows, first in row {int(bad.nonzero()[0])}: "
            "remove or fill them"
        )
    return samples


def _check_values(samples: Tensor, spec: InputSpec, name: str) -> None:
    largest = {"pixels": spec.pixel_max, "tokens": spec.vocabulary - 1}.get(spec.kind)
    if samples.dtype == torch.uint8 and (largest is None or largest >= 255):
        return  # every byte is valid
    outside = samples.numel() > 0 and (samples.min() < 0 or (largest is not None and samples.max() > largest))
    if outside or (samples.is_floating_point() and not bool((samples == samples.floor()).all())):
        limit = f"from 0 to {largest}" if largest is not None else "from 0"
        raise GpflError(f"{name} has values that are not {spec.kind}: they must be whole numbers {limit}")


def _check_labels(y: ArrayLike, classes: int | None, name: str) -> tuple[Tensor, int]:
    labels = y.detach().cpu().to(torch.float64).numpy() if isinstance(y, Tensor) else _numeric_array(y, f"data '{name}'")
    if labels.ndim != 1:
        raise GpflError(f"data '{name}' has labels of shape {labels.shape}; give one whole number per row")
    with np.errstate(invalid="ignore"):  # NaN fails the comparison below
        integers = labels.astype(np.int64)
    if not np.array_equal(integers, labels):
        raise GpflError(f"data '{name}' has labels that are not whole numbers, such as {labels[integers != labels][0]}")
    count = classes if classes is not None else int(integers.max(initial=0)) + 1
    if count > MAX_CLASSES:
        raise GpflError(
            f"data '{name}' has label {integers.max()}; labels must be below {MAX_CLASSES:,}: number classes from 0"
        )
    outside = (integers < 0) | (integers >= count)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise GpflError(f"data '{name}' has label {integers[row]} in row {row}; labels must be 0 to {count - 1}")
    return torch.from_numpy(np.ascontiguousarray(integers)), count
