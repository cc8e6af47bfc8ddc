"""A restricted unpickler for dicts of numeric arrays.

PFLlib stores each client's samples as a pickled array of one object, a dict, in an npz file. Python's own unpickler would
run whatever such a file names. Here every name leads to one of the classes below or to an error, and numpy's reader never
sees a byte: arrays are made from checked numbers alone.
"""

import io
import math
import pickle
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
KINDS = "biuf"


class UnsupportedPickleError(Exception):
    """The pickle holds something other than dicts and numeric arrays."""


class DtypeStub:
    """A numeric type as numpy pickles it: a name, then a state whose second entry is the byte order. None is for objects."""

    dtype: np.dtype[np.generic] | None = None  # of the class, because a pickle may skip __init__

    def __init__(self, name: object, *_: object) -> None:
        if name == "O8":
            return
        if not isinstance(name, str) or name[:1] not in KINDS or not name[1:].isdigit():
            raise UnsupportedPickleError(f"the type {name!r}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise UnsupportedPickleError("a type with an unexpected state")
        if self.dtype is not None:
            self.dtype = self.dtype.newbyteorder(state[1])


class ArrayStub:
    """An array as numpy pickles it: empty, then a state of shape, type, order and bytes; or an array of one object."""

    array: Array | None = None
    content: object = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise UnsupportedPickleError("an array with an unexpected state")
        _, shape, dtype, fortran, content = state
        is_object = isinstance(dtype, DtypeStub) and dtype.dtype is None
        if is_object and shape == () and isinstance(content, list) and len(content) == 1:
            self.content = content[0]
            return
        self.array = _make_array(content, dtype, shape, "F" if fortran else "C")


class NdarrayStub:
    """The class `numpy.ndarray`, which a pickle names but never calls."""

    def __setstate__(self, state: object) -> None:
        raise UnsupportedPickleError("an array with an unexpected state")


class BufferStub(ArrayStub):
    """An array as numpy pickles it from protocol 5 on."""

    def __init__(self, content: object, dtype: object, shape: object, order: object = "C") -> None:
        self.array = _make_array(content, dtype, shape, order)


class BytesStub:
    """Bytes as protocol 2 pickles them: a text of the first 256 characters, or nothing."""

    __slots__ = ()

    def __call__(self, text: object = "", encoding: object = "latin1") -> bytes:
        """Return the bytes."""
        if not isinstance(text, str) or encoding != "latin1":
            raise UnsupportedPickleError("bytes in an encoding other than latin1")
        return text.encode("latin1")


def _make_array(content: object, dtype: object, shape: object, order: object) -> Array:
    if (
        not isinstance(dtype, DtypeStub)
        or dtype.dtype is None
        or not isinstance(content, (bytes, bytearray))
        or order not in ("C", "F")
    ):
        raise UnsupportedPickleError("an array of objects" if isinstance(content, list) else "an array of no numeric type")
    if not isinstance(shape, tuple) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise UnsupportedPickleError(f"an array of shape {shape!r}")
    if math.prod(shape) * dtype.dtype.itemsize != len(content):
        raise UnsupportedPickleError(f"an array of shape {shape} with {len(content)} bytes")
    return np.frombuffer(bytearray(content), dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


CORES = ("numpy.core", "numpy._core")
# A pickle may set attributes of what it names. None of these allows it: a class has a __setstate__, which needs an instance,
# and an instance has no attributes.
NAMES: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "ndarray"): NdarrayStub,
    ("numpy", "dtype"): DtypeStub,
    ("_codecs", "encode"): BytesStub(),
    ("__builtin__", "bytes"): BytesStub(),
    **{(f"{core}.multiarray", "_reconstruct"): ArrayStub for core in CORES},
    **{(f"{core}.numeric", "_frombuffer"): BufferStub for core in CORES},
}


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that knows only the names in NAMES."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """Return our class for a name."""
        if (module, name) not in NAMES:
            raise UnsupportedPickleError(f"{module}.{name}")
        return NAMES[module, name]


def load_dict(content: bytes) -> dict[str, Array]:
    """Return a pickled dict of arrays, or the one in a pickled array of one object."""
    try:
        found = RestrictedUnpickler(io.BytesIO(content)).load()
    except UnsupportedPickleError:
        raise
    except Exception as problem:  # a damaged pickle may raise anything
        raise UnsupportedPickleError(f"bytes that are not a pickle ({problem})") from None
    if isinstance(found, ArrayStub):
        found = found.content
    if not isinstance(found, dict) or not found:
        raise UnsupportedPickleError(f"{type(found).__name__} instead of a dict of arrays")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, ArrayStub) or value.array is None:
            kind = "a list" if isinstance(value, list) else "an empty array" if isinstance(value, ArrayStub) else "an object"
            raise UnsupportedPickleError(f"{kind} under {key!r} instead of an array")
    return {key: value.array for key, value in found.items()}
