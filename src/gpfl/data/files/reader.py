"""Read the columns of CSV, TSV, Parquet and npz files; nothing in a file is executed."""

import csv
import gzip
import io
import re
import zipfile
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpfl.data.files.layout import InputFile, file_suffix
from gpfl.data.files.raw_table import MISSING, UNREAD, Array, Columns, RawTable, as_text, ignore_flag, is_number, number_rows
from gpfl.data.files.unpickler import UnsupportedPickleError, load_dict
from gpfl.data.published import archive
from gpfl.errors import GpflError, pluralize

if TYPE_CHECKING:
    import polars as pl

csv.field_size_limit(1 << 20)  # largest number of characters in a cell of a file that polars cannot read
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
EXCEL_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # a first line in which Excel names the delimiter
UNNAMED = re.compile(r"(Unnamed: \d+)?")
"""The names that pandas gives to a column without one, when it writes and when it reads."""
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # columns in which pandas numbers the rows
MAX_BYTES = 1 << 32  # largest array in an npz file
NPZ_KINDS = "biufUS"  # kinds of numpy arrays that hold numbers or text
OBJECTS = re.compile(r"an array of objects|(a list|an object) under")
"""Why arrays of unequal length are not read: PFLlib stores texts so."""


def read_table(source: InputFile, ignore: Collection[str] = (), text: Collection[str] = (), min_columns: int = 2) -> RawTable:
    """Return the columns of a file: numbers, or text without spaces around it. Missing values are NaN, "" or in `MISSING`.

    Columns of a CSV file whose lower-case names are in `text` stay text even if all their cells are numbers.
    A file with fewer columns than `min_columns` has another separator, or no names of columns.
    """
    suffix = file_suffix(source.path)
    if suffix == ".npz":
        return _read_npz(source, ignore)
    try:
        import polars  # noqa: F401
    except ImportError:
        raise GpflError(f"{source.path} needs polars to be read: pip install polars") from None
    return _read_parquet(source, ignore) if suffix == ".parquet" else _read_csv(source, ignore, text, min_columns)


# CSV.


@dataclass(frozen=True)
class _CsvText:
    path: Path
    text: str
    delimiter: str
    skipped: int  # lines before the text
    note: str

    def records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the first line and the cells of every record that is not empty, the header first."""
        records = csv.reader(io.StringIO(self.text, newline=""), delimiter=self.delimiter, strict=True)
        line = 1
        try:
            for cells in records:
                if any(cell.strip() for cell in cells):
                    yield line + self.skipped, cells
                line = records.line_num + 1
        except csv.Error as problem:
            raise GpflError(f"{self.path} cannot be read as CSV ({problem})") from None


def _read_csv(source: InputFile, ignore: Collection[str], text: Collection[str], min_columns: int) -> RawTable:
    import polars as pl

    path = source.path
    file = _decode(path)
    stream = io.StringIO(file.text, newline="")
    names = [name.strip() for name in next(csv.reader(stream, delimiter=file.delimiter), [])]
    _check_header(names, file, min_columns)
    try:
        frame = pl.read_csv(
            io.BytesIO(stream.read().lstrip("\r\n").encode()),
            has_header=False,
            separator=file.delimiter,
            schema={str(index): pl.String for index in range(len(names))},
        )
        frame = frame.with_columns(pl.all().str.strip_chars().replace("", None))
        frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
        if frame.to_series(-1).null_count():  # polars also reads a row with too few cells
            deque(_read_rows(file, len(names)), maxlen=0)
    except pl.exceptions.PolarsError:
        cells = zip(*_read_rows(file, len(names)), strict=True)
        frame = pl.DataFrame({str(i): [cell.strip() or None for cell in column] for i, column in enumerate(cells)})
    if not len(frame):
        raise GpflError(f"{path} has no rows below its first line")
    columns = [
        UNREAD if name and name in ignore else _parse_cells(series, keep_text=UNNAMED.fullmatch(name) or name.lower() in text)
        for name, series in zip(names, frame.get_columns(), strict=True)
    ]
    named, notes = _drop_unnamed(names, columns, path)

    def find_line(row: int) -> int:  # only messages need it, so the file is read again
        return next(islice(_decode(path).records(), row + 1, None))[0]

    source = replace(source, line_of=find_line)
    notes = [file.note, *notes] if file.note else notes
    return number_rows(source, named, tuple(notes), decimal_commas=file.delimiter != ",")


def _decode(path: Path) -> _CsvText:
    """Return the text of a file as UTF-8, UTF-16 with a byte order mark, or Latin-1, and its delimiter."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise GpflError(f"{path} cannot be decompressed ({problem}): get it again") from None
    note = ""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = content.decode("utf-16", errors="replace")
    else:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            text = content.decode("latin-1")
            note = f"{path.name} is not UTF-8 (byte {problem.start}) and was read as Latin-1."
    if "\n" not in text:
        text = text.replace("\r", "\n")  # old Macintosh files
    start, _, rest = text.partition("\n")
    named = EXCEL_LINE.fullmatch(start)
    if named and named[1] in DELIMITERS:
        return _CsvText(path, rest, named[1], 1, note)
    unquoted = "".join(start.split('"')[::2])
    delimiter = "\t" if file_suffix(path).startswith(".tsv") else max(DELIMITERS, key=unquoted.count)
    return _CsvText(path, text, delimiter, 0, note)


def _check_header(names: list[str], file: _CsvText, min_columns: int) -> None:
    path = file.path
    if not names:
        raise GpflError(f"{path} is empty")
    if all(is_number(name) for name in names):
        raise GpflError(f"{path} begins with numbers ({', '.join(names[:3])} …); its first line must name the columns")
    if len(names) < min_columns:
        raise GpflError(
            f"{path} has one column, '{names[0][:40]}', when split at {DELIMITERS[file.delimiter]}; its first line must name "
            f"the columns, separated by {', '.join(DELIMITERS.values())}"
        )
    if duplicate := next((name for name in names if name and names.count(name) > 1), ""):
        raise GpflError(f"{path} has two columns named '{duplicate}'")


def _read_rows(file: _CsvText, width: int) -> Iterator[list[str]]:
    """Yield the cells of all rows; raise if a row has more or fewer than the header."""
    for line, cells in islice(file.records(), 1, None):
        if len(cells) != width:
            raise GpflError(
                f"{file.path}, line {line}, has {pluralize(len(cells), 'cell')} when split at {DELIMITERS[file.delimiter]}; "
                f"the first line has {width}"
            )
        yield cells


def _parse_cells(series: "pl.Series", keep_text: object) -> Array:
    """Return the cells of a column as numbers if all are numbers or missing, else as text."""
    import polars as pl

    if not keep_text:
        present = series.set(series.str.to_lowercase().is_in(list(MISSING)), None)
        numbers = present.cast(pl.Float64, strict=False)
        if numbers.null_count() == present.null_count():
            return numbers.to_numpy().copy()
    return as_text(series.fill_null("").to_list())


def _drop_unnamed(names: Sequence[str], columns: Sequence[Array], path: Path) -> tuple[Columns, list[str]]:
    """Return the columns without unnamed ones that are empty or, if first, number the rows; and a note about each."""
    named: Columns = {}
    notes: list[str] = []
    for index, (name, values) in enumerate(zip(names, columns, strict=True)):
        if UNNAMED.fullmatch(name) and values is not UNREAD:
            if not any(values):
                notes.append(f"Left out of {path.name}: an empty column without a name.")
                continue
            if index == 0 and all(cell.isdecimal() for cell in values) and len(set(values)) == len(values):
                notes.append(f"Left out of {path.name}: the first column, which has no name and numbers the rows.")
                continue
        if not name:
            raise GpflError(f"{path}: column {index + 1} of {len(names)} has no name: name it in the first line")
        named[name] = values
    return named, list(dict.fromkeys(notes))


# Parquet.


def _read_parquet(source: InputFile, ignore: Collection[str]) -> RawTable:
    import polars as pl

    path = source.path
    try:
        frame = pl.read_parquet(path.read_bytes())
    except pl.exceptions.PolarsError as problem:
        raise GpflError(f"{path} cannot be read as Parquet ({str(problem).splitlines()[0]})") from None
    columns: Columns = {}
    notes: list[str] = []
    unsupported: dict[str, str] = {}
    for series in frame.get_columns():
        name, kind = series.name, series.dtype
        if PANDAS_INDEX.fullmatch(name):
            notes.append(f"Left out of {path.name}: {name}, in which pandas numbers the rows.")
        elif name in ignore:
            columns[name] = UNREAD
        elif kind.is_numeric():
            columns[name] = series.cast(pl.Float64).to_numpy().copy()
        elif kind.is_nested() or kind in (pl.Binary, pl.Object):
            unsupported[name] = f"column '{name}' of type {kind}"
        else:
            columns[name] = as_text(["" if value is None else str(value) for value in series.to_list()])
    if unsupported:
        flag = ignore_flag(list(ignore), unsupported)
        raise GpflError(f"{path} has {', '.join(unsupported.values())}; columns must be numbers or text: leave out with {flag}")
    if not len(frame):
        raise GpflError(f"{path} has no rows")
    return number_rows(source, columns, tuple(notes))


# Arrays.


def _read_npz(source: InputFile, ignore: Collection[str] = ()) -> RawTable:
    """Return the arrays of an npz file, or of the pickled dict that is the one member of PFLlib's files."""
    arrays: Columns = {}
    path = source.path
    with archive.open_zip(path, str(path)) as members:
        for name in members.namelist():
            if name.removesuffix(".npy") in ignore:
                arrays[name.removesuffix(".npy")] = UNREAD
            else:
                arrays.update(_read_npz_member(members, name, path))
    if not arrays:
        raise GpflError(f"{path} holds no array")
    return number_rows(source, arrays)


def _read_npz_member(members: zipfile.ZipFile, name: str, path: Path) -> Columns:
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
        if dtype.kind in NPZ_KINDS:
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
