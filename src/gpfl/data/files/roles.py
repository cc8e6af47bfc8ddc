"""Columns that are not inputs: labels, clients, splits and groups; and the options that choose them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.core.options import option
from gpfl.data.files import raw_table
from gpfl.data.files.cells import MAJORITY, parse_column
from gpfl.data.files.layout import SPLIT_NAMES
from gpfl.data.files.raw_table import MISSING_LABELS, Array, Mask, RawTable, find_missing, join_names, to_text
from gpfl.data.preprocessing import FILLED, PreprocessingOptions
from gpfl.errors import GpflError, did_you_mean, pluralize

LABEL_NAMES = ("label", "labels", "y", "target", "targets", "class")
CLIENT_NAMES = ("client", "clients", "client_id")
SPLIT_COLUMNS = ("part", "split")
ADDED_OPTIONS = ("group", "missing_labels", "missing_indicator", "unreadable", "dates", "unseen")
"""Options that later versions added; a manifest lists them only where they are not at their default."""
MAX_CLASSES = 1000
CANDIDATES = {"label": range(2, 21), "client": range(2, 1001)}
"""How many different values a column may have to be suggested as label or client."""
HINTS = {
    "label": ("outcome", "diagnos", "label", "class", "target", "result", "status", "disease"),
    "client": ("hospital", "site", "cent", "clinic", "client", "user", "subject", "patient", "device", "region"),
}
"""Parts of names that suggest a role."""


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(PreprocessingOptions):
    """Options for the columns of files. A column that is not named is found by its usual name, or there is none."""

    label: str = option("", "column (or array) of labels; found if named label, y, target or class")
    client: str = option("", "column that names each row's client; found if named client")
    split_column: str = option("", "column with train, validation or test for each row; found if named split or part")
    group: str = option(
        "", "column of groups, such as patients: a client's rows of a group are never divided between splits", omit_default=True
    )
    ignore: tuple[str, ...] = option((), "columns that are not inputs, such as a row number")
    missing: str = option(
        "error",
        "missing inputs: an error, rows dropped, or filled with the mean, the median or the most frequent value of the "
        "training samples of all clients; categories are always filled with the most frequent",
        choices=("error", *FILLED, "drop"),
    )
    missing_labels: str = option(
        "error",
        "rows with a missing label, client or group: an error, or dropped",
        choices=("error", "drop"),
        omit_default=True,
    )
    unreadable: str = option(
        "error",
        "cells such as >100 in a column of numbers or dates: an error, or missing values",
        choices=("error", "missing"),
        omit_default=True,
    )
    dates: str = option(
        "days",
        "columns of dates: read as days since 1970-01-01, left out, or an error",
        choices=("days", "ignore", "error"),
        omit_default=True,
    )
    schema: str = option(
        "",
        "TOML file that declares the columns and classes: their kinds, categories and ranges; values outside count as missing",
        omit_default=True,
    )

    @property
    def chosen_names(self) -> dict[str, str]:
        """Name of the column that the user chose for each role."""
        return {role: getattr(self, role) for role in ("label", "client", "split_column", "group")}

    def check_roles(self) -> None:
        """Raise if a column has two roles."""
        flags: dict[str, str] = {}
        for role, name in (*self.chosen_names.items(), *(("ignore", name) for name in self.ignore)):
            flag = f"--{role.replace('_', '-')}"
            if name and flags.setdefault(name, flag) != flag:
                raise GpflError(f"column '{name}' is named by both {flags[name]} and {flag}: remove it from one")


@dataclass(frozen=True)
class Roles:
    """Names of the columns that are not inputs; "" where there is none."""

    label: str
    client: str = ""
    group: str = ""
    split_column: str = ""

    @property
    def names(self) -> list[str]:
        """The columns of labels, clients and groups."""
        return [name for name in (self.label, self.client, self.group) if name]

    def metadata(self, options: ColumnOptions) -> dict[str, object]:
        """Return how the columns were read, for the manifest."""
        changed = {name: value for name in ADDED_OPTIONS if (value := getattr(options, name)) != getattr(ColumnOptions, name)}
        return {
            "label": self.label,
            "client": self.client,
            "split_column": self.split_column,
            **changed,
            "ignore": list(options.ignore),
            "missing": options.missing,
        }


def find_roles(table: RawTable, options: ColumnOptions) -> Roles:
    """Return the columns that the user chose or that have a usual name; paths that name clients and splits win."""
    label = _find(table, options, "label", LABEL_NAMES)
    if not label:
        candidates = describe_candidates(table, "label", [name for name in options.chosen_names.values() if name])
        columns = join_names(list(table.columns), 20) or "none"
        fix = f"which column holds it? {candidates}" if candidates else f"use --label NAME; the columns are {columns}"
        raise GpflError(f"no label column found: {fix}")
    named = all(file.client for file in table.files)
    return Roles(
        label,
        _find(table, options, "client", () if named else CLIENT_NAMES),
        _find(table, options, "group"),
        "" if has_split_paths(table) else _find_split_column(table, options),
    )


def _find(table: RawTable, options: ColumnOptions, role: str, usual: Sequence[str] = ()) -> str:
    chosen = options.chosen_names
    if name := chosen[role]:
        if name not in table.columns:
            raise GpflError(f"data.{role} is '{name}', which is not a column; {did_you_mean(name, table.columns)}")
        return name
    lower = {name.lower(): name for name in table.columns if name not in chosen.values()}
    return next((lower[name] for name in usual if name in lower), "")


def _find_split_column(table: RawTable, options: ColumnOptions) -> str:
    name = _find(table, options, "split_column", SPLIT_COLUMNS)
    if not name or table.columns[name].ndim != 1:
        return ""
    values = _lower_text(table, name)
    unknown = ~np.isin(values, list(SPLIT_NAMES))
    if unknown.any() and options.split_column:
        value, where = values[unknown][0], table.locate_first(unknown)
        raise GpflError(f"column '{name}' holds '{value}' in {where}; it must hold train, validation or test")
    return "" if unknown.any() else name  # a column of that name may be about something else


def _lower_text(table: RawTable, name: str) -> Array:
    return np.char.lower(to_text(table.columns[name]).astype(str))


def has_split_paths(table: RawTable) -> bool:
    """Return whether paths name the splits; raise if only some do."""
    divided = next((file for file in table.files if file.split), None)
    whole = next((file for file in table.files if not file.split), None)
    if whole and divided:
        raise GpflError(
            f"{divided.path} is a {divided.split} split, but {whole.path} is not divided: divide all clients or none"
        )
    return not whole


def describe_candidates(table: RawTable, role: str, taken: Sequence[str] = ()) -> str:
    """Return the columns that may hold labels or clients with the flag that chooses one, or "" if there is none."""
    counts: dict[str, int] = {}
    for name, values in table.columns.items():
        if name in taken or values.ndim != 1:
            continue
        present = values[~find_missing(values)]
        if present.dtype.kind == "f" and not np.array_equal(present, np.floor(present)):
            continue
        count = len(set(present.tolist()))
        if count in CANDIDATES[role] and 2 * count <= len(values):
            counts[name] = count
    if not counts:
        return ""

    def rank(name: str) -> tuple[int, bool]:
        roles = [other for other, hints in HINTS.items() if any(hint in name.lower() for hint in hints)]
        is_numeric = role == "client" and table.columns[name].dtype.kind != "O"
        return (0 if role in roles else 2 if roles else 1), is_numeric

    names = list(reversed(counts)) if role == "label" else list(counts)  # labels tend to be the last column
    ordered = sorted(names, key=rank)
    listed = join_names([f"{name} ({counts[name]:,} values)" for name in ordered], 5)
    return f"candidates: {listed}; choose one with --{role} {shlex.quote(ordered[0])}"


def find_complete_rows(
    table: RawTable, roles: Roles, inputs: Mapping[str, Mask], options: ColumnOptions
) -> tuple[Mask | None, list[str]]:
    """Return which rows are left if the user drops those with missing values, and a line about the others.

    `inputs` has the rows with a missing value in each column of inputs.
    """
    missing: dict[str, Mask] = {}
    if options.missing_labels == "drop":
        missing |= {name: find_missing(table.columns[name], MISSING_LABELS) for name in roles.names}
    if options.missing == "drop":
        missing |= inputs
    if not missing:
        return None, []
    complete = ~np.logical_or.reduce(list(missing.values()))
    counts = {name: int(mask.sum()) for name, mask in missing.items()}
    rows = pluralize(len(complete), "row")
    if not complete.any():
        worst = max(counts, key=lambda name: counts[name])
        fix = "" if worst in roles.names else f": leave it out with {raw_table.ignore_flag(options.ignore, [worst])}"
        raise GpflError(f"each of {rows} has a missing value, most of them in column '{worst}'{fix}")
    left_out = int((~complete).sum())
    if not left_out:
        return None, ["No row has missing values."]
    columns = join_names([f"{name} {count:,}" for name, count in counts.items() if count])
    note = f"Left out {left_out:,} of {rows} with missing values: {columns}."
    left = np.bincount(table.file_of[complete], minlength=len(table.files))
    empty = [file.path.name for file, n_rows in zip(table.files, left, strict=True) if not n_rows]
    return complete, [note + (f" Nothing is left of {join_names(empty)}." if empty else "")]


def read_names(table: RawTable, name: str) -> Array:
    """Return a column of clients or groups as text; raise if one is missing."""
    _check_no_missing(table, name)
    return to_text(table.columns[name])


def read_clients(table: RawTable, roles: Roles) -> tuple[Array | None, str]:
    """Return the client of each row, by column or path, or None and how the user can name it."""
    if roles.client:
        return read_names(table, roles.client), ""
    if all(file.client for file in table.files):
        return np.array([file.client for file in table.files])[table.file_of], ""
    candidates = describe_candidates(table, "client", [name for name in (*roles.names, roles.split_column) if name])
    return None, f"which column does? {candidates}" if candidates else "name the column with --client"


def read_splits(table: RawTable, roles: Roles) -> Array | None:
    """Return the split of each row, by path or column; None if all rows are for training."""
    if roles.split_column:
        splits = np.array([SPLIT_NAMES[text] for text in _lower_text(table, roles.split_column).tolist()])
    elif has_split_paths(table):
        splits = np.array([file.split for file in table.files])[table.file_of]
    else:
        return None
    found = sorted(set(splits.tolist()))
    if "train" not in found:
        raise GpflError(f"there are {' and '.join(found)} rows, but none for training")
    return None if found == ["train"] else splits


def encode_names(values: Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return the index of every text, and the texts in numeric order if all are numbers, else in alphabetic order."""
    names, indices = np.unique(values, return_inverse=True)
    if all(raw_table.is_number(name) for name in names):
        order = np.argsort([float(name) for name in names], kind="stable")
        return np.argsort(order)[indices.ravel()].astype(np.int64), names[order].tolist()
    return indices.ravel().astype(np.int64), names.tolist()


def read_labels(
    table: RawTable, name: str, declared: Sequence[str] = (), declared_by: str = "the schema"
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return labels from 0 and the names of the classes; raise if the values cannot be classes."""
    _check_no_missing(table, name)
    values = table.columns[name]
    column = parse_column(name, values, not table.decimal_commas, frozenset(), "numeric")
    if not column.notation.startswith("as fractions"):
        readable = ~column.unreadable
        fractions = readable & (~np.isfinite(column.values) | (column.values != np.floor(column.values)))
        if fractions.any() and readable.mean() >= MAJORITY:  # the others may be "?"
            raise GpflError(
                f"'{name}' holds {column.values[fractions][0]:g}; labels are whole numbers or names of classes, and "
                f"regression is not offered yet: make classes of the numbers, such as '{name} above 10' with yes and no, "
                "or choose another column with --label"
            )
        values = column.values if readable.all() else values
    texts = to_text(values)
    if not declared:
        return encode_classes(name, texts)
    index = {text: i for i, text in enumerate(declared)}
    codes = np.array([index.get(text, -1) for text in texts.tolist()], dtype=np.int64)
    if (codes < 0).any():
        where = table.locate_first(codes < 0)
        raise GpflError(
            f"column '{name}' holds '{texts[codes < 0][0]}' in {where}, which is not among the classes of {declared_by} "
            f"({join_names(declared)}): correct the file{' or the schema' if declared_by == 'the schema' else ''}"
        )
    return codes, list(declared)


def encode_classes(name: str, values: Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return labels from 0 and the names of the classes; raise if there is one class, or too many."""
    labels, classes = encode_names(values)
    if len(classes) < 2:
        raise GpflError(f"every row has the class '{classes[0]}'; there must be at least two classes")
    if len(classes) > MAX_CLASSES or (len(classes) > 20 and 2 * len(classes) > len(labels)):
        raise GpflError(
            f"'{name}' holds {len(classes):,} different values in {len(labels):,} rows, too many for classes; "
            "regression is not offered yet: group the values into classes, or choose another column with --label"
        )
    return labels, classes


def _check_no_missing(table: RawTable, name: str) -> None:
    missing = find_missing(table.columns[name], MISSING_LABELS)
    if missing.any():
        raise GpflError(
            f"column '{name}' has {table.describe_missing(missing)}: fill in the file, "
            "or leave such rows out with --missing-labels drop"
        )
