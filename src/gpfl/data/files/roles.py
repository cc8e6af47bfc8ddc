"""Columns that are not inputs: labels, clients, splits and groups."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.data.files.cells import MAJORITY, parse_column
from gpfl.data.files.layout import SPLIT_NAMES, InputFile
from gpfl.data.files.raw_table import (
    MISSING_LABELS,
    Array,
    Mask,
    RawTable,
    RowLocator,
    find_missing,
    is_number,
    join_column,
    join_names,
    to_text,
)
from gpfl.data.files.samples import (
    CLIENT_NAMES,
    LABEL_NAMES,
    SPLIT_COLUMNS,
    ColumnOptions,
    FileSamples,
    check_no_missing,
    find_complete_rows,
    split_rows,
)
from gpfl.errors import GpflError, did_you_mean

MAX_CLASSES = 1000
CANDIDATES = {"label": range(2, 21), "client": range(2, 1001)}
"""Numbers of values of columns that may have a role."""
HINTS = {
    "label": ("outcome", "diagnos", "label", "class", "target", "result", "status", "disease"),
    "client": ("hospital", "site", "cent", "clinic", "client", "user", "subject", "patient", "device", "region"),
}
"""Parts of names that suggest a role."""


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


def find_roles(tables: Sequence[RawTable], options: ColumnOptions) -> Roles:
    """Return the columns that the user chose or that have a usual name; paths that name clients win over the latter."""
    label = _find(options, "label", LABEL_NAMES, tables)
    usual = () if all(table.source.client for table in tables) else CLIENT_NAMES
    client = _find(options, "client", usual, tables, required=False)
    return Roles(label, client, _find(options, "group", (), tables, required=False))


def _find(options: ColumnOptions, role: str, usual: Sequence[str], tables: Sequence[RawTable], *, required: bool = True) -> str:
    chosen, table = options.roles, tables[0]
    name = chosen[role]
    if name:
        if name not in table.columns:
            raise GpflError(f"data.{role} is '{name}', which is not a column; {did_you_mean(name, table.columns)}")
        return name
    lower = {name.lower(): name for name in table.columns if name not in chosen.values()}
    found = next((lower[name] for name in usual if name in lower), "")
    if required and not found:
        candidates = describe_candidates(tables, role, [name for name in chosen.values() if name])
        columns = join_names(list(tables[0].columns), 20) or "none"
        fix = f"which column holds it? {candidates}" if candidates else f"use --{role} NAME; the columns are {columns}"
        raise GpflError(f"no column is named as the {role}: {fix}")
    return found


def describe_candidates(tables: Sequence[RawTable], role: str, taken: Sequence[str] = ()) -> str:
    """Return the columns that may hold labels or clients with the flag that chooses one, or "" if there is none."""
    counts: dict[str, int] = {}
    for name, first in tables[0].columns.items():
        if name in taken or first.ndim != 1 or any(name not in table.columns for table in tables):
            continue
        values = join_column(tables, name)
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
        is_number = role == "client" and tables[0].columns[name].dtype.kind != "O"
        return (0 if role in roles else 2 if roles else 1), is_number

    names = list(reversed(counts)) if role == "label" else list(counts)  # labels tend to be the last column
    ordered = sorted(names, key=rank)
    listed = join_names([f"{name} ({counts[name]:,} values)" for name in ordered], 5)
    return f"candidates: {listed}; choose one with --{role} {shlex.quote(ordered[0])}"


def read_roles(
    tables: Sequence[RawTable], roles: Roles, inputs: Mapping[str, Mask], options: ColumnOptions
) -> tuple[FileSamples, Mask]:
    """Return the samples without inputs, and which rows they are: those without missing values if the user chose so.

    Args:
        tables: The tables of all files.
        roles: Names of columns.
        inputs: Rows with a missing value in each column of inputs.
        options: The user's options.

    """
    rows, notes = np.ones(sum(map(len, tables)), dtype=bool), []
    missing: dict[str, Mask] = {}
    if options.missing_labels == "drop":
        missing |= {name: find_missing(join_column(tables, name), MISSING_LABELS) for name in roles.names}
    if options.missing == "drop":
        missing |= inputs
    if missing:
        rows, note = find_complete_rows(tables, missing, roles.names, options.ignore)
        tables = [table.filter(mask) for table, mask in zip(tables, split_rows(tables, rows), strict=True) if mask.any()]
        notes.append(note)
    locator = RowLocator(tables)
    splits, split_column = find_splits(tables, options)
    clients, client_hint = None, ""
    if roles.client:
        clients = _read_role(tables, roles.client, locator)
    elif all(table.source.client for table in tables):
        clients = np.repeat([table.source.client for table in tables], list(map(len, tables)))
    else:
        candidates = describe_candidates(tables, "client", [name for name in (*roles.names, split_column) if name])
        client_hint = f"which column does? {candidates}" if candidates else "name the column with --client"
    metadata: dict[str, object] = {"label": roles.label, "client": roles.client, "split_column": split_column}
    metadata |= {"group": options.group} if options.group else {}
    samples = FileSamples(
        labels=join_column(tables, roles.label),
        clients=clients,
        splits=splits,
        groups=_read_role(tables, roles.group, locator) if roles.group else None,
        label_name=roles.label,
        client_name=roles.client,
        client_hint=client_hint,
        metadata=metadata | _changed_options(options) | {"ignore": list(options.ignore), "missing": options.missing},
        notes=notes,
        locator=locator,
    )
    return samples, rows


def _changed_options(options: ColumnOptions) -> dict[str, object]:
    """Return the options that later versions added, where they are not at their default."""
    names = ("missing_labels", "missing_indicator", "unreadable", "dates", "unseen")
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(ColumnOptions, name)}


def _read_role(tables: Sequence[RawTable], name: str, locator: RowLocator) -> Array:
    values = join_column(tables, name)
    check_no_missing(name, find_missing(values, MISSING_LABELS), locator)
    return to_text(values)


def find_splits(tables: Sequence[RawTable], options: ColumnOptions) -> tuple[Array | None, str]:
    """Return each row's split, by path or column, and that column; None if all rows are for training."""
    sources = [table.source for table in tables]
    if check_divided(sources):
        return check_splits(np.repeat([source.split for source in sources], list(map(len, tables)))), ""
    name = _find(options, "split_column", SPLIT_COLUMNS, tables, required=False)
    if not name:
        return None, ""
    values = np.char.lower(to_text(join_column(tables, name)).astype(str))
    unknown = ~np.isin(values, list(SPLIT_NAMES))
    if unknown.any():
        if not options.split_column:
            return None, ""  # a column of that name about something else
        row = int(np.flatnonzero(unknown)[0])
        where = RowLocator(tables).describe(row)
        raise GpflError(f"column '{name}' holds '{values[row]}' in {where}; it must hold train, validation or test")
    return check_splits(np.array([SPLIT_NAMES[value] for value in values])), name


def check_divided(sources: Sequence[InputFile]) -> bool:
    """Return whether paths name the splits; raise if only some do."""
    whole = [source for source in sources if not source.split]
    divided = [source for source in sources if source.split]
    if whole and divided:
        raise GpflError(
            f"{divided[0].path} is a {divided[0].split} split, but {whole[0].path} is not divided: divide all clients or none"
        )
    return not whole


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
    name, values = samples.label_name, samples.labels
    if samples.locator is not None:  # every class folder has a name, so no label of an image is missing
        check_no_missing(name, find_missing(values, MISSING_LABELS), samples.locator)
        column = parse_column(name, values, not samples.decimal_commas, frozenset(), "numeric")
        readable = ~column.unreadable
        fractions = readable & (~np.isfinite(column.values) | (column.values != np.floor(column.values)))
        if not column.notation.startswith("as fractions"):
            if fractions.any() and readable.mean() >= MAJORITY:  # the others may be "?"
                raise GpflError(
                    f"'{name}' holds {column.values[fractions][0]:g}; labels are whole numbers or names of classes, and "
                    f"regression is not offered yet: make classes of the numbers, such as '{name} above 10' with yes and no, "
                    "or choose another column with --label"
                )
            values = column.values if readable.all() else values
    if samples.classes:
        return _encode_declared(samples, to_text(values)), list(samples.classes)
    labels, classes = encode_names(to_text(values))
    if len(classes) < 2:
        raise GpflError(f"every row has the class '{classes[0]}'; there must be at least two classes")
    if len(classes) > MAX_CLASSES or (len(classes) > 20 and 2 * len(classes) > len(labels)):
        raise GpflError(
            f"'{name}' holds {len(classes):,} different values in {len(labels):,} rows, too many for classes; "
            "regression is not offered yet: group the values into classes, or choose another column with --label"
        )
    return labels, classes


def _encode_declared(samples: FileSamples, labels: Array) -> npt.NDArray[np.int64]:
    """Return the index of each label in the declared classes; raise for a label that is none of them."""
    index = {name: i for i, name in enumerate(samples.classes)}
    codes = np.array([index.get(label, -1) for label in labels.tolist()], dtype=np.int64)
    if (codes < 0).any():
        assert samples.locator is not None
        row = int(np.flatnonzero(codes < 0)[0])
        where = samples.locator.describe(row)
        raise GpflError(
            f"column '{samples.label_name}' holds '{labels[row]}' in {where}, which is not among the classes of the schema "
            f"({join_names(samples.classes)}): correct the file or the schema"
        )
    return codes
