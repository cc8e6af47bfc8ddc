"""Read samples from arrays in the type that the model takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def read(paths: Sequence[str]) -> npt.NDArray[Any]:
    """Return the samples of .npy files, or of the array x of .npz files."""
    arrays = [np.load(path, allow_pickle=False) for path in paths]
    return np.concatenate([array["x"] if hasattr(array, "files") else array for array in arrays])


def encode(x: npt.NDArray[Any], spec: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return samples in the type of the inputs. Raise if they have another shape or values outside the range."""
    if list(x.shape[1:]) != spec["shape"]:
        raise ValueError(f"samples have shape {list(x.shape[1:])}; the model takes {spec['shape']}")
    low, high = (-np.inf, np.inf) if spec["range"] is None else spec["range"]
    if not (np.isfinite(x).all() and x.min() >= low and x.max() <= (np.inf if high is None else high)):
        raise ValueError(f"samples hold values that the model does not take: NaN, or outside {low} to {high}")
    return x.astype(spec["dtype"])


def graph_inputs(x: npt.NDArray[Any], spec: Mapping[str, Any], _: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the input of the ONNX model."""
    return {"x": x.astype(spec["dtype"])}
