"""Samples on their way from files to a table, and the options of their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpfl.core.options import option
from gpfl.data.columns import RawColumns
from gpfl.data.files.raw_table import (
    Array,
    Mask,
    RawTable,
    RowLocator,
    ignore_flag,
    join_names,
)
from gpfl.data.images import ImageFormat
from gpfl.data.preprocessing import FILLED, PreprocessingOptions
from gpfl.errors import GpflError, pluralize

LABEL_NAMES = ("label", "labels", "y", "target", "targets", "class")
CLIENT_NAMES = ("client", "clients", "client_id")
SPLIT_COLUMNS = ("part", "split")


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(PreprocessingOptions):
    """Options for the columns of files; a name of "" is found by itself or absent."""

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
    def roles(self) -> dict[str, str]:
        """Name of the column that the user chose for each role."""
        return {role: getattr(self, role) for role in ("label", "client", "split_column", "group")}

    @property
    def role_names(self) -> set[str]:
        """Lower-case names of columns that may have a role."""
        return {name.lower() for name in self.roles.values()} | {*LABEL_NAMES, *CLIENT_NAMES, *SPLIT_COLUMNS}

    def check_roles(self) -> None:
        """Raise if a column has two roles."""
        flags: dict[str, str] = {}
        for role, names in {**{role: (name,) for role, name in self.roles.items()}, "ignore": self.ignore}.items():
            flag = f"--{role.replace('_', '-')}"
            for name in filter(None, names):
                if flags.setdefault(name, flag) != flag:
                    raise GpflError(f"column '{name}' is named by both {flags[name]} and {flag}: remove it from one")


@dataclass(kw_only=True)
class FileSamples:
    """The samples of all files: inputs, labels as in the files, and what else is known of each sample."""

    x: Array | RawColumns = field(default_factory=lambda: np.empty(0))
    input_description: str = ""
    labels: Array
    clients: Array | None
    splits: Array | None
    groups: Array | None = None
    label_name: str = "class"
    client_name: str = ""
    client_hint: str = ""  # how to name the clients if the files do not
    metadata: dict[str, object]  # how the files were read; saved with the manifest
    notes: list[str] = field(default_factory=list)  # lines for the user
    locator: RowLocator | None = None
    decimal_commas: bool = False
    classes: tuple[str, ...] = ()  # declared classes of the label
    encoder: ImageFormat | None = None  # of images


def split_rows(tables: Sequence[RawTable], mask: Mask) -> list[Mask]:
    """Return the part of a mask over all rows for each table."""
    return np.split(mask, np.cumsum([len(table) for table in tables])[:-1])


def find_complete_rows(
    tables: Sequence[RawTable], missing: Mapping[str, Mask], roles: Sequence[str], ignored: Sequence[str]
) -> tuple[Mask, str]:
    """Return which rows have a value in each column of `missing`, and a line about the others."""
    complete = ~np.logical_or.reduce(list(missing.values()))
    counts = {name: int(mask.sum()) for name, mask in missing.items()}
    rows = pluralize(len(complete), "row")
    if not complete.any():
        worst = max(counts, key=lambda name: counts[name])
        fix = "" if worst in roles else f": leave it out with {ignore_flag(ignored, [worst])}"
        raise GpflError(f"each of {rows} has a missing value, most of them in column '{worst}'{fix}")
    left = int((~complete).sum())
    if not left:
        return complete, "No row has missing values."
    columns = join_names([f"{name} {count:,}" for name, count in counts.items() if count])
    have, are = ("has", "is") if left == 1 else ("have", "are")
    note = f"{left:,} of {rows} {have} missing values and {are} left out: {columns}."
    empty = [table.path.name for table, mask in zip(tables, split_rows(tables, complete), strict=True) if not mask.any()]
    return complete, note + (f" Nothing is left of {join_names(empty)}." if empty else "")


def check_no_missing(name: str, missing: Mask, locator: RowLocator) -> None:
    """Raise if a label, client or group is missing."""
    if missing.any():
        raise GpflError(
            f"column '{name}' has {describe_missing(missing, locator)}: fill in the file, "
            "or leave such rows out with --missing-labels drop"
        )


def describe_missing(missing: Mask, locator: RowLocator) -> str:
    """Return the number and the first place of missing values."""
    first = f"{'first ' if missing.sum() > 1 else ''}in {locator.describe_first(missing)}"
    return f"{pluralize(int(missing.sum()), 'missing value')}, {first}"


def case_warnings(names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each kind of name of which two differ only in case."""
    warnings = []
    for kind, entries in names.items():
        first: dict[str, str] = {}
        for entry in entries:
            other = first.setdefault(entry.casefold(), entry)
            if other != entry:
                warnings.append(f"The {kind} '{other}' and '{entry}' differ only in case: are they the same?")
                break
    return warnings
