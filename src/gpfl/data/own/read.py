"""Files with rows: CSV and TSV, Parquet, npz. Each gives its columns by name; nothing in them is run."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpfl.data import archive
from gpfl.data.own.pickled import RefusedError, read_dict
from gpfl.errors import GpflError

Array = npt.NDArray[Any]
Columns = dict[str, Array]
"""Arrays by name, all of one length: text as read, numbers, or rows of any shape."""

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))
"""What stands for a missing value in a text file, in small letters."""
MOST = 1 << 34
"""Bytes that an array in an npz file may hold."""
KINDS = "biufUS"
"""Kinds of array that hold numbers or text."""
CELL = 1 << 20
"""Characters that a cell of a CSV file may hold."""


def read_csv(path: Path) -> Columns:
    """Gives the columns of a CSV or TSV file as text; its first line names them."""
    csv.field_size_limit(CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            start = file.readline()
            file.seek(0)
            records = csv.reader(file, delimiter=delimiter_of(path, start), strict=True)
            names = [name.strip() for name in next(records, [])]
            check_names(names, path)
            rows = []
            for cells in records:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise GpflError(
                        f"{path}, line {records.line_num}, has {len(cells)} cells; the first line names {len(names)}"
                    )
                rows.append(cells)
    except UnicodeDecodeError:
        raise GpflError(f"{path} is not UTF-8 text (byte {first_odd_byte(path)}): save it as UTF-8") from None
    except (OSError, csv.Error) as problem:
        raise GpflError(f"{path} cannot be read as CSV ({problem})") from None
    if not rows:
        raise GpflError(f"{path} has no rows below its first line")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def first_odd_byte(path: Path) -> int:
    """Gives the place of the first byte that is not UTF-8; one that a file read in pieces names is counted from its piece."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError as problem:
        return problem.start
    return 0


def delimiter_of(path: Path, line: str) -> str:
    """Gives the mark between cells: the most frequent of comma, semicolon and tab in the first line."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    return max(",;\t", key=line.count)


def check_names(names: list[str], path: Path) -> None:
    """Refuses a first line that does not name the columns."""
    if not names:
        raise GpflError(f"{path} is empty")
    if all(is_number(name) for name in names):
        raise GpflError(f"{path} begins with numbers ({', '.join(names[:3])} …); its first line must name the columns")
    if "" in names:
        raise GpflError(
            f"{path} has a column without a name, the {names.index('') + 1}. of {len(names)}: name it in the first line"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise GpflError(f"{path} has two columns named '{twice}'")


def is_number(text: str) -> bool:
    """Tells whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_parquet(path: Path) -> Columns:
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
    for name, values in zip(table.column_names, table.columns, strict=True):
        kind = values.type
        if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
            columns[name] = np.array([np.nan if v is None else v for v in values.to_pylist()])
        elif pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
            raise GpflError(f"{path} has column '{name}' of type {kind}; columns must be numbers or text")
        else:
            columns[name] = np.array(["" if v is None else str(v) for v in values.to_pylist()])
    check_names(list(columns), path)
    if not table.num_rows:
        raise GpflError(f"{path} has no rows")
    return columns


def read_npz(path: Path) -> Columns:
    """Gives the arrays of an npz file by name; of PFLlib's files, whose one member is a pickled dict, those of the dict."""
    found: Columns = {}
    with archive.open_zip(path, str(path)) as members:
        for name in members.namelist():
            read_member(members, name, path, found)
    if not found:
        raise GpflError(f"{path} holds no array")
    return found


def read_member(members: zipfile.ZipFile, name: str, path: Path, found: Columns) -> None:
    """Puts the array of one member into `found`, or the arrays of a pickled dict."""
    content = io.BytesIO(archive.zip_member(members, name, MOST, str(path)))
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
        raise GpflError(f"{name} in {path} is not an array of numbers or text, nor a dict of such ({words})") from None


READERS: Mapping[str, Callable[[Path], Columns]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".npz": read_npz,
}
"""The readers by ending of a file's name."""
