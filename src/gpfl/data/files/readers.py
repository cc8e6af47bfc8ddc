"""Readers of CSV, TSV, Parquet and npz files; nothing in a file is executed."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from gpfl.data.files.csv_reader import check_unique, read_csv
from gpfl.data.files.layout import InputFile
from gpfl.data.files.raw_table import UNREAD, Columns, RawTable, ignore_flag, number_rows
from gpfl.data.files.unpickler import UnsupportedPickleError, load_dict
from gpfl.data.published import archive
from gpfl.errors import GpflError

MAX_BYTES = 1 << 32  # largest array in an npz file
KINDS = "biufUS"  # kinds of numpy arrays that hold numbers or text
OBJECTS = re.compile(r"an array of objects|(a list|an object) under")
"""Why arrays of unequal length are not read: PFLlib stores texts so."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # columns in which pandas numbers the rows


def read_parquet(source: InputFile, ignore: Collection[str] = ()) -> RawTable:
    """Return the columns of a Parquet file: numbers, or text; missing values are NaN or ""."""
    path = source.path
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
    unsupported: dict[str, str] = {}
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
            unsupported[name] = f"column '{name}' of type {kind}"
        else:
            columns[name] = np.array(["" if v is None else str(v) for v in values.to_pylist()])
    if unsupported:
        flag = ignore_flag(list(ignore), unsupported)
        raise GpflError(f"{path} has {', '.join(unsupported.values())}; columns must be numbers or text: leave out with {flag}")
    check_unique(list(columns), path)
    if not table.num_rows:
        raise GpflError(f"{path} has no rows")
    return number_rows(source, columns, tuple(notes))


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
    content = io.BytesIO(archive.read_zip_member(members, name, MAX_BYTES, str(path)))
    try:
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(content)
        if dtype.kind in KINDS:
            content.seek(0)
            array = np.lib.format.read_array(content, allow_pickle=False)
            return {name.removesuffix(".npy"): array.astype(str) if dtype.kind == "S" else array}
        if dtype.hasobject and shape == ():
            return load_dict(content.read())
        raise UnsupportedPickleError("an array of objects" if dtype.hasobject else f"the type {dtype}")
    except Exception as problem:  # a damaged header may raise anything
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        fix = ": if these are PFLlib's texts, use --data agnews or give them as CSV" if OBJECTS.match(reason) else ""
        raise GpflError(f"{name} in {path} is not an array of numbers or text, nor a dict of arrays ({reason}){fix}") from None


READERS: Mapping[str, Callable[[InputFile, Collection[str]], RawTable]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".npz": read_npz,
}
"""Readers by suffix; they take a file and the columns that are not read."""
