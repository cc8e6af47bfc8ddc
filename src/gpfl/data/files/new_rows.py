"""Read new rows into the columns of a known schema, such as that of a trained model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gpfl.data.columns import UNKNOWN, RawColumns, Schema
from gpfl.data.files.cells import parse_column
from gpfl.data.files.checks import describe_unreadable
from gpfl.data.files.layout import SUFFIXES, InputFile, file_suffix, find_inputs
from gpfl.data.files.raw_table import Array, RawTable, as_text, join_names, join_tables, number_rows
from gpfl.data.files.reader import read_table
from gpfl.errors import GpflError, did_you_mean, pluralize


class DataFrame(Protocol):
    """A data frame of pandas, polars or another library."""

    @property
    def columns(self) -> Iterable[str]:
        """Names of the columns."""

    def __getitem__(self, name: str, /) -> npt.ArrayLike:
        """Return the values of a column."""


NewData: TypeAlias = str | Path | Mapping[str, npt.ArrayLike] | DataFrame
"""The path of a CSV, TSV, Parquet or npz file or of a folder with one per client, columns by name, or a data frame."""


@dataclass(frozen=True, eq=False)
class NewRows:
    """New rows as the columns of a schema."""

    columns: RawColumns  # the columns in the schema's order; `UNKNOWN` where a category is not in the schema
    unseen: Mapping[str, Mapping[str, int]]  # categories that are not in the schema and their numbers of rows, by column
    unreadable: Mapping[str, int]  # numbers of unreadable cells that were read as missing, by column
    table: RawTable  # all columns as they were read, such as that of the label


def read_new_rows(
    data: NewData, schema: Schema, *, unreadable: Literal["error", "missing"] = "error", text: Collection[str] = ()
) -> NewRows:
    """Return new rows as the columns of a schema, matched by name; other columns are ignored.

    Numbers in a column of dates are days since 1970-01-01. Cells that cannot be parsed as a number or date raise, or are
    missing values if `unreadable` is "missing". `text` names other columns that stay text even if all their cells are numbers.
    """
    categorical = {column.name.lower() for column in schema.columns if column.is_categorical}
    table = read_columns(data, categorical | {name.lower() for name in text})
    absent = [column.name for column in schema.columns if column.name not in table.columns]
    if absent:
        columns = _suggest(absent, list(table.columns))
        raise GpflError(f"{table.path} lacks {pluralize(len(absent), 'column')} that the model needs: {columns}")
    values = np.empty((len(table), len(schema)))
    unseen: dict[str, dict[str, int]] = {}
    missing: dict[str, int] = {}
    for index, column in enumerate(schema.columns):
        cells = table.columns[column.name]
        if len(cells) != len(table) or cells.ndim != 1:
            raise GpflError(f"{table.path} has {column.name} of shape {cells.shape}; give one value per row")
        parsed = parse_column(column.name, cells, not table.decimal_commas, kind=column.kind)
        values[:, index] = parsed.values
        if column.is_categorical:
            codes = RawColumns(Schema((parsed.schema,)), parsed.values[:, None]).codes(column.name, column.categories)
            values[:, index] = codes
            names, counts = np.unique(parsed.values[codes == UNKNOWN], return_counts=True)
            if len(names):
                unseen[column.name] = {parsed.schema.categories[int(k)]: int(n) for k, n in zip(names, counts, strict=True)}
        elif parsed.unreadable.any():
            if unreadable == "error":
                reason, fix = describe_unreadable(parsed, table)
                raise GpflError(f"column '{column.name}' {reason}: {fix}")
            missing[column.name] = int(parsed.unreadable.sum())
    return NewRows(RawColumns(schema, values), unseen, missing, table)


def _suggest(absent: Sequence[str], known: Sequence[str]) -> str:
    """Return the absent columns, each with the most similar known one; all known ones if none is similar."""
    similar = {name: did_you_mean(name, known) for name in absent}
    close = [f"{name} ({hint})" for name, hint in similar.items() if hint.startswith("did")]
    others = [name for name, hint in similar.items() if not hint.startswith("did")]
    listed = [*close, *([join_names(others)] if others else [])]
    return ", ".join(listed[:6]) + ("" if close else f"; its columns are {join_names(known)}")


def read_columns(data: NewData, text: Collection[str] = ()) -> RawTable:
    """Return the columns of a file, a folder of files, a data frame or a mapping; those named in `text` stay text."""
    if isinstance(data, (str, Path)):
        path = Path(data)
        if path.is_dir():
            return _read_folder(path, text)
        if not path.is_file():
            raise GpflError(f"there is no file {path}")
        if file_suffix(path) not in SUFFIXES:
            raise GpflError(f"cannot read {path}: give a {', '.join(SUFFIXES)} file")
        try:
            return read_table(InputFile(path), text=text, min_columns=1)
        except OSError as problem:
            raise GpflError(f"cannot read {path}: {problem.strerror}") from None
    names = list(data) if isinstance(data, Mapping) else list(data.columns)
    columns = {str(name): _to_array(data[name], str(name)) for name in names}
    table = number_rows(InputFile(Path(type(data).__name__)), columns)
    if not len(table):
        raise GpflError(f"{table.path} has no rows")
    return table


def _read_folder(folder: Path, text: Collection[str]) -> RawTable:
    """Return the rows of a file per client; column `client` holds the client in the path of the file."""
    layout = find_inputs(folder)
    if layout.images:
        raise GpflError(f"{folder} holds images; give rows: a {', '.join(SUFFIXES)} file, or a folder with one per client")
    named = next((entry for entry in layout.inputs if entry.split), None)
    if named is not None:
        raise GpflError(f"{folder} holds a {named.split} split, {named.path}: give the file or folder of the new rows alone")
    rows = join_tables([read_table(entry, text=text, min_columns=1) for entry in layout.inputs])
    clients = as_text([entry.client for entry in layout.inputs])[rows.file_of]
    return replace(rows, columns={"client": clients, **rows.columns})  # unless the files have a column of that name


def _to_array(values: npt.ArrayLike, name: str) -> Array:
    """Return a column as numbers, or as text with "" for a missing value."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise GpflError(f"column '{name}' has shape {array.shape}; give one value per row")
    if array.dtype.kind == "M":
        return (array - np.datetime64(0, "D")) / np.timedelta64(1, "D")
    if array.dtype.kind in "iuf":
        return array
    return as_text(["" if value is None or str(value) in ("nan", "NaT", "<NA>") else str(value) for value in array.tolist()])
