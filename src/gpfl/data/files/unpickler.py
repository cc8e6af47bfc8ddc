"""Dicts of arrays that others pickled, read by a reader that knows dicts and numeric arrays and nothing else.

PFLlib keeps each client's rows as a pickled array of one object, a dict, inside an npz file. Python's own reader would run
whatever such a file names. Here every name in it leads to one of the small classes below or to an error, and numpy's own
reader never sees a byte: an array is made from checked numbers alone.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
KINDS = "biuf"


class RefusedError(Exception):
    """The file holds something else than dicts and numeric arrays."""


class Dtype:
    """A numeric type, as numpy pickles it: its name, then a state whose second entry is the order of bytes. None is objects."""

    dtype: np.dtype[np.generic] | None = None  # of the class, because a pickle may leave __init__ out

    def __init__(self, name: object, *_: object) -> None:
        if name == "O8":
            return
        if not isinstance(name, str) or name[:1] not in KINDS or not name[1:].isdigit():
            raise RefusedError(f"the type {name!r}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise RefusedError("a type with a state of its own")
        if self.dtype is not None:
            self.dtype = self.dtype.newbyteorder(state[1])


class Pickled:
    """An array, as numpy pickles it: empty first, then a state of shape, type, order and bytes; or an array of one object."""

    array: Array | None = None
    content: object = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise RefusedError("an array with a state of its own")
        _, shape, dtype, fortran, content = state
        if isinstance(dtype, Dtype) and dtype.dtype is None and shape == () and isinstance(content, list) and len(content) == 1:
            self.content = content[0]
            return
        self.array = made(content, dtype, shape, "F" if fortran else "C")


class Kind:
    """The class of arrays, which is only ever named."""

    def __setstate__(self, state: object) -> None:
        raise RefusedError("an array with a state of its own")


class Buffered(Pickled):
    """An array, as numpy pickles it from protocol 5 on."""

    def __init__(self, content: object, dtype: object, shape: object, order: object = "C") -> None:
        self.array = made(content, dtype, shape, order)


class Latin:
    """Bytes, as protocol 2 pickles them: a text of the first 256 letters, or nothing."""

    __slots__ = ()

    def __call__(self, text: object = "", code: object = "latin1") -> bytes:
        """Gives the bytes."""
        if not isinstance(text, str) or code != "latin1":
            raise RefusedError("bytes in another code than latin1")
        return text.encode("latin1")


def made(content: object, dtype: object, shape: object, order: object) -> Array:
    """Gives the array of these bytes, or says what is wrong with them."""
    if (
        not isinstance(dtype, Dtype)
        or dtype.dtype is None
        or not isinstance(content, (bytes, bytearray))
        or order not in ("C", "F")
    ):
        raise RefusedError("an array of objects" if isinstance(content, list) else "an array of no numeric type")
    if not isinstance(shape, tuple) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise RefusedError(f"an array of shape {shape!r}")
    if math.prod(shape) * dtype.dtype.itemsize != len(content):
        raise RefusedError(f"an array of shape {shape} with {len(content)} bytes")
    return np.frombuffer(bytearray(content), dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


CORES = ("numpy.core", "numpy._core")
# A pickle may set attributes of what it names. None of these lets it: a class has a __setstate__, which wants an instance,
# and an instance has no attributes.
NAMES: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "ndarray"): Kind,
    ("numpy", "dtype"): Dtype,
    ("_codecs", "encode"): Latin(),
    ("__builtin__", "bytes"): Latin(),
    **{(f"{core}.multiarray", "_reconstruct"): Pickled for core in CORES},
    **{(f"{core}.numeric", "_frombuffer"): Buffered for core in CORES},
}


class Reader(pickle.Unpickler):
    """Reads what is listed in NAMES."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """Gives our own reader of a name."""
        if (module, name) not in NAMES:
            raise RefusedError(f"{module}.{name}")
        return NAMES[module, name]


def read_dict(content: bytes) -> dict[str, Array]:
    """Gives a pickled dict of arrays, or the one in a pickled array of one object."""
    try:
        found = Reader(io.BytesIO(content)).load()
    except RefusedError:
        raise
    except Exception as problem:  # a damaged pickle may raise anything
        raise RefusedError(f"bytes that are no pickle ({problem})") from None
    if isinstance(found, Pickled):
        found = found.content
    if not isinstance(found, dict) or not found:
        raise RefusedError(f"{type(found).__name__} where a dict of arrays should be")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, Pickled) or value.array is None:
            kind = "a list" if isinstance(value, list) else "an unfinished array" if isinstance(value, Pickled) else "an object"
            raise RefusedError(f"{kind} under {key!r} where an array should be")
    return {key: value.array for key, value in found.items()}
