"""Own files as a source of data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpfl.core.options import option
from gpfl.data.files.encoding import gather
from gpfl.data.files.gathered import Columned, Gathered, case_remarks
from gpfl.data.files.images import gather_images
from gpfl.data.files.labels import number_classes, number_values
from gpfl.data.files.layout import Found, find_pieces
from gpfl.data.files.readers import READERS
from gpfl.data.files.sheet import shortened
from gpfl.data.table import SPLITS, DataSource, Table
from gpfl.errors import GpflError, pluralize

FOR_IMAGES = ("image_size",)
"""Options that say how images are read; the others are about columns."""


@dataclass(frozen=True, kw_only=True)
class FileDataset(DataSource):
    """Your own files."""

    path: Path

    label: str = option("", "column (or array) of labels; found by itself where it is named label, y, target or class")
    client: str = option("", "column that names each row's client; found by itself where it is named client")
    split_column: str = option(
        "", "column that says train, validation or test of each row; without one, rows are divided at random"
    )
    group: str = option(
        "",
        "column whose rows stay together: a client's with one value (a patient) are all for training, validation or testing",
        omit_default=True,
    )
    ignore: tuple[str, ...] = option((), "columns that are no inputs, such as a row's number")
    scale: str = option(
        "standard",
        "columns of numbers: to mean 0 and std 1 over all clients' training rows (all rows, if drawn later), or as they are",
        choices=("standard", "none"),
    )
    missing: str = option(
        "refuse",
        "missing values in columns: refuse them, fill in the mean over training rows (of text: a category of their own), or "
        "leave such rows out",
        choices=("refuse", "mean", "drop"),
    )
    image_size: int = option(0, "resize images to this many pixels a side; 0 = they have one size", min=0, max=1024)

    @property
    def config_name(self) -> str:
        """The whole path, so that a run can be resumed from elsewhere."""
        return str(self.path.resolve())

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """A net for the shape of a row; clients as they are, if the files tell them."""
        table = self.load()
        net = {"name": "cnn4" if len(table.shape) == 3 else "mlp"}
        partition = {"name": "natural"} if table.client_ids is not None else {"name": "dirichlet"}
        return {"partition": partition, "net": net}

    def read(self) -> Table:
        """Gives the table, read once as long as no file changes."""
        if not self.path.exists():
            raise GpflError(f"there is no file or folder {self.path}")
        whole = dataclasses.replace(self, path=self.path.resolve())  # as a run's config has it: trials read the same
        with readable(self.path):
            return read_once(whole, stamp(find_pieces(whole.path)))

    def gather(self) -> Table:
        """Gives the table that the files hold now."""
        found = find_pieces(self.path)
        self._refuse_others(found)
        if found.images:
            gathered = gather_images(found.pieces, self.image_size)
        else:
            columned = Columned(self.label, self.client, self.split_column, self.group, self.ignore, self.scale, self.missing)
            columned.check()
            sheets = [READERS[piece.path.suffix.lower()](piece.path, self.ignore) for piece in found.pieces]
            gathered = gather(found.pieces, sheets, columned)
        if found.unread:
            gathered.notes.append(f"Not read: {shortened([str(path.relative_to(self.path)) for path in found.unread])}.")
        return self._made(gathered)

    def _refuse_others(self, found: Found) -> None:
        """Refuses options that say nothing of the kind of files that were found."""
        kinds = ("images", "columns") if found.images else ("rows", "images")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "option" in field.metadata and value != field.default and (field.name in FOR_IMAGES) != found.images:
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise GpflError(
                    f"data.{field.name} is {shown!r}, but {self.name} holds {kinds[0]}, not {kinds[1]}: leave it out"
                )

    def _made(self, gathered: Gathered) -> Table:
        labels, classes = number_classes(gathered)
        groups, names = number_values(gathered.clients) if gathered.clients is not None else (None, [])
        parts = None if gathered.parts is None else np.array([SPLITS.index(part) for part in gathered.parts.tolist()])
        table = Table(
            gathered.x,
            labels,
            classes=len(classes),
            name=self.name,
            client_ids=groups,
            client_names=names,
            splits=parts,
            group_ids=gathered.together,
            metadata={"classes": classes, **gathered.recipe},
        )
        table.description = self._words(gathered, table, classes)
        return table

    def _shared_bundles(self, table: Table) -> list[str]:
        """Gives a line about rows that stay together within a client, but lie with several."""
        if table.group_ids is None or table.client_ids is None:
            return []
        pairs = np.unique(np.stack([table.group_ids, table.client_ids]), axis=1)
        several = int((np.bincount(pairs[0]) > 1).sum())
        if not several:
            return []
        lie, are = ("lies", "is") if several == 1 else ("lie", "are")
        return [
            f"{pluralize(several, 'value')} of '{self.group}' {lie} with several clients, and {are} drawn at each by itself."
        ]

    def _words(self, gathered: Gathered, table: Table, classes: list[str]) -> str:
        """Gives what was found in the files, for a person to check."""
        if table.client_ids is None:
            whose = "no clients are told, so rows are divided among clients by a partition"
        else:
            sizes = np.bincount(table.client_ids)
            by = f" by '{gathered.client_name}'" if gathered.client_name else ""
            whose = f"{pluralize(len(sizes), 'client')}{by} with {span(sizes.min(), sizes.max())}"
        parts = "train and test as given" if table.splits is not None else "train and test drawn at random"
        parts += f", rows of one '{self.group}' together" if table.group_ids is not None else ""
        bundles = [] if gathered.together is None else np.unique(gathered.together).tolist()
        names = {"classes": classes, "clients": table.client_names, f"values of '{self.group}'": bundles}
        notes = [*gathered.notes, *case_remarks(names), *self._shared_bundles(table)]
        if len(table.client_names) == 1:
            notes.append("There is one client only, so nothing is exchanged.")
        return "\n".join(
            (
                f"{self.name}: {pluralize(len(table), 'row')}; {whose}; {parts}.",
                f"{pluralize(len(classes), 'class')} of '{gathered.label_name}': {shortened(classes)}. "
                f"Inputs: {gathered.words}.",
                *notes,
            )
        )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Says which file or folder cannot be read."""
    try:
        yield
    except OSError as problem:
        raise GpflError(f"cannot read {problem.filename or path}: {problem.strerror}") from None


def stamp(found: Found) -> int:
    """Gives a number that changes with any file that is read, and with what is not."""
    facts = [(str(file), (state := file.stat()).st_mtime_ns, state.st_size) for file in found.files()]
    return hash((found, tuple(facts)))


def span(low: int, high: int) -> str:
    """Gives a range of rows in words."""
    return pluralize(low, "row") if low == high else f"{low:,} to {pluralize(high, 'row')}"


@lru_cache(maxsize=2)
def read_once(source: FileDataset, stamp: int) -> Table:
    """Gives the table of files that had this stamp; several trials on one table read it once."""
    return source.gather()
