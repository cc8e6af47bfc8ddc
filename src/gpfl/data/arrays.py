"""Users' arrays as tensors of samples: types, shapes and values are checked here."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpfl.core.net import INPUT_KINDS, InputSpec
from gpfl.errors import GpflError

ArrayLike: TypeAlias = npt.ArrayLike | Tensor


def store_samples(x: ArrayLike, kind: str | None, pixel_max: int, vocabulary: int, name: str) -> tuple[Tensor, InputSpec]:
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


def numeric_array(values: ArrayLike, name: str) -> npt.NDArray[np.generic]:
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
        array = numeric_array(x, name)
        keeps_type = array.dtype.newbyteorder("=") in (np.uint8, np.int16, np.int32, np.int64)
        with np.errstate(over="ignore"):  # _check_finite reports infinity
            native = array.astype(array.dtype.newbyteorder("=") if keeps_type else np.float32, copy=False)
        samples = torch.from_numpy(np.require(native, requirements=("C", "W")))
    if samples.dim() < 2:
        raise GpflError(f"{name} has rows of no dimension (shape {tuple(samples.shape)}); give one vector or image per row")
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
