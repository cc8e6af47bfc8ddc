"""Files with rows: CSV and TSV, Parquet, npz. Each gives its columns by name; nothing in them is run."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from gpfl.data.files.csv_reader import check_names, read_csv
from gpfl.data.files.sheet import UNREAD, Columns, Sheet, ignoring, numbered
from gpfl.data.files.unpickler import RefusedError, read_dict
from gpfl.data.published import archive
from gpfl.errors import GpflError

MOST = 1 << 32
"""Bytes that an array in an npz file may hold."""
KINDS = "biufUS"
"""Kinds of array that hold numbers or text."""
OBJECTS = re.compile(r"an array of objects|(a list|an object) under")
"""How arrays of unequal length are refused: PFLlib's texts are such."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas keeps the numbers of rows."""


def read_parquet(path: Path, ignore: Collection[str] = ()) -> Sheet:
    """Gives the columns of a Parquet file: numbers as they are, the rest as text, NaN or "" where a value is missing."""
    try:
        import pyarrow.parquet
        import pyarrow.types
    except ImportError:
        raise GpflError(f"{path} is a Parquet file, which needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as problem:
        raise GpflError(f"{path} cannot be read as Parquet ({str(problem).splitlines()[0]})") from None
    columns: Columns = {}
    notes: list[str] = []
    odd: dict[str, str] = {}
    for name, values in zip(table.column_names, table.columns, strict=True):
        kind = values.type
        if PANDAS_INDEX.fullmatch(name):
            notes.append(f"Left out of {path.name}: {name}, in which pandas numbers the rows.")
            continue
        if name in ignore:
            columns[name] = UNREAD
        elif pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
            columns[name] = np.array([np.nan if v is None else v for v in values.to_pylist()])
        elif pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
            odd[name] = f"column '{name}' of type {kind}"
        else:
            columns[name] = np.array(["" if v is None else str(v) for v in values.to_pylist()])
    if odd:
        out = ignoring(list(ignore), odd)
        raise GpflError(f"{path} has {', '.join(odd.values())}; columns must be numbers or text: leave out with {out}")
    check_names(list(columns), path)
    if not table.num_rows:
        raise GpflError(f"{path} has no rows")
    return numbered(columns, tuple(notes))


def read_npz(path: Path, ignore: Collection[str] = ()) -> Sheet:
    """Gives the arrays of an npz file by name; of PFLlib's files, whose one member is a pickled dict, those of the dict."""
    found: Columns = {}
    with archive.open_zip(path, str(path)) as members:
        for name in members.namelist():
            if name.removesuffix(".npy") in ignore:
                found[name.removesuffix(".npy")] = UNREAD
            else:
                read_member(members, name, path, found)
    if not found:
        raise GpflError(f"{path} holds no array")
    return numbered(found)


def read_member(members: zipfile.ZipFile, name: str, path: Path, found: Columns) -> None:
    """Puts the array of one member into `found`, or the arrays of a pickled dict."""
    size = members.getinfo(name).file_size
    if size > MOST:
        raise GpflError(
            f"{name} in {path} would take {size:,} bytes; an array may take {MOST:,}: divide it among several files"
        )
    content = io.BytesIO(archive.read_zip_member(members, name, MOST, str(path)))
    try:
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(content)
        if dtype.kind in KINDS:
            content.seek(0)
            array = np.lib.format.read_array(content, allow_pickle=False)
            found[name.removesuffix(".npy")] = array.astype(str) if dtype.kind == "S" else array
        elif dtype.hasobject and shape == ():
            found.update(read_dict(content.read()))
        else:
            raise RefusedError("an array of objects" if dtype.hasobject else f"the type {dtype}")
    except Exception as problem:  # a damaged header may raise anything
        words = (str(problem).splitlines() or [type(problem).__name__])[0]
        way = ": if these are PFLlib's texts, use --data agnews, or give them as CSV" if OBJECTS.match(words) else ""
        raise GpflError(f"{name} in {path} is not an array of numbers or text, nor a dict of such ({words}){way}") from None


READERS: Mapping[str, Callable[[Path, Collection[str]], Sheet]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".npz": read_npz,
}
"""The readers by ending of a file's name; the columns named beside the path are UNREAD."""
