"""Published data sets: which files, where from, under what licence, how parsed, and with which settings the paper runs them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpfl.data.published import cache
from gpfl.data.published import download as fetch
from gpfl.data.published.cache import Origin, Parsed
from gpfl.data.published.download import PublishedFile, Tell
from gpfl.data.table import DataSource, Table
from gpfl.errors import GpflError

Parse = Callable[[Mapping[str, Path]], Parsed]


@dataclass(frozen=True, kw_only=True)
class PublishedDataset(DataSource):
    """A data set that lies with its publisher."""

    files: tuple[PublishedFile, ...]
    licence: str
    parse: Parse
    settings: Mapping[str, Mapping[str, object]]  # the paper's
    rows: int = 0  # how many are published
    folders: tuple[str, ...] = ()  # what others call the folder it lies in
    also_in: tuple[Path, ...] = ()  # folders of system packages that hold the same content
    mistaken: Mapping[str, str] = field(default_factory=dict)  # files brought in its place, and what is wrong with them

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """The paper's settings."""
        return self.settings

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(file.size for file in self.files)

    @property
    def bring(self) -> str:
        """The way to the data without a network."""
        if len(self.files) == 1:
            return f"bring the file: gpfl data get {self.name} --from {shlex.quote(self.files[0].name)}"
        return f"bring its {len(self.files)} files: gpfl data get {self.name} --from FOLDER"

    def read(self) -> Table:
        """Gives the table: parsed before, or parsed now from files that are here, or downloaded."""
        return cache.load(self.name) or self.get()

    def get(
        self, source: Path | None = None, *, unverified: bool = False, again: bool = False, tell: Tell = fetch.silent
    ) -> Table:
        """Gives the table from `source` (a file or folder), from GPFL_DATA, from a system package, or from the publisher.

        A local file whose checksum is not the published one is taken only if `unverified` says so; the table remembers.
        A parsed table that is damaged is parsed anew.
        """
        with cache.locked(self.name):
            table = None
            if not again and source is None:
                with suppress(GpflError):
                    table = cache.load(self.name)
            if table is None:
                paths = self.find(source) or self.download(tell)
                origin = self.check(paths, unverified)
                cache.save(self.name, self.parse(paths), origin)
                table = cache.load(self.name)
        if table is None:
            raise GpflError(f"the parsed table of '{self.name}' vanished from {cache.table_folder(self.name)}")
        table.source = self
        return table

    def download(self, tell: Tell) -> dict[str, Path]:
        """Gives the files from the publisher."""
        folder = cache.cache_folder() / "downloads" / self.name
        return {file.name: fetch.download(file, folder, tell, self.bring) for file in self.files}

    def find(self, source: Path | None) -> dict[str, Path] | None:
        """Gives the files on this machine; None where they are not all here."""
        if source is not None:
            self.refuse_mistaken(source)
            found = self.files_in(source)
            if found is None:
                wanted = ", ".join(file.name for file in self.files)
                raise GpflError(f"{source} does not hold the files of '{self.name}': {wanted}")
            return found
        places = [*self.also_in]
        named = os.environ.get("GPFL_DATA")
        if named:
            root = Path(named)
            if root.is_file():  # that file is its own set's, not that of any other
                root = root.parent if root.name in {file.name for file in self.files} else root / "elsewhere"
            places = [*(root / folder for folder in (self.name, *self.folders)), root, *places]
        return next((found for place in places if (found := self.files_in(place)) is not None), None)

    def refuse_mistaken(self, source: Path) -> None:
        """Refuses a file that is known not to be the one that is wanted."""
        for name, words in self.mistaken.items():
            if source.name == name:
                raise GpflError(f"{source} {words}")
            if (source / name).is_file() and self.files_in(source) is None:
                raise GpflError(f"{source / name} {words}")

    def files_in(self, place: Path) -> dict[str, Path] | None:
        """Gives the files in a folder, or the one file there is; None where one is missing."""
        if place.is_file() and len(self.files) == 1:
            return {self.files[0].name: place}
        found = {file.name: place / file.name for file in self.files}
        return found if all(path.is_file() for path in found.values()) else None

    def check(self, paths: Mapping[str, Path], unverified: bool) -> Origin:
        """Gives the files' origin; refuses one that is not the published one, unless that is accepted."""
        other = []
        for file in self.files:
            path = paths[file.name]
            if not fetch.is_published(path, file):
                other.append(path)
        if other and not unverified:
            given = other[0] if len(self.files) == 1 else other[0].parent
            raise GpflError(
                f"{other[0]} is not the file its publisher offers (its checksum differs); "
                f"if you know it to be good: gpfl data get {self.name} --from {shlex.quote(str(given))} --unverified"
            )
        files = [{"name": file.name, "sha256": fetch.digest(paths[file.name])} for file in self.files]
        return Origin(files, verified=not other)


def caveat(table: Table) -> str:
    """Gives in a line what nobody vouches for: missing rows of a published set, files other than the published ones; or ""."""
    if not isinstance(table.source, PublishedDataset):
        return ""
    doubts = []
    rows = table.source.rows
    if rows and len(table) != rows:
        doubts.append(f"has {len(table):,} of the {rows:,} published rows")
    if table.metadata.get("verified") is not True:
        doubts.append("comes from files whose checksum is not the published one")
    return f"{table.name} {' and '.join(doubts)}." if doubts else ""
