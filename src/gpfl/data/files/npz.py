"""Read the arrays of npz files; nothing in a file is executed."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np

from gpfl.data.files.layout import InputFile
from gpfl.data.files.raw_table import UNREAD, Columns, RawTable, as_text, number_rows
from gpfl.data.files.unpickler import UnsupportedPickleError, load_dict
from gpfl.data.published import archive
from gpfl.errors import GpflError

MAX_BYTES = 1 << 32  # largest array in an npz file
KINDS = "biufUS"  # kinds of numpy arrays that hold numbers or text
OBJECTS = re.compile(r"an array of objects|(a list|an object) under")
"""Why arrays of unequal length are not read: PFLlib stores texts so."""


def read_npz(source: InputFile, ignore: Collection[str] = ()) -> RawTable:
    """Return the arrays of an npz file, or of the pickled dict that is the one member of PFLlib's files."""
    arrays: Columns = {}
    path = source.path
    with archive.open_zip(path, str(path)) as members:
        for name in members.namelist():
            if name.removesuffix(".npy") in ignore:
                arrays[name.removesuffix(".npy")] = UNREAD
            else:
                arrays.update(_read_member(members, name, path))
    if not arrays:
        raise GpflError(f"{path} holds no array")
    return number_rows(source, arrays)


def _read_member(members: zipfile.ZipFile, name: str, path: Path) -> Columns:
    size = members.getinfo(name).file_size
    if size > MAX_BYTES:
        raise GpflError(
            f"{name} in {path} would take {size:,} bytes; an array may take {MAX_BYTES:,}: divide it among several files"
        )
    content = io.BytesIO(archive.read_zip_member(members, name, MAX_BYTES))
    try:
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(content)
        if dtype.kind in KINDS:
            content.seek(0)
            array = np.lib.format.read_array(content, allow_pickle=False)
            texts = dtype.kind in "SU" and array.ndim == 1
            return {name.removesuffix(".npy"): as_text(array.astype(str).tolist()) if texts else array}
        if dtype.hasobject and shape == ():
            return load_dict(content.read())
        raise UnsupportedPickleError("an array of objects" if dtype.hasobject else f"the type {dtype}")
    except Exception as problem:  # a damaged header may raise anything
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        fix = ": if these are PFLlib's texts, use --data agnews or give them as CSV" if OBJECTS.match(reason) else ""
        raise GpflError(f"{name} in {path} is not an array of numbers or text, nor a dict of arrays ({reason}){fix}") from None
