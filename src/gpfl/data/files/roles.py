"""Columns that are not inputs: labels, clients, splits and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.data.files.columns import parse_column
from gpfl.data.files.csv_reader import is_number
from gpfl.data.files.layout import SPLIT_NAMES, InputFile
from gpfl.data.files.raw_table import (
    MISSING_LABELS,
    Array,
    RawTable,
    RowLocator,
    find_missing,
    join_column,
    join_names,
    to_text,
)
from gpfl.data.files.samples import ColumnOptions, FileSamples, check_no_missing, drop_missing
from gpfl.errors import GpflError, did_you_mean

LABEL_NAMES = ("label", "labels", "y", "target", "targets", "class")
CLIENT_NAMES = ("client", "clients", "client_id")
SPLIT_COLUMNS = ("part", "split")
MAX_CLASSES = 1000


@dataclass(frozen=True)
class Roles:
    """Names of the columns of labels, clients and groups; "" where there is none."""

    label: str
    client: str
    group: str

    @property
    def names(self) -> list[str]:
        """The columns that there are."""
        return [name for name in (self.label, self.client, self.group) if name]


def find_roles(inputs: Sequence[InputFile], table: RawTable, options: ColumnOptions) -> Roles:
    """Return the columns that the user chose or that have a usual name; paths that name clients win over the latter."""
    label = _find(options, "label", LABEL_NAMES, table)
    client = _find(options, "client", () if all(entry.client for entry in inputs) else CLIENT_NAMES, table, required=False)
    return Roles(label, client, _find(options, "group", (), table, required=False))


def _find(options: ColumnOptions, role: str, usual: Sequence[str], table: RawTable, *, required: bool = True) -> str:
    chosen = options.roles
    name = chosen[role]
    if name:
        if name not in table.columns:
            raise GpflError(f"data.{role} is '{name}', which is not a column; {did_you_mean(name, table.columns)}")
        return name
    lower = {name.lower(): name for name in table.columns if name not in chosen.values()}
    found = next((lower[name] for name in usual if name in lower), "")
    if required and not found:
        columns = join_names(list(table.columns), 20) or "none"
        raise GpflError(f"no column is named as the {role}: use --{role} NAME; the columns are {columns}")
    return found


@dataclass
class Rows:
    """The rows of all files with what is known of each."""

    tables: list[RawTable]
    locator: RowLocator
    labels: Array
    clients: Array | None
    splits: Array | None
    groups: Array | None
    metadata: dict[str, object]  # how the files were read, with the names that were found
    notes: list[str]


def read_rows(
    inputs: Sequence[InputFile], tables: Sequence[RawTable], roles: Roles, features: Sequence[str], options: ColumnOptions
) -> Rows:
    """Return the rows, without those with missing values if the user chose so."""
    notes = []
    if options.missing == "drop":
        inputs, tables, note = drop_missing(inputs, tables, roles.names, features, options.ignore)
        notes.append(note)
    locator = RowLocator(inputs, tables)
    splits, split_column = find_splits(inputs, tables, options, locator)
    clients = None
    if roles.client:
        clients = _read_role(tables, roles.client, locator)
    elif all(entry.client for entry in inputs):
        clients = np.repeat([entry.client for entry in inputs], [len(table.numbers) for table in tables])
    groups = _read_role(tables, roles.group, locator) if roles.group else None
    metadata: dict[str, object] = {"label": roles.label, "client": roles.client, "split_column": split_column}
    metadata |= {"group": options.group} if options.group else {}
    metadata |= {"ignore": list(options.ignore), "missing": options.missing}
    return Rows(list(tables), locator, join_column(tables, roles.label), clients, splits, groups, metadata, notes)


def _read_role(tables: Sequence[RawTable], name: str, locator: RowLocator) -> Array:
    values = join_column(tables, name)
    check_no_missing(name, find_missing(values, MISSING_LABELS), locator)
    return to_text(values)


def find_splits(
    inputs: Sequence[InputFile], tables: Sequence[RawTable], options: ColumnOptions, locator: RowLocator
) -> tuple[Array | None, str]:
    """Return each row's split, by path or column, and that column; None if all rows are for training."""
    by_path = [bool(entry.split) for entry in inputs]
    if any(by_path) and not all(by_path):
        divided, whole = inputs[by_path.index(True)], inputs[by_path.index(False)]
        raise GpflError(
            f"{divided.path} is a {divided.split} split, but {whole.path} is not divided: divide all clients or none"
        )
    if all(by_path):
        splits = np.repeat([entry.split for entry in inputs], [len(table.numbers) for table in tables])
        return check_splits(splits), ""
    name = _find(options, "split_column", SPLIT_COLUMNS, tables[0], required=False)
    if not name:
        return None, ""
    values = np.char.lower(to_text(join_column(tables, name)))
    unknown = ~np.isin(values, list(SPLIT_NAMES))
    if unknown.any():
        if not options.split_column:
            return None, ""  # a column of that name about something else
        row = int(np.flatnonzero(unknown)[0])
        raise GpflError(
            f"column '{name}' holds '{values[row]}' in {locator.describe(row)}; it must hold train, validation or test"
        )
    return check_splits(np.array([SPLIT_NAMES[value] for value in values])), name


def check_splits(splits: Array) -> Array | None:
    """Return the splits, or None if all rows are for training; raise if no row is."""
    if set(splits.tolist()) == {"train"}:
        return None
    if "train" not in splits:
        raise GpflError(f"there are {' and '.join(sorted(set(splits.tolist())))} rows, but none for training")
    return splits


def encode_names(values: Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return the index of every text, and the texts in numeric order if all are numbers, else in alphabetic order."""
    names, indices = np.unique(values, return_inverse=True)
    if all(is_number(name) for name in names):
        order = np.argsort([float(name) for name in names], kind="stable")
        return np.argsort(order)[indices.ravel()].astype(np.int64), names[order].tolist()
    return indices.ravel().astype(np.int64), names.tolist()


def encode_labels(samples: FileSamples) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return labels from 0 and the names of the classes; raise if the values cannot be classes."""
    name = samples.label_name
    # Every class folder has a name, so no label of an image is missing.
    column = parse_column(name, samples.labels, samples.decimal_commas, MISSING_LABELS if samples.locator else frozenset())
    if samples.locator is not None:
        check_no_missing(name, column.missing, samples.locator)
    if column.numbers is not None:
        whole = np.isfinite(column.numbers) & (column.numbers == np.floor(column.numbers))
        if not whole.all():
            raise GpflError(
                f"'{name}' holds {column.numbers[~whole][0]:g}; labels are whole numbers or names of classes: "
                "choose another column with --label"
            )
    text = to_text(column.numbers) if column.numbers is not None else column.texts
    labels, classes = encode_names(text if text is not None else samples.labels)
    if len(classes) < 2:
        raise GpflError(f"every row has the class '{classes[0]}'; there must be at least two classes")
    if len(classes) > MAX_CLASSES or (len(classes) > 20 and 2 * len(classes) > len(labels)):
        raise GpflError(
            f"'{name}' holds {len(classes):,} different values in {len(labels):,} rows, too many for classes: "
            "choose another column with --label"
        )
    return labels, classes
