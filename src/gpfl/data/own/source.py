"""Own files as a source of data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpfl.data.own.encode import Columned, Gathered, gather, number_classes, number_values, shortened
from gpfl.data.own.images import gather_images
from gpfl.data.own.layout import find_pieces
from gpfl.data.own.read import READERS
from gpfl.data.table import PARTS, Source, Table
from gpfl.errors import GpflError
from gpfl.options import option


@dataclass(frozen=True, kw_only=True)
class Own(Source):
    """Your own files."""

    path: Path

    label: str = option("", "column (or array) of labels; found by itself where it is named label, y, target or class")
    client: str = option("", "column that names each row's client; found by itself where it is named client")
    part: str = option("", "column that says train, validation or test of each row; without one, rows are divided at random")
    ignore: tuple[str, ...] = option((), "columns that are no inputs, such as a row's number")
    scale: str = option(
        "standard",
        "columns of numbers: to mean 0 and std 1 over all clients' training rows (all rows, if drawn later), or as they are",
        choices=("standard", "none"),
    )
    image_size: int = option(0, "resize images to this many pixels a side; 0 = they have one size", least=0, most=1024)

    @property
    def address(self) -> str:
        """The whole path, so that a run can be resumed from elsewhere."""
        return str(self.path.resolve())

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """A net for the shape of a row; clients as they are, if the files tell them."""
        table = self.load()
        net = {"name": "cnn4" if len(table.shape) == 3 else "mlp"}
        split = {"name": "natural"} if table.groups is not None else {"name": "dirichlet"}
        return {"split": split, "net": net}

    def read(self) -> Table:
        """Gives the table, read once as long as no file changes."""
        if not self.path.exists():
            raise GpflError(f"there is no file or folder {self.path}")
        whole = dataclasses.replace(self, path=self.path.resolve())  # as a run's config has it: trials read the same
        return read_once(whole, whole._stamp())

    def _stamp(self) -> int:
        """Gives a number that changes with any file."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        return hash(tuple((str(file), (facts := file.stat()).st_mtime_ns, facts.st_size) for file in files if file.exists()))

    def gather(self) -> Table:
        """Gives the table that the files hold now."""
        try:
            pieces = find_pieces(self.path)
            if any(piece.images for piece in pieces):
                odd = next((piece for piece in pieces if not piece.images), None)
                if odd is not None:
                    raise GpflError(f"{odd.path} holds no class folders of images, but others do: give all clients one form")
                gathered = gather_images(pieces, self.image_size)
            else:
                tables = [READERS[piece.path.suffix.lower()](piece.path) for piece in pieces]
                gathered = gather(pieces, tables, Columned(self.label, self.client, self.part, self.ignore, self.scale))
        except OSError as problem:
            raise GpflError(f"cannot read {problem.filename or self.path}: {problem.strerror}") from None
        return self._made(gathered)

    def _made(self, gathered: Gathered) -> Table:
        labels, classes = number_classes(gathered)
        groups, names = number_values(gathered.clients) if gathered.clients is not None else (None, [])
        parts = None if gathered.parts is None else np.array([PARTS.index(part) for part in gathered.parts.tolist()])
        table = Table(
            gathered.x,
            labels,
            classes=len(classes),
            name=self.name,
            groups=groups,
            group_names=names,
            parts=parts,
            origin={"classes": classes, **gathered.recipe},
        )
        table.words = self._words(gathered, table, classes)
        return table

    def _words(self, gathered: Gathered, table: Table, classes: list[str]) -> str:
        """Gives what was found in the files, for a person to check."""
        if table.groups is None:
            whose = "no clients are told, so rows are divided among clients by a split"
        else:
            sizes = np.bincount(table.groups)
            by = f" by '{gathered.client_name}'" if gathered.client_name else ""
            whose = f"{len(sizes)} clients{by} with {span(sizes.min(), sizes.max())} rows"
        parts = "train and test as given" if table.parts is not None else "train and test drawn at random"
        return (
            f"{self.name}: {len(table):,} rows; {whose}; {parts}.\n"
            f"{len(classes)} classes of '{gathered.label_name}': {shortened(classes)}. Inputs: {gathered.words}."
        )


def span(low: int, high: int) -> str:
    """Gives a range in words."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@lru_cache(maxsize=2)
def read_once(source: Own, stamp: int) -> Table:
    """Gives the table of files that had this stamp; several trials on one table read it once."""
    return source.gather()
