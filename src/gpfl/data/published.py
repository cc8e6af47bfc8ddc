"""Published data sets: which files, where from, under what licence, how parsed, and with which settings the paper runs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpfl.data import cache, fetch
from gpfl.data.cache import Origin, Parsed
from gpfl.data.fetch import PublishedFile, Tell
from gpfl.data.table import Source, Table
from gpfl.errors import GpflError

Parse = Callable[[Mapping[str, Path]], Parsed]


@dataclass(frozen=True, kw_only=True)
class Published(Source):
    """A data set that lies with its publisher."""

    files: tuple[PublishedFile, ...]
    licence: str
    parse: Parse
    settings: Mapping[str, Mapping[str, object]]  # the paper's
    also_in: tuple[Path, ...] = ()  # folders of system packages that hold the same content

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """The paper's settings."""
        return self.settings

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(file.size for file in self.files)

    def read(self) -> Table:
        """Gives the table: parsed before, or parsed now from files that are here, or downloaded."""
        return cache.load(self.name) or self.get()

    def get(
        self, source: Path | None = None, *, unverified: bool = False, again: bool = False, tell: Tell = fetch.silent
    ) -> Table:
        """Gives the table from `source` (a file or folder), from GPFL_DATA, from a system package, or from the publisher.

        A local file whose checksum is not the published one is taken only if `unverified` says so; the table remembers.
        """
        with cache.locked(self.name):
            here = None if again or source else cache.load(self.name)
            if here is not None:
                return here
            paths = self.find(source) or {
                file.name: fetch.download(file, cache.cache_folder() / "downloads" / self.name, tell) for file in self.files
            }
            origin = self.check(paths, unverified)
            cache.save(self.name, self.parse(paths), origin)
        table = cache.load(self.name)
        if table is None:
            raise GpflError(f"the parsed table of '{self.name}' vanished from {cache.table_folder(self.name)}")
        return table

    def find(self, source: Path | None) -> dict[str, Path] | None:
        """Gives the files on this machine; None where they are not all here."""
        if source is not None:
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
            places = [root / self.name, root, *places]
        return next((found for place in places if (found := self.files_in(place)) is not None), None)

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
                f"if you know it to be good: gpfl data get {self.name} --from {given} --unverified"
            )
        files = [{"name": file.name, "sha256": fetch.digest(paths[file.name])} for file in self.files]
        return Origin(files, verified=not other)
