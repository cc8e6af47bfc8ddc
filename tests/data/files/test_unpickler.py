"""Pickled dicts of arrays: what numpy writes is read, and everything else is an error."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpfl.data.files import unpickler
from gpfl.data.files.unpickler import UnsupportedPickleError, load_dict

PROTOCOLS = (2, 3, 4, 5)
RNG = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "int64": np.array([[1, -2], [3, 1 << 40]]),
    "int32": np.array([1, -2, 3], dtype=np.int32),
    "int16": np.array([1, -2, 3], dtype=np.int16),
    "int8": np.array([-128, 127], dtype=np.int8),
    "uint8": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "uint64": np.array([0, (1 << 64) - 1], dtype=np.uint64),
    "float16": np.array([0.5, -2], dtype=np.float16),
    "float32": RNG.normal(size=(3, 1, 2, 2)).astype(np.float32),
    "float64": RNG.normal(size=(2, 5)),
    "NaN and infinity": np.array([np.nan, np.inf, -0.0]),
    "bool": np.array([True, False, True]),
    "big-endian": np.array([1.5, -2.25], dtype=">f4"),
    "big-endian int": np.array([[1, 2], [3, 4]], dtype=">i8"),
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "a slice": np.arange(20).reshape(4, 5)[::2, 1:4],
    "empty": np.zeros((0, 3), dtype=np.float32),
    "one number": np.array(7.0),
}


def box(content: object) -> np.ndarray:
    """Return an array of one object, as np.savez makes of a dict."""
    box = np.empty((), dtype=object)
    box[()] = content
    return box


# Supported pickles.


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("box", [dict, box], ids=["a dict", "an array of one object"])
def test_numeric_arrays_are_read_as_numpy_wrote_them(protocol: int, box: Callable[[object], object]) -> None:
    found = load_dict(pickle.dumps(box(dict(ARRAYS)), protocol=protocol))
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
        assert found[name].flags.writeable, name


def test_arrays_of_numpy_1_are_read() -> None:
    for protocol in PROTOCOLS:
        content = pickle.dumps({"x": np.arange(6.0).reshape(2, 3)}, protocol=protocol)
        if protocol < 4:  # there, names are lines; later, they carry their length
            content = content.replace(b"numpy._core.", b"numpy.core.")
        else:
            new, old = b"numpy._core.", b"numpy.core."
            at = content.index(new)
            length = content[at - 1]
            content = content[: at - 1] + bytes([length - 1]) + content[at:].replace(new, old, 1)
            content = content[:2] + add_frame(content[11:-1]) + b"."
        assert np.array_equal(load_dict(content)["x"], np.arange(6.0).reshape(2, 3)), protocol


def add_frame(content: bytes) -> bytes:
    return b"\x95" + struct.pack("<Q", len(content) + 1) + content


def test_one_array_under_two_names_is_read_twice() -> None:
    array = np.arange(4)
    found = load_dict(pickle.dumps({"x": array, "again": array}))
    assert np.array_equal(found["x"], array)
    assert np.array_equal(found["again"], array)


# Errors. Pickles are written by hand with a short assembler of pickle opcodes.


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def raw(content: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(content)) + content


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def new(kind: bytes) -> bytes:
    """Pickle an instance that skips its __init__."""
    return kind + b")\x81"


def build(thing: bytes, *state: bytes) -> bytes:
    return thing + b"(" + b"".join(state) + b"tb"


def tuple_of(*entries: bytes) -> bytes:
    return b"(" + b"".join(entries) + b"t"


def dict_of(value: bytes) -> bytes:
    """Return the pickle of a dict with this value under x."""
    return b"\x80\x03}" + text("x") + value + b"s."


NONE, TRUE, FALSE, EMPTY = b"N", b"\x88", b"\x89", b")"
NDARRAY, DTYPE = name("numpy", "ndarray"), name("numpy", "dtype")
RECONSTRUCT = name("numpy.core.multiarray", "_reconstruct")
FROMBUFFER = name("numpy._core.numeric", "_frombuffer")
F4 = call(DTYPE, text("f4"), FALSE, TRUE)
OBJECTS = call(DTYPE, text("O8"), FALSE, TRUE)
STATE = (number(3), text("<"), NONE, NONE, NONE, number(-1), number(-1), number(0))
LITTLE = build(F4, *STATE)
UNMADE = call(RECONSTRUCT, NDARRAY, tuple_of(number(0)), raw(b"b"))


def array_of(shape: bytes, dtype: bytes = LITTLE, content: bytes = raw(bytes(8)), fortran: bytes = FALSE) -> bytes:
    return build(UNMADE, number(1), shape, dtype, fortran, content)


def test_assembled_pickles_are_read() -> None:
    found = load_dict(dict_of(array_of(tuple_of(number(2)), content=raw(np.array([1.5, -3], "<f4").tobytes()))))
    assert found["x"].tolist() == [1.5, -3]
    buffered = call(FROMBUFFER, raw(np.arange(4, dtype="<f4").tobytes()), LITTLE, tuple_of(number(2), number(2)), text("F"))
    assert load_dict(dict_of(buffered))["x"].tolist() == [[0, 2], [1, 3]]


class Runs:
    """An object that pickles as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def calls(marker: Path) -> dict[str, Runs]:
    """Return calls that would create a file."""
    order = f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system": Runs(os.system, f"touch {marker}"),
        "eval": Runs(eval, order),
        "exec": Runs(exec, order),
        "open": Runs(open, str(marker), "w"),
        "getattr": Runs(getattr, np.ndarray, "tofile"),
        "Path.touch": Runs(Path.touch, marker),
        "numpy.load": Runs(np.load, str(marker)),
        "numpy.savetxt": Runs(np.savetxt, str(marker), [1.0]),
        "numpy.fromfile": Runs(np.fromfile, str(marker)),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", calls(Path("x")))
def test_no_call_in_a_pickle_is_made(kind: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    run = calls(marker)[kind]
    for content in (run, {"x": run}, {"x": [run]}, box({"x": run}), box(run), {run.call[0]: np.zeros(2)}):
        with pytest.raises(UnsupportedPickleError):
            load_dict(pickle.dumps(content, protocol=protocol))
    assert not marker.exists()


NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("builtins", "bytearray"),
    ("__builtin__", "eval"),
    ("copy_reg", "_reconstructor"),
    ("copyreg", "__newobj__"),
    ("operator", "attrgetter"),
    ("_codecs", "decode"),
    ("builtins", "bytes"),
    ("numpy", "load"),
    ("numpy", "memmap"),
    ("numpy", "matrix"),
    ("numpy", "ndarray.tofile"),
    ("numpy", "dtype.__init__.__globals__"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "fromfile"),
    ("numpy.core.multiarray", "_reconstruct.__globals__"),
    ("numpy.core.numeric", "load"),
    ("numpy.testing._private.utils", "runstring"),
    ("numpy.core", "_frombuffer"),
    ("numpy.core.multiarray.", "_reconstruct"),
    ("Numpy", "ndarray"),
    ("gpfl.data.files.unpickler", "ArrayStub"),
    ("torch.storage", "_load_from_bytes"),
]


@pytest.mark.parametrize(("module", "attribute"), NAMES, ids=[f"{module}:{attribute}" for module, attribute in NAMES])
def test_an_unlisted_name_is_an_error_that_names_it(module: str, attribute: str) -> None:
    listed = f"^{module}.{attribute}$".replace(".", r"\.")
    stacked = text(module) + text(attribute) + b"\x93"
    instance = b"(i" + name(module, attribute)[1:]
    for content in (name(module, attribute), stacked, call(name(module, attribute)), instance):
        with pytest.raises(UnsupportedPickleError, match=listed):
            load_dict(b"\x80\x04" + content + b".")


def test_a_pickled_numpy_scalar_is_an_error() -> None:
    for protocol in PROTOCOLS:
        with pytest.raises(UnsupportedPickleError, match=r"numpy\._?core\.multiarray\.scalar"):
            load_dict(pickle.dumps({"x": np.float64(1.0)}, protocol=protocol))


def objects(*entries: object) -> np.ndarray:
    out = np.empty(len(entries), dtype=object)
    out[:] = entries
    return out


ODD: dict[str, tuple[object, str]] = {
    "a list of arrays": ([np.zeros(2)], "list instead of a dict of arrays"),
    "an array": (np.zeros(2), "NoneType instead of a dict of arrays"),
    "text": ("x", "str instead of a dict of arrays"),
    "None": (None, "NoneType instead of a dict of arrays"),
    "an empty dict": ({}, "dict instead of a dict of arrays"),
    "a list in the dict": ({"x": [1, 2]}, "a list under 'x' instead of an array"),
    "text in the dict": ({"x": "1"}, "an object under 'x' instead of an array"),
    "a dict in the dict": ({"x": {"x": np.zeros(2)}}, "an object under 'x' instead of an array"),
    "a key that is no text": ({1: np.zeros(2)}, "an empty array under 1 instead of an array"),
    "objects in the dict": ({"x": objects(1, "a")}, "an array of objects"),
    "arrays in an array": ({"x": objects(np.zeros(1), np.zeros(2))}, "an array of objects"),
    "one object in the dict": ({"x": box(np.zeros(2))}, "an empty array under 'x' instead of an array"),
    "an object in an object": (box(box({"x": np.zeros(2)})), "ArrayStub instead of a dict of arrays"),
    "an array of two dicts": (objects({"x": 1}, {"x": 2}), "an array of objects"),
    "texts": ({"x": np.array(["a", "bc"])}, "the type 'U2'"),
    "bytes": ({"x": np.array([b"a"])}, "the type 'S1'"),
    "complex numbers": ({"x": np.array([1j])}, "the type 'c16'"),
    "times": ({"x": np.array(["2024-01-01"], dtype="M8[D]")}, "the type 'M8'"),
    "records": ({"x": np.zeros(2, dtype=[("a", "i4")])}, "the type 'V4'"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ODD)
def test_anything_but_a_dict_of_numeric_arrays_is_an_error(kind: str, protocol: int) -> None:
    content, message = ODD[kind]
    with pytest.raises(UnsupportedPickleError) as problem:
        load_dict(pickle.dumps(content, protocol=protocol))
    assert str(problem.value) == message


SETTING = b"N}" + text("made_up") + number(1) + b"s"  # as slots: set on the thing itself
HOSTILE: dict[str, tuple[bytes, str]] = {
    "too few bytes": (array_of(tuple_of(number(3))), r"^an array of shape \(3,\) with 8 bytes$"),
    "too many bytes": (array_of(tuple_of(number(1))), r"^an array of shape \(1,\) with 8 bytes$"),
    "a negative shape": (array_of(tuple_of(number(-1), number(-2))), r"^an array of shape \(-1, -2\)$"),
    "a shape of text": (array_of(tuple_of(text("2"))), r"^an array of shape \('2',\)$"),
    "a shape that is no tuple": (array_of(number(2)), "^an array of shape 2$"),
    "an endless shape": (array_of(tuple_of(number(0), *[number(1 << 30)] * 4), content=raw(b"")), "not a pickle"),
    "too many dimensions": (array_of(tuple_of(*[number(1)] * 99), content=raw(bytes(4))), "not a pickle"),
    "a list for bytes": (array_of(tuple_of(number(2)), content=b"]"), "^an array of objects$"),
    "text for bytes": (array_of(tuple_of(number(2)), content=text("abcdefgh")), "^an array of no numeric type$"),
    "an array for bytes": (
        array_of(tuple_of(number(2)), content=array_of(tuple_of(number(2)))),
        "^an array of no numeric type$",
    ),
    "bytes of objects": (array_of(tuple_of(number(1)), OBJECTS), "^an array of no numeric type$"),
    "an address for an object": (array_of(EMPTY, OBJECTS), "^an array of no numeric type$"),
    "a shape of one object": (array_of(tuple_of(number(1)), OBJECTS, b"](" + number(1) + b"e"), "^an array of objects$"),
    "a type that is a class": (array_of(tuple_of(number(2)), DTYPE), "^an array of no numeric type$"),
    "a type that is text": (array_of(tuple_of(number(2)), text("f4")), "^an array of no numeric type$"),
    "a type without __init__": (array_of(tuple_of(number(2)), new(DTYPE)), "^an array of no numeric type$"),
    "a short state": (build(UNMADE, number(1), tuple_of(number(2))), "^an array with an unexpected state$"),
    "a state that is no tuple": (UNMADE + b"}b", "^an array with an unexpected state$"),
    "an empty array": (UNMADE, "^an empty array under 'x' instead of an array$"),
    "an array without __init__": (new(RECONSTRUCT), "^an empty array under 'x' instead of an array$"),
    "a buffer without __init__": (new(FROMBUFFER), "^an empty array under 'x' instead of an array$"),
    "a buffer in another order": (call(FROMBUFFER, raw(bytes(8)), LITTLE, tuple_of(number(2)), text("K")), "no numeric type"),
    "a buffer of nothing": (call(FROMBUFFER), "not a pickle"),
    "a type of objects in a buffer": (call(FROMBUFFER, raw(bytes(8)), OBJECTS, tuple_of(number(1))), "no numeric type"),
    "the type of Python 2's objects": (call(DTYPE, text("O4")), "^the type 'O4'$"),
    "a type of fields": (call(DTYPE, b"]"), r"^the type \[\]$"),
    "a type named by a number": (call(DTYPE, number(8)), "^the type 8$"),
    "a type with commas": (call(DTYPE, text("f4,O")), "^the type 'f4,O'$"),
    "a type of 3 bytes": (call(DTYPE, text("f3")), "not a pickle"),
    "a type without a name": (call(DTYPE), "not a pickle"),
    "a state of a type that is short": (build(F4, number(3)), "^a type with an unexpected state$"),
    "a state of a type that is a dict": (F4 + b"}b", "^a type with an unexpected state$"),
    "an order of bytes that is none": (build(F4, number(3), text("x")), "^a type with an unexpected state$"),
    "an order of bytes that is an object": (build(F4, number(3), F4), "^a type with an unexpected state$"),
    "fields in the state of a type": (
        array_of(tuple_of(number(1)), build(F4, number(3), text("<"), NONE, tuple_of(text("a")), b"}")),
        r"^an array of shape \(1,\) with 8 bytes$",
    ),
    "a changed class of arrays": (build(NDARRAY, SETTING), "not a pickle"),
    "a changed type": (build(DTYPE, SETTING), "not a pickle"),
    "a changed maker of arrays": (build(RECONSTRUCT, SETTING), "not a pickle"),
    "a changed maker of buffers": (build(FROMBUFFER, SETTING), "not a pickle"),
    "a changed maker of bytes": (build(name("_codecs", "encode"), SETTING), "not a pickle"),
    "bytes in a code that runs": (call(name("_codecs", "encode"), text("x"), text("zip")), "in an encoding other than latin1$"),
    "bytes of a number": (call(name("_codecs", "encode"), number(1 << 30)), "in an encoding other than latin1$"),
    "bytes of other letters": (call(name("_codecs", "encode"), text("€"), text("latin1")), "not a pickle"),
    "endless bytes": (call(name("__builtin__", "bytes"), number(1 << 30)), "in an encoding other than latin1$"),
    "a changed instance": (build(UNMADE, SETTING), "^an array with an unexpected state$"),
    "a changed dict": (build(b"}", SETTING), "not a pickle"),
    "a changed text": (build(text("a"), SETTING), "not a pickle"),
    "an array of the class's class": (new(NDARRAY), "^an object under 'x' instead of an array$"),
    "a call of an array": (call(UNMADE), "not a pickle"),
    "a call of text": (call(text("os.system"), text("ls")), "not a pickle"),
    "a persistent id": (b"Pos.system\n", "not a pickle"),
    "a persistent id from the stack": (text("os.system") + b"Q", "not a pickle"),
    "a buffer from elsewhere": (b"\x97", "not a pickle"),
    "extension 1": (b"\x82\x01", "not a pickle"),
    "extension 0": (b"\x82\x00", "not a pickle"),
    "extension 2": (b"\x83\x01\x02", "not a pickle"),
    "extension 4": (b"\x84\x01\x02\x03\x04", "not a pickle"),
    "a stack that is empty": (b"0000", "not a pickle"),
    "a memory that is empty": (b"h\x07", "not a pickle"),
    "text in another code": (b"X\x02\x00\x00\x00\xff\xfe", "not a pickle"),
}


def state_of_names() -> list[dict[str, object]]:
    """Return everything that a pickle could change in the listed names."""
    kinds = [thing if isinstance(thing, type) else type(thing) for thing in unpickler.NAMES.values()]
    return [dict(vars(kind)) for kind in kinds]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle_is_an_error_and_changes_nothing(kind: str) -> None:
    content, message = HOSTILE[kind]
    before = state_of_names()
    with pytest.raises(UnsupportedPickleError, match=message):
        load_dict(dict_of(content))
    assert state_of_names() == before
    good = {"x": np.arange(6.0).reshape(2, 3)}
    for protocol in PROTOCOLS:
        assert np.array_equal(load_dict(pickle.dumps(good, protocol=protocol))["x"], good["x"])


def test_a_registered_extension_is_an_error_that_names_it() -> None:
    copyreg.add_extension("os", "system", 200)
    try:
        with pytest.raises(UnsupportedPickleError, match=r"^os\.system$"):
            load_dict(dict_of(b"\x82\xc8"))
    finally:
        copyreg.remove_extension("os", "system", 200)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncated_pickle_is_an_error(protocol: int) -> None:
    content = pickle.dumps(box({"x": np.arange(3.0), "y": np.array([1])}), protocol=protocol)
    for length in range(len(content)):
        with pytest.raises(UnsupportedPickleError):
            load_dict(content[:length])
    with pytest.raises(UnsupportedPickleError, match="not a pickle"):
        load_dict(b"\x80\xff" + content[2:])


def test_garbled_pickles_are_read_or_raise_our_error() -> None:
    draw = random.Random(0)
    content = pickle.dumps(box({"x": np.zeros((3, 2), np.float32), "y": np.arange(3)}), protocol=4)
    failures = 0
    for _ in range(3000):
        garbled = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            garbled[draw.randrange(len(garbled))] = draw.choice(b"\x00\x01()].0abcthjsuXBCKRMN}\x81\x85\x86\x87\x93\x94\xff")
        try:
            found = load_dict(bytes(garbled))
        except UnsupportedPickleError:
            failures += 1
        else:
            assert all(isinstance(key, str) and array.dtype.kind in "biuf" for key, array in found.items())
    assert failures > 1000


def test_numpy_itself_would_run_these_pickles(tmp_path: Path) -> None:
    """Check that the pickles of these tests do run in numpy."""
    marker = tmp_path / "ran"
    content = io.BytesIO()
    np.save(content, box({"x": calls(marker)["os.system"]}), allow_pickle=True)
    content.seek(0)
    np.load(content, allow_pickle=True)
    assert marker.exists()
